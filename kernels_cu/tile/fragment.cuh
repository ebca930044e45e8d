// Register tiles of a warp, in the layout that mma.sync gives and takes.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tile/halves.cuh"
#include "tile/shared.cuh"

// Two numbers that lie side by side, rounded to T (RELU: see pack2).
template <class T, bool RELU>
__device__ void store_pair(unsigned address, float x, float y) {
    store_shared(address, pack2<T, RELU>(x, y));
}
template <class T, bool RELU>
__device__ void store_pair(unsigned address, double x, double y) {
    store_shared_double2(address, RELU ? larger(x, 0.0) : x, RELU ? larger(y, 0.0) : y);
}

// M x N fragments of 16 x 8 sums. Lane l holds rows l / 4 and l / 4 + 8 of a fragment, columns 2 (l % 4) + {0, 1}.
template <int M, int N>
struct Accumulator {
    Accum x[M][N][4];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) x[m][n][e] = 0;
    }

    // Every row becomes `row`.
    template <class Row>
    __device__ void fill(const Row& row) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) x[m][n][e] = row.x[n][e % 2];
    }

    // Where this lane's element x[m][n][e] stands.
    __device__ static int row(int m, int e) { return 16 * m + threadIdx.x % 32 / 4 + e / 2 * 8; }
    __device__ static int column(int n, int e) { return 8 * n + threadIdx.x % 4 * 2 + e % 2; }

    // f(x, row, column, y...) for elements this lane holds and their counterparts in other accumulators: all of them,
    // or those of column groups [BEGIN, END) of eight.
    template <int BEGIN = 0, int END = N, class F, class... Others>
    __device__ void each(F f, Others&... others) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = BEGIN; n < END; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) f(x[m][n][e], row(m, e), column(n, e), others.x[m][n][e]...);
    }

    // The same for what belongs to step k of STEPS, in order.
    template <int STEPS, class F, class... Others>
    __device__ void part(int k, F f, Others&... others) {
        constexpr int EACH = (4 * M * N + STEPS - 1) / STEPS;
#pragma unroll
        for (int i = k * EACH; i < (k + 1) * EACH && i < 4 * M * N; i++) {
            int m = i / (4 * N), n = i / 4 % N, e = i % 4;
            f(x[m][n][e], row(m, e), column(n, e), others.x[m][n][e]...);
        }
    }

    // Round to Product (RELU: see pack2), in parts `times` as large, and store at (row, col) of a shared tile.
    template <bool RELU = false, class Tile>
    __device__ void store(Tile tile, int row, int col, float times = 1) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int r = row + 16 * m + lane / 4 + 8 * h, c = col + 8 * n + lane % 4 * 2;
                    if constexpr (PARTS == 2) {
                        unsigned pairs[PARTS];
                        pack_parts<RELU>(pairs, x[m][n][2 * h], x[m][n][2 * h + 1], times);
                        store_shared(tile.address(r, c), pairs[0]);
                        store_shared(tile.address(r, c + Tile::COLUMNS / PARTS), pairs[PARTS - 1]);
                    } else {
                        store_pair<Product, RELU>(tile.address(r, c), x[m][n][2 * h], x[m][n][2 * h + 1]);
                    }
                }
    }
};

// Where a lane's first accumulator column lies in a row of floats, in bytes. Through a shuffle, which hides from the
// compiler how it is reckoned: else it does so again and again, between waits.
__device__ inline unsigned column_offset() { return __shfl_sync(~0u, threadIdx.x % 4 * 8, threadIdx.x % 32); }

// One number for each of the accumulator columns that a lane holds, column 8 n + 2 (lane % 4) + e at x[n][e].
template <int N>
struct ColumnVector {
    Accum x[N][2];

    ColumnVector() = default;
    __device__ ColumnVector(unsigned address, unsigned own) { load(address, own); }

    // From consecutive numbers in shared memory.
    __device__ void load(unsigned address, unsigned own = threadIdx.x % 4 * 2 * sizeof(Accum)) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            auto pair = load_shared_pair<Accum>(address + own + 8 * sizeof(Accum) * n);
            x[n][0] = pair.x, x[n][1] = pair.y;
        }
    }

    __device__ Accum operator[](int column) const { return x[column / 8][column % 2]; }  // a constant, once unrolled
};

// Where the A operand of a product comes from; (a, m, k) gives its 16 x 16 fragment at row fragment m, columns 16 k; of
// two parts, those of one.

// An accumulator, rounded to Product (RELU: see pack2), in parts `times` as large: the two layouts agree.
template <int M, int N, bool RELU = false>
struct FromRegisters {
    const Accumulator<M, N>& sum;
    float times = 1;

    __device__ void operator()(unsigned (&a)[4], int m, int k, int part = 0) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&f)[4] = sum.x[m][2 * k + i / 2];
            unsigned pairs[PARTS];
            pack_parts<RELU>(pairs, f[i % 2 * 2], f[i % 2 * 2 + 1], times);
            a[i] = pairs[part];
        }
    }
};

// A shared tile from `row` on.
template <class Tile>
struct FromShared {
    Tile tile;
    int row;

    __device__ void operator()(unsigned (&a)[4], int m, int k, int part = 0) const {
        int lane = threadIdx.x % 32;
        ldmatrix_x4(a, tile.address(row + 16 * m + lane % 16, part * (Tile::COLUMNS / PARTS) + 16 * k + lane / 16 * 8));
    }
};

// The transpose of a shared tile: rows of the operand are columns of the tile, from `row` on.
template <class Tile>
struct FromTransposed {
    Tile tile;
    int row;

