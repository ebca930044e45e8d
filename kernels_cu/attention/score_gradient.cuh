// Gradients of the arrays that a score function reads: dS times what the score changes by, added to the element that
// the pair reads. As with a bias (array_gradient.cuh) a thread block sums dS of all tiles of pairs that read the same
// elements, in registers. Which these are follows from what the index depends on. Then it adds up what reads one
// element for certain: the pairs of a row, a column or a diagonal. What is left is few, and is added in memory: by
// atomic operations in any order, or, where the result must be the same in every run, as integers, in units that the
// largest of all sums decides.
#pragma once
#include "attention/array_gradient.cuh"

// For deterministic sums. Of the largest size that is added, and how many may be added to an element.
struct FixedPoint {
    double unit;

    __device__ FixedPoint(const Params& p) {
        int exponent;
        frexp(largest(p), &exponent);
        unit = ldexp(1.0, 62 - p.score_bits - exponent);
    }

    __device__ static double largest(const Params& p) { return __longlong_as_double(p.score_largest[0]); }
    __device__ unsigned long long fixed(double x) const { return (unsigned long long)(long long)rint(x * unit); }
    __device__ double number(unsigned long long x) const { return double((long long)x) / unit; }
};

// The N-th read; with LARGEST nothing is added, but the largest size found.
template <int N, bool LARGEST>
struct OfRead : user::Read<N> {
    using Read = user::Read<N>;
    static constexpr bool BIAS = false, LINES = false;
    static constexpr bool BY_PAIR = Read::BY_QUERY && Read::BY_KEY && !Read::DIAGONAL;

    // As of an array over pairs: 0 along axes on which the index does not depend.
    __device__ static PairStrides strides(const Params&) {
        return {Read::BY_BATCH, Read::BY_HEAD, Read::BY_QUERY, Read::BY_KEY};
    }
    __device__ static int queries(const Params& p) { return Sequence::most_queries(p); }
    __device__ static int keys(const Params& p) { return Sequence::most_keys(p); }
    __device__ static Accum change(const Pairs& pairs, Pair at, Accum s) {
        return Read::change(pairs.p, pairs.natural(s), pairs.head.batch, at.head, at.i, at.j);
    }
    __device__ static Accum bend(const Pairs& pairs, Pair at, Accum s, Accum ts) {
        return Read::bend(pairs.p, pairs.natural(s), pairs.natural(ts), pairs.head.batch, at.head, at.i, at.j);
    }

    __device__ static void add(const Params& p, Accum x, int batch, Pair at) {
        if (x == 0) return;
        if constexpr (LARGEST) {
            atomicMax(p.score_largest, __double_as_longlong(fabs(double(x))));  // NaN is above all
        } else {
            auto* sum = p.score_sums + Read::element(p, 0, batch, at.head, at.i, at.j);
            if constexpr (config::DETERMINISTIC)
                atomicAdd(sum, FixedPoint(p).fixed(x));
            else
                atomicAdd(sum, x);
        }
    }
};

// Of the tile that a block has summed, value(row, column).
template <int THREADS, int N, bool LARGEST, int ROWS, int KEYS, class F>
__device__ void write_sums(const SummedTiles<OfRead<N, LARGEST>, ROWS, KEYS>& tiles, F value, Accum*) {
    using Of = OfRead<N, LARGEST>;
    constexpr bool DIAGONAL = Of::DIAGONAL, COLUMNS = Of::BY_KEY && !DIAGONAL;
    auto add = [&](Accum x, int r, int c) {
        Of::add(tiles.p, x, tiles.batch, {tiles.head, tiles.tile_q * ROWS + r, tiles.tile_k * KEYS + c});
    };
    if constexpr (Of::BY_PAIR) {
        for (int n = threadIdx.x; n < ROWS * KEYS; n += THREADS) add(value(n / KEYS, n % KEYS), n / KEYS, n % KEYS);
    } else {
        constexpr int LINES = DIAGONAL ? ROWS + KEYS - 1 : COLUMNS ? KEYS : ROWS;
        for (int line = threadIdx.x; line < LINES; line += THREADS) {
            int shift = line - (ROWS - 1);  // of a diagonal: column less row
            int r = DIAGONAL ? max(0, -shift) : COLUMNS ? 0 : line, c = DIAGONAL ? max(0, shift) : COLUMNS ? line : 0;
            int count = DIAGONAL ? min(ROWS - r, KEYS - c) : COLUMNS ? ROWS : KEYS;
            Accum sum = 0;
#pragma unroll 8
            for (int n = 0; n < count; n++) sum += value(r + (DIAGONAL || COLUMNS ? n : 0), c + (COLUMNS ? 0 : n));
            add(sum, r, c);
        }
    }
}

// f(OfRead, block) for the read that a block works for: those of one come after those of the other.
template <bool LARGEST, int N = 0, class F>
__device__ void for_read(const Params& p, int block, F f) {
    if constexpr (N < user::READS) {
        if (block < user::Read<N>::blocks(p))
            f(OfRead<N, LARGEST>(), block);
        else
            for_read<LARGEST, N + 1>(p, block - user::Read<N>::blocks(p), f);
    }
}

// One sum for each thread, of blocks of THREADS threads: start at 0; become the gradient.
template <int THREADS>
__device__ void clear_sum(const Params& p) {
    long long n = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (n < user::elements(p)) p.score_sums[n] = 0;
    if (config::DETERMINISTIC && n == 0) p.score_largest[0] = 0;
}
template <int THREADS>
__device__ void finish_sum(const Params& p) {
    long long n = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (n >= user::elements(p)) return;
    if constexpr (config::DETERMINISTIC) {
        double largest = FixedPoint::largest(p), x = FixedPoint(p).number(p.score_sums[n]);
        user::store(
            p, n,
            Accum(largest <= 1.7976931348623157e308 ? x : largest - largest));  // NaN where something is not finite
    } else {
        user::store(p, n, p.score_sums[n]);
    }
}
