// Twin of ptx/cp_async.cuh: copies land when they are asked for, or when they are waited for.
#pragma once

namespace on_cpu {

template <unsigned BYTES>
void copy_later(unsigned shared, const void* global, bool read) {
    char* to = at(shared, BYTES);
    if ((unsigned long long)global % BYTES && read) fail("cp.async of %u bytes from %p", BYTES, global);
    me->copies.add([=] {
        if (read)
            memcpy(to, global, BYTES);
        else
            memset(to, 0, BYTES);
    });
}

}  // namespace on_cpu

inline void cp_async_16(unsigned shared, const void* global, bool read) { on_cpu::copy_later<16>(shared, global, read); }
inline void cp_async_4(unsigned shared, const void* global, bool read, bool copy) {
    if (copy) on_cpu::copy_later<4>(shared, global, read);
}
inline void cp_async_commit() { on_cpu::me->copies.commit(); }
template <int PENDING>
void cp_async_wait() {
    on_cpu::me->copies.finish(PENDING);
}
