// Which tile a persistent thread block of the Hopper forward works on next; it begins with the one of its own number.
#pragma once
#include "attention/schedule.cuh"
#include "ptx/flag.cuh"

// What a persistent thread block works on.
struct Tile {
    Head head;  // the first of those whose queries it has
    Range queries;
    int share = 0;  // of the keys that it visits, where they are dealt out
    int part = 0;   // of the columns of V, where these are

    // Whether it is the place of no tile, among those of packed sequences.
    __device__ bool none() const { return config::PACKED_Q && queries.end == 0; }
};

// Tiles of ROWS queries of PACK heads each, which share K and V; the last of those that do may have heads beyond them.
// Where later tiles see more keys, heads are worked on in rounds. Workers are of BLOCKS thread blocks.
template <int ROWS, int PACK, int BLOCKS = 1, bool IN_ROUNDS = walk::GROWING>
struct PackSchedule : Schedule<QueryTiles<ROWS>, QUERY_ORDER, IN_ROUNDS> {
    using Base = Schedule<QueryTiles<ROWS>, QUERY_ORDER, IN_ROUNDS>;
    // Heads whose K and V together stay in the L2 cache, while their Q and O pass through it. Heads of a few tiles wait
    // for memory rather than for products: of half as many, so that long tiles of some are beside short ones of others.
    static constexpr long long CACHE = 16 << 20;
    static constexpr int FEW_TILES = 8;
    // Tiles of the last round for each worker, at least: with few the end would come to some sooner than to others.
    // But no more than twice the cache asks for it. (Less than a round comes on top.)
    static constexpr int LAST = 2;

    int packs;                 // of the heads that share K and V
    int heads;                 // packs of all heads of an entry
    int together, rounds = 0;  // of these, whose tiles are worked on together; of so many; those that are left are the
                               // last round

    __device__ PackSchedule(const Params& p) : Base(p), packs(tiles_in(group_of(p), PACK)) {
        heads = p.heads_k * packs;
        int workers = gridDim.x / BLOCKS;
        together = heads_in(of_sequence() > FEW_TILES ? CACHE : CACHE / 2);
        if (walk::GROWING)
            rounds = max(0, heads * entries() - min(tiles_in(LAST * workers, of_sequence()), heads_in(2 * CACHE))) /
                     together;
    }

    // Tiles of a head of one sequence: of packed ones, which come one after the other, in the mean.
    __device__ int of_sequence() const { return config::PACKED_Q ? max(1, this->tiles / this->p.batch) : this->tiles; }

    // Of the batch; packed sequences are one.
    __device__ int entries() const { return config::PACKED_Q ? 1 : this->p.batch; }
    __device__ int total() const { return this->tiles * heads * entries(); }

    // Packs of heads whose K and V take so many bytes; one head at least.
    __device__ int heads_in(long long bytes) const { return heads_in(bytes, Sequence::bytes_of_kv(this->p)); }
    __device__ int heads_in(long long bytes, long long of_head) const {
        const Params& p = this->p;
        // Every thread comes to the same, and faster than by integers.
        float fit = float(bytes) / float(of_head);
        return int(fmaxf(1, fminf(fit, float(p.heads_k * entries())))) * packs;
    }

    __device__ TileIndex index(int number) const {
        return Base::index(number, heads * entries(), together, rounds);
    }
    // The first head of Q of a pack, and that of K and V.
    struct Heads {
        int q, k;
    };
    __device__ Heads heads_of(int number) const {
        int pack = number % heads, k = pack / packs;
        return {PACK > 1 ? k * group_of(this->p) + pack % packs * PACK : pack, k};
    }
    // (BY_WARP: by one that asks for all.)
    template <bool BY_WARP = false>
    __device__ Tile tile(int number) const {
        return tile<BY_WARP>(index(number));
    }
    template <bool BY_WARP = false>
    __device__ Tile tile(TileIndex at) const {
        const Params& p = this->p;
        auto [head_q, head_k] = heads_of(at.head);
        if constexpr (config::PACKED_Q) {
            using Tiles = QueryTiles<ROWS>;
            HeadTile found = this->ordered(BY_WARP ? Tiles::placed_by_warp(p, at.tile, head_q)
                                                   : Tiles::placed(p, at.tile, head_q));
            if (found.none()) return {};
            return {found.head, found.head.template query_tile<ROWS>(p, found.number)};
        } else {
            int tile = this->ordered(at.tile);
            Head head = Head::of(p, at.head / heads, head_q, head_k);
            return {head, head.template query_tile<ROWS>(p, this->listed(head, tile))};
        }
    }
};

// Deals out the numbers 0, 1, ... to the thread blocks of a launch in the order of asking. N numbers are wanted; each
// block asks until it is told N or more, so that they ask N + blocks times in all, and `last` is that less one. The
// memory (3 words) comes uninitialised, and nothing before this launch could set it: the first block that asks does,
// under a pair of marks that memory does not hold by chance; the last one that asks removes them, so that another
// launch on the same memory starts afresh.
struct Tickets {
    static constexpr unsigned long long SETTING = 0x9d3f6a1cc5e2704bull, READY = 0x71b8e40a2f96d35dull;

    unsigned* workspace;

    // `first`: the thread has not asked before.
    __device__ int take(bool first) const {
        if (first) set();
        return atomicAdd(workspace + 2, 1);
    }

    // With the last ticket a thread took.
    __device__ void settle(int ticket, int last) const {
        if (ticket == last) store_release(mark(), 0);
    }

   private:
    __device__ unsigned long long* mark() const { return (unsigned long long*)workspace; }

    __device__ void set() const {
        unsigned long long seen = load_acquire(mark());
        if (seen != READY && seen != SETTING && atomicCAS(mark(), seen, SETTING) == seen) {
            workspace[2] = 0;
            store_release(mark(), READY);
        }
        while (load_acquire(mark()) != READY) {
        }
    }
};
