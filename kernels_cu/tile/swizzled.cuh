// Tiles in shared memory as TMA writes and wgmma reads them: blocks of 64 columns of 16 bits, or 128 of 8, one after
// the other, each a row of 128 bytes for every row of the tile, its eight 16-byte chunks permuted by the row ("128-byte
// swizzle"), so that neither rows nor columns meet in one bank. Tiles start at multiples of 1024 bytes.
#pragma once
#include "ptx/order.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/places.cuh"
#include "tile/rows.cuh"

// A row of 32 bytes of K is what a product takes at once.
template <class T>
constexpr int STEP = 32 / sizeof(T);

template <int ROWS, int COLS, class T = Product>
struct SwizzledTile {
    using Number = T;
    static constexpr int COLUMNS = COLS;
    static constexpr int SIZE = sizeof(T);
    static constexpr int WIDTH = 128 / SIZE;  // columns of a block
    static constexpr int BLOCKS = (COLS + WIDTH - 1) / WIDTH;
    static constexpr int BLOCK_BYTES = 128 * ROWS;
    static constexpr int BYTES = BLOCKS * BLOCK_BYTES;
    static_assert(ROWS % 8 == 0 && COLS % 16 == 0);

    unsigned base;  // 32-bit address in shared memory

    __device__ unsigned address(int row, int col) const {
        constexpr int CHUNK = 16 / SIZE;
        return base + col / WIDTH * BLOCK_BYTES + 128 * row + (col / CHUNK % 8 ^ row % 8) * 16 + col % CHUNK * SIZE;
    }

    // Its rows from `first` on.
    __device__ SwizzledTile from(int first) const { return {base + 128 * first}; }

    // Fill the tile, or a box of rows, from there of the array on; its bytes arrive on the barrier.
    __device__ void load(const TensorMap& map, unsigned barrier, InMap at) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            tma_load(base + b * BLOCK_BYTES, map, barrier, at.column + WIDTH * b, at.row, at.head, at.batch);
    }
    __device__ void load(const TensorMap& map, unsigned barrier, InWindow at) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            tma_load_window(base + b * BLOCK_BYTES, map, barrier, at.column + WIDTH * b, at.row, at.head, at.entry);
    }

    // And store it, by one thread, which says `yes`.
    __device__ void store(const TensorMap& map, InMap at, bool yes = true) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            tma_store(map, base + b * BLOCK_BYTES, at.column + WIDTH * b, at.row, at.head, at.batch, yes);
    }
    __device__ void store(const TensorMap& map, InWindow at) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            tma_store_window(map, base + b * BLOCK_BYTES, at.column + WIDTH * b, at.row, at.head, at.entry);
    }

    // The tile for `down_columns` in a block of a cluster, whose rank is in the upper bits of its addresses: they would
    // be added to the distance of column blocks.
    __device__ SwizzledTile without_rank() const { return {base & 0x3ffff}; }

    // Operand of a product whose sum runs along the rows: STEP columns at STEP k, rows from `row` on. (Its address is
    // that before the swizzle.)
    __device__ unsigned long long along_rows(int row, int k) const {
        return descriptor(128 * row + k / 4 * BLOCK_BYTES + k % 4 * 32, 0);
    }

    // Operand of a product whose sum runs down the columns, of 16-bit numbers: 16 rows at 16 k, all columns from block
    // `b` on.
    __device__ unsigned long long down_columns(int k, int b = 0) const {
        return descriptor(128 * 16 * k + b * BLOCK_BYTES, BLOCK_BYTES);
    }

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
        for (int e = 0; e < 4; e++) mark_changed(sum.x[0][n][e]);
}

// A 64 x K operand in registers, rounded to Product. Of 8 bits, a lane's four numbers of a row that follow each other
// in K are two and two of the accumulator, eight columns apart: K is in that order (sm90/turned_values.cuh).
template <int K>
struct Operand {
    static constexpr int EACH = STEP<Product>;

    unsigned x[K / EACH][4];

    // A warp's 16 rows of a tile of 16-bit numbers, from `row` on.
    template <class Tile>
    __device__ void load(Tile tile, int row) {
#pragma unroll
        for (int k = 0; k < K / 16; k++) FromShared<Tile>{tile, row}(x[k], 0, k);
    }

