// Twin of ptx/cp_async.cuh: copies land when they are asked for, or when they are waited for.
#pragma once

namespace on_cpu {

// The source is to be aligned also where nothing is read.
template <unsigned CHUNK>
void copy_later(unsigned shared, const void* global, bool read) {
    char* to = at(shared, CHUNK);
    if ((unsigned long long)global % CHUNK) fail("cp.async of %u bytes from %p", CHUNK, global);
    auto& landing = me->block->landing;
    if (landing.empty()) landing.resize(MEMORY / 4);
    shared &= OFFSET;
    auto mark = [&landing, shared](bool lands) {
        for (unsigned n = 0; n < CHUNK / 4; n++) landing[shared / 4 + n] = lands;
    };
    mark(now.last_first);
    me->copies.add([=] {
        mark(false);
        if (read)
            memcpy(to, global, CHUNK);
        else
            memset(to, 0, CHUNK);
    });
}

}  // namespace on_cpu

inline void cp_async_16(unsigned shared, const void* global, bool read) {
    on_cpu::copy_later<16>(shared, global, read);
}
inline void cp_async_float(unsigned shared, const float* global, bool read) {
    on_cpu::copy_later<4>(shared, global, read);
}
inline void cp_async_commit() { on_cpu::me->copies.commit(); }
template <int PENDING>
void cp_async_wait() {
    if (on_cpu::now.last_first) on_cpu::spin("cp.async.wait");  // others may be ahead, or not have asked yet
    on_cpu::me->copies.finish(PENDING);
}
