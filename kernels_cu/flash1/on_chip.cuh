// What both FlashAttention-1 kernels stand on: tiles that stay on the chip for a whole step, and results that lie in
// global memory between steps. A thread block works on one head; simt/tile.cuh says how its threads share a tile.
#pragma once
#include "simt/tile.cuh"

static_assert(config::OWNED == config::VISITED, "scores are used as they are and transposed: tiles are square");
constexpr int TILE = config::OWNED;

using TileRows = SharedTile<TILE, config::COLUMNS>;  // of Q, K, V or dO, all columns of the head
using Weights = SharedTile<TILE, TILE>;

extern __shared__ __align__(16) char on_chip[];

// A result that is read and written at every step, in float32: `sum` where the output has 16 bits, else the output
// itself. Rounding O to 16 bits at every step, as the paper's listing has it, costs eight times the error of standard
// attention at 16k keys; the authors' own kernels keep it in float32, too.
__device__ inline Matrix<Accum> between_steps(const Params& p, const Head& head, Out* result, const Strides& strides,
                                              float* sum, int columns) {
    if (sizeof(Out) == sizeof(Accum)) return query_matrix(p, head, (Accum*)result, strides, columns);
    return {sum + head.row_number(p) * columns, columns, head.queries(p), columns};
}

// The tile of a result whose first row is `row`; what hangs over the edge is 0.
__device__ inline void load(ResultTile& tile, const Matrix<Accum>& from, int row) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
        const Accum* source = from.at + (row + row_of(i)) * from.stride;
        const bool inside = row + row_of(i) < from.rows;
#pragma unroll
        for (int j = 0; j < N; j += TOGETHER) {
            Vector<Accum, TOGETHER> x = {};
            const int c = result_column_of(j);
            if (inside && from.vectors && c < from.columns) {
                x = *reinterpret_cast<const Vector<Accum, TOGETHER>*>(source + c);
            } else {
#pragma unroll
                for (int e = 0; e < TOGETHER; ++e)
                    if (inside && c + e < from.columns) x.at[e] = source[c + e];
            }
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e) tile[i][j + e] = x.at[e];
        }
    }
}

__device__ inline void clear(const Matrix<Accum>& result) {
    const ResultTile zeros = {};
    for (int row = 0; row < result.rows; row += TILE) store(result, zeros, row, 0);
}

// Round what is in float32 to the 16 bits of the output.
__device__ inline void finish(const Matrix<Out>& to, const Matrix<Accum>& result) {
    if constexpr (sizeof(Out) < sizeof(Accum)) {
        for (int row = 0; row < result.rows; row += TILE) {
            ResultTile tile;
            load(tile, result, row);
            store(to, tile, row, 0);
        }
    }
}

// The threads of a row exchange its scores through shared memory, where a product can take them as its left operand.
__device__ inline void store(Weights& to, ScoreTile& scores) {
    for_each(scores, [&](Accum x, int i, int j) { to.at[row_of(i)][score_column_of(j)] = x; });
}
__device__ inline void store_transposed(Weights& to, ScoreTile& scores) {
    for_each(scores, [&](Accum x, int i, int j) { to.at[score_column_of(j)][row_of(i)] = x; });
}

// sum += weights B. `tested`: some pairs are hidden, and 0 times what a hidden row holds may be NaN; see simt/tile.cuh.
__device__ inline void add_product(ResultTile& sum, const Weights& weights, const TileRows& b, bool tested) {
    if (tested)
        add_piece<true>(sum, weights, 0, b);
    else
        add_piece<false>(sum, weights, 0, b);
}