    // Its first columns, or COUNT from FIRST on.
    template <int FIRST = 0, int COUNT = K, bool RELU = false, int N>
    __device__ void take(const Accumulator<1, N>& sum) {
        if constexpr (EACH == 32) {
#pragma unroll
            for (int k = FIRST / 32; k < (FIRST + COUNT) / 32 && k < N / 4; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float(&a)[4] = sum.x[0][4 * k + i / 2 * 2], (&b)[4] = sum.x[0][4 * k + i / 2 * 2 + 1];
                    int h = i % 2 * 2;
                    x[k][i] = pack4<RELU>(a[h], a[h + 1], b[h], b[h + 1]);
                }
        } else {
            FromRegisters<1, N, RELU> rounded{sum};
#pragma unroll
            for (int k = FIRST / 16; k < (FIRST + COUNT) / 16 && k < N / 2; k++) rounded(x[k], 0, k);
        }
    }
};

// Tells the compiler that an operand is read until here: by products that were under way.
template <int K>
__device__ void was_read(const Operand<K>& a) {
#pragma unroll
    for (int k = 0; k < K / STEP<Product>; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) mark_read(a.x[k][i]);
}

// Products in the background: `sum` = A B or, with ADD, += A B, over K; a(k) and b(k) describe STEP of K, the first of
// four that lie behind each other. Up to six steps go one by one: descriptors of so few stay in uniform registers from
// tile to tile, and no instruction comes between the products.
constexpr bool ADD = true;

template <int K, bool ADD, int TRANSPOSED_A, int TRANSPOSED_B, int N, class A, class B>
__device__ void start_product(Accumulator<1, N>& sum, A a, B b) {
    constexpr int ALL = K / STEP<Product>, AT_ONCE = ALL > 6 ? 4 : 1;
    wgmma_fence();
    for_constants<(ALL + AT_ONCE - 1) / AT_ONCE>([&](auto n) {
        constexpr int FIRST = AT_ONCE * decltype(n)::value, STEPS = ALL - FIRST < AT_ONCE ? ALL - FIRST : AT_ONCE;
        if constexpr (ADD || FIRST > 0)
            wgmma<STEPS, TRANSPOSED_A, TRANSPOSED_B>(sum.x[0], a(FIRST), b(FIRST), Product());
        else
            wgmma_start<STEPS, TRANSPOSED_A, TRANSPOSED_B>(sum.x[0], a(FIRST), b(FIRST), Product());
    });
    wgmma_commit();
}

// A B^T over K columns; A's 64 rows from `row` on, B's first rows are the columns of the sum.
template <int K, bool ADD = false, int N, int ROWS, int COLS, int ROWS_B, class T>
__device__ void start_ABt(Accumulator<1, N>& sum, SwizzledTile<ROWS, COLS, T> a, int row,
                          SwizzledTile<ROWS_B, COLS, T> b) {
    static_assert(8 * N <= ROWS_B);
    start_product<K, ADD, 0, 0>(
        sum, [&](int k) { return a.along_rows(row, k); }, [&](int k) { return b.along_rows(0, k); });
}

// The same with A in registers, of 16-bit numbers.
template <int K, bool ADD = false, int N, int HELD, class Tile>
__device__ void start_ABt(Accumulator<1, N>& sum, const Operand<HELD>& a, Tile b) {
    static_assert(K <= HELD && 8 * N <= Tile::BLOCK_BYTES / 128);
    wgmma_fence();
    if constexpr (!ADD) wgmma_start<0>(sum.x[0], a.x[0], b.along_rows(0, 0), Product());
#pragma unroll
    for (int k = ADD ? 0 : 1; k < K / 16; k++) wgmma<0>(sum.x[0], a.x[k], b.along_rows(0, k), Product());
    wgmma_commit();
}

// A^T B^T over K: 64 columns of A, block `a_block`, by 8 N rows of B, from `b_row` on.
template <int K, bool ADD = false, int N, class TileA, class TileB>
__device__ void start_AtBt(Accumulator<1, N>& sum, TileA a, int a_block, TileB b, int b_row) {
    start_product<K, ADD, 1, 0>(
        sum, [&](int k) { return a.down_columns(k, a_block); }, [&](int k) { return b.along_rows(b_row, k); });
}

// A^T B over K: 64 columns of A, block `a_block`, by the first 8 N columns of B.
template <int K, bool ADD = false, int N, class TileA, class TileB>
__device__ void start_AtB(Accumulator<1, N>& sum, TileA a, int a_block, TileB b) {
    start_product<K, ADD, 1, 1>(
        sum, [&](int k) { return a.down_columns(k, a_block); }, [&](int k) { return b.down_columns(k); });
}

// sum = A B^T over K columns by one warp, A's 16 rows from `row` on, at once: slow.
template <int K, int N, class TileA, class TileB>
__device__ void warp_ABt(Accumulator<1, N>& sum, TileA tile, int row, TileB b) {
    int lane = threadIdx.x % 32;
    sum.clear();
#pragma unroll 1
    for (int k = 0; k < K / 16; k++) {
        unsigned a[4];
        FromShared<TileA>{tile, row}(a, 0, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned r[4];
            ldmatrix_x4(r, b.address(8 * n + lane % 8 + lane / 16 * 8, 16 * k + lane / 8 % 2 * 8));
            mma_m16n8k16(sum.x[0][n], a, r[0], r[1], Product());
            mma_m16n8k16(sum.x[0][n + 1], a, r[2], r[3], Product());
        }
    }
}

