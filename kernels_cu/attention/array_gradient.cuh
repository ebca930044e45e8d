// Gradients of arrays that a score reads (bias, ALiBi slopes): dS times what the score changes by, summed over all pairs that
// read an element. A thread block has a tile of the array, or, along axes that it is broadcast along, all that reads it, and
// recomputes dS of one tile of pairs after the other: nothing is added in memory, so that the result is the same bits in every
// run, and no kernel that computes dQ, dK and dV knows of it. Where blocks would be too few, several ("splits") share what a
// tile sums, and their parts are added afterwards.
#pragma once
#include "attention/pairs.cuh"

// What is known of such an array: where its gradient goes, and what an element's score changes by.
struct OfBias {
    static constexpr bool BIAS = true, DIAGONAL = false;
    __device__ static auto target(const Params& p) { return p.dbias; }
    __device__ static const PairStrides& strides(const Params& p) { return p.dbias_strides; }
    __device__ static Accum* parts(const Params& p) { return p.dbias_parts; }
    __device__ static int splits(const Params& p) { return p.dbias_splits; }
    static constexpr bool WEIGHTED = false;  // whether the change depends on the product s
    __device__ static Accum change(const Pairs&, Pair, Accum) { return 1; }
};
struct OfSlopes {
    static constexpr bool BIAS = false, DIAGONAL = false, WEIGHTED = false;
    __device__ static auto target(const Params& p) { return p.dalibi_slopes; }
    __device__ static const PairStrides& strides(const Params& p) { return p.dalibi_slopes_strides; }
    __device__ static Accum* parts(const Params& p) { return p.dalibi_slopes_parts; }
    __device__ static int splits(const Params& p) { return p.dalibi_slopes_splits; }
    __device__ static Accum change(const Pairs& pairs, Pair at, Accum) {
        return -Accum(abs(at.i + pairs.head.diagonal(pairs.p) - at.j));
    }
};

// A tile of pairs.
struct PairsTile {
    Head head;
    int i, j;  // its first query and key
    TileBits bits;
};

// What a thread block sums: tiles of ROWS queries by KEYS keys, in order. Strides of 0 are those of axes that the array is
// broadcast along: all tiles along them are summed. Of what is alike along diagonals it has a diagonal of tiles.
template <class Of, int ROWS, int KEYS>
struct Share {
    static constexpr bool DIAGONAL = Of::DIAGONAL && ROWS == KEYS;

    const Params& p;
    int batches, heads, tiles_q, tiles_k;  // along each axis, how many are summed
    int batch, head, tile_q, tile_k;       // the first
    int split, begin, end;                 // of the tiles, numbered

    __device__ Share(const Params& p, int block) : p(p) {
        const PairStrides& s = Of::strides(p);
        Head any{0, 0, 0};
        int all_q = tiles_in(any.queries(p), ROWS), all_k = tiles_in(any.keys(p), KEYS);
        auto own = [&](bool broadcast, int count, int& summed, int& first) {
            summed = broadcast ? count : 1;
            first = broadcast ? 0 : block % count;
            if (!broadcast) block /= count;
        };
        if constexpr (DIAGONAL) {
            int number = block % (all_q + all_k - 1), shift = number - (all_q - 1);  // tile of keys less tile of queries
            block /= all_q + all_k - 1;
            tile_q = max(0, -shift), tile_k = max(0, shift), tiles_k = 1, tiles_q = min(all_q - tile_q, all_k - tile_k);
        } else {
            own(s.key == 0, all_k, tiles_k, tile_k);
            own(s.query == 0, all_q, tiles_q, tile_q);
        }
        own(s.head == 0, p.heads_q, heads, head);
        own(s.batch == 0, p.batch, batches, batch);
        split = block;
        long long count = (long long)batches * heads * tiles_q * tiles_k, splits = Of::splits(p);
        begin = int(split * count / splits), end = int((split + 1) * count / splits);
    }

    // How many blocks, or turns of blocks, have one.
    __device__ static int count(const Params& p) {
        const PairStrides& s = Of::strides(p);
        Head any{0, 0, 0};
        return Of::splits(p) * (s.batch ? p.batch : 1) * (s.head ? p.heads_q : 1) *
               (s.query ? tiles_in(any.queries(p), ROWS) : 1) * (s.key ? tiles_in(any.keys(p), KEYS) : 1);
    }

    // A place in them, in order: heads that share K and V follow each other. Tiles in which no query sees a key are left out.
    struct Step {
        int n, b, h, q, k;  // number, and place along each axis
        PairsTile tile;
    };
    __device__ Step first() const {
        if (begin == end) return {begin};  // without keys there is no tile to count by
        int k = begin % tiles_k, rest = begin / tiles_k, q = rest % tiles_q;
        rest /= tiles_q;
        Step step{begin, rest / heads, rest % heads, q, k};
        return visible(step);
    }
    __device__ bool has(const Step& step) const { return step.n < end; }
    __device__ void advance(Step& step) const {
        after(step);
        step = visible(step);
    }

