// Twin of ptx/tma.cuh. The test writes into a tensor map what it says in plain words (tests/on_cpu.py).
#pragma once
#include "ptx_on_cpu/mbarrier.h"

struct alignas(64) TensorMap {
    char bytes[128];
};

namespace on_cpu {

struct MapText {
    unsigned long long magic;
    char* base;
    long long shape[5];    // columns, rows, heads, batch or entries, and what takes back
    long long strides[4];  // bytes, of all but columns
    int box[3];
    int axes;
    int size;  // bytes of an element
};
constexpr unsigned long long MAP_MAGIC = 0x70614d20726f736e;  // "nsor Map"

// f(element in memory or null, element in shared memory, its bytes) for the elements of a box, 128-byte swizzled. Those
// beyond a row's end are null, of a `store` only from the next multiple of 16 bytes on.
template <class F>
void each_of_box(const TensorMap& map, char* memory, unsigned shared, int column, int row, int head, int batch,
                 int back, bool store, F f) {
    MapText m;
    memcpy(&m, map.bytes, sizeof m);
    if (store) m.shape[0] = (m.shape[0] * m.size + 15) / 16 * 16 / m.size;
    for (int h = 0; h < m.box[2]; h++)
        for (int r = 0; r < m.box[1]; r++)
            for (int c = 0; c < m.box[0]; c++) {
                unsigned to = shared + (h * m.box[1] + r) * 128 + c * m.size;
                to ^= (to >> 7 & 7) << 4;
                long long place[5] = {column + c, (long long)row + r, head + h, batch, back};
                auto from = (unsigned long long)m.base + m.size * place[0];
                bool inside = true;
                for (int i = 0; i < 5; i++) {
                    inside &= place[i] >= 0 && place[i] < m.shape[i];
                    if (i) from += (unsigned long long)place[i] * m.strides[i - 1];
                }
                f(inside ? (char*)from : nullptr, memory + to, m.size);
            }
}

// What the driver and the instruction ask of an array and of a box that begins at this column; the box's bytes.
inline int map_bytes(const TensorMap& map, int column, int axes) {
    MapText m;
    memcpy(&m, map.bytes, sizeof m);
    if (m.magic != MAP_MAGIC) fail("there is no tensor map");
    if (m.axes != axes) fail("a tensor map of %d axes, where %d are asked for", m.axes, axes);
    bool aligned = (unsigned long long)m.base % 16 == 0 && (long long)column * m.size % 16 == 0;
    for (long long stride : m.strides) aligned &= stride % 16 == 0 && stride > 0 && stride < 1ll << 40;
    if (!aligned) fail("a tensor map or a column (%d) that does not lie at 16 bytes", column);
    for (long long length : m.shape)
        if (length < 1 || length > 1ll << 32) fail("a tensor map with a length of %lld", length);
    if (m.box[0] * m.size != 128 || m.box[1] < 1 || m.box[1] > 256)
        fail("a box of %d columns, %d rows, %d heads", m.box[0], m.box[1], m.box[2]);
    return 128 * m.box[1] * m.box[2];
}
inline int box_bytes(const TensorMap& map, unsigned shared, int column, int axes) {
    int bytes = map_bytes(map, column, axes);
    at(*me->block, shared, bytes, 128);
    return bytes;
}

// A store of TMA: it reads shared memory, and some time later writes.
template <class R, class W>
void store_later(R read, W write) {
    auto is_read = std::make_shared<bool>(false);
    auto read_once = [=] {
        if (!*is_read) read(), *is_read = true;
    };
    if (!now.last_first) read_once();
    me->reads.push_back({read_once, is_read});
    me->stores.add([=] { read_once(), write(); });
}

}  // namespace on_cpu

inline bool elected() { return threadIdx.x % 32 == 0; }
inline void tma_prefetch(const TensorMap& map) {}

// It reads the box: what lies in the map and not in memory that is there is a fault.
inline void tma_prefetch(const TensorMap& map, int column, int row, int head, int batch) {
    on_cpu::map_bytes(map, column, 4);
    on_cpu::each_of_box(map, nullptr, 0, column, row, head, batch, 0, false,
                        [](const char* from, char*, int) { if (from) (void)*(const volatile char*)from; });
}

