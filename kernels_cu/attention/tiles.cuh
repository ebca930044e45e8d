// How the tiles of all heads are numbered: tile by tile of a head, head by head of a sequence. Of heads in portions
// (gpu/portions.py) those of one alone have tiles: p.portion_heads heads of K and V, from number p.first_head on.
#pragma once
#include "attention/head.cuh"

// A tile of a head.
struct HeadTile {
    Head head;
    int number;

    // Where sequences are packed some numbers are those of no tile.
    __device__ bool none() const { return (config::PACKED_Q || config::PACKED_K) && number < 0; }
};

// Tiles of packed sequences have places, whatever the lengths: those of number n begin at (its first row) / SIZE + n,
// and there is room for all of them before those of the next. So many there are in all, with what is left behind the
// last one.
template <int SIZE>
__device__ int places_of(const Params& p, int rows) {
    return rows / SIZE + p.batch + 1;
}

// Tiles of COUNT queries, or (below) keys.
template <int COUNT>
struct QueryTiles {
    static constexpr int SIZE = COUNT;
    static constexpr bool PACKED = config::PACKED_Q;

    __device__ static int heads(const Params& p) { return p.heads_q; }
    __device__ static Head head(const Params& p, int batch, int head) { return Head::of_q(p, batch, head); }
    // What of a block mask they walk by.
    __device__ static const int* lists(const Params& p) { return p.key_lists; }

    // The number of the portion's first head.
    __device__ static int first_head(const Params& p) { return config::PORTIONS ? p.first_head * group_of(p) : 0; }
    // How many a head has (of packed sequences: places for them), a head of a sequence, and how many there are in all.
    __device__ static int of_head(const Params& p) {
        return PACKED ? places_of<SIZE>(p, p.rows_q) : tiles_in(Sequence::most_queries(p), SIZE);
    }
    __device__ static int of(const Params& p, const Head& head) { return head.query_tiles<SIZE>(p); }
    __device__ static int all_heads(const Params& p) {
        if (config::PORTIONS) return p.portion_heads * group_of(p);
        return PACKED ? p.heads_q : p.heads_q * p.batch;
    }
    __device__ static long long count(const Params& p) {
        if (config::PORTIONS) return (long long)all_heads(p) * of_head(p);
        if (PACKED) return (long long)p.heads_q * of_head(p);
        return (long long)p.batch * p.heads_q * of_head(p);
    }

    __device__ static long long number(const Params& p, const Head& head, int tile) {
        int first = first_head(p);
        if constexpr (PACKED)
            return (long long)(head.q - first) * of_head(p) + head.first_query() / SIZE + head.number() + tile;
        return ((long long)head.batch * p.heads_q + head.q - first) * of_head(p) + tile;
    }
    // What has a place of packed sequences.
    __device__ static HeadTile placed(const Params& p, int place, int head) {
        Packed at = find_queries(p, begins_by(place));
        return {Head::of_packed_q(p, at, head), tile_at(at, place)};
    }
    // The same for who asks for all places, and of nothing but these whose keys are whose.
    __device__ static HeadTile placed_of_all(const Params& p, int place, int head) {
        return with_said_keys(p, find_queries(p, begins_by(place)), place, head);
    }
    __device__ static HeadTile placed_by_warp(const Params& p, int place, int head) {
        return with_said_keys(p, find_packed_by_warp(p.cu_seqlens_q, p.batch, p.rows_q, begins_by(place)), place, head);
    }

   private:
    __device__ static auto begins_by(int place) {
        return [=](int n, int begin) { return begin / SIZE + n <= place; };
    }
    __device__ static HeadTile with_said_keys(const Params& p, const Packed& at, int place, int head) {
        return {Head::of_packed_q(p, at, Sequence::said_keys(p, at.n), head), tile_at(at, place)};
    }
    __device__ static int tile_at(const Packed& at, int place) {
        int tile = place - (at.rows.begin / SIZE + at.n);
        return tile < tiles_in(at.rows.end - at.rows.begin, SIZE) ? tile : -1;
    }
};
template <int COUNT>
struct KeyTiles {
    static constexpr int SIZE = COUNT;
    static constexpr bool PACKED = config::PACKED_K;

    __device__ static int heads(const Params& p) { return p.heads_k; }
    __device__ static Head head(const Params& p, int batch, int head) { return Head::of_k(p, batch, head); }
    __device__ static const int* lists(const Params& p) { return p.query_lists; }

    __device__ static int first_head(const Params& p) { return p.first_head; }
    __device__ static int of_head(const Params& p) {
        return PACKED ? places_of<SIZE>(p, p.rows_k) : tiles_in(Sequence::most_key_rows(p), SIZE);
    }
    __device__ static int of(const Params& p, const Head& head) { return tiles_in(head.key_rows(p), SIZE); }
    __device__ static int all_heads(const Params& p) {
        if (config::PORTIONS) return p.portion_heads;
        return PACKED ? p.heads_k : p.heads_k * p.batch;
    }
    __device__ static long long count(const Params& p) {
        if (config::PORTIONS) return (long long)all_heads(p) * of_head(p);
        if (PACKED) return (long long)p.heads_k * of_head(p);
        return (long long)p.batch * p.heads_k * of_head(p);
    }

    __device__ static long long number(const Params& p, const Head& head, int tile) {
        int first = first_head(p);
        if constexpr (PACKED)
            return (long long)(head.k - first) * of_head(p) + head.first_key() / SIZE + head.number() + tile;
        return ((long long)head.batch * p.heads_k + head.k - first) * of_head(p) + tile;
    }
    __device__ static HeadTile placed(const Params& p, int place, int head) {
        Packed at = find_keys(p, [=](int n, int begin) { return begin / SIZE + n <= place; });
        int tile = place - (at.rows.begin / SIZE + at.n);
        return {Head::of_packed_k(p, at, head), tile < tiles_in(at.rows.end - at.rows.begin, SIZE) ? tile : -1};
    }
};

struct Place {
    int tile, head, batch;
};
__device__ inline Place place(int n, int tiles, int heads) { return {n % tiles, n / tiles % heads, n / tiles / heads}; }

// Which one a number says, of so many tiles of a head.
template <class Tiles>
__device__ HeadTile numbered(const Params& p, int n, int tiles) {
    n += Tiles::first_head(p) * tiles;
    if constexpr (Tiles::PACKED) return Tiles::placed(p, n % tiles, n / tiles);
    int heads = Tiles::heads(p);
    int tile = n % tiles, head = n / tiles % heads, batch = n / tiles / heads;
    return {Tiles::head(p, batch, head), tile};
}
template <class Tiles>
__device__ HeadTile numbered(const Params& p, int n) {
    return numbered<Tiles>(p, n, Tiles::of_head(p));
}
// Tile `tile` (or what has that place) of head number `head` of all.
template <class Tiles>
__device__ HeadTile of_all_heads(const Params& p, int head, int tile) {
    head += Tiles::first_head(p);
    if constexpr (Tiles::PACKED) return Tiles::placed(p, tile, head);
    int heads = Tiles::heads(p);
    return {Tiles::head(p, head / heads, head % heads), tile};
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
    if constexpr (Tiles::PACKED) return Tiles::placed(p, n / heads, n % heads);
    int tile = n / heads % tiles, head = n % heads, batch = n / heads / tiles;
    return {Tiles::head(p, batch, head), tile};
}
