// A sequence, an entry of the batch: how many queries and keys it has, on which keys its queries stand, and where its
// rows lie. Lengths are read here alone, and coordinates of rows made: those of packed sequences, caches and pages come
// in here.
#pragma once
#include "attention/origin.cuh"
#include "tile/places.cuh"

// Keys or queries by position: [begin, end).
struct Range {
    int begin, end;

    // The n-th of so many shares, as large as each other but for the last ones.
    __device__ Range share(int n, int of) const {
        int each = (end - begin + of - 1) / of;
        return {min(end, begin + n * each), min(end, begin + (n + 1) * each)};
    }
    // What of another one lies in this one; where nothing does, none of its begin.
    __device__ Range common(Range other) const {
        int from = max(begin, other.begin), to = min(end, other.end);
        return from < to ? Range{from, to} : Range{begin, begin};
    }
};

// Tiles of `size` that hold n.
__device__ inline constexpr int tiles_in(int n, int size) { return (n + size - 1) / size; }

// Whether lengths are data, and not those of shapes.
constexpr bool RAGGED = config::PACKED_Q || config::PACKED_K || config::LENGTHS;
// Whether it is data on which keys queries stand: rows that are dead by position are told from others here then, and no
// tensor map leaves them out.
constexpr bool SHIFTS = RAGGED || config::AT;

// One of packed sequences: which, and its rows of all.
struct Packed {
    int n;
    Range rows;
};

// The last of `count` sequences of which starts(n, its first row) is true; what is left behind them is one more, number
// `count`. Whatever `offsets` hold, sequences follow each other without a gap: each begins between the two that the
// search has met.
template <class Offset, class F>
__device__ Packed find_packed(const Offset* offsets, int count, int rows, F starts) {
    Packed at{0, {0, rows}};
    int last = count;
    while (at.n < last) {
        int middle = (at.n + last + 1) / 2;
        long long offset = offsets[middle];
        int begin = offset < at.rows.begin ? at.rows.begin : offset > at.rows.end ? at.rows.end : int(offset);
        if (starts(middle, begin))
            at.n = middle, at.rows.begin = begin;
        else
            last = middle - 1, at.rows.end = begin;
    }
    return at;
}
// The same by a warp, of whose lanes each looks at a sequence at a time. (Between offsets that decrease others begin
// than above: who asks so asks for all.)
template <class Offset, class F>
__device__ Packed find_packed_by_warp(const Offset* offsets, int count, int rows, F starts) {
    Packed at{0, {0, rows}};
    int last = count, lane = threadIdx.x % 32;
    while (at.n < last) {
        int each = tiles_in(last - at.n, 32), n = min(last, at.n + (lane + 1) * each);
        long long offset = offsets[n];
        int begin = offset < at.rows.begin ? at.rows.begin : offset > at.rows.end ? at.rows.end : int(offset);
        if (__any_sync(~0u, begin < __shfl_sync(~0u, begin, max(0, lane - 1)))) {
#pragma unroll
            for (int step = 1; step < 32; step *= 2)
                begin = max(begin, __shfl_sync(~0u, begin, max(0, lane - step)));
        }
        int begun = __popc(__ballot_sync(~0u, starts(n, begin)));  // of lanes from the first on
        int before = max(0, begun - 1), after = min(31, begun);
        int own_n = __shfl_sync(~0u, n, before), own_begin = __shfl_sync(~0u, begin, before);
        int next_n = __shfl_sync(~0u, n, after), next_begin = __shfl_sync(~0u, begin, after);
        if (begun > 0) at.n = own_n, at.rows.begin = own_begin;
        if (begun < 32) last = next_n - 1, at.rows.end = next_begin;
    }
    return at;
}
template <class F>
__device__ Packed find_queries(const Params& p, F starts) {
    return find_packed(p.cu_seqlens_q, p.batch, p.rows_q, starts);
}
template <class F>
__device__ Packed find_keys(const Params& p, F starts) {
    return find_packed(p.cu_seqlens_k, p.batch, p.rows_k, starts);
}

// How many queries and keys a sequence has, and where they begin in arrays that have one entry for all sequences: said
// by shapes, or (DATA) by what was read when it was made.
template <bool DATA>
struct Lengths {
    __device__ static Lengths of(int, Range, Range) { return {}; }
    __device__ int queries(const Params& p) const { return p.seq_q; }
    __device__ int keys(const Params& p) const { return p.seq_k; }
    __device__ int number() const { return 0; }
    __device__ int first_query() const { return 0; }
    __device__ int first_key() const { return 0; }
};
template <>
struct Lengths<true> {
    int n;  // of the sequence
    Range rows_q, rows_k;

