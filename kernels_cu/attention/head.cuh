// One head of the problem: how long its sequences are, where its rows lie in memory, and how tiles of all heads are numbered.
// With walk.cuh the only place that reads lengths: those of packed sequences, or a part of the keys, would come in here.
#pragma once

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

// Query heads that share a head of K and V.
__device__ inline int group_of(const Params& p) { return p.heads_q / p.heads_k; }

struct Head {
    int batch, q, k;  // which head of Q, and which of K and V

    // By the head of Q, or by that of K and V with the first of the heads that share it.
    __device__ static Head of_q(const Params& p, int batch, int q) { return {batch, q, q / group_of(p)}; }
    __device__ static Head of_k(const Params& p, int batch, int k) { return {batch, k * group_of(p), k}; }

    __device__ int queries(const Params& p) const { return p.seq_q; }
    __device__ int keys(const Params& p) const { return p.seq_k; }
    // Of these, by position, some query sees each key, and each query sees some. The others may hold anything.
    __device__ Range live_queries(const Params& p) const { return {p.first_q, p.end_q}; }
    __device__ Range live_keys(const Params& p) const { return {p.first_k, p.end_k}; }
    // So many come before those that tensor maps know of (gpu/tensormap.py).
    __device__ int unmapped_queries(const Params& p) const { return p.first_q; }
    __device__ int unmapped_keys(const Params& p) const { return p.first_k; }
    // Query i stands on key i + diagonal.
    __device__ int diagonal(const Params& p) const { return p.diagonal; }

    // The queries, or keys, of tile `n` of SIZE.
    template <int SIZE>
    __device__ Range query_tile(const Params& p, int n) const {
        return {n * SIZE, min(queries(p), (n + 1) * SIZE)};
    }
    template <int SIZE>
    __device__ Range key_tile(const Params& p, int n) const {
        return {n * SIZE, min(keys(p), (n + 1) * SIZE)};
    }

    // Row i of an array that has rows for queries (Q, O, dO, dQ), row j of one that has rows for keys (K, V, dK, dV).
    template <class T>
    __device__ T* query_row(T* array, const Strides& strides, int i = 0) const {
        return array + batch * strides.batch + q * strides.head + i * strides.row;
    }
    template <class T>
    __device__ T* key_row(T* array, const Strides& strides, int j = 0) const {
        return array + batch * strides.batch + k * strides.head + j * strides.row;
    }

    // Where query i has its number in an array (B, Hq, Sq): lse, dlse, delta.
    __device__ long long row_number(const Params& p, int i = 0) const {
        return ((long long)batch * p.heads_q + q) * p.seq_q + i;
    }
    // And key j in one (B, Hk, Sk).
    __device__ long long key_row_number(const Params& p, int j = 0) const {
        return ((long long)batch * p.heads_k + k) * p.seq_k + j;
    }
};

// How many tiles of SIZE a head has.
template <int SIZE>
__device__ int query_tiles(const Params& p) {
    return tiles_in(p.seq_q, SIZE);
}
template <int SIZE>
__device__ int key_tiles(const Params& p) {
    return tiles_in(p.seq_k, SIZE);
}

// Bytes of K and V of a head.
__device__ inline long long bytes_of_kv(const Params& p) { return (long long)sizeof(In) * p.seq_k * (p.dim + p.dim_v); }

// Where a tile of SIZE queries, or keys, stands among those of all heads, head by head.
template <int SIZE>
__device__ long long query_tile_number(const Params& p, const Head& head, int tile) {
    return ((long long)head.batch * p.heads_q + head.q) * query_tiles<SIZE>(p) + tile;
}
template <int SIZE>
__device__ long long key_tile_number(const Params& p, const Head& head, int tile) {
    return ((long long)head.batch * p.heads_k + head.k) * key_tiles<SIZE>(p) + tile;
}

// What number n stands for where the tiles of all heads are numbered, tile by tile of a head, head by head of a batch entry.
struct Place {
    int tile, head, batch;
};
__device__ inline Place place(int n, int tiles, int heads) { return {n % tiles, n / tiles % heads, n / tiles / heads}; }

// The query that number n of an array (B, Hq, Sq) is of, as `tile`.
__device__ inline Place query_place(const Params& p, long long n) {
    return {int(n % p.seq_q), int(n / p.seq_q % p.heads_q), int(n / p.seq_q / p.heads_q)};
}

// The same where heads come first: in the usual layout rows of all heads lie side by side.
__device__ inline Place place_heads_first(int n, int tiles, int heads) {
    return {n / heads % tiles, n % heads, n / heads / tiles};
}

// The same where the tiles of `together` heads (of all batch entries) are dealt out at once, first tiles first: so many `groups`
// at most, then those of all heads that are left.
struct Dealt {
    int head, tile;
};
constexpr int ANY_NUMBER = 0x7fffffff;
__device__ inline Dealt deal(int n, int tiles, int heads, int together, int groups = ANY_NUMBER) {
    int group = min(n / (together * tiles), groups), first = group * together, rest = n - first * tiles;
    int these = group < groups ? min(together, heads - first) : heads - first;
    return {first + rest % these, rest / these};
}

// The same where the first tiles of a head may be far longer than all others: a few of each head before everything else.
__device__ inline Dealt deal_longest_first(int n, int tiles, int heads, int together) {
    int longest = tiles_in(tiles, 64);
    if (n < longest * heads) return {n % heads, n / heads};
    Dealt at = deal(n - longest * heads, tiles - longest, heads, together);
    return {at.head, at.tile + longest};
}
__device__ inline Place longest_first(int n, int tiles, int heads, int batch) {
    Dealt at = deal_longest_first(n, tiles, heads * batch, 1);
    return {at.tile, at.head % heads, at.head / heads};
}
