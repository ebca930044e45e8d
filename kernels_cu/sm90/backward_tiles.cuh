// The backward's tiles in shared memory, the order in which they are visited, and the threads that move them: copies
// come as far ahead as the rings reach.
#pragma once
#include "attention/mask.cuh"
#include "attention/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/flag.cuh"
#include "ptx/math.cuh"
#include "tile/ring.cuh"
#include "tile/rows.cuh"
#include "tile/swizzled.cuh"

using namespace config;

// The workers share out the columns of dK, dV (backward_wide.cuh), not the keys (backward_narrow.cuh).
constexpr bool WIDE = KEYS < 64 * GROUPS;

constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int WORKERS = 4 * GROUPS;  // warps

// Per thread. What the moving warpgroup gives away the others take: together no more than at the start.
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
// Sums alone (dK, dV, S and dP) leave a worker few registers.
constexpr int SUMS = ROWS + (DIM + DIM_V) / 2;
constexpr bool TIGHT = !WIDE && (SUMS > 192 || (SUMS == 192 && DIM == 64));
constexpr int MOVER_REGISTERS = GROUPS == 3 ? 32 : TIGHT ? 24 : 40;
constexpr int WORKER_REGISTERS = GROUPS == 3 ? 160 : TIGHT ? 240 : 232;
static_assert(MOVER_REGISTERS + GROUPS * WORKER_REGISTERS <= (GROUPS + 1) * START_REGISTERS);

using QTile = SwizzledTile<ROWS, DIM>;
using DOTile = SwizzledTile<ROWS, DIM_V>;
using KTile = SwizzledTile<KEYS, DIM>;
using VTile = SwizzledTile<KEYS, DIM_V>;
// Of P or dS. The rows are what need not be a multiple of 64.
using STile = SwizzledTile<WIDE ? KEYS : ROWS, WIDE ? ROWS : KEYS>;

// Two blocks of a cluster, with KEYS keys each, visit the same queries side by side. Each computes dQ of the keys of both,
// for half of the columns: it has those columns of the other's K, and is sent the other's dS ("far").
constexpr bool PAIRED = CLUSTER == 2;
constexpr int SPAN = CLUSTER * KEYS;
using FarKTile = SwizzledTile<KEYS, 64 * GROUPS>;
static_assert(CLUSTER == 1 || PAIRED && WIDE);

// dQ^T of a tile is computed in parts of 64 columns by PART_ROWS queries, one for each worker of a cluster. Where there are
// 64 columns only, two workers share out the rows.
constexpr bool SHARE_ROWS = !WIDE && DIM <= 64;
constexpr int PART_ROWS = SHARE_ROWS ? ROWS / GROUPS : ROWS;
constexpr int PART_BYTES = 4 * 64 * PART_ROWS;
constexpr int DQ_TILE = ROWS * DIM;          // floats of one tile in dq_sum
constexpr int FRAGMENT_BYTES = 4 * 16 * 8;  // 16 columns by 8 queries of it
constexpr int FINISH_BYTES = FINISH_FRAGMENTS * FRAGMENT_BYTES;

struct TensorMaps {
    TensorMap q, k, v, dout, dk, dv;
    int map_out;  // 0 where dk or dv lies as no map can tell
};

// A tile of keys of a head of K and V, and the query tiles [first, last) that see it. One thread hands it to the others
// through shared memory, as the four words that it is.
struct KeyTile {
    int pair;  // of batch and head; -1: there is no tile any more
    int number, first, last;  // keys from SPAN * number on

    __device__ KeyTile(int pair, int number, int first, int last)
        : pair(pair), number(number), first(first), last(last) {}

    __device__ KeyTile(uint4 words) : KeyTile(words.x, words.y, words.z, words.w) {}

    __device__ void store(unsigned address) const {
        store_shared(address, pair);
        store_shared(address + 4, number);
        store_shared(address + 8, first);
        store_shared(address + 12, last);
    }
};

// Shared memory, and one thread's place in its rings. `gpu/tuning.py` reckons the same size.
struct Shared {
    int rank;  // of the block in its cluster
    KTile k_tile;
    VTile v_tile;
    FarKTile far_k_tile;
    unsigned q_tiles, do_tiles, ds_tiles, p_tile, far_ds_tiles, parts, rows;
    Ring<1, WORKERS + 1> k;  // and the KeyTile that it belongs to, at `tile`: the thread that adds dQ reads that too
    Ring<1, WORKERS> v;
    Ring<STAGES, WORKERS> q;  // with -lse and -delta of its rows
    Ring<DO_STAGES, WORKERS> d;
    unsigned dq_rings, tile;
    // PAIRED: dS of two steps that this block is sent, and tickets that block 0 sends to block 1. Who reads waits for "full"
    // in its own memory; who sends, for "empty" in its own.
    Ring<2, WORKERS, WORKERS> far_ds;
    Ring<1, 1> ticket;
    unsigned ticket_slot;
    unsigned finish;  // rings and slots of the warps that turn sums of dQ to rows

