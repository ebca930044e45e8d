// The seam for a warp's accumulator. A lane holds few rows of many columns ("lines"); what a row has in common is
// looked up once. `arrays`: where the kernel has mask and bias, in memory (here) or in shared memory
// (sm90/pair_tiles.cuh).
#pragma once
#include "attention/pairs.cuh"
#include "tile/fragment.cuh"

// Mask and bias in memory, as the lines of an accumulator of M row fragments read them: a query and keys from the
// lane's first one on, or (TRANSPOSED) a key and queries.
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
            Pair first = at.template line<Accumulator<M, 1>>(line);
            first.head = real_head(p, first.head);
            int queries = pairs.head.queries(p) - first.i, keys = pairs.head.keys(p) - first.j;
            counts[line] = min(queries, keys) > 0 ? (TRANSPOSED ? queries : keys) : 0;
            if (config::MASK) masks[line] = at_pair<config::MASK_LINES>(p.mask, p.mask_strides, pairs.head, first);
            if (config::BIAS) biases[line] = at_pair<config::BIAS_LINES>(p.bias, p.bias_strides, pairs.head, first);
        }
    }

    // Of column n, of those that the lane holds: 8 * group + {0, 1}.
    __device__ bool visible(int line, int n) const { return n < counts[line] && masks[line][n * mask_step]; }
    __device__ Accum bias(int line, int n) const {
        return n < counts[line] ? Accum(to_float(biases[line][n * bias_step])) : 0;
    }

    // Of columns n and n + 1.
    __device__ void visible(int line, int n, bool (&x)[2]) const {
        x[0] = visible(line, n), x[1] = visible(line, n + 1);
    }
    __device__ void bias(int line, int n, Accum (&x)[2]) const { x[0] = bias(line, n), x[1] = bias(line, n + 1); }
};

// What the score function needs to know of a lane's lines in an accumulator of M row fragments, where `at` says that it
// stands.
template <int M, bool TRANSPOSED, class Arrays>
struct Lines {
    using Tile = Accumulator<M, 1>;

    const Pairs& pairs;
    const Arrays& arrays;
    Terms::Along<M, Tile, TRANSPOSED> terms;
    Pair firsts[config::SCORE ? 2 * M : 1];
    const Accum* tables[user::TABLES ? 2 * M : 1];

    template <int HEAD_ROWS>
    __device__ Lines(const Pairs& pairs, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Arrays& arrays)
        : pairs(pairs), arrays(arrays), terms(pairs.p, pairs.head, at) {
#pragma unroll
        for (int line = 0; config::SCORE && line < 2 * M; line++) {
            firsts[line] = at.template line<Tile>(line);
            if (user::TABLES) tables[line] = pairs.tabled(firsts[line]);
        }
    }

    // Of the element at row r and column c. NEAR: see near_zero.
    template <bool NEAR = false>
    __device__ Accum score(Accum s, int r, int c) const {
        int line = r / 8, n = c - Tile::column(0, 0);
        return terms.template read<1>(arrays, line, n, [&](auto... read) { return sum<NEAR>(s, line, n, read[0]...); });
    }
    // factor * score + x
    template <bool NEAR>
    __device__ Accum exponent(Accum s, int r, int c, Accum factor, Accum x) const {
        if constexpr (NEAR_CAPS && Terms::GIVEN == 0) return pairs.capped_and<NEAR>(s, x);
        return fma(score<NEAR>(s, r, c), factor, x);
    }
    template <bool NEAR = false>
    __device__ Accum slope(Accum s, int r, int c) const {
        int line = r / 8, n = c - Tile::column(0, 0);
        return pairs.product_slope<NEAR>(s, pair(line, n), tabled(line, n));
    }

    // Both elements of a line from column n on.
    template <bool NEAR>
    __device__ void score(Accum& first, Accum& second, int line, int n) const {
        // With more to see through, the compiler would leave a consumer's run as a function.
        if constexpr (Terms::GIVEN == Terms::IN_PRODUCT) {
            first = sum<NEAR>(first, line, n);
            second = sum<NEAR>(second, line, n + 1);
        } else {
            terms.template read<2>(arrays, line, n, [&](auto... read) {
                first = sum<NEAR>(first, line, n, read[0]...);
                second = sum<NEAR>(second, line, n + 1, read[1]...);
            });
        }
    }

