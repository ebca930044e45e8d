// Which tile a thread block works on: those of all heads are numbered in the order in which they should start.
#pragma once
#include "attention/tiles.cuh"
#include "attention/walk.cuh"

// In which order the tiles of a head start.
enum class Order { AS_NUMBERED, LAST_FIRST, LONGEST_FIRST };

// Of queries: where later ones see more keys these first; of a list those with most tiles to visit. (Its lists do not
// know how many of these there are where lengths are data.)
constexpr Order QUERY_ORDER =
    walk::LISTED && !RAGGED ? Order::LONGEST_FIRST : walk::GROWING ? Order::LAST_FIRST : Order::AS_NUMBERED;

// Of keys, whose tiles add to dQ, in turn (KeyWalk::rank) or as they come.
constexpr Order key_order(bool in_turn) {
    if (in_turn) return walk::TURNS_FROM_LAST ? Order::LAST_FIRST : Order::AS_NUMBERED;
    return walk::LISTED && !RAGGED ? Order::LONGEST_FIRST : Order::AS_NUMBERED;
}

// The n-th tile of `heads` heads, where those of `together` heads are dealt out at once, first tiles first: so many
// `rounds` at most, then those of all heads that are left.
struct TileIndex {
    int head, tile;
};
constexpr int ANY_NUMBER = 0x7fffffff;
__device__ inline TileIndex index_in_turn(int n, int tiles, int heads, int together, int rounds = ANY_NUMBER) {
    int round = min(n / (together * tiles), rounds), first = round * together, rest = n - first * tiles;
    int these = round < rounds ? min(together, heads - first) : heads - first;
    return {first + rest % these, rest / these};
}

// The same where the first tiles of a head may be far longer than all others: a few of each head before everything
// else.
__device__ inline TileIndex index_longest_first(int n, int tiles, int heads, int together) {
    int longest = tiles_in(tiles, 64);
    if (n < longest * heads) return {n % heads, n / heads};
    TileIndex at = index_in_turn(n - longest * heads, tiles - longest, heads, together);
    return {at.head, at.tile + longest};
}

// Which tile of all heads is the n-th to start. IN_ROUNDS: tiles of `together` heads at once.
template <class Tiles, Order ORDER, bool IN_ROUNDS = false>
struct Schedule {
    const Params& p;
    int tiles;  // of a head

    __device__ Schedule(const Params& p) : p(p), tiles(Tiles::of_head(p)) {}

    // Of so many heads in all.
    __device__ TileIndex index(int n, int heads, int together = 1, int rounds = ANY_NUMBER) const {
        if (ORDER == Order::LONGEST_FIRST) return index_longest_first(n, tiles, heads, together);
        return IN_ROUNDS ? index_in_turn(n, tiles, heads, together, rounds) : TileIndex{n / tiles, n % tiles};
    }
    // Which tile of a head that is; of a list, which of those with most to visit, and which tile.
    __device__ int ordered(int n) const { return ORDER == Order::LAST_FIRST ? tiles - 1 - n : n; }
    __device__ HeadTile ordered(HeadTile at) const {
        if constexpr (Tiles::PACKED)
            at.number =
                at.number < 0 || ORDER == Order::AS_NUMBERED ? at.number : Tiles::of(p, at.head) - 1 - at.number;
        else
            at.number = ordered(at.number);
        return at;
    }
    __device__ int listed(const Head& head, int n) const {
        return ORDER == Order::LONGEST_FIRST ? Visits::nth(p, head, Tiles::lists(p), tiles, n) : n;
    }

    // Between portions (gpu/portions.py) multiprocessors wait for the last tile: those that take longest come first, of
    // all heads of the portion.
    __device__ HeadTile tile(int n) const { return tile(n, config::PORTIONS ? Tiles::all_heads(p) : 1); }
    __device__ HeadTile tile(int n, int together) const {
        if (ORDER != Order::LONGEST_FIRST && !IN_ROUNDS) {
            return ordered(numbered<Tiles>(p, n, tiles));
        }
        TileIndex at = index(n, Tiles::all_heads(p), together);
        HeadTile tile = ordered(of_all_heads<Tiles>(p, at.head, at.tile));
        return {tile.head, listed(tile.head, tile.number)};
    }
};
