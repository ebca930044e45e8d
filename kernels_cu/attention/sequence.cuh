// A sequence, an entry of the batch: how many queries and keys it has, on which keys its queries stand, and where its rows lie.
// Lengths are read here alone, and coordinates of rows made: those of packed sequences, caches and pages come in here.
#pragma once
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

// A query of a head of Q.
struct QueryOf {
    int query, head, batch;
};

struct Sequence {
    int batch;

    __device__ int queries(const Params& p) const { return p.seq_q; }
    __device__ int keys(const Params& p) const { return p.seq_k; }
    // Of these, by position, some query sees each key, and each query sees some. The others may hold anything.
    __device__ Range live_queries(const Params& p) const { return {p.first_q, p.end_q}; }
    __device__ Range live_keys(const Params& p) const { return {p.first_k, p.end_k}; }
    // Query i stands on key i + diagonal.
    __device__ int diagonal(const Params& p) const { return p.diagonal; }

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

    // In which row of its entry of an array query i lies, or key j.
    __device__ int query_at(int i) const { return i; }
    __device__ int key_at(int j) const { return j; }
    // The same in a tensor map (gpu/tensormap.py), which of inputs knows of no rows before the first live one. (Of what can be none
    // the loading thread has no registers.)
    __device__ int mapped_query(const Params& p, int i) const { return i - (config::RIGHT ? p.first_q : 0); }
    __device__ int mapped_key(const Params& p, int j) const { return j - (config::LEFT ? p.first_k : 0); }

    // Where query i of a head has its number in an array (B, Hq, Sq), and key j in one (B, Hk, Sk).
    __device__ long long query_number(const Params& p, int head, int i) const {
        return ((long long)batch * p.heads_q + head) * p.seq_q + i;
    }
    __device__ long long key_number(const Params& p, int head, int j) const {
        return ((long long)batch * p.heads_k + head) * p.seq_k + j;
    }

    // What query number n of an array (B, Hq, Sq) is; behind the last one the batch has no such entry.
    __device__ static QueryOf numbered_query(const Params& p, long long n) {
        return {int(n % p.seq_q), int(n / p.seq_q % p.heads_q), int(n / p.seq_q / p.heads_q)};
    }

    // Of all: how many numbers an array (B, Hq, Sq) has, or so many times; the longest one's queries and keys, which are the axes of
    // arrays over pairs; bytes of K and V of a head.
    __device__ static long long all_query_numbers(const Params& p, long long times = 1) {
        return times * p.batch * p.heads_q * p.seq_q;
    }
    __device__ static int most_queries(const Params& p) { return p.seq_q; }
    __device__ static int most_keys(const Params& p) { return p.seq_k; }
    __device__ static long long bytes_of_kv(const Params& p) { return (long long)sizeof(In) * p.seq_k * (p.dim + p.dim_v); }
};
