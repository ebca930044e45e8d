// The tiles that the simt kernels compute with, and the few things done with them.
//
// A thread block owns OWNED rows of the result and visits the other side of the score matrix VISITED rows at a time.
// Its threads stand in a grid of THREADS / 16 by 16, and each holds, in registers, every (THREADS / 16)-th row and
// 1 / 16 of the columns of each tile. The 16 threads of a row are half a warp, so that row reductions are shuffles.
#pragma once
#include "attention/cached.cuh"
#include "attention/dropout.cuh"
#include "attention/schedule.cuh"
#include "ptx/convert.cuh"

constexpr int ACROSS = 16;                         // threads along a row
constexpr int DOWN = config::THREADS / ACROSS;     // threads along a column
constexpr int WIDTH = 16 / sizeof(Accum);          // elements moved at once: shared memory gives 16 bytes a thread
constexpr int M = config::OWNED / DOWN;            // rows of each tile that a thread holds
constexpr int N = config::COLUMNS / ACROSS;        // columns of a result tile that a thread holds
constexpr int SCORES = config::VISITED / ACROSS;   // columns of a score tile that a thread holds
constexpr int TOGETHER = N < WIDTH ? N : WIDTH;    // of the N columns, so many lie side by side

static_assert(config::OWNED % DOWN == 0 && config::VISITED % ACROSS == 0 && config::COLUMNS % ACROSS == 0,
              "each thread holds whole elements");
static_assert(config::DEPTH % WIDTH == 0 && config::VISITED % config::DEPTH == 0, "staged in whole vectors and pieces");

__device__ inline Accum infinity() { return __int_as_float(0x7f800000); }

using ScoreTile = Accum[M][SCORES];  // OWNED x VISITED over the block
using ResultTile = Accum[M][N];      // OWNED x COLUMNS over the block

// Where this thread's element i of a column, or j of a row, stands in the tile.
__device__ inline int row_of(int i) { return threadIdx.x / ACROSS + i * DOWN; }
__device__ inline int score_column_of(int j) { return threadIdx.x % ACROSS + j * ACROSS; }
__device__ inline int result_column_of(int j) {
    return (j / TOGETHER * ACROSS + threadIdx.x % ACROSS) * TOGETHER + j % TOGETHER;
}

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
    T at[COUNT];
};

// Where rows of K and V lie where these are pools of pages.
template <class T, bool = config::PAGED>
struct Paged {
    __device__ bool in_pages() const { return false; }
    __device__ T* paged(int) const { return nullptr; }
};
template <class T>
struct Paged<T, true> {
    const Params* p = nullptr;
    const Head* head;
    T* pool;
    const Strides* strides;

    __device__ bool in_pages() const { return p != nullptr; }
    __device__ T* paged(int r) const { return head->paged_row(*p, pool, *strides, r); }
};

// What rows of a matrix are multiplied by: nothing, or what `Of` (attention/cached.cuh) says.
struct Unscaled {
    static constexpr bool GIVEN = false;
};
template <class Of>
struct Scaled {
    static constexpr bool GIVEN = Of::GIVEN;
    const Params& p;
    const Head& head;
    __device__ Accum operator()(int r) const { return *Of::of_row(p, head, r); }
};

// One head of one batch entry of an array in global memory.
template <class T, class Scale = Unscaled>
struct Matrix : Paged<T> {
    T* at;
    long long stride;
    int rows, columns;
    bool vectors;  // every row starts where WIDTH elements can be moved at once, and is a multiple of them long
    Scale scale;

    __device__ Matrix(T* at, long long stride, int rows, int columns, Paged<T> pages = {}, Scale scale = {})
        : Paged<T>(pages), at(at), stride(stride), rows(rows), columns(columns), scale(scale) {
        vectors = reinterpret_cast<unsigned long long>(at) % (WIDTH * sizeof(T)) == 0 && stride % WIDTH == 0 &&
                  columns % WIDTH == 0;
    }
};

// Those of a head that have rows for queries (Q, O, dO, dQ), and those that have rows for keys.
template <class T>
__device__ Matrix<T> query_matrix(const Params& p, const Head& head, T* array, const Strides& strides, int columns) {
    return {head.query_row(array, strides), strides.row, head.queries(p), columns};
}
template <class T, class Scale = Unscaled>
__device__ Matrix<T, Scale> key_matrix(const Params& p, const Head& head, T* array, const Strides& strides, int columns,
                                       Scale scale = {}) {
    if constexpr (config::PAGED) {
        T* first = array + head.k * strides.head;
        Matrix<T, Scale> matrix{first, strides.row, head.keys(p), columns, {&p, &head, array, &strides}, scale};
        matrix.vectors = matrix.vectors && strides.batch % WIDTH == 0;
        return matrix;
    } else {
        return {head.key_row(array, strides), strides.row, head.keys(p), columns, {}, scale};
    }
}
// Results for keys have the rows of a cache that hold none, too: what is summed there is 0.
template <class T>
__device__ Matrix<T> all_key_rows(const Params& p, const Head& head, T* array, const Strides& strides, int columns) {
    return {head.key_row(array, strides), strides.row, head.key_rows(p), columns};
}

