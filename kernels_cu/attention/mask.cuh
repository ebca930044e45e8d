// What the seam hides in a warp's accumulator.
#pragma once
#include "attention/pairs.cuh"
#include "tile/fragment.cuh"

// Hidden elements of column groups [BEGIN, END) become `value`. A lane holds few rows of many columns: of each row the
// columns that positions leave are one range, so that an element costs a comparison or two with a constant.
template <int BEGIN, int END, int M, int N, bool TRANSPOSED, int HEAD_ROWS, int COUNT>
__device__ void hide(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                     const KeysSeen<COUNT>& seen, float value) {
    constexpr bool LOWER = TRANSPOSED ? walk::BOUND_LAST : walk::BOUND_FIRST;
    int own = Accumulator<M, N>::column(0, 0);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = Accumulator<M, N>::row(m, 2 * h);
            Range columns = TRANSPOSED ? pairs.queries_of(at(r, 0).j, seen[r]) : pairs.keys_of(at(r, 0).i);
            int first = columns.begin - (TRANSPOSED ? at.i : at.j) - own, last = columns.end - (TRANSPOSED ? at.i : at.j) - own;
#pragma unroll
            for (int n = BEGIN; n < END; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    bool visible = (!LOWER || 8 * n + e >= first) && 8 * n + e < last;
                    if (!visible || (!TRANSPOSED && !seen.shifted(8 * n + e, own))) x.x[m][n][2 * h + e] = value;
                }
        }
}

template <int M, int N, bool TRANSPOSED, int HEAD_ROWS, int COUNT>
__device__ void hide(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                     const KeysSeen<COUNT>& seen, float value) {
    hide<0, N>(x, at, pairs, seen, value);
}
