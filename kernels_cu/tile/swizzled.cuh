// Tiles of 16-bit numbers in shared memory as TMA writes and wgmma reads them: blocks of 64 columns one after the other,
// each a row of 128 bytes for every row of the tile, its eight 16-byte chunks permuted by the row ("128-byte swizzle"), so
// that neither rows nor columns meet in one bank. Tiles start at multiples of 1024 bytes.
#pragma once
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"

template <int ROWS, int COLS>
struct SwizzledTile {
    static constexpr int COLUMNS = COLS;
    static constexpr int BLOCKS = (COLS + 63) / 64;
    static constexpr int BLOCK_BYTES = 128 * ROWS;
    static constexpr int BYTES = BLOCKS * BLOCK_BYTES;
    static_assert(ROWS % 8 == 0 && COLS % 16 == 0);

    unsigned base;  // 32-bit address in shared memory

    __device__ unsigned address(int row, int col) const {
        return base + col / 64 * BLOCK_BYTES + 128 * row + (col / 8 % 8 ^ row % 8) * 16 + col % 8 * 2;
    }

    // Fill the tile from a row of the array on; BYTES arrive on the barrier.
    __device__ void load(const TensorMap& map, unsigned barrier, int row, int head, int batch) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) tma_load(base + b * BLOCK_BYTES, map, barrier, 64 * b, row, head, batch);
    }

    // Store a box of rows, from `first` of the tile to `row` of the array on. By one thread.
    __device__ void store(const TensorMap& map, int first, int row, int head, int batch) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            tma_store(map, base + b * BLOCK_BYTES + 128 * first, 64 * b, row, head, batch);
    }

    // Operand of a product whose sum runs along the rows: 16 columns at 16 k, rows from `row` on. (Its address is that
    // before the swizzle.)
    __device__ unsigned long long along_rows(int row, int k) const {
        return descriptor(128 * row + k / 4 * BLOCK_BYTES + k % 4 * 32, 0);
    }

    // Operand of a product whose sum runs down the columns: 16 rows at 16 k, all columns.
    __device__ unsigned long long down_columns(int k) const { return descriptor(128 * 16 * k, BLOCK_BYTES); }

   private:
    // Address, distance of column blocks, distance of groups of eight rows, all in 16 bytes; 1: 128-byte swizzle.
    __device__ unsigned long long descriptor(int offset, int block) const {
        unsigned low = (base >> 4) + (offset >> 4) + (block >> 4 << 16), high = 1024 >> 4 | 1u << 30;
        return (unsigned long long)high << 32 | low;
    }
};

// Tells the compiler that these registers change here: what reads them is not moved up over a wait.
template <int N>
__device__ void changed(Accumulator<1, N>& sum) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(sum.x[0][n][e])::"memory");
}

// sum = A B^T over K columns, in the background; A's 64 rows from `row` on, B's rows are the columns of the sum.
template <int K, int N, int ROWS, int COLS>
__device__ void start_ABt(Accumulator<1, N>& sum, SwizzledTile<ROWS, COLS> a, int row, SwizzledTile<8 * N, COLS> b) {
    wgmma_fence();
    wgmma_start(sum.x[0], a.along_rows(row, 0), b.along_rows(0, 0), Element());
#pragma unroll
    for (int k = 1; k < K / 16; k++) wgmma(sum.x[0], a.along_rows(row, k), b.along_rows(0, k), Element());
    wgmma_commit();
}

// A 64 x K operand in registers, rounded to Element.
template <int K>
struct Operand {
    unsigned x[K / 16][4];

    __device__ void take(const Accumulator<1, K / 8>& sum) {
        FromRegisters<1, K / 8> rounded{sum};
#pragma unroll
        for (int k = 0; k < K / 16; k++) rounded(x[k], 0, k);
    }
};

// sum += A B, in the background; A and the sum in registers.
template <int K, int N>
__device__ void start_AB(Accumulator<1, N>& sum, const Operand<K>& a, SwizzledTile<K, 8 * N> b) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma(sum.x[0], a.x[k], b.down_columns(k), Element());
    wgmma_commit();
}

// Round a warp's 16 rows to Element and store them from `row` of the tile on.
template <int N, int ROWS>
__device__ void store_rounded(const Accumulator<1, N>& sum, SwizzledTile<ROWS, 8 * N> tile, int row) {
    int lane = threadIdx.x % 32;
    FromRegisters<1, N> rounded{sum};
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        unsigned pairs[4];
        rounded(pairs, 0, k);
        stmatrix_x4(tile.address(row + lane % 16, 16 * k + lane / 16 * 8), pairs);
    }
}