    __device__ Shared(unsigned base)
        : rank(blockIdx.x % CLUSTER),
          k_tile{base},
          v_tile{base + KTile::BYTES},
          far_k_tile{v_tile.base + VTile::BYTES},
          q_tiles(far_k_tile.base + PAIRED * FarKTile::BYTES),
          do_tiles(q_tiles + STAGES * QTile::BYTES),
          ds_tiles(do_tiles + DO_STAGES * DOTile::BYTES),
          p_tile(ds_tiles + (PAIRED ? 2 : 1) * STile::BYTES),
          far_ds_tiles(p_tile + STile::BYTES),
          parts(p_tile + STile::BYTES),
          rows(PAIRED ? far_ds_tiles + 2 * STile::BYTES : parts + GROUPS * PART_BYTES),
          k(rows + STAGES * 8 * ROWS),
          v(k.barriers + k.BYTES),
          q(v.barriers + v.BYTES),
          d(q.barriers + q.BYTES),
          dq_rings(d.barriers + d.BYTES),
          tile(dq_rings + GROUPS * Ring<1, 1, 4>::BYTES),
          far_ds(tile + 16),
          ticket(far_ds.barriers + far_ds.BYTES),
          ticket_slot(ticket.barriers + ticket.BYTES),
          finish(PAIRED ? ticket_slot + 16 : tile + 16) {}

    // Where an address of this block's shared memory is in the other's.
    __device__ unsigned far(unsigned address) const { return far_address(address, 1 - rank); }
    // The block's own first key.
    __device__ int first_key(const KeyTile& t) const { return t.number * SPAN + rank * KEYS; }
    // Which 64 columns of dQ are a worker's.
    __device__ int dq_block(int group) const { return rank * GROUPS + group; }

    // For a moving thread that does not read K, alone in its warp.
    __device__ KeyTile next_tile() {
        k.wait_full();
        uint4 words = load_shared_16(tile);
        mbarrier_arrive(k.empty());
        k.advance();
        return words;
    }

    // For whole warps, after a wait for K. (The shuffles tell the compiler that all lanes have the same.)
    __device__ KeyTile this_tile() const {
        uint4 words = load_shared_16(tile);
        return {__shfl_sync(~0u, int(words.x), 0), __shfl_sync(~0u, int(words.y), 0), __shfl_sync(~0u, int(words.z), 0),
                __shfl_sync(~0u, int(words.w), 0)};
    }

    __device__ QTile q_tile() const { return {q_tiles + q.stage * QTile::BYTES}; }
    __device__ DOTile do_tile() const { return {do_tiles + d.stage * DOTile::BYTES}; }
    __device__ unsigned row_values() const { return rows + q.stage * 8 * ROWS; }
    __device__ unsigned part(int group) const { return parts + group * PART_BYTES; }
    // What dK and dV leave through. Narrow: all of a worker's, where dS and parts of dQ are. Wide: 64 columns of a
    // worker's at a time, where its dS (PAIRED) or its part of dQ is.
    __device__ unsigned out_tile(int group) const {
        if (!WIDE) return ds_tiles + group * ((rows - ds_tiles) / GROUPS);
        return PAIRED ? ds_tiles + group * STile::BYTES : part(group);
    }
    __device__ Ring<FINISH_STAGES, 1> finish_ring(int i) const { return {finish + i * Ring<FINISH_STAGES, 1>::BYTES}; }
    __device__ unsigned finish_slots(int i) const {
        return finish + FINISHERS * Ring<FINISH_STAGES, 1>::BYTES + i * FINISH_STAGES * FINISH_BYTES;
    }
    __device__ Ring<1, 1, 4> dq(int group) const { return {dq_rings + group * Ring<1, 1, 4>::BYTES}; }
};

__device__ inline int key_tiles(const Params& p) { return (p.seq_k + SPAN - 1) / SPAN; }

// The thread blocks take tiles in the order of their numbers. With a causal mask later keys are seen by fewer
// queries: in a group of heads whose Q, dO and dQ stay in the L2 cache, tiles with much to do come first. The
// deterministic backward adds to a dQ tile in the order of the numbers: there those of the last keys come first,
// since they begin where the diagonal is and nobody needs to wait.
__device__ inline KeyTile key_tile(const Params& p, int number) {
    int tiles = key_tiles(p), pairs = p.heads_k * p.batch;
    int first = number / (p.together * tiles) * p.together, place = number - first * tiles;
    int heads = min(p.together, pairs - first);
    int pair = first + place % heads, tile = place / heads;
    if (RIGHT && DETERMINISTIC) tile = tiles - 1 - tile;
    Range queries = Mask(p, 0).queries_of({tile * SPAN, min(p.seq_k, (tile + 1) * SPAN)});
    bool seen = queries.begin < queries.end;
    return {pair, tile, seen ? queries.begin / ROWS : 0, seen ? (queries.end + ROWS - 1) / ROWS : 0};
}