// A tile in shared memory. The pad spreads a column over all banks, and keeps rows on 16 bytes.
template <int ROWS, int COLUMNS>
struct SharedTile {
    alignas(16) Accum at[ROWS][COLUMNS + WIDTH];

    // Fetch the tile whose corner is (row, column), with zeros where it hangs over the edge of the matrix.
    template <class T, class Scale>
    __device__ void load(const Matrix<const T, Scale>& from, int row, int column) {
        if (from.vectors)
            load_by<true>(from, row, column);
        else
            load_by<false>(from, row, column);
    }

    template <bool VECTORS, class T, class Scale>
    __device__ void load_by(const Matrix<const T, Scale>& from, int row, int column) {
        constexpr int ALONG = COLUMNS / WIDTH, STEP = config::THREADS / ALONG;  // threads along a row, rows at once
        const int first = threadIdx.x / ALONG, c = threadIdx.x % ALONG * WIDTH, left = from.columns - column - c;
        const T* source = from.at + (row + first) * from.stride + column + c;
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP, source += STEP * from.stride) {
            Vector<T, WIDTH> x = {};
            int inside = row + first + r < from.rows ? left : 0;
            if constexpr (config::PAGED)
                if (inside > 0 && from.in_pages()) {
                    const T* at = from.paged(row + first + r);
                    source = at + column + c;
                    if (at == nullptr) inside = 0;
                }
            if (VECTORS) {
                if (inside > 0) x = *reinterpret_cast<const Vector<T, WIDTH>*>(source);
            } else {
                for (int e = 0; e < WIDTH; ++e)
                    if (e < inside) x.at[e] = source[e];
            }
            if (ROWS % STEP == 0 || first + r < ROWS)
                for (int e = 0; e < WIDTH; ++e) at[first + r][c + e] = to_float(x.at[e]);
            if constexpr (Scale::GIVEN)
                if (inside > 0 && (ROWS % STEP == 0 || first + r < ROWS)) {
                    const Accum times = from.scale(row + first + r);
                    for (int e = 0; e < WIDTH; ++e) at[first + r][c + e] *= times;
                }
        }
    }

    template <int COUNT = WIDTH>
    __device__ Vector<Accum, COUNT> vector(int row, int column) const {
        return *reinterpret_cast<const Vector<Accum, COUNT>*>(&at[row][column]);
    }
};

// Shared memory of a block. The operands of A B^T and the right operand of A B are never needed at the same time.
struct Shared {
    union {
        struct {
            SharedTile<config::OWNED, config::DEPTH> owned;
            SharedTile<config::VISITED, config::DEPTH> visited;
        };
        SharedTile<config::DEPTH, config::COLUMNS> right;
    };
    SharedTile<config::OWNED, config::VISITED> weights;
};

// f(element, i, j) for every element that this thread holds.
template <int ROWS, int COLUMNS, class F>
__device__ void for_each(Accum (&tile)[ROWS][COLUMNS], F f) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) f(tile[i][j], i, j);
}

// s += A B^T for two tiles in shared memory.
template <int COLUMNS>
__device__ void add_products(ScoreTile& s, const SharedTile<config::OWNED, COLUMNS>& a,
                             const SharedTile<config::VISITED, COLUMNS>& b) {
    // Each thread multiplies M x SCORES pairs for M + SCORES elements read: from registers the arithmetic units can be
    // fed, from shared memory they cannot.
#pragma unroll 1
    for (int d = 0; d < COLUMNS; d += WIDTH) {
        Vector<Accum, WIDTH> right[SCORES];
#pragma unroll
        for (int j = 0; j < SCORES; ++j) right[j] = b.vector(score_column_of(j), d);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const auto left = a.vector(row_of(i), d);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e)
#pragma unroll
                for (int j = 0; j < SCORES; ++j) s[i][j] = fma(left.at[e], right[j].at[e], s[i][j]);
        }
    }
}

