// How the tiles of all heads are numbered: tile by tile of a head, head by head of a sequence.
#pragma once
#include "attention/head.cuh"

// A tile of a head.
struct HeadTile {
    Head head;
    int number;
};

// Tiles of COUNT queries, or (below) keys.
template <int COUNT>
struct QueryTiles {
    static constexpr int SIZE = COUNT;

    __device__ static int heads(const Params& p) { return p.heads_q; }
    __device__ static Head head(const Params& p, int batch, int head) { return Head::of_q(p, batch, head); }
    // What of a block mask they walk by.
    __device__ static const int* lists(const Params& p) { return p.key_lists; }

    // How many a head has, and all of them.
    __device__ static int of_head(const Params& p) { return tiles_in(Sequence::most_queries(p), SIZE); }
    __device__ static long long count(const Params& p) { return (long long)p.batch * p.heads_q * of_head(p); }

    __device__ static long long number(const Params& p, const Head& head, int tile) {
        return ((long long)head.batch * p.heads_q + head.q) * of_head(p) + tile;
    }
};
template <int COUNT>
struct KeyTiles {
    static constexpr int SIZE = COUNT;

    __device__ static int heads(const Params& p) { return p.heads_k; }
    __device__ static Head head(const Params& p, int batch, int head) { return Head::of_k(p, batch, head); }
    __device__ static const int* lists(const Params& p) { return p.query_lists; }

    __device__ static int of_head(const Params& p) { return tiles_in(Sequence::most_keys(p), SIZE); }
    __device__ static long long count(const Params& p) { return (long long)p.batch * p.heads_k * of_head(p); }

    __device__ static long long number(const Params& p, const Head& head, int tile) {
        return ((long long)head.batch * p.heads_k + head.k) * of_head(p) + tile;
    }
};

struct Place {
    int tile, head, batch;
};
__device__ inline Place place(int n, int tiles, int heads) { return {n % tiles, n / tiles % heads, n / tiles / heads}; }

// Which one a number says, of so many tiles of a head.
template <class Tiles>
__device__ HeadTile numbered(const Params& p, int n, int tiles) {
    int heads = Tiles::heads(p);
    int tile = n % tiles, head = n / tiles % heads, batch = n / tiles / heads;
    return {Tiles::head(p, batch, head), tile};
}
template <class Tiles>
__device__ HeadTile numbered(const Params& p, int n) {
    return numbered<Tiles>(p, n, Tiles::of_head(p));
}
// The head, where a thread block has all tiles of one.
template <class Tiles>
__device__ Head numbered_head(const Params& p, int n) {
    Place at = place(n, 1, Tiles::heads(p));
    return Tiles::head(p, at.batch, at.head);
}
// The same where heads come first: in the usual layout rows of all heads lie side by side.
template <class Tiles>
__device__ HeadTile numbered_heads_first(const Params& p, int n) {
    int tiles = Tiles::of_head(p), heads = Tiles::heads(p);
    int tile = n / heads % tiles, head = n % heads, batch = n / heads / tiles;
    return {Tiles::head(p, batch, head), tile};
}