    __device__ void operator()(unsigned (&a)[4], int m, int k, int part = 0) const {
        int lane = threadIdx.x % 32, column = part * (Tile::COLUMNS / PARTS) + row;
        ldmatrix_x4_transposed(a,
                               tile.address(16 * k + lane % 8 + lane / 16 * 8, column + 16 * m + lane / 8 % 2 * 8));
    }
};

template <auto X>
struct Constant {
    static constexpr auto value = X;
};

// f(Constant<0>(), x...), ..., f(Constant<N - 1>(), x...).
template <int N, int FIRST = 0, class F, class... X>
__device__ void for_constants(F f, X... x) {
    if constexpr (FIRST < N) {
        f(Constant<FIRST>(), x...);
        for_constants<N, FIRST + 1>(f, x...);
    }
}

// All parts of A's fragments at columns 16 k.
template <int M, class A>
__device__ void load_parts(unsigned (&a)[PARTS][M][4], const A& operand, int k) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int m = 0; m < M; m++) operand(a[part][m], m, k, part);
}

struct Nothing {
    __device__ void operator()(int = 0) const {}
};

// The sums of a product: of two parts, those of what is small have accumulators of their own.
template <int M, int N>
struct ProductSums {
    Accumulator<M, N> small;

    __device__ ProductSums() {
        if (PARTS == 2) small.clear();
    }

    // Fragments n and n + 1 of all rows, from all parts of a step's operands. TRANSPOSED: in the order of the
    // transposed product, which then has the same bits.
    template <bool TRANSPOSED, int L>
    __device__ void multiply(Accumulator<M, L>& sum, int n, const unsigned (&a)[PARTS][M][4],
                             const unsigned (&b)[PARTS][4]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                constexpr int LOW = PARTS - 1;
                mma_m16n8k16(sum.x[m][n + h], a[0][m], b[0][2 * h], b[0][2 * h + 1], Product());
                if constexpr (PARTS == 2) {
                    constexpr int FIRST = TRANSPOSED ? LOW : 0, SECOND = LOW - FIRST;
                    mma_m16n8k16(small.x[m][n + h], a[FIRST][m], b[SECOND][2 * h], b[SECOND][2 * h + 1], Product());
                    mma_m16n8k16(small.x[m][n + h], a[SECOND][m], b[FIRST][2 * h], b[FIRST][2 * h + 1], Product());
                }
            }
    }

    // At the end of a product: all of it.
    __device__ void add_to(Accumulator<M, N>& sum) {
        if (PARTS == 2) sum.each([](float& x, int, int, float& y) { x = fmaf(y, LOW_UNIT, x); }, small);
    }
};

// sum += A B^T over K; B's rows [row, row + 8 N) are the columns of the sum. `along(k)` is
// called at every step of 16: the place for copies that should not come in a burst.
// `sums`: of an operand that comes piece by piece.
template <int K, bool TRANSPOSED = false, int M, int N, int ROWS, int COLS, class T, class A, class F = Nothing>
__device__ void mma_ABt(Accumulator<M, N>& sum, ProductSums<M, N>& sums, const A& operand, SharedTile<ROWS, COLS, T> b,
                        int row, F along = F()) {
    int lane = threadIdx.x % 32;
    unsigned base = b.address(row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        along(k);
        unsigned a[PARTS][M][4];
        load_parts(a, operand, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned r[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                ldmatrix_x4(r[part], base + 2 * (8 * n * b.PITCH + part * (COLS / PARTS) + 16 * k));
            sums.template multiply<TRANSPOSED>(sum, n, a, r);
        }
    }
}
template <int K, bool TRANSPOSED = false, int M, int N, int ROWS, int COLS, class T, class A, class F = Nothing>
__device__ void mma_ABt(Accumulator<M, N>& sum, const A& operand, SharedTile<ROWS, COLS, T> b, int row, F along = F()) {
    ProductSums<M, N> sums;
    mma_ABt<K, TRANSPOSED>(sum, sums, operand, b, row, along);
    sums.add_to(sum);
}

// sum += A B over K; B's rows are summed over, its columns [col, col + 8 N) are those of the sum. Of two parts, sum +=
// unit A B; the tensor cores cut off what does not fit a sum, so theirs are of this product alone, a few fragments at a
// time.
template <int K, int M, int N, int ROWS, int COLS, class T, class A, class F = Nothing>
__device__ void mma_AB(Accumulator<M, N>& sum, const A& operand, SharedTile<ROWS, COLS, T> b, int col, F along = F(),
                       float unit = 1) {
    int lane = threadIdx.x % 32;
    unsigned base = b.address(lane % 16, col + lane / 16 * 8);
    constexpr int TOGETHER = PARTS == 1 ? N : N % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int first = 0; first < N; first += TOGETHER) {
        Accumulator<M, TOGETHER> own;
        ProductSums<M, TOGETHER> sums;
        if (PARTS == 2) own.clear();
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            if (first == 0) along(k);
            unsigned a[PARTS][M][4];
            load_parts(a, operand, k);
#pragma unroll
            for (int n = 0; n < TOGETHER; n += 2) {
                unsigned r[PARTS][4];
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    ldmatrix_x4_transposed(
                        r[part], base + 2 * (16 * k * b.PITCH + part * (COLS / PARTS) + 8 * (first + n)));
                if constexpr (PARTS == 2)
                    sums.template multiply<false>(own, n, a, r);
                else
                    sums.template multiply<false>(sum, n, a, r);
            }
        }
#pragma unroll
        for (int m = 0; PARTS == 2 && m < M; m++)
#pragma unroll
            for (int n = 0; n < TOGETHER; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& x = sum.x[m][first + n][e];
                    x = fmaf(fmaf(sums.small.x[m][n][e], LOW_UNIT, own.x[m][n][e]), unit, x);
                }
    }
}