// s += A B^T for OWNED rows of A and VISITED rows of B, in pieces of DEPTH columns: any head dimension fits.
template <class B>
__device__ void add_dot_products(ScoreTile& s, const Matrix<const In>& a, int row_a, const B& b, int row_b,
                                 Shared& shared) {
    for (int column = 0; column < a.columns; column += config::DEPTH) {
        __syncthreads();  // nobody reads the piece before any more
        shared.owned.load(a, row_a, column);
        shared.visited.load(b, row_b, column);
        __syncthreads();
        add_products(s, shared.owned, shared.visited);
    }
}

// s = A B^T.
template <class B>
__device__ void dot_products(ScoreTile& s, const Matrix<const In>& a, int row_a, const B& b, int row_b,
                             Shared& shared) {
    for_each(s, [](Accum& x, int, int) { x = 0; });
    add_dot_products(s, a, row_a, b, row_b, shared);
}

// sum += weights B for ROWS rows of B; `from` is the column of the weights that belongs to the first.
template <bool SKIP_ZEROS, int ROWS>
__device__ void add_piece(ResultTile& sum, const SharedTile<config::OWNED, config::VISITED>& weights, int from,
                          const SharedTile<ROWS, config::COLUMNS>& b) {
#pragma unroll 1
    for (int k = 0; k < ROWS; k += WIDTH) {
        Vector<Accum, WIDTH> left[M];
#pragma unroll
        for (int i = 0; i < M; ++i) left[i] = weights.vector(row_of(i), from + k);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e)
#pragma unroll
            for (int j = 0; j < N; j += TOGETHER) {
                const auto right = b.template vector<TOGETHER>(k + e, result_column_of(j));
#pragma unroll
                for (int i = 0; i < M; ++i)
                    if (!SKIP_ZEROS || left[i].at[e] != 0)
#pragma unroll
                        for (int t = 0; t < TOGETHER; ++t)
                            sum[i][j + t] = fma(left[i].at[e], right.at[t], sum[i][j + t]);
            }
    }
}

// sum += weights B for VISITED rows of B and COLUMNS columns of it. `tested` says that some pairs are hidden: their
// weight is 0, but 0 times what a hidden row holds may be NaN, so such terms are left out.
template <class B>
__device__ void add_weighted(ResultTile& sum, ScoreTile& weights, const B& b, int row, int column, bool tested,
                             Shared& shared) {
    if (column >= b.columns) return;  // this block's columns exist in another result only (Dv > D, or D > Dv)
    __syncthreads();
    // A thread holds other columns of the weights than it multiplies, so the 16 threads of a row exchange them.
    for_each(weights, [&](Accum x, int i, int j) { shared.weights.at[row_of(i)][score_column_of(j)] = x; });
#pragma unroll 1
    for (int k = 0; k < config::VISITED; k += config::DEPTH) {
        if (k > 0) __syncthreads();
        shared.right.load(b, row + k, column);
        __syncthreads();
        if (tested)
            add_piece<true>(sum, shared.weights, k, shared.right);
        else
            add_piece<false>(sum, shared.weights, k, shared.right);
    }
}

// Write a tile of results, without what hangs over the edge of the matrix.
template <class T>
__device__ void store(const Matrix<T>& to, const ResultTile& tile, int row, int column) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
        if (row + row_of(i) >= to.rows) continue;
        T* target = to.at + (row + row_of(i)) * to.stride;
        if constexpr (config::ADDS) {  // rounded once, with what is there
#pragma unroll
            for (int j = 0; j < N; j++)
                if (const int c = column + result_column_of(j); c < to.columns)
                    target[c] = from_float<T>(tile[i][j] + to_float(target[c]));
            continue;
        }
#pragma unroll
        for (int j = 0; j < N; j += TOGETHER) {
            Vector<T, TOGETHER> x;
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e) x.at[e] = from_float<T>(tile[i][j + e]);
            const int c = column + result_column_of(j);
            if (to.vectors && c < to.columns) {
                *reinterpret_cast<Vector<T, TOGETHER>*>(target + c) = x;
            } else {
#pragma unroll
                for (int e = 0; e < TOGETHER; ++e)
                    if (c + e < to.columns) target[c + e] = x.at[e];
            }
        }
    }
}

// Reductions over the 16 threads that hold a row; each of them gets the result.
template <class F>
__device__ Accum over_row(Accum x, F combine) {
#pragma unroll
    for (int n = ACROSS / 2; n > 0; n /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, n));
    return x;
}
__device__ inline Accum row_max(Accum x) {
    return over_row(x, [](Accum x, Accum y) { return max(x, y); });
}
__device__ inline Accum row_sum(Accum x) {
    return over_row(x, [](Accum x, Accum y) { return x + y; });
}