    __device__ static Lengths of(int n, Range q, Range k) { return {n, q, k}; }
    __device__ int queries(const Params&) const { return rows_q.end - rows_q.begin; }
    __device__ int keys(const Params&) const { return rows_k.end - rows_k.begin; }
    __device__ int number() const { return n; }
    __device__ int first_query() const { return rows_q.begin; }
    __device__ int first_key() const { return rows_k.begin; }
};

// A query of a head of Q, by the number of its sequence.
struct QueryOf {
    int query, head, batch;

    // Whether its number is behind the last one.
    __device__ bool none(const Params& p) const { return config::PACKED_Q ? head >= p.heads_q : batch >= p.batch; }
};

struct Sequence : Lengths<RAGGED> {
    int batch;  // its entry of arrays that have one for each

    // Number n, to compute what belongs to its queries, or to its keys.
    template <bool OF_QUERIES>
    __device__ static Sequence of(const Params& p, int n) {
        return of<OF_QUERIES>(p, n, OF_QUERIES ? rows_of_queries(p, n) : rows_of_keys(p, n));
    }
    // The same where its own rows are known. What is left behind packed sequences sees nothing and is seen by nobody,
    // and so is what arrays over pairs are too small for.
    template <bool OF_QUERIES>
    __device__ static Sequence of(const Params& p, int n, Range own) {
        return of<OF_QUERIES>(p, n, OF_QUERIES ? own : rows_of_queries(p, n), OF_QUERIES ? rows_of_keys(p, n) : own);
    }
    template <bool OF_QUERIES>
    __device__ static Sequence of(const Params& p, int n, Range q, Range k) {
        if (n == p.batch || q.end - q.begin > p.seq_q || k.end - k.begin > p.seq_k) {
            Range& others = OF_QUERIES ? k : q;
            others.end = others.begin;
        }
        return {Lengths<RAGGED>::of(n, q, k), min(n, p.batch - 1)};
    }

    // Keys of number n as their offsets say, without a search: for who asks of nobody else whose they are. (Between
    // offsets that decrease some are of two sequences. The first one's begin at 0 for who searches, too.)
    __device__ static Range said_keys(const Params& p, int n) {
        if constexpr (!config::PACKED_K) return rows_of_keys(p, n);
        auto offset = [&](int m, int least) {
            long long x = m <= p.batch ? p.cu_seqlens_k[m] : p.rows_k;
            return x < least ? least : x > p.rows_k ? p.rows_k : int(x);
        };
        int begin = n == 0 ? 0 : offset(n, 0);
        return {begin, offset(n + 1, begin)};
    }

    // Whether it is what is left behind packed sequences.
    __device__ bool behind_all(const Params& p) const { return RAGGED && number() == p.batch; }
    // How many rows its entry of results for keys has: a cache has some behind the last key.
    __device__ int key_rows(const Params& p) const { return config::LENGTHS ? p.rows_k : keys(p); }
    // Of these, by position, some query sees each key, and each query sees some. The others may hold anything.
    __device__ Range live_queries(const Params& p) const { return SHIFTS ? live(p).q : Range{p.first_q, p.end_q}; }
    __device__ Range live_keys(const Params& p) const { return SHIFTS ? live(p).k : Range{p.first_k, p.end_k}; }
    // Those keys where it is data: none where no query sees any, of which `live_keys` has all.
    __device__ Range seen_keys(const Params& p) const {
        Live seen = by_position(p);
        return seen.none() ? Range{0, 0} : seen.k;
    }
    // Query i stands on key i + diagonal.
    __device__ int diagonal(const Params& p) const {
        if constexpr (config::AT) return Origin::diagonal(p);
        return !RAGGED ? p.diagonal : config::TOP_LEFT ? 0 : keys(p) - queries(p);
    }

    // How many tiles of SIZE it has, and the queries, or keys, of the n-th.
    template <int SIZE>
    __device__ int query_tiles(const Params& p) const {
        return tiles_in(queries(p), SIZE);
    }
    template <int SIZE>
    __device__ int key_tiles(const Params& p) const {
        return tiles_in(keys(p), SIZE);
    }
    template <int SIZE>
    __device__ Range query_tile(const Params& p, int n) const {
        return {n * SIZE, min(queries(p), (n + 1) * SIZE)};
    }
    template <int SIZE>
    __device__ Range key_tile(const Params& p, int n) const {
        return {n * SIZE, min(keys(p), (n + 1) * SIZE)};
    }

