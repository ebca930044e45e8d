// The seam for a warp's accumulator. A lane holds few rows of many columns ("lines"); what a row has in common is looked up
// once. `arrays`: where the kernel has mask and bias, in memory (here) or in shared memory (sm90/pair_tiles.cuh).
#pragma once
#include "attention/pairs.cuh"
#include "tile/fragment.cuh"

// Mask and bias in memory, as the lines of an accumulator of M row fragments read them: a query and keys from the lane's
// first one on, or (TRANSPOSED) a key and queries.
template <int M, bool TRANSPOSED>
struct InMemory {
    decltype(Params::mask) masks[config::MASK ? 2 * M : 1];
    decltype(Params::bias) biases[config::BIAS ? 2 * M : 1];
    long long mask_step, bias_step;
    int counts[2 * M];  // of what is there, from the first on

    template <int HEAD_ROWS>
    __device__ InMemory(const Pairs& pairs, const Placement<TRANSPOSED, HEAD_ROWS>& at) {
        const Params& p = pairs.p;
        mask_step = TRANSPOSED ? p.mask_strides.query : p.mask_strides.key;
        bias_step = TRANSPOSED ? p.bias_strides.query : p.bias_strides.key;
#pragma unroll
        for (int line = 0; line < 2 * M; line++) {
            Pair first = at(Accumulator<M, 1>::row(line / 2, line % 2 * 2), Accumulator<M, 1>::column(0, 0));
            first.head = pairs.real(first.head);
            int queries = pairs.head.queries(p) - first.i, keys = pairs.head.keys(p) - first.j;
            counts[line] = min(queries, keys) > 0 ? (TRANSPOSED ? queries : keys) : 0;
            if (config::MASK) masks[line] = at_pair(p.mask, p.mask_strides, pairs.head.batch, first);
            if (config::BIAS) biases[line] = at_pair(p.bias, p.bias_strides, pairs.head.batch, first);
        }
    }

    // Of column n, of those that the lane holds: 8 * group + {0, 1}.
    __device__ bool visible(int line, int n) const { return n < counts[line] && masks[line][n * mask_step]; }
    __device__ float bias(int line, int n) const { return n < counts[line] ? to_float(biases[line][n * bias_step]) : 0.f; }

    // Of columns n and n + 1.
    __device__ void visible(int line, int n, bool (&x)[2]) const { x[0] = visible(line, n), x[1] = visible(line, n + 1); }
    __device__ void bias(int line, int n, float (&x)[2]) const { x[0] = bias(line, n), x[1] = bias(line, n + 1); }
};

// What the score function needs to know of a lane's lines in an accumulator of M row fragments, where `at` says that it
// stands.
template <int M, bool TRANSPOSED, class Arrays>
struct Lines {
    using Tile = Accumulator<M, 1>;

    const Pairs& pairs;
    const Arrays& arrays;
    float alibi[config::ALIBI_SLOPES ? 2 * M : 1];  // what a key less of distance adds, and
    float from[config::ALIBI_SLOPES ? 2 * M : 1];   // the distance of the line's first pair, or what it adds

    template <int HEAD_ROWS>
    __device__ Lines(const Pairs& pairs, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Arrays& arrays)
        : pairs(pairs), arrays(arrays) {
#pragma unroll
        for (int line = 0; config::ALIBI_SLOPES && line < 2 * M; line++) {
            Pair first = at(Tile::row(line / 2, line % 2 * 2), Tile::column(0, 0));
            alibi[line] = -pairs.alibi(first.head);
            from[line] = first.i + pairs.head.diagonal(pairs.p) - first.j;
            if (config::ALIBI_BEHIND) from[line] *= alibi[line];
        }
    }

    // Of the element at row r and column c.
    __device__ float score(float s, int r, int c) const {
        int line = r / 8, n = c - Tile::column(0, 0);
        return score(s, line, n, config::BIAS ? arrays.bias(line, n) : 0.f);
    }
    __device__ float slope(float s, int, int) const { return pairs.product_slope(s); }