// sum += A B over K columns of A and rows of B, from FIRST on, in the background; A and the sum in registers.
template <int K, int FIRST = 0, int N, int COLS, int ROWS>
__device__ void start_AB(Accumulator<1, N>& sum, const Operand<COLS>& a, SwizzledTile<ROWS, 8 * N> b) {
    static_assert(FIRST + K <= COLS && FIRST + K <= ROWS);
    wgmma_fence();
#pragma unroll
    for (int k = FIRST / 16; k < (FIRST + K) / 16; k++) wgmma(sum.x[0], a.x[k], b.down_columns(k), Product());
    wgmma_commit();
}

// The same with B turned: its rows are the columns of the sum.
template <int K, int FIRST = 0, int N, int COLS, int ROWS>
__device__ void start_AB_turned(Accumulator<1, N>& sum, const Operand<COLS>& a, SwizzledTile<8 * N, ROWS> b) {
    constexpr int EACH = STEP<Product>;
    static_assert(FIRST + K <= COLS && FIRST + K <= ROWS);
    wgmma_fence();
#pragma unroll
    for (int k = FIRST / EACH; k < (FIRST + K) / EACH; k++) wgmma(sum.x[0], a.x[k], b.along_rows(0, k), Product());
    wgmma_commit();
}

// Store the transpose of a warp's 16 rows of an operand: as 16 columns of a tile, from (row, col) on.
template <int FIRST = 0, int COUNT = 1 << 20, int K, class Tile>
__device__ void store_transposed(const Operand<K>& operand, Tile tile, int row, int col) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = FIRST / 16; k < (FIRST + COUNT) / 16 && k < K / 16; k++)
        stmatrix_x4_transposed(tile.address(row + 16 * k + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8),
                               operand.x[k]);
}

// Round a warp's 16 rows to a tile's numbers of 16 bits and store them from (row, col) of the tile on; TRANSPOSED: as
// 16 columns.
template <bool TRANSPOSED = false, bool RELU = false, int N, class Tile>
__device__ void store_rounded(const Accumulator<1, N>& sum, Tile tile, int row, int col, int lane = threadIdx.x % 32) {
    using T = typename Tile::Number;
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&f)[4] = sum.x[0][2 * k + i / 2];
            pairs[i] = pack2<T, RELU>(f[i % 2 * 2], f[i % 2 * 2 + 1]);
        }
        if (TRANSPOSED)
            stmatrix_x4_transposed(tile.address(row + 16 * k + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8),
                                   pairs);
        else
            stmatrix_x4(tile.address(row + lane % 16, col + 16 * k + lane / 16 * 8), pairs);
    }
    if constexpr (N % 2) {
        static_assert(TRANSPOSED);
        const float(&f)[4] = sum.x[0][N - 1];
        stmatrix_x2_transposed(tile.address(row + 8 * (N - 1) + lane % 8, col + lane / 8 % 2 * 8),
                               pack2<T, RELU>(f[0], f[1]), pack2<T, RELU>(f[2], f[3]));
    }
}

// As store_rows (tile/rows.cuh), through 16 rows of 64 columns in shared memory that are the warp's own: half as many
// instructions.
using Strip = SwizzledTile<16, 64, Out>;

template <int N, class F>
__device__ void store_rows_through(Strip strip, const Accumulator<1, N>& sum, bool vectors, int cols, F at) {
    static_assert(N % 2 == 0);
    if (!__all_sync(~0u, vectors)) return store_one_by_one(sum, cols, at);
    int lane = threadIdx.x % 32, row = lane / 8, own = lane % 8 * 8;
    Out* to[4];
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = at(row + 4 * i);
    for_constants<(N + 7) / 8>([&](auto block) {
        constexpr int FIRST = 8 * block.value, COUNT = N - FIRST < 8 ? N - FIRST : 8;
        Accumulator<1, COUNT> part;
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) part.x[0][n][e] = sum.x[0][FIRST + n][e];
        __syncwarp();  // what was there before has been read
        store_rounded(part, strip, 0, 0);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int col = 8 * FIRST + own;
            uint4 words = load_shared_16(strip.address(row + 4 * i, own));
            if (to[i] != nullptr && own < 8 * COUNT && col < cols) *(uint4*)(to[i] + col) = words;
        }
    });
}