namespace on_cpu {
inline void load_box(unsigned shared, const TensorMap& map, unsigned barrier, int column, int row, int head, int batch,
                     int back, int axes) {
    char* memory = me->block->memory;
    int bytes = box_bytes(map, shared, column, axes);
    note_hardware(*me->block, shared, bytes, true);
    Mbarrier* b = &mbarrier(barrier);
    shared &= OFFSET;
    in_background([=] {
        each_of_box(map, memory, shared, column, row, head, batch, back, false,
                    [](const char* from, char* to, int size) {
                        if (from)
                            memcpy(to, from, size);
                        else
                            memset(to, 0, size);
                    });
        b->complete(bytes);
    });
}

inline void store_box(const TensorMap& map, unsigned shared, int column, int row, int head, int batch, int back,
                      int axes) {
    char* memory = me->block->memory;
    auto box = std::make_shared<std::vector<char>>(box_bytes(map, shared, column, axes));
    note_hardware(*me->block, shared, box->size(), false);
    shared &= OFFSET;
    store_later([=] { memcpy(box->data(), memory + shared, box->size()); },
                [=] {
                    each_of_box(map, box->data() - shared, shared, column, row, head, batch, back, true,
                                [](char* to, const char* from, int size) {
                                    if (to) memcpy(to, from, size);
                                });
                });
}
}  // namespace on_cpu

inline void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int column, int row, int head,
                     int batch) {
    on_cpu::load_box(shared, map, barrier, column, row, head, batch, 0, 4);
}
inline void tma_store(const TensorMap& map, unsigned shared, int column, int row, int head, int batch,
                      bool yes = true) {
    if (yes) on_cpu::store_box(map, shared, column, row, head, batch, 0, 4);
}

inline void tma_load_window(unsigned shared, const TensorMap& map, unsigned barrier, int column, int row, int head,
                            int entry) {
    on_cpu::load_box(shared, map, barrier, column, row, head, entry, 1 << 30, 5);
}
inline void tma_store_window(const TensorMap& map, unsigned shared, int column, int row, int head, int entry) {
    on_cpu::store_box(map, shared, column, row, head, entry, 1 << 30, 5);
}

inline void bulk_load(unsigned shared, const void* global, int bytes, unsigned barrier) {
    if (bytes % 16 || (unsigned long long)global % 16) on_cpu::fail("a bulk load of %d bytes from %p", bytes, global);
    char* to = on_cpu::at(*on_cpu::me->block, shared, bytes, 16);
    on_cpu::note_hardware(*on_cpu::me->block, shared, bytes, true);
    on_cpu::Mbarrier* b = &on_cpu::mbarrier(barrier);
    on_cpu::in_background([=] {
        memcpy(to, global, bytes);
        b->complete(bytes);
    });
}

namespace on_cpu {
// f(to, x) for each of consecutive floats.
template <class F>
void bulk_out(float* global, unsigned shared, int bytes, F f) {
    if (bytes % 16 || (unsigned long long)global % 16) fail("a bulk copy of %d bytes to %p", bytes, global);
    const char* from = at(*me->block, shared, bytes, 16);
    note_hardware(*me->block, shared, bytes, false);
    auto x = std::make_shared<std::vector<float>>(bytes / 4);
    store_later([=] { memcpy(x->data(), from, bytes); },
                [=] {
                    for (int i = 0; i < bytes / 4; i++) f(global[i], (*x)[i]);
                });
}
}  // namespace on_cpu

inline void bulk_add(float* global, unsigned shared, int bytes) {
    on_cpu::bulk_out(global, shared, bytes, [](float& to, float x) { to += x; });
}
inline void bulk_store(float* global, unsigned shared, int bytes) {
    on_cpu::bulk_out(global, shared, bytes, [](float& to, float x) { to = x; });
}

inline void tma_commit() { on_cpu::me->stores.commit(); }
inline void tma_wait_read() {
    for (auto& read : on_cpu::me->reads) read.now();
    on_cpu::me->reads.clear();
}
template <int PENDING = 0>
void tma_wait() {
    on_cpu::me->stores.finish(PENDING);
}
inline void fence_async() { on_cpu::note_fence(); }
inline void fence_async_global() {}