    // Both elements of a line from column n on.
    __device__ void score(float& first, float& second, int line, int n) const {
        float bias[2] = {};
        if constexpr (config::BIAS) arrays.bias(line, n, bias);
        first = score(first, line, n, bias[0]);
        second = score(second, line, n + 1, bias[1]);
    }

   private:
    __device__ float score(float s, int line, int n, float bias) const {
        float x = config::ALIBI_SLOPES ? pairs.product_and(s, alibi_of(line, n)) : pairs.product(s);
        return config::BIAS ? fmaf(bias, LOG2_E, x) : x;
    }

    // Where every key that is seen is behind its query, a multiplication and an addition.
    __device__ float alibi_of(int line, int n) const {
        float step = TRANSPOSED ? n : -n;
        return config::ALIBI_BEHIND ? fmaf(alibi[line], step, from[line]) : alibi[line] * fabsf(from[line] + step);
    }
};

// Products become scores.
template <int M, int N, bool TRANSPOSED, int HEAD_ROWS, class Arrays>
__device__ void score(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                      const Arrays& arrays) {
    Lines<M, TRANSPOSED, Arrays> lines(pairs, at, arrays);
#pragma unroll
    for (int line = 0; line < 2 * M; line++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            float(&f)[4] = x.x[line / 2][n];
            lines.score(f[line % 2 * 2], f[line % 2 * 2 + 1], line, 8 * n);
        }
}

// Elements of column groups [BEGIN, END) that `mask` hides become `value`.
template <int BEGIN, int END, int M, int N, class Arrays>
__device__ void hide_masked(Accumulator<M, N>& x, const Arrays& arrays, float value) {
#pragma unroll
    for (int line = 0; line < 2 * M; line++)
#pragma unroll
        for (int n = BEGIN; n < END; n++) {
            bool visible[2];
            arrays.visible(line, 8 * n, visible);
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (!visible[e]) x.x[line / 2][n][line % 2 * 2 + e] = value;
        }
}

// Hidden elements of column groups [BEGIN, END) become `value`: of each row the columns that positions leave are one range,
// so that an element costs a comparison or two with a constant.
template <int BEGIN, int END, int M, int N, bool TRANSPOSED, int HEAD_ROWS, int COUNT, class Arrays>
__device__ void hide(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                     const KeysSeen<COUNT>& seen, const Arrays& arrays, float value) {
    using Tile = Accumulator<M, N>;
    constexpr bool LOWER = TRANSPOSED ? walk::BOUND_LAST : walk::BOUND_FIRST;
    if constexpr (config::MASK) {
        hide_masked<BEGIN, END>(x, arrays, value);
        Pair first = at(0, 0);
        Range rows{0, HEAD_ROWS > 0 ? HEAD_ROWS : 16 * M}, columns{8 * BEGIN, 8 * END};
        Range q = TRANSPOSED ? columns : rows, k = TRANSPOSED ? rows : columns;
        q = {first.i + q.begin, first.i + q.end}, k = {first.j + k.begin, first.j + k.end};
        if (!config::KEY_MASK && !pairs.edges(q, k)) return;
    }
    int own = Tile::column(0, 0);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = Tile::row(m, 2 * h);
            Pair first = at(r, own);
            Range columns = TRANSPOSED ? pairs.queries_of(first.j, seen[r]) : pairs.keys_of(first.i);
            int origin = TRANSPOSED ? first.i : first.j, begin = columns.begin - origin, end = columns.end - origin;
#pragma unroll
            for (int n = BEGIN; n < END; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    bool visible = (!LOWER || 8 * n + e >= begin) && 8 * n + e < end;
                    if (!TRANSPOSED) visible = visible && seen.shifted(8 * n + e, own);
                    if (!visible) x.x[m][n][2 * h + e] = value;
                }
        }
}

template <int M, int N, bool TRANSPOSED, int HEAD_ROWS, int COUNT, class Arrays>
__device__ void hide(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                     const KeysSeen<COUNT>& seen, const Arrays& arrays, float value) {
    hide<0, N>(x, at, pairs, seen, arrays, value);
}
