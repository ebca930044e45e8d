// A tile of 16-bit numbers in shared memory. Rows are 16 bytes longer than their elements, so that the eight rows that
// ldmatrix reads at once lie in different banks, and every address is a base plus a constant.
#pragma once
#include "ptx/cp_async.cuh"

__device__ inline unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

template <int ROWS, int COLS>
struct SharedTile {
    static constexpr int PITCH = COLS + 8;
    static constexpr int ELEMENTS = ROWS * PITCH;

    Element* data;

    __device__ Element* at(int row, int col) const { return data + row * PITCH + col; }
    __device__ unsigned address(int row, int col) const { return shared_address(at(row, col)); }
};

// Start copying rows x cols elements of global memory into the tile; what lies beyond them in the tile becomes zeros.
template <int THREADS, int ROWS, int COLS>
__device__ void load_async(SharedTile<ROWS, COLS> tile, const Element* source, long long row_stride, int rows,
                           int cols) {
    constexpr int CHUNKS = COLS / 8;  // of 16 bytes in a row
    constexpr int STEP = THREADS / CHUNKS;  // rows that the block copies at once
    int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    int bytes = 2 * min(max(cols - 8 * chunk, 0), 8);
    source += first * row_stride + 8 * chunk;
    unsigned target = tile.address(first, 8 * chunk);
    if (THREADS % CHUNKS != 0 && first >= STEP) return;
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP) {
        if (ROWS % STEP == 0 || first + row < ROWS) {
            cp_async_16(target + row * tile.PITCH * 2, source, first + row < rows ? bytes : 0);
        }
        source += STEP * row_stride;
    }
}

// Write the warp's rows [first, first + ROWS) of a tile to global memory, where they are rows of `cols` elements.
template <int COUNT, int ROWS, int COLS>
__device__ void store_rows(SharedTile<ROWS, COLS> tile, int first, Element* target, long long row_stride, int rows,
                           int cols) {
    int lane = threadIdx.x % 32;
    bool vectors = cols % 8 == 0 && row_stride % 8 == 0 && (unsigned long long)target % 16 == 0;
    constexpr int CHUNKS = COLS / 8;
    for (int i = lane; i < COUNT * CHUNKS; i += 32) {
        int row = first + i / CHUNKS, col = i % CHUNKS * 8;
        if (row >= rows || col >= cols) continue;
        Element* to = target + row * row_stride + col;
        if (vectors) {
            *(uint4*)to = *(const uint4*)tile.at(row, col);
        } else {
            for (int c = 0; c < min(8, cols - col); c++) to[c] = *tile.at(row, col + c);
        }
    }
}
