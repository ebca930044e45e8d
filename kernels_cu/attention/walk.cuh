// The walk: which tiles of the other side a tile visits, in which order, and whether their elements need tests.
// Producers and consumers, forward and backward, ordered additions and completion counts all ask it. It is a band
// around the diagonal (causal, window), or what of a block mask's list lies in that band: two answers to the same
// questions.
#pragma once
#include "attention/block_list.cuh"

// What a kernel may know of all walks when it is compiled.
namespace walk {
constexpr bool LISTED = config::BLOCK_MASK;                         // tiles are those of a list
constexpr bool ALIKE = !config::LEFT && !config::RIGHT && !LISTED;  // every tile visits all tiles of the other side
constexpr bool GROWING = config::RIGHT && !LISTED;                  // later tiles of queries visit more keys
// Whether a query's keys have a first one, and a last one, but those of the sequence.
constexpr bool BOUND_FIRST = config::LEFT, BOUND_LAST = config::RIGHT;
// Whether key tiles that add to dQ in turn do so from the last to the first: under a causal mask they begin where the
// diagonal is then, and none needs to wait.
constexpr bool TURNS_FROM_LAST = config::RIGHT;
// Where in a walk over keys, from the last to the first, tiles need tests (the very first one always may: it may hang
// over the end).
constexpr bool TESTS_FIRST = config::RIGHT, TESTS_LAST = config::LEFT, TESTS_ANY = config::KEY_MASK || config::MASK;
}

// The pairs (i, j) that positions leave: i + diagonal - left <= j <= i + diagonal + right.
struct Band {
    const Params& p;
    Head head;

    // Keys that any query of [q.begin, q.end) may see.
    __device__ Range keys_of(Range q) const {
        int keys = head.keys(p), diagonal = head.diagonal(p);
        int begin = config::LEFT ? max(0, q.begin + diagonal - p.left) : 0;
        int end = config::RIGHT ? min(keys, q.end + diagonal + p.right) : keys;
        return {begin, max(begin, end)};
    }

    // Queries that may see any key of [k.begin, k.end).
    __device__ Range queries_of(Range k) const {
        int queries = head.queries(p), diagonal = head.diagonal(p);
        if (config::LENGTHS && k.begin >= head.keys(p)) return {0, 0};
        int begin = config::RIGHT ? max(0, k.begin - diagonal - p.right) : 0;
        int end = config::LEFT ? min(queries, k.end - diagonal + p.left) : queries;
        return {begin, max(begin, end)};
    }

    __device__ bool contains(int i, int j) const {
        int diagonal = head.diagonal(p);
        return i < head.queries(p) && j < head.keys(p) && (!config::RIGHT || j <= i + diagonal + p.right) &&
               (!config::LEFT || j >= i + diagonal - p.left);
    }

    // The keys that query i may see, and the queries that may see key j. Behind the ends there are none.
    __device__ Range keys_of(int i) const {
        Range keys = keys_of(Range{i, i + 1});
        return {keys.begin, i < head.queries(p) ? keys.end : 0};
    }
    __device__ Range queries_of(int j) const {
        Range queries = queries_of(Range{j, j + 1});
        return {queries.begin, j < head.keys(p) ? queries.end : 0};
    }

    // Whether some pair of these may be hidden, so that elements must be tested. Queries behind the end matter to the
    // backward alone, which sums over them: their Q is 0, but times an infinite K that is NaN.
    __device__ bool tests_backward(Range q, Range k) const { return tests(q, k) || q.end > head.queries(p); }
    __device__ bool tests(Range q, Range k) const { return walk::TESTS_ANY || edges(q, k); }

    // Whether positions hide some.
    __device__ bool edges(Range q, Range k) const {
        int diagonal = head.diagonal(p);
        return k.end > head.keys(p) || (config::RIGHT && k.end - 1 > q.begin + diagonal + p.right) ||
               (config::LEFT && k.begin < q.end - 1 + diagonal - p.left);
    }
};

// The tiles of SIZE that hold a range.
template <int SIZE>
__device__ Range covering(Range x) {
    return {x.begin / SIZE, x.begin == x.end ? x.begin / SIZE : tiles_in(x.end, SIZE)};
}

// The tiles of SIZE keys that some queries, a tile of OWNED, visit, from the last to the first: with a causal mask
// those that need tests come first. The same tiles add to dQ of these queries. A `step` is a place in the walk.
template <int SIZE, int OWNED, bool LISTED = walk::LISTED>
struct KeyWalk {
    Range tiles{0, 0};

    __device__ KeyWalk() {}
    __device__ KeyWalk(Range tiles) : tiles(tiles) {}
    __device__ KeyWalk(const Params& p, const Head& head, Range queries)
        : tiles(covering<SIZE>(Band{p, head}.keys_of(queries))) {}

    __device__ int count() const { return tiles.end - tiles.begin; }

    __device__ int start() const { return tiles.end - 1; }
    __device__ bool has(int step) const { return step >= tiles.begin; }
    __device__ int next(int step) const { return step - 1; }
    __device__ int after(int step) const { return step - tiles.begin; }  // how many steps come after
    __device__ int tile(int step) const { return step; }
    __device__ TileBits bits(int, Range) const { return {}; }

    // Whether the elements of a step need tests for these queries; `more`: or those of so many keys behind them.
    __device__ bool tests(const Params& p, const Head& head, Range queries, int step, int more = 0) const {
        return Band{p, head}.tests(queries, {tile(step) * SIZE, (tile(step) + 1) * SIZE + more});
    }

