// A tile of numbers of 8 bits in shared memory, as the cache has them, and how it becomes one of numbers of 16.
#pragma once
#include "ptx/convert.cuh"
#include "tile/shared.cuh"

template <int ROWS, int COLS>
struct ByteTile {
    static constexpr int COLUMNS = COLS, BYTES = ROWS * COLS;

    unsigned base;

    __device__ unsigned address(int row, int col) const { return base + row * COLS + col; }

    struct Column {
        unsigned first;
        __device__ unsigned operator()(int rows) const { return first + rows * COLS; }
    };
    __device__ Column column(int row, int col) const { return {address(row, col)}; }
};

// By a block of THREADS. SCALED: rows are multiplied by the floats at `scales`, one for each.
template <int THREADS, bool SCALED, class From, int ROWS, int COLS, class To>
__device__ void widen(ByteTile<ROWS, COLS> from, unsigned scales, To to) {
    constexpr int CHUNKS = COLS / 16;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, col = i % CHUNKS * 16;
        float times = 1;
        if constexpr (SCALED) times = __uint_as_float(load_shared(scales + 4 * row));
        uint4 x = load_shared_16(from.address(row, col));
        uint2 a = widen4<Product, From, SCALED>(x.x, times), b = widen4<Product, From, SCALED>(x.y, times);
        uint2 c = widen4<Product, From, SCALED>(x.z, times), d = widen4<Product, From, SCALED>(x.w, times);
        store_shared_16(to.address(row, col), make_uint4(a.x, a.y, b.x, b.y));
        store_shared_16(to.address(row, col + 8), make_uint4(c.x, c.y, d.x, d.y));
    }
}
