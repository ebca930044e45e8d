// Gradients of arrays that a score reads (bias, ALiBi slopes): dS times what the score changes by, summed over all
// pairs that read an element. A thread block has a tile of the array, or, along axes that it is broadcast along, all
// that reads it, and recomputes dS of one tile of pairs after the other: nothing is added in memory, so that the result
// is the same bits in every run, and no kernel that computes dQ, dK and dV knows of it. Where blocks would be too few,
// several ("splits") share what a tile sums, and their parts are added afterwards.
#pragma once
#include "attention/pairs.cuh"

// What is known of such an array: where its gradient goes, and what an element's score changes by. A new one is a class
// here, and its line in ARRAYS_OVER_PAIRS.
struct OfPairs {
    static constexpr bool BIAS = false;      // whether it is the bias, whose own tile a block may keep
    static constexpr bool BY_KEY = true;     // whether it may have an axis of keys
    static constexpr bool DIAGONAL = false;  // whether what reads an element lies along a diagonal
    static constexpr bool WEIGHTED = false;  // whether the change depends on the product s
    static constexpr bool LINES = false;     // whether it has a line for each packed query
    __device__ static Accum change(const Pairs&, Pair, Accum) { return 1; }
    // What that changes by where s does by ts.
    __device__ static Accum bend(const Pairs&, Pair, Accum, Accum) { return 0; }
};
#define IN_PARAMS(ARRAY)                                                                           \
    __device__ static auto target(const Params& p) { return p.d##ARRAY; }                          \
    __device__ static const PairStrides& strides(const Params& p) { return p.d##ARRAY##_strides; } \
    __device__ static Accum* parts(const Params& p) { return p.d##ARRAY##_parts; }                 \
    __device__ static int splits(const Params& p) { return p.d##ARRAY##_splits; }                  \
    template <class Given>                                                                         \
    __device__ static int queries(const Given& p) {                                                \
        if constexpr (RAGGED) return p.d##ARRAY##_queries;                                         \
        return Sequence::most_queries(p);                                                          \
    }                                                                                              \
    template <class Given>                                                                         \
    __device__ static int keys(const Given& p) {                                                   \
        if constexpr (RAGGED) return p.d##ARRAY##_keys;                                            \
        return Sequence::most_keys(p);                                                             \
    }

struct OfBias : OfPairs {
    IN_PARAMS(bias)
    static constexpr bool BIAS = true, LINES = config::BIAS_LINES;
};
struct OfSlopes : OfPairs {
    IN_PARAMS(alibi_slopes)
    static constexpr bool BY_KEY = false;
    __device__ static Accum change(const Pairs& pairs, Pair at, Accum) {
        return -Accum(abs(at.i + pairs.head.diagonal(pairs.p) - at.j));
    }
};

// KERNELS(array, whether its gradient is wanted, its class): each family has two kernels for an array.
#define ARRAYS_OVER_PAIRS(KERNELS)        \
    KERNELS(bias, config::D_BIAS, OfBias) \
    KERNELS(alibi_slopes, config::D_ALIBI_SLOPES, OfSlopes)

// A tile of pairs.
struct PairsTile {
    Head head;
    int i, j;  // its first query and key
    TileBits bits;
};

// Where lengths are data: whether a step has its head already, whose lengths take a search.
template <bool>
struct Known {};
template <>
struct Known<true> {
    bool known = false;
};

// Of tiles, where sequences are as many as tiles of the longest one.
template <bool>
struct CountOf {
    using type = int;
};
template <>
struct CountOf<true> {
    using type = long long;
};

// What a thread block sums: tiles of ROWS queries by KEYS keys, in order. Strides of 0 are those of axes that the array
// is broadcast along: all tiles along them are summed. Of what is alike along diagonals it has a diagonal of tiles.
template <class Of, int ROWS, int KEYS>
struct SummedTiles {
    static constexpr bool DIAGONAL = Of::DIAGONAL && ROWS == KEYS, LINES = Of::LINES;
    using Count = typename CountOf<RAGGED>::type;

    const Params& p;
    int batches, heads, tiles_q, tiles_k;  // along each axis, how many are summed
    int batch, head, tile_q, tile_k;       // the first
    int split;
    Count begin, end;  // of the tiles, numbered
    Range lines;       // LINES: those of the array that are its own

    __device__ SummedTiles(const Params& p, int block) : p(p) {
        const PairStrides& s = Of::strides(p);
        int all_q = tiles_q_of(p, s.query != 0), all_k = tiles_k_of(p, s.key != 0);
        auto own = [&](bool broadcast, int count, int& summed, int& first) {
            summed = broadcast ? count : 1;
            first = broadcast ? 0 : block % count;
            if (!broadcast) block /= count;
        };
        if constexpr (DIAGONAL) {
            // shift: tile of keys less tile of queries.
            int number = block % (all_q + all_k - 1), shift = number - (all_q - 1);
            block /= all_q + all_k - 1;
            tile_q = max(0, -shift), tile_k = max(0, shift), tiles_k = 1, tiles_q = min(all_q - tile_q, all_k - tile_k);
        } else {
            own(s.key == 0, all_k, tiles_k, tile_k);
            own(s.query == 0, all_q, tiles_q, tile_q);
        }
        own(s.head == 0, p.heads_q, heads, head);
        own(s.batch == 0, p.batch, batches, batch);
        split = block;
        if constexpr (LINES) {
            HeadTile of = QueryTiles<ROWS>::placed(p, tile_q, head);
            batches = 1, batch = of.head.number(), tile_q = of.number;
            int first = tile_q * ROWS, rows = of.none() ? 0 : min(ROWS, of.head.queries(p) - first);
            lines = {of.head.query_at(first), of.head.query_at(first) + rows};
        }
        long long count = (long long)batches * heads * tiles_q * tiles_k, splits = Of::splits(p);
        begin = Count(split * count / splits), end = Count((split + 1) * count / splits);
        if (LINES && lines.begin >= lines.end) end = begin;
    }

    // How many blocks, or turns of blocks, have one.
    __device__ static int count(const Params& p) {
        const PairStrides& s = Of::strides(p);
        return Of::splits(p) * (s.batch ? p.batch : 1) * (s.head ? p.heads_q : 1) *
               (s.query ? tiles_q_of(p, true) : 1) * (s.key ? tiles_k_of(p, true) : 1);
    }

    // A place in them, in order: heads that share K and V follow each other. Tiles in which no query sees a key are
    // left out.
    struct Step : Known<RAGGED> {
        Count n;
        int b, h, q, k;  // number, and place along each axis
        PairsTile tile;
    };
    __device__ Step first() const {
        if (begin == end) return {{}, begin};  // without keys there is no tile to count by
        int k = int(begin % tiles_k);
        Count rest = begin / tiles_k;
        int q = int(rest % tiles_q);
        rest /= tiles_q;
        Step step{{}, begin, int(rest / heads), int(rest % heads), q, k};
        return visible(step);
    }
    __device__ bool has(const Step& step) const { return step.n < end; }
    __device__ void advance(Step& step) const {
        after(step);
        step = visible(step);
    }

   private:
    // Tiles of queries, or keys, that the array has, or that are summed.
    __device__ static int tiles_q_of(const Params& p, bool own) {
        if constexpr (LINES) return QueryTiles<ROWS>::of_head(p);
        return tiles_in(own ? Of::queries(p) : Sequence::most_queries(p), ROWS);
    }
    __device__ static int tiles_k_of(const Params& p, bool own) {
        return tiles_in(own ? Of::keys(p) : Sequence::most_keys(p), KEYS);
    }

    // Up to the last tile of keys of this tile of queries of the head.
    __device__ void pass_over(Step& step, int q) const {
        step.n += Count(q - step.q) * tiles_k + (tiles_k - 1 - step.k);
        step.q = q, step.k = tiles_k - 1;
    }
    __device__ void after(Step& step) const {
        step.n++;
        if (++step.k < tiles_k) return;
        step.k = 0;
        if (++step.q < tiles_q) return;
        step.q = 0;
        if constexpr (RAGGED) step.known = false;
        if (++step.h < heads) return;
        step.h = 0, step.b++;
    }
    // The first from a step on in which some query may see some key.
    __device__ Step visible(Step step) const {
        for (; has(step); after(step)) {
            PairsTile& at = step.tile;
            if constexpr (!RAGGED) {
                at = {Head::of_q(p, batch + step.b, head + step.h), (tile_q + step.q) * ROWS,
                      (tile_k + step.k + (DIAGONAL ? step.q : 0)) * KEYS};
            } else {
                if (!step.known) at.head = Head::of_q(p, batch + step.b, head + step.h);
                const Head& of = at.head;
                at.i = (tile_q + step.q) * ROWS, at.j = (tile_k + step.k + (DIAGONAL ? step.q : 0)) * KEYS,
                at.bits = {};
                step.known = true;
                if (at.i >= of.queries(p) || of.keys(p) == 0) {
                    pass_over(step, tiles_q - 1);
                    continue;
                }
                if (at.j >= of.keys(p)) {
                    pass_over(step, step.q);
                    continue;
                }
            }
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
    // Add up the block's tile of sums, value(row, column), where the array is broadcast along queries or keys, and
    // write it; by a block of THREADS, with scratch memory for ROWS numbers.
    template <int THREADS, class F>
    __device__ void write(F value, Accum* scratch) const {
        const PairStrides& s = Of::strides(p);
        int rows = s.query ? min(ROWS, Of::queries(p) - tile_q * ROWS) : 1;
        int columns = s.key ? min(KEYS, Of::keys(p) - tile_k * KEYS) : 1;
        if (LINES) rows = lines.end - lines.begin;
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
            long long at = batch * s.batch + head * s.head + ((LINES ? lines.begin : tile_q * ROWS) + row) * s.query +
                           (tile_k * KEYS + column) * s.key;
            if (Of::splits(p) == 1)
                Of::target(p)[at] = from_float<Pointed<decltype(Of::target(p))>>(sum);
            else
                Of::parts(p)[split * elements(p) + at] = sum;
        }
    }

    // Of the array.
    __device__ static long long elements(const Params& p) {
        const PairStrides& s = Of::strides(p);
        return (s.batch ? p.batch : 1LL) * (s.head ? p.heads_q : 1) * (s.query ? Of::queries(p) : 1) *
               (s.key ? Of::keys(p) : 1);
    }

    // The parts of all splits, `each` of them so many, become the gradient: one element for each thread, by blocks of
    // THREADS.
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
__device__ void write_sums(const SummedTiles<Of, ROWS, KEYS>& tiles, F value, Accum* scratch) {
    tiles.template write<THREADS>(value, scratch);
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
                Accum lse = p.lse[head.row_number(p, i)], weight = exp2((sink - lse) * LOG2E);
                // Of a row without a score, and without this one, nothing is added, whatever delta is.
                if (weight != 0 && lse != MINUS_INFINITY) sum = fma(weight, minus_delta(head, i), sum);
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