// The key tiles that add to the dQ of a query tile.
__device__ inline Range keys_of(const Params& p, int tile_q) {
    Range keys = Mask(p, 0).keys_of({tile_q * ROWS, min(p.seq_q, (tile_q + 1) * ROWS)});
    return keys.begin < keys.end ? Range{keys.begin / SPAN, (keys.end + SPAN - 1) / SPAN} : Range{0, 0};
}

// f(head, i, n) for every query head of the group and query tile that sees the keys; n numbers the query tiles of all
// heads.
template <class F>
__device__ void query_tiles(const Params& p, const KeyTile& t, F f) {
    int group = p.heads_q / p.heads_k, tiles = (p.seq_q + ROWS - 1) / ROWS;
#pragma unroll 1
    for (int h = 0; h < group; h++)
#pragma unroll 1
        for (int i = t.first; i < t.last; i++) f(t.pair % p.heads_k * group + h, i, (t.pair * group + h) * tiles + i);
}

// How far dQ is, in `counters` behind the ticket: heads of K and V ("pairs") take the room in dq_sum in turn.
struct DQCounters {
    unsigned *ticket, *clear, *added;
    int tiles;  // of queries, for one pair

    __device__ DQCounters(const Params& p) {
        int pairs = p.heads_k * p.batch;
        ticket = p.counters + 1;   // who turns the next tile of queries to rows
        clear = ticket + 1;     // of a pair, tiles of queries in whose place are zeros
        added = clear + pairs;  // thread blocks, with a key tile each, that have added to a tile of queries
        tiles = (p.seq_q + ROWS - 1) / ROWS * (p.heads_q / p.heads_k);
    }

    // The first tile of a pair's sums, less that of its queries.
    __device__ int shift(const Params& p, int pair) const { return (pair % p.kept - pair) * tiles; }

    // Wait until there are zeros where the sums of `pair` will be. Before, sums of a pair of an earlier group lie there
    // (kept >= 2 * together): all its tickets are taken, and none of them waits for one that came later.
    __device__ void wait_for_room(int pair) const {
        while (load_acquire(clear + pair) != tiles) {
        }
        fence_async_global();
    }
};

// The number of the next key tile. Of a cluster, block 0 draws it and hands it on.
__device__ inline int next_number(const Params& p, Shared& s) {
    int number = 0;
    if (s.rank == 0) number = atomicAdd(p.counters, 1);
    if (!PAIRED) return number;
    if (s.rank == 0) {
        s.ticket.wait_empty();
        store_far(s.far(s.ticket_slot), number, s.far(s.ticket.full()));
    } else {
        mbarrier_arrive_expect(s.ticket.full(), 4);
        s.ticket.wait_full();
        number = load_shared(s.ticket_slot);
        if (number >= 0) mbarrier_arrive_far(s.far(s.ticket.empty()));  // it has been read
    }
    s.ticket.advance();
    return number;
}

// The thread that deals out the tiles, and loads.
__device__ inline void load(const Params& p, const TensorMaps& maps, Shared& s) {
    DQCounters counters(p);
    int number = next_number(p, s);
    while (number < key_tiles(p) * p.heads_k * p.batch) {
        KeyTile t = key_tile(p, number);
        counters.wait_for_room(t.pair);
        s.k.wait_empty();
        t.store(s.tile);
        int batch = t.pair / p.heads_k, head_k = t.pair % p.heads_k;
        bool seen = t.first < t.last, first = true;
        if (seen) {
            mbarrier_arrive_expect(s.k.full(), KTile::BYTES + PAIRED * FarKTile::BYTES);
            s.k_tile.load(maps.k, s.k.full(), s.first_key(t), head_k, batch);
            int far_key = t.number * SPAN + (1 - s.rank) * KEYS;
            if (PAIRED) s.far_k_tile.load(maps.k, s.k.full(), far_key, head_k, batch, 64 * s.dq_block(0));
        } else {
            mbarrier_arrive(s.k.full());
            s.v.wait_empty();
            mbarrier_arrive(s.v.full());
            s.v.advance();
        }
        s.k.advance();
        query_tiles(p, t, [&](int head, int i, int n) {
            s.q.wait_empty();
            mbarrier_arrive_expect(s.q.full(), QTile::BYTES + 8 * ROWS);
            s.q_tile().load(maps.q, s.q.full(), i * ROWS, head, batch);
            bulk_load(s.row_values(), p.delta + n * (2ll * ROWS), 8 * ROWS, s.q.full());
            s.q.advance();
            if (first) {
                first = false;
                s.v.wait_empty();
                mbarrier_arrive_expect(s.v.full(), VTile::BYTES);
                s.v_tile.load(maps.v, s.v.full(), s.first_key(t), head_k, batch);
                s.v.advance();
            }
            s.d.wait_empty();
            mbarrier_arrive_expect(s.d.full(), DOTile::BYTES);
            s.do_tile().load(maps.dout, s.d.full(), i * ROWS, head, batch);
            s.d.advance();
        });
        number = next_number(p, s);  // not before: blocks that had little to do so far ask first
    }
    s.k.wait_empty();
    KeyTile(-1, 0, 0, 0).store(s.tile);
    mbarrier_arrive(s.k.full());
}