   private:
    __device__ void after(Step& step) const {
        step.n++;
        if (++step.k < tiles_k) return;
        step.k = 0;
        if (++step.q < tiles_q) return;
        step.q = 0;
        if (++step.h < heads) return;
        step.h = 0, step.b++;
    }
    // The first from a step on in which some query may see some key.
    __device__ Step visible(Step step) const {
        for (; has(step); after(step)) {
            PairsTile& at = step.tile;
            at = {Head::of_q(p, batch + step.b, head + step.h), (tile_q + step.q) * ROWS, (tile_k + step.k + (DIAGONAL ? step.q : 0)) * KEYS};
            if constexpr (walk::ALIKE) break;
            Range queries{at.i, min(at.i + ROWS, at.head.queries(p))};
            if constexpr (walk::LISTED) {
                KeyWalk<KEYS, ROWS> walk(p, at.head, queries);
                int found = walk.visits.find(at.j / KEYS);
                if (found < walk.visits.steps.end && walk.tile(found) == at.j / KEYS) {
                    at.bits = walk.bits(found, queries);
                    break;
                }
            } else {
                Range keys = Band{p, at.head}.keys_of(queries);
                if (keys.begin < at.j + KEYS && keys.end > at.j) break;
            }
        }
        return step;
    }

   public:
    // Add up the block's tile of sums, value(row, column), where the array is broadcast along queries or keys, and write it;
    // by a block of THREADS, with scratch memory for ROWS numbers.
    template <int THREADS, class F>
    __device__ void write(F value, Accum* scratch) const {
        const PairStrides& s = Of::strides(p);
        Head any{0, 0, 0};
        int rows = s.query ? min(ROWS, any.queries(p) - tile_q * ROWS) : 1;
        int columns = s.key ? min(KEYS, any.keys(p) - tile_k * KEYS) : 1;
        if (!s.key) {
            for (int r = threadIdx.x; r < ROWS; r += THREADS) {
                Accum sum = 0;
                for (int c = 0; c < KEYS; c++) sum += value(r, c);
                scratch[r] = sum;
            }
            __syncthreads();
        }
        for (int n = threadIdx.x; n < rows * columns; n += THREADS) {
            int row = n / columns, column = n % columns;
            Accum sum = 0;
            for (int r = row; r < (s.query ? row + 1 : ROWS); r++) sum += s.key ? value(r, column) : scratch[r];
            long long at = batch * s.batch + head * s.head + (tile_q * ROWS + row) * s.query + (tile_k * KEYS + column) * s.key;
            if (Of::splits(p) == 1)
                Of::target(p)[at] = from_float<Pointed<decltype(Of::target(p))>>(sum);
            else
                Of::parts(p)[split * elements(p) + at] = sum;
        }
    }

    // Of the array.
    __device__ static long long elements(const Params& p) {
        const PairStrides& s = Of::strides(p);
        Head any{0, 0, 0};
        return (s.batch ? p.batch : 1LL) * (s.head ? p.heads_q : 1) * (s.query ? any.queries(p) : 1) * (s.key ? any.keys(p) : 1);
    }

    // The parts of all splits, `each` of them so many, become the gradient: one element for each thread, by blocks of THREADS.
    template <int THREADS>
    __device__ void add_parts(int each = 1) const {
        long long count = elements(p), at = (long long)blockIdx.x * THREADS + threadIdx.x;
        if (at >= count) return;
        Accum sum = 0;
        for (int n = 0; n < Of::splits(p) * each; n++) sum += Of::parts(p)[n * count + at];
        Of::target(p)[at] = from_float<Pointed<decltype(Of::target(p))>>(sum);
    }
};

// What a block has summed becomes the gradient, or a part of it.
template <int THREADS, class Of, int ROWS, int KEYS, class F>
__device__ void write_sums(const Share<Of, ROWS, KEYS>& share, F value, Accum* scratch) {
    share.template write<THREADS>(value, scratch);
}

// The gradient of a head's sink, by a block of THREADS threads: a score whose value counts for nothing, dS = -P delta.
// minus_delta(head, i), of rows that have a finite lse.
template <bool WANTED, int THREADS, class F>
__device__ void gather_sink(const Params& p, int of_head, F minus_delta) {
    if constexpr (WANTED) {
        __shared__ Accum sums[THREADS];
        Accum sum = 0;
        int heads = p.dsinks_strides.head == 0 ? p.heads_q : 1;  // that share a sink
        for (int n = 0; n < p.batch * heads; n++) {
            Head head = Head::of_q(p, n / heads, of_head + n % heads);
            Accum sink = Pairs(p, head).sink(head.q);
            for (int i = threadIdx.x; i < head.queries(p); i += THREADS) {
                Accum weight = exp2((sink - p.lse[head.row_number(p, i)]) * LOG2E);
                // Of a row without a score NaN: nothing is added, whatever delta is.
                if (weight > 0) sum = fma(weight, minus_delta(head, i), sum);
            }
        }
        sums[threadIdx.x] = sum;
        for (int n = THREADS / 2; n > 0; n /= 2) {
            __syncthreads();
            if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
        }
        if (threadIdx.x == 0)
            p.dsinks[of_head * p.dsinks_strides.head] = from_float<Pointed<decltype(p.dsinks)>>(sums[0]);
    }
}