    // In which row of its entry of an array query i lies, or key j. (Of pages: Head::key_row.)
    __device__ int query_at(int i) const { return config::PACKED_Q ? first_query() + i : i; }
    __device__ int key_at(int j) const { return config::PACKED_K ? first_key() + j : j; }
    // The same in a tensor map (gpu/tensormap.py), which of inputs knows of no rows before the first live one. (Of what
    // can be none the loading thread has no registers.)
    __device__ int mapped_query(const Params& p, int i) const {
        return RAGGED ? query_at(i) : i - (config::RIGHT ? p.first_q : 0);
    }
    __device__ int mapped_key(const Params& p, int j) const {
        return RAGGED ? key_at(j) : j - (config::LEFT ? p.first_k : 0);
    }

    // Where query i of a head has its number in an array (B, Hq, Sq), and key j in one (B, Hk, Sk): (Hq, T), (Hk, Tk)
    // of packed ones.
    __device__ long long query_number(const Params& p, int head, int i) const {
        if (config::PACKED_Q) return (long long)head * p.rows_q + query_at(i);
        return ((long long)batch * p.heads_q + head) * p.seq_q + i;
    }
    __device__ long long key_number(const Params& p, int head, int j) const {
        if (config::PACKED_K) return (long long)head * p.rows_k + key_at(j);
        return ((long long)batch * p.heads_k + head) * p.seq_k + j;
    }

    // The first number there of a head, by that which it has among those of all sequences.
    __device__ static long long first_query_number(const Params& p, int head) {
        return (long long)head * (config::PACKED_Q ? p.rows_q : p.seq_q);
    }
    __device__ static long long first_key_number(const Params& p, int head) {
        return (long long)head * (config::PACKED_K ? p.rows_k : p.seq_k);
    }

    // What query number n of such an array is; behind the last one it is none.
    __device__ static QueryOf numbered_query(const Params& p, long long n) {
        if constexpr (config::PACKED_Q) {
            int row = int(n % p.rows_q), head = int(n / p.rows_q);
            Packed at = find_queries(p, [=](int, int begin) { return begin <= row; });
            return {row - at.rows.begin, head, at.n};
        }
        return {int(n % p.seq_q), int(n / p.seq_q % p.heads_q), int(n / p.seq_q / p.heads_q)};
    }

    // Of all: how many numbers an array (B, Hq, Sq) has, or so many times; the longest one's queries and keys, which
    // are the axes of arrays over pairs; bytes of K and V of a head, of so many keys (of packed sequences in the mean).
    __device__ static long long all_query_numbers(const Params& p, long long times = 1) {
        if (config::PACKED_Q) return times * p.heads_q * p.rows_q;
        return times * p.batch * p.heads_q * p.seq_q;
    }
    __device__ static int most_queries(const Params& p) { return p.seq_q; }
    __device__ static int most_keys(const Params& p) { return p.seq_k; }
    __device__ static int most_key_rows(const Params& p) { return config::LENGTHS ? p.rows_k : p.seq_k; }
    __device__ static long long bytes_of_kv(const Params& p, int keys) {
        return (long long)sizeof(Kept) * keys * (p.dim + p.dim_v);
    }
    __device__ static long long bytes_of_kv(const Params& p) {
        return bytes_of_kv(p, config::PACKED_K ? max(1, p.rows_k / p.batch) : p.seq_k);
    }

   private:
    // Rows of number n, as arrays of lengths have them now.
    __device__ static Range rows_of_queries(const Params& p, int n) {
        if constexpr (config::PACKED_Q) return find_queries(p, [=](int m, int) { return m <= n; }).rows;
        return {0, p.seq_q};
    }
    __device__ static Range rows_of_keys(const Params& p, int n) {
        if constexpr (config::PACKED_K) return find_keys(p, [=](int m, int) { return m <= n; }).rows;
        if constexpr (config::LENGTHS) {
            long long length = p.seqlens_k[min(n, p.batch - 1)];
            return {0, length < 0 ? 0 : length > p.seq_k ? p.seq_k : int(length)};
        }
        return {0, p.seq_k};
    }

    struct Live {
        Range q, k;
        __device__ bool none() const { return q.begin >= q.end || k.begin >= k.end; }
    };
    __device__ Live by_position(const Params& p) const {
        int queries = this->queries(p), keys = this->keys(p), shift = diagonal(p);
        Range q{config::RIGHT ? max(0, -shift - p.right) : 0,
                config::LEFT ? min(queries, keys - shift + p.left) : queries};
        Range k{config::LEFT ? max(0, shift - p.left) : 0, config::RIGHT ? min(keys, queries + shift + p.right) : keys};
        return {q, k};
    }
    // As AttentionProblem.live.
    __device__ Live live(const Params& p) const {
        Live found = by_position(p);
        return found.none() ? Live{{0, queries(p)}, {0, keys(p)}} : found;
    }
};
