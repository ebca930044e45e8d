// The seam for a warp's accumulator. A lane holds few rows of many columns; what a row has in common is looked up once.
#pragma once
#include "attention/pairs.cuh"
#include "tile/fragment.cuh"

// One row of a lane: a query and keys from the lane's first one on, or (TRANSPOSED) a key and queries.
template <bool TRANSPOSED>
struct Line {
    Pair first;
    int count;          // of what is there from the first on
    float alibi, from;  // minus the slope, and the distance of the first pair
    decltype(Params::bias) bias;
    decltype(Params::mask) mask;

    Line() = default;
    __device__ Line(const Pairs& pairs, Pair at) : first{pairs.real(at.head), at.i, at.j} {
        const Params& p = pairs.p;
        int queries = pairs.head.queries(p) - first.i, keys = pairs.head.keys(p) - first.j;
        count = min(queries, keys) > 0 ? (TRANSPOSED ? queries : keys) : 0;
        if (config::ALIBI_SLOPES) {
            alibi = -pairs.alibi(first.head);
            from = first.i + pairs.head.diagonal(p) - first.j;
        }
        if (config::BIAS) bias = at_pair(p.bias, p.bias_strides, pairs.head.batch, first);
        if (config::MASK) mask = at_pair(p.mask, p.mask_strides, pairs.head.batch, first);
    }

    // Of the n-th pair from the first on.
    __device__ float score(const Pairs& pairs, float s, int n) const {
        float x = pairs.product(s);
        if (config::ALIBI_SLOPES) x = fmaf(alibi, fabsf(TRANSPOSED ? from + n : from - n), x);
        if (config::BIAS && n < count) x = fmaf(to_float(bias[n * step(pairs.p.bias_strides)]), LOG2_E, x);
        return x;
    }

    // Whether `mask` leaves it; n is less than `count`.
    __device__ bool visible(const Pairs& pairs, int n) const {
        return !config::MASK || mask[n * step(pairs.p.mask_strides)];
    }

   private:
    __device__ static long long step(const PairStrides& strides) { return TRANSPOSED ? strides.query : strides.key; }
};

// The lines of a lane in an accumulator of M row fragments, where `at` says that it stands.
template <int M, bool TRANSPOSED>
struct Lines {
    using Tile = Accumulator<M, 1>;

    const Pairs& pairs;
    Line<TRANSPOSED> lines[2 * M];

    template <int HEAD_ROWS>
    __device__ Lines(const Pairs& pairs, const Placement<TRANSPOSED, HEAD_ROWS>& at) : pairs(pairs) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                lines[2 * m + h] = {pairs, at(Tile::row(m, 2 * h), Tile::column(0, 0))};
    }

    // Of the element at row r and column c.
    __device__ float score(float s, int r, int c) const { return lines[r / 8].score(pairs, s, c - Tile::column(0, 0)); }
    __device__ float slope(float s, int, int) const { return pairs.product_slope(s); }
};

// Products become scores.
template <int M, int N, bool TRANSPOSED, int HEAD_ROWS>
__device__ void score(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs) {
    Lines<M, TRANSPOSED> lines(pairs, at);
    x.each([&](float& s, int r, int c) { s = lines.score(s, r, c); });
}

// Hidden elements of column groups [BEGIN, END) become `value`: of each row the columns that positions leave are one range,
// so that an element costs a comparison or two with a constant.
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
            Line<TRANSPOSED> line(pairs, at(r, own));
            Range columns = TRANSPOSED ? pairs.queries_of(line.first.j, seen[r]) : pairs.keys_of(line.first.i);
            int origin = TRANSPOSED ? line.first.i : line.first.j, first = columns.begin - origin, last = columns.end - origin;
#pragma unroll
            for (int n = BEGIN; n < END; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    bool visible = (!LOWER || 8 * n + e >= first) && 8 * n + e < last;
                    if (!TRANSPOSED) visible = visible && seen.shifted(8 * n + e, own);
                    if (!visible || !line.visible(pairs, 8 * n + e)) x.x[m][n][2 * h + e] = value;
                }
        }
}

template <int M, int N, bool TRANSPOSED, int HEAD_ROWS, int COUNT>
__device__ void hide(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                     const KeysSeen<COUNT>& seen, float value) {
    hide<0, N>(x, at, pairs, seen, value);
}
