// Products in double precision: tiles of doubles in shared memory, and how operands come from them.
//
// A product's step takes eight columns of A and eight rows of B. The tensor cores want a lane to hold one column of A,
// or row of B, of the first four and one of the last four. A sum does not care for the order: here they are 2 t and
// 2 t + 1, t = lane % 4, which lie side by side. That is where a lane has them in an accumulator, too, so that P is an
// operand as it is.
#pragma once
#include "tile/fragment.cuh"

// Rows are multiples of 128 bytes, all banks. Their chunks of 16 bytes are permuted by the row, so that three ways to
// read meet no bank twice: pairs of a row, by eight lanes of two rows; a number of four rows 2 t by four columns, by
// half a warp; and whole rows.
template <int ROWS, int COLS>
struct SharedTile<ROWS, COLS, double> {
    static constexpr int COLUMNS = COLS;
    static constexpr int PITCH = 8 * COLS;  // bytes
    static constexpr int BYTES = ROWS * PITCH;
    static_assert(COLS % 16 == 0);

    unsigned base;

    __device__ unsigned address(int row, int col) const { return base + offset(row, col); }

    struct Column {
        unsigned base;
        int row, col;
        __device__ unsigned operator()(int rows) const { return base + offset(row + rows, col); }
    };
    __device__ Column column(int row, int col) const { return {base, row, col}; }

   private:
    __device__ static unsigned offset(int row, int col) {
        int permutation = (row ^ row >> 2) % 2 * 4 + row % 4 / 2 * 2;
        return row * PITCH + (col / 2 ^ permutation) * 16 + col % 2 * 8;
    }
};

// What a lane reads of a tile of doubles at (row, col) and whole groups of eight rows and columns further: a base and a
// constant, of two bases one for every other group of columns. The row below has them in turn.
template <class Tile>
struct EightByEight {
    unsigned bases[2];

    __device__ EightByEight(Tile tile, int row, int col) : bases{tile.address(row, col), tile.address(row, col + 8)} {}
    __device__ unsigned operator()(int rows, int columns, int below = 0) const {
        return bases[(columns + below) % 2] + columns / 2 * 128 + (8 * rows + below) * Tile::PITCH;
    }
};

// A operands: (a, m, k) gives the fragment of 16 rows 16 m by eight columns 8 k.
template <int M, int N, bool RELU>
__device__ auto operand_of_doubles(const FromRegisters<M, N, RELU>& from) {
    return [&sum = from.sum](double (&a)[4], int m, int k) {
        const double (&f)[4] = sum.x[m][k];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = RELU ? larger(f[i % 2 * 2 + i / 2], 0.0) : f[i % 2 * 2 + i / 2];
    };
}
template <class Tile>
__device__ auto operand_of_doubles(const FromShared<Tile>& from) {
    int lane = threadIdx.x % 32;
    EightByEight<Tile> at(from.tile, from.row + lane / 4, lane % 4 * 2);
    return [=](double (&a)[4], int m, int k) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            double2 pair = load_shared_double2(at(2 * m + h, k));
            a[h] = pair.x, a[h + 2] = pair.y;
        }
    };
}
template <class Tile>
__device__ auto operand_of_doubles(const FromTransposed<Tile>& from) {
    int lane = threadIdx.x % 32;
    EightByEight<Tile> at(from.tile, lane % 4 * 2, from.row + lane / 4);
    return [=](double (&a)[4], int m, int k) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = load_shared_double(at(k, 2 * m + i % 2, i / 2));
    };
}

// sum += A B over K, where read_b(n, k, b) gives B's numbers in columns 8 n at step k of eight.
template <int K, int M, int N, class A, class B, class F>
__device__ void multiply_doubles(Accumulator<M, N>& sum, const A& operand, const B& read_b, F along) {
    auto read_a = operand_of_doubles(operand);
#pragma unroll
    for (int k = 0; k < K / 8; k++) {
        if (k % 2 == 0) along(k / 2);
        double a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) read_a(a[m], m, k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            double b[2];
            read_b(n, k, b);
#pragma unroll
            for (int m = 0; m < M; m++) mma_m16n8k8(sum.x[m][n], a[m], b[0], b[1]);
        }
    }
}

// (The order of the sums is the same in the transposed product.)
template <int K, bool TRANSPOSED = false, int M, int N, int ROWS, int COLS, class A, class F = Nothing>
__device__ void mma_ABt(Accumulator<M, N>& sum, const A& operand, SharedTile<ROWS, COLS, double> b, int row,
                        F along = F()) {
    int lane = threadIdx.x % 32;
    EightByEight<SharedTile<ROWS, COLS, double>> at(b, row + lane / 4, lane % 4 * 2);
    auto read = [=](int n, int k, double (&x)[2]) {
        double2 pair = load_shared_double2(at(n, k));
        x[0] = pair.x, x[1] = pair.y;
    };
    multiply_doubles<K>(sum, operand, read, along);
}

template <int K, int M, int N, int ROWS, int COLS, class A, class F = Nothing>
__device__ void mma_AB(Accumulator<M, N>& sum, const A& operand, SharedTile<ROWS, COLS, double> b, int col,
                       F along = F(), float = 1) {
    int lane = threadIdx.x % 32;
    EightByEight<SharedTile<ROWS, COLS, double>> at(b, lane % 4 * 2, col + lane / 4);
    auto read = [=](int n, int k, double (&x)[2]) {
        x[0] = load_shared_double(at(k, n)), x[1] = load_shared_double(at(k, n, 1));
    };
    multiply_doubles<K>(sum, operand, read, along);
}