    // The walk of a part of the queries, which see these keys, if any: how many tiles of this one come before it, and
    // after it.
    __device__ KeyWalk part(Range keys, bool any) const {
        return any ? KeyWalk(covering<SIZE>(keys)) : KeyWalk(Range{tiles.begin, tiles.begin});
    }
    // One of so many shares of this walk, and what of another one lies in this one.
    __device__ KeyWalk share(int n, int of) const { return tiles.share(n, of); }
    __device__ KeyWalk common(const KeyWalk& other) const { return tiles.common(other.tiles); }
    __device__ int before(const KeyWalk& part) const { return tiles.end - part.tiles.end; }
    __device__ int behind(const KeyWalk& part) const { return part.tiles.begin - tiles.begin; }

    // Where tiles add in turn: how many of them come before this one.
    __device__ int rank(int tile) const { return walk::TURNS_FROM_LAST ? tiles.end - 1 - tile : tile - tiles.begin; }
};

// The same of a list.
template <int SIZE, int OWNED>
struct KeyWalk<SIZE, OWNED, true> {
    Visits visits;

    __device__ KeyWalk() {}
    __device__ KeyWalk(const Params& p, const Head& head, Range queries)
        : visits(p, head, p.key_lists, tiles_in(Sequence::most_queries(p), OWNED), queries.begin / OWNED) {
        keep(Band{p, head}.keys_of(queries));
    }

    __device__ int count() const { return visits.steps.end - visits.steps.begin; }

    __device__ int start() const { return visits.steps.end - 1; }
    __device__ bool has(int step) const { return step >= visits.steps.begin; }
    __device__ int next(int step) const { return step - 1; }
    __device__ int after(int step) const { return step - visits.steps.begin; }
    __device__ int tile(int step) const { return visits.tile(step); }
    // Which pairs of a step are visible; `queries`: of the tile.
    __device__ TileBits bits(int step, Range queries) const {
        return {visits.words(step), SIZE / 16, queries.begin, tile(step) * SIZE};
    }

    __device__ bool tests(const Params& p, const Head& head, Range queries, int step, int more = 0) const {
        int key = tile(step) * SIZE;
        return visits.words(step) != nullptr || Band{p, head}.tests(queries, {key, key + SIZE + more});
    }

    __device__ KeyWalk part(Range keys, bool any) const {
        KeyWalk walk = *this;
        if (any)
            walk.keep(keys);
        else
            walk.visits.steps.end = walk.visits.steps.begin;
        return walk;
    }
    __device__ KeyWalk share(int n, int of) const { return with(visits.steps.share(n, of)); }
    __device__ KeyWalk common(const KeyWalk& other) const { return with(visits.steps.common(other.visits.steps)); }
    __device__ int before(const KeyWalk& part) const { return visits.steps.end - part.visits.steps.end; }
    __device__ int behind(const KeyWalk& part) const { return part.visits.steps.begin - visits.steps.begin; }

    __device__ int rank(int tile) const {
        int step = visits.find(tile);
        return walk::TURNS_FROM_LAST ? visits.steps.end - 1 - step : step - visits.steps.begin;
    }

   private:
    __device__ KeyWalk with(Range steps) const {
        KeyWalk walk = *this;
        walk.visits.steps = steps;
        return walk;
    }
    __device__ void keep(Range keys) {
        if (config::LEFT || config::RIGHT || RAGGED) visits.steps = visits.within(covering<SIZE>(keys));
    }
};

// The tiles of SIZE queries that visit some keys, a tile of OWNED, from the first to the last.
template <int SIZE, int OWNED, bool LISTED = walk::LISTED>
struct QueryWalk {
    Range tiles;

    __device__ QueryWalk(const Params& p, const Head& head, Range keys)
        : tiles(covering<SIZE>(Band{p, head}.queries_of(keys))) {}
    // Again, from what `extent` said; of another head it may be another walk.
    __device__ QueryWalk(const Params&, const Head&, Range, Range extent) : tiles(extent) {}

    __device__ Range extent() const { return tiles; }
    __device__ int count() const { return tiles.end - tiles.begin; }

    __device__ int start() const { return tiles.begin; }
    __device__ int end() const { return tiles.end; }
    __device__ bool has(int step) const { return step < tiles.end; }
    __device__ int next(int step) const { return step + 1; }
    __device__ int tile(int step) const { return step; }
    template <bool BY_KEY>
    __device__ TileBits bits(int, Range) const {
        return {};
    }
};

// The same of a list.
template <int SIZE, int OWNED>
struct QueryWalk<SIZE, OWNED, true> {
    Visits visits;

    __device__ QueryWalk(const Params& p, const Head& head, Range keys)
        : visits(p, head, p.query_lists, tiles_in(Sequence::most_keys(p), OWNED), keys.begin / OWNED) {
        if (config::LEFT || config::RIGHT || RAGGED)
            visits.steps = visits.within(covering<SIZE>(Band{p, head}.queries_of(keys)));
    }

    __device__ QueryWalk(const Params& p, const Head& head, Range keys, Range) : QueryWalk(p, head, keys) {}

    __device__ Range extent() const { return {0, count()}; }
    __device__ int count() const { return visits.steps.end - visits.steps.begin; }

    __device__ int start() const { return visits.steps.begin; }
    __device__ int end() const { return visits.steps.end; }
    __device__ bool has(int step) const { return step < visits.steps.end; }
    __device__ int next(int step) const { return step + 1; }
    __device__ int tile(int step) const { return visits.tile(step); }
    // Which pairs of a step are visible; `keys`: of the tile. BY_KEY: rows are keys.
    template <bool BY_KEY>
    __device__ TileBits bits(int step, Range keys) const {
        return {visits.words(step), (BY_KEY ? SIZE : OWNED) / 16, tile(step) * SIZE, keys.begin};
    }
};