   private:
    // Known to score functions alone.
    __device__ Pair pair(int line, int n) const {
        if constexpr (!config::SCORE) return {};
        return firsts[config::SCORE ? line : 0].template along<TRANSPOSED>(n);
    }
    __device__ const Accum* tabled(int line, int n) const {
        if constexpr (user::TABLES == 0) return nullptr;
        return tables[user::TABLES ? line : 0] + (TRANSPOSED ? -n : n);
    }
    template <bool NEAR, class... Others>
    __device__ Accum sum(Accum s, int line, int n, Others... added) const {
        Accum x = pairs.product<NEAR>(s, pair(line, n), tabled(line, n), terms.number(line, n));
        ((x = plus(x, added)), ...);
        return x;
    }
};

// Whether a warp's products are all so near 0 that their soft caps are a polynomial: told by sums of squares, of eight
// in a tile for 128 keys. (By absolute values it takes as long.)
template <int M, int N>
__device__ bool near_zero(const Accumulator<M, N>& x, const Pairs& pairs) {
    if constexpr (!NEAR_CAPS) return false;
    Accum sums[2][4] = {};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[n % 2][e] = fma(x.x[m][n][e], x.x[m][n][e], sums[n % 2][e]);
    bool near = true;
#pragma unroll
    for (int e = 0; e < 4; e++)
        near = near && sums[0][e] < pairs.p.near_cap_squared && sums[1][e] < pairs.p.near_cap_squared;
    return __all_sync(~0u, near);
}

// f(Constant<near>()): a warp takes one of two ways.
template <class F>
__device__ void as_near(bool near, F f) {
    if constexpr (NEAR_CAPS) {
        if (__builtin_expect(near, true)) {
            keep_branch();
            f(Constant<true>());
            return;
        }
        keep_branch();
    }
    f(Constant<false>());
}

// Products become scores.
template <int M, int N, bool TRANSPOSED, int HEAD_ROWS, class Arrays>
__device__ void score(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                      const Arrays& arrays) {
    Lines<M, TRANSPOSED, Arrays> lines(pairs, at, arrays);
    as_near(near_zero(x, pairs), [&](auto how) {
        constexpr bool NEAR = decltype(how)::value;
#pragma unroll
        for (int line = 0; line < 2 * M; line++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                Accum(&f)[4] = x.x[line / 2][n];
                lines.template score<NEAR>(f[line % 2 * 2], f[line % 2 * 2 + 1], line, 8 * n);
            }
    });
}

// Elements of column groups [BEGIN, END) that `mask` hides become `value`.
template <int BEGIN, int END, int M, int N, class Arrays>
__device__ void hide_masked(Accumulator<M, N>& x, const Arrays& arrays, Accum value) {
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

// The same of those that a block mask hides.
template <int BEGIN, int END, int M, int N, bool TRANSPOSED, int HEAD_ROWS>
__device__ void hide_by_bits(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const TileBits& bits,
                             Accum value) {
    using Tile = Accumulator<M, N>;
    static_assert(BEGIN % 2 == 0 && END % 2 == 0, "whole words");
    Pair first = at(0, 0);
    int i = first.i - bits.i, j = first.j - bits.j, own = Tile::column(0, 0);
    int row = TRANSPOSED ? j : i, column = TRANSPOSED ? i : j;
#pragma unroll
    for (int line = 0; line < 2 * M; line++) {
        const unsigned short* words = bits.row(row + Tile::row(line / 2, line % 2 * 2)) + column / 16;
#pragma unroll
        for (int n = BEGIN; n < END; n += 2) {
            unsigned word = words[n / 2] >> own;
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!(word >> (e / 2 * 8 + e % 2) & 1)) x.x[line / 2][n + e / 2][line % 2 * 2 + e % 2] = value;
        }
    }
}

// Hidden elements of column groups [BEGIN, END) become `value`: of each row the columns that positions leave are one
// range, so that an element costs a comparison or two with a constant.
template <int BEGIN, int END, int M, int N, bool TRANSPOSED, int HEAD_ROWS, int COUNT, class Arrays>
__device__ void hide(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, const Pairs& pairs,
                     const KeysSeen<COUNT>& seen, const Arrays& arrays, Accum value) {
    using Tile = Accumulator<M, N>;
    constexpr bool LOWER = TRANSPOSED ? walk::BOUND_LAST : walk::BOUND_FIRST;
    if constexpr (config::MASK || config::BLOCK_MASK) {
        if constexpr (config::MASK) hide_masked<BEGIN, END>(x, arrays, value);
        if constexpr (config::BLOCK_MASK)
            if (pairs.bits.partial()) hide_by_bits<BEGIN, END>(x, at, pairs.bits, value);
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
                     const KeysSeen<COUNT>& seen, const Arrays& arrays, Accum value) {
    hide<0, N>(x, at, pairs, seen, arrays, value);
}
