// The Hopper backward's tiles in shared memory, and the order in which they are visited.
#pragma once
#include "attention/dead_rows.cuh"
#include "attention/dropped.cuh"
#include "attention/mask.cuh"
#include "attention/schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/flag.cuh"
#include "ptx/math.cuh"
#include "sm90/far_sums.cuh"
#include "sm90/pair_tiles.cuh"
#include "sm90/tangent_maps.cuh"
#include "sm90/tile_order.cuh"
#include "sm90/told_lengths.cuh"
#include "tile/ring.cuh"
#include "tile/rows.cuh"
#include "tile/swizzled.cuh"

using namespace config;

// The consumers share out the columns of dK, dV (backward_wide.cuh), not the keys (backward_narrow.cuh).
constexpr bool WIDE = KEYS < 64 * WARPGROUPS;

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int BLOCKS = WARPGROUPS == 1 ? 2 : 1;  // of a multiprocessor
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;

// Per thread. What the moving warpgroup gives away the others take: together no more than at the start.
constexpr int START_REGISTERS = 65536 / (THREADS * BLOCKS) / 8 * 8;
// Sums alone (dK, dV, S and dP) leave a consumer few registers.
constexpr int SUMS = ROWS + (DIM + DIM_V) / 2;
constexpr bool TIGHT = !WIDE && (SUMS > 192 || (SUMS == 192 && DIM == 64));
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : TIGHT ? 24 : 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1 ? 216 : WARPGROUPS == 3 ? 160 : TIGHT ? 240 : 232;
static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= (WARPGROUPS + 1) * START_REGISTERS);

// Columns of a block. Where they are shared out, both blocks of a cluster have the same keys.
constexpr bool SPLIT_COLUMNS = COLUMN_PARTS == 2;
constexpr int DQ_DIM = (DIM + 31) / 32 * 32;  // of sums of dQ
constexpr int BLOCK_DIM = DIM / COLUMN_PARTS, BLOCK_DIM_V = DIM_V / COLUMN_PARTS;

using QTile = SwizzledTile<ROWS, BLOCK_DIM>;
using DOTile = SwizzledTile<ROWS, BLOCK_DIM_V>;
using KTile = SwizzledTile<KEYS, BLOCK_DIM>;
using VTile = SwizzledTile<KEYS, BLOCK_DIM_V>;
// Tangents come with what they are of, and lie behind it.
constexpr int Q_BYTES = (1 + TQ) * QTile::BYTES, DO_BYTES = (1 + TDOUT) * DOTile::BYTES;
constexpr int K_BYTES = (1 + TK) * KTile::BYTES, V_BYTES = (1 + TV) * VTile::BYTES;
constexpr int NUMBERS_BYTES = (MOVED ? 4 : 2) * 4 * ROWS;  // of a tile of queries: lse and delta, and their tangents
// Of P or dS, queries by keys or the other way round. The rows are what need not be a multiple of 64.
using STile = SwizzledTile<WIDE && !MOVED ? KEYS : ROWS, WIDE && !MOVED ? ROWS : KEYS>;

// Two blocks of a cluster visit the same queries side by side. SPLIT_KEYS: with KEYS keys each. Each computes dQ of the
// keys of both, for half of the columns: it has those columns of the other's K, and is sent the other's dS ("far").
constexpr bool CLUSTERED = CLUSTER == 2, SPLIT_KEYS = CLUSTERED && !SPLIT_COLUMNS;
constexpr int CLUSTER_KEYS = SPLIT_KEYS ? CLUSTER * KEYS : KEYS;
using FarKTile = SwizzledTile<KEYS, 64 * WARPGROUPS>;
static_assert(CLUSTER == 1 || CLUSTERED && WIDE);
static_assert(COLUMN_PARTS == 1 || SPLIT_COLUMNS && CLUSTERED && DIM % 128 == 0 && DIM_V % 128 == 0);
static_assert(!SHARES || !walk::LISTED);
static_assert(!FIRST_STORES || !CLUSTERED && !SHARES && !WHOLE_DQ && !walk::LISTED);
// Where lengths are data, both sides are packed or none, so that the queries that see a head's keys are those of heads
// of its own.
static_assert(!RAGGED || PACKED_Q == PACKED_K && !SHARES && !FIRST_STORES && !WHOLE_DQ);
// (Of packed sequences all heads have the same tiles where no sums lie: nobody else needs zeros there.)
static_assert(!WHOLE_BY_LENGTH || PACKED_K && !WIDE && !MOVED && !walk::LISTED);

// dQ^T of a tile is computed in parts of 64 columns by PART_ROWS queries, one for each consumer of a cluster. Where
// there are 64 columns only, two consumers share out the rows; or (MOVED) each adds what its own keys do, and waits for
// nobody.
constexpr bool SHARE_ROWS = !WIDE && DIM <= 64 && !MOVED;
static_assert(!MOVED || !SHARES && !FIRST_STORES && !WHOLE_DQ && !DETERMINISTIC);
// Whether consumers themselves add their parts to memory.
constexpr bool CONSUMERS_ADD = CLUSTERED || (MOVED && WIDE);
constexpr int PART_ROWS = SHARE_ROWS ? ROWS / WARPGROUPS : ROWS;
constexpr int PART_BYTES = 4 * 64 * PART_ROWS * (MOVED && !WIDE ? (DIM + 63) / 64 : 1);
// Columns that are left where each of the narrow consumers has 64: these share out their rows.
constexpr int REST = WIDE || MOVED || DQ_DIM <= 64 * WARPGROUPS ? 0 : DQ_DIM - 64 * WARPGROUPS;
constexpr int REST_ROWS = ROWS / WARPGROUPS, REST_BYTES = 4 * ROWS * REST;
static_assert(REST == 0 || !WHOLE_BY_LENGTH && REST <= 64 && REST % 32 == 0 && REST_ROWS % 8 == 0);
static_assert(!WHOLE_DQ || !walk::LISTED);
// Whether rows of dQ leave from registers, or lie in shared memory and are sent from there.
constexpr bool PUTS_DQ = WHOLE_DQ && CLUSTERED, SENDS_DQ = WHOLE_DQ && !CLUSTERED;
constexpr int DQ_TILE = ROWS * DQ_DIM;      // floats of one tile in dq_sum
constexpr int FRAGMENT_BYTES = 4 * 16 * 8;  // 16 columns by 8 queries of it
constexpr int FINISH_BYTES = FINISH_FRAGMENTS * FRAGMENT_BYTES;

using Pairwise = PairTiles<ROWS>;  // mask and bias
using FarSums = ColumnSums<KEYS / WARPGROUPS>;

template <bool GIVEN>
struct ResultMaps {
    TensorMap dk, dv;
};
template <>
struct ResultMaps<true> {
    TensorMap dk, dv, dq;
};
struct InputMaps : PairMaps {
    TensorMap q, k, v, dout;
};
template <bool GIVEN>
struct TangentMaps {};
template <>
struct TangentMaps<true> : QTangentMap<TQ>, KTangentMap<TK>, VTangentMap<TV>, DOTangentMap<TDOUT> {};
struct TensorMaps : TangentMaps<MOVED>, InputMaps, ResultMaps<SENDS_DQ || WHOLE_BY_LENGTH> {
    int map_out;  // 0 where a result lies as no map can tell
};

using Queries = QueryWalk<ROWS, CLUSTER_KEYS>;
using AddingTiles = KeyWalk<CLUSTER_KEYS, ROWS>;  // of a tile of queries: those of keys that add to its dQ

// Of a head of K and V, the query tiles of all heads that share it, head by head; SHARES: of the heads behind the first
// `whole_heads` some of them (backward_shares.cuh). Packed sequences are one, and what is said of its tiles is said of
// their places.
struct Share {
    int kv_head;  // over all batch entries
    int number;   // which share of it
    Range tiles;  // of queries

    // `n` numbers the shares of all heads.
    __device__ Share(const Params& p, int n) : kv_head(n), number(0), tiles{0, query_tiles(p)} {
        if (!SHARES || n < p.whole_heads) return;
        n -= p.whole_heads;
        kv_head = p.whole_heads + n / p.shares, number = n % p.shares;
        long long all = tiles.end;
        tiles = {int(number * all / p.shares), int((number + 1) * all / p.shares)};
    }

    // How many there are, and the most query tiles that one has.
    __device__ static int count(const Params& p) {
        int heads = KeyTiles<CLUSTER_KEYS>::all_heads(p);
        return SHARES ? p.whole_heads + (heads - p.whole_heads) * p.shares : heads;
    }
    __device__ static int most_tiles(const Params& p) {
        return tiles_in(query_tiles(p), SHARES && p.whole_heads == 0 ? p.shares : 1);
    }

    // Its first query tile, among those of all heads.
    __device__ int first(const Params& p) const { return kv_head * query_tiles(p) + tiles.begin; }

    // Those of all heads that share the head of K and V.
    __device__ static int query_tiles(const Params& p) { return QueryTiles<ROWS>::of_head(p) * group_of(p); }
};

// Whether maps of packed arrays have windows, so that boxes end with a sequence.
constexpr bool WINDOWS = PACKED_K && !WIDE;

// Where boxes begin, given the place of the first row.
__device__ inline auto box_of_keys(const Params& p, const Head& head, InMap at, int key) {
    if constexpr (WINDOWS)
        return at.in_window(head.keys(p) - key);
    else
        return at;
}
__device__ inline auto box_of_queries(const Params& p, const Head& head, InMap at, int query) {
    if constexpr (WINDOWS)
        return at.in_window(head.queries(p) - query);
    else
        return at;
}

// Whether the first key tile has all keys of a head. What it computes of dQ is all of it then, and leaves as rows
// (WHOLE_BY_LENGTH: where lengths are data, of which each sequence has its own).
__device__ inline bool has_whole_dq(const Params& p, const Head& head) {
    return WHOLE_DQ || WHOLE_BY_LENGTH && head.keys(p) > 0 && head.keys(p) <= KEYS;
}
// The query tiles of one head that visit a tile of keys. (Where that has all of them also queries without a key, which
// have a dQ, too.)
__device__ inline Range visiting(const Params& p, const Head& head, int tile) {
    if constexpr (WHOLE_DQ) return {0, head.query_tiles<ROWS>(p)};
    if (WHOLE_BY_LENGTH && tile == 0 && has_whole_dq(p, head)) return {0, head.query_tiles<ROWS>(p)};
    return Queries(p, head, head.key_tile<CLUSTER_KEYS>(p, tile)).extent();
}

// A tile of keys of a head of K and V, and the query tiles of a share that visit it. One thread hands it to the others
// through shared memory, as the four words that it is, and what is told of its lengths.
struct KeyTile {
    static constexpr int BYTES = 16 + ToldLengths<RAGGED>::BYTES;

    int share;      // among those of all heads of K and V; -1: there is no tile any more
    int number;     // keys from CLUSTER_KEYS * number on
    Range queries;  // tiles of queries that visit it, from each head; LISTED: {0, how many from all heads together}
    ToldLengths<RAGGED> lengths{};

    __device__ KeyTile(int share, int number, Range queries) : share(share), number(number), queries(queries) {}

    __device__ void store(unsigned address) const {
        store_shared(address, share);
        store_shared(address + 4, number);
        store_shared(address + 8, queries.begin);
        store_shared(address + 12, queries.end);
        lengths.store(address + 16);
    }
    // From there, with what lanes of a warp have in common `settled`.
    template <class F>
    __device__ static KeyTile load(unsigned address, F settled) {
        uint4 words = load_shared_16(address);
        KeyTile t(settled(words.x), settled(words.y), Range{settled(words.z), settled(words.w)});
        t.lengths = ToldLengths<RAGGED>::load(address + 16, settled);
        return t;
    }

    __device__ bool none() const { return share == -1; }
    __device__ int kv_head(const Params& p) const { return Share(p, share).kv_head; }
    __device__ Head head(const Params& p) const { return lengths.head(p, kv_head(p)); }
    __device__ Range keys(const Params& p) const { return head(p).key_tile<CLUSTER_KEYS>(p, number); }

    // f(h, walk) for the h-th query head of the group, and so on: of the share's query tiles those that visit the keys.
    template <class F>
    __device__ void for_heads(const Params& p, F f) const {
        Head keys_of = head(p);
        Range own = Share(p, share).tiles;
        int tiles = keys_of.query_tiles<ROWS>(p);
#pragma unroll 1
        for (int h = SHARES ? own.begin / tiles : 0; SHARES ? h * tiles < own.end : h < group_of(p); h++) {
            Head of = keys_of.other(keys_of.q + h);
            Range some = queries;
            if (SHARES) {
                some.begin = max(some.begin, own.begin - h * tiles);
                some.end = max(some.begin, min(some.end, own.end - h * tiles));
            }
            f(h, of, Queries(p, of, keys(p), some));
        }
    }

    // How many query tiles visit it, of all heads.
    __device__ int visits(const Params& p) const {
        int count = queries.end - queries.begin;
        if (walk::LISTED) return count;
        if (!SHARES) return group_of(p) * count;
        int sum = 0;
        for_heads(p, [&](int, const Head&, const Queries& walk) { sum += walk.count(); });
        return sum;
    }
};

// Shared memory, and one thread's place in its rings.
struct Shared {
    // The thread that adds dQ, or sends it, reads the KeyTile that comes with K.
    using KRing = Ring<1, CONSUMER_WARPS + !PUTS_DQ>;
    using VRing = Ring<1, CONSUMER_WARPS>;
    using QRing = Ring<STAGES, CONSUMER_WARPS>;  // with -lse and -delta of its rows
    using DORing = Ring<DO_STAGES, CONSUMER_WARPS>;
    using PairRing = Ring<PAIR_STAGES, CONSUMER_WARPS>;
    using DQRing = Ring<1, 1, 4>;
    using FarDSRing = Ring<2, CONSUMER_WARPS, CONSUMER_WARPS>;
    using TicketRing = Ring<1, 1>;
    using FinishRing = Ring<FINISH_STAGES, 1>;

    // Offsets. What dK and dV leave through lies where dS and parts of dQ do.
    static constexpr int V_TILE = K_BYTES;
    static constexpr int FAR_K_TILE = V_TILE + V_BYTES;
    static constexpr int Q_TILES = FAR_K_TILE + SPLIT_KEYS * FarKTile::BYTES;
    static constexpr int DO_TILES = Q_TILES + STAGES * Q_BYTES;
    static constexpr int DS_TILES = DO_TILES + DO_STAGES * DO_BYTES;
    // Narrow: dS of the other step. MOVED: tdX, dX; wide also tP.
    static constexpr int P_TILE = DS_TILES + (CONSUMERS_ADD ? 2 : 1) * STile::BYTES;
    static constexpr int FAR_DS_TILES = P_TILE + STile::BYTES;
    static constexpr int PARTS = P_TILE + STile::BYTES;
    static constexpr int FAR_SUMS = P_TILE + STile::BYTES;
    static constexpr int PAIR_TILES = SPLIT_COLUMNS ? FAR_SUMS + WARPGROUPS * FarSums::BYTES
                                      : CLUSTERED   ? FAR_DS_TILES + 2 * STile::BYTES
                                                    : PARTS + WARPGROUPS * PART_BYTES + REST_BYTES;
    static constexpr int ROW_VALUES = PAIR_TILES + PAIR_STAGES * Pairwise::BYTES;
    static constexpr int K_RING = ROW_VALUES + STAGES * NUMBERS_BYTES;
    static constexpr int V_RING = K_RING + KRing::BYTES;
    static constexpr int Q_RING = V_RING + VRing::BYTES;
    static constexpr int DO_RING = Q_RING + QRing::BYTES;
    static constexpr int PAIR_RING = DO_RING + DORing::BYTES;
    static constexpr int DQ_RINGS = PAIR_RING + (PAIR_ARRAYS ? PairRing::BYTES : 0);
    static constexpr int TILE = DQ_RINGS + WARPGROUPS * DQRing::BYTES;
    static constexpr int FAR_DS_RING = TILE + KeyTile::BYTES;
    static constexpr int TICKET_RING = FAR_DS_RING + FarDSRing::BYTES;
    static constexpr int TICKET = TICKET_RING + TicketRing::BYTES;
    static constexpr int FAR_SUMS_BARRIERS = TICKET + 16;
    static constexpr int FINISH_RINGS = SPLIT_COLUMNS ? FAR_SUMS_BARRIERS + WARPGROUPS * FarSums::BARRIERS
                                        : CLUSTERED   ? TICKET + 16
                                                      : FAR_DS_RING;
    static constexpr int FINISH_SLOTS = FINISH_RINGS + FINISHERS * FinishRing::BYTES;
    static constexpr int END = FINISH_SLOTS + FINISHERS * FINISH_STAGES * FINISH_BYTES;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");
    // Consumers that help to finish dQ, once no key tile is left: slots and barriers where K, V, Q and dO lay.
    static constexpr int HELPER_BYTES = FINISH_STAGES * FINISH_BYTES + (FinishRing::BYTES + 127) / 128 * 128;
    static constexpr int FREE_SLOTS = FINISHERS == 0 ? 0 : DS_TILES / HELPER_BYTES;
    static constexpr int HELPERS = FREE_SLOTS < CONSUMER_WARPS ? FREE_SLOTS : CONSUMER_WARPS;

    unsigned base;
    int rank;  // of the block in its cluster
    KRing k;
    VRing v;
    QRing q;
    DORing d;
    PairRing pairs;
    // SPLIT_KEYS: dS of two steps that this block is sent. CLUSTERED: tickets that block 0 sends to block 1. Who reads
    // waits for "full" in its own memory; who sends, for "empty" in its own.
    FarDSRing far_ds;
    TicketRing ticket;

    __device__ Shared(unsigned base)
        : base(base),
          rank(blockIdx.x % CLUSTER),
          k(base + K_RING),
          v(base + V_RING),
          q(base + Q_RING),
          d(base + DO_RING),
          pairs(base + PAIR_RING),
          far_ds(base + FAR_DS_RING),
          ticket(base + TICKET_RING) {}

    // All barriers, by one thread.
    __device__ void init() const {
        k.init();
        v.init();
        q.init();
        d.init();
        if (PAIR_ARRAYS) pairs.init();
        for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) dq(warpgroup).init();
        for (int i = 0; i < FINISHERS; i++) finish_ring(i).init();
        if (CLUSTERED) ticket.init();
        if (SPLIT_KEYS) far_ds.init();
        if (SPLIT_COLUMNS)
            for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) far_sums(warpgroup).init();
        mbarrier_init_fence();
    }

    // Where an address of this block's shared memory is in the other's.
    __device__ unsigned far(unsigned address) const { return far_address(address, 1 - rank); }
    // The block's own first key, and the other block's.
    __device__ int first_key(const KeyTile& t) const { return t.number * CLUSTER_KEYS + SPLIT_KEYS * rank * KEYS; }
    __device__ int far_key(const KeyTile& t) const { return t.number * CLUSTER_KEYS + (1 - rank) * KEYS; }
    // The block's own first columns.
    __device__ int column() const { return SPLIT_COLUMNS ? rank * BLOCK_DIM : 0; }
    __device__ int column_v() const { return SPLIT_COLUMNS ? rank * BLOCK_DIM_V : 0; }
    // Which 64 columns of dQ are a consumer's, without SPLIT_COLUMNS.
    __device__ int dq_block(int warpgroup) const { return rank * WARPGROUPS + warpgroup; }
    __device__ FarSums far_sums(int warpgroup) const {
        return {base + FAR_SUMS + warpgroup * FarSums::BYTES, base + FAR_SUMS_BARRIERS + warpgroup * FarSums::BARRIERS,
                unsigned(1 - rank)};
    }

    // For a moving thread that does not read K, alone in its warp.
    __device__ KeyTile next_tile() {
        k.wait_full();
        KeyTile t = KeyTile::load(base + TILE, [](unsigned word) { return int(word); });
        mbarrier_arrive(k.empty());
        k.advance();
        return t;
    }

    // For whole warps, after a wait for K. (The shuffles tell the compiler that all lanes have the same.)
    __device__ KeyTile this_tile() const {
        return KeyTile::load(base + TILE, [](unsigned word) { return __shfl_sync(~0u, int(word), 0); });
    }

    __device__ KTile k_tile() const { return {base}; }
    __device__ VTile v_tile() const { return {base + V_TILE}; }
    __device__ FarKTile far_k_tile() const { return {base + FAR_K_TILE}; }
    __device__ QTile q_tile() const { return {base + Q_TILES + q.stage * Q_BYTES}; }
    __device__ DOTile do_tile() const { return {base + DO_TILES + d.stage * DO_BYTES}; }
    __device__ KTile tk_tile() const { return {k_tile().base + KTile::BYTES}; }
    __device__ VTile tv_tile() const { return {v_tile().base + VTile::BYTES}; }
    __device__ QTile tq_tile() const { return {q_tile().base + QTile::BYTES}; }
    __device__ DOTile tdo_tile() const { return {do_tile().base + DOTile::BYTES}; }
    __device__ Pairwise pair_tiles() const { return {base + PAIR_TILES + pairs.stage * Pairwise::BYTES}; }
    __device__ STile ds_tile(unsigned step) const { return {base + DS_TILES + step % 2 * STile::BYTES}; }
    __device__ unsigned far_ds_tile() const { return base + FAR_DS_TILES + far_ds.stage * STile::BYTES; }
    __device__ STile p_tile() const { return {base + P_TILE}; }
    __device__ unsigned row_values() const { return base + ROW_VALUES + q.stage * NUMBERS_BYTES; }
    __device__ unsigned part(int warpgroup) const { return base + PARTS + warpgroup * PART_BYTES; }
    // What dK and dV leave through. Narrow: all of a consumer's, where dS and parts of dQ are. Wide: 64 columns of a
    // consumer's at a time, where its dS (CLUSTERED) or its part of dQ is.
    __device__ unsigned out_tile(int warpgroup) const {
        if (!WIDE) return base + DS_TILES + warpgroup * ((PAIR_TILES - DS_TILES) / WARPGROUPS);
        return CLUSTERED ? base + DS_TILES + warpgroup * STile::BYTES : part(warpgroup);
    }
    __device__ FinishRing finish_ring(int i) const { return {base + FINISH_RINGS + i * FinishRing::BYTES}; }
    __device__ unsigned finish_slots(int i) const { return base + FINISH_SLOTS + i * FINISH_STAGES * FINISH_BYTES; }
    __device__ unsigned helper_slots(int i) const { return base + i * HELPER_BYTES; }
    __device__ FinishRing helper_ring(int i) const { return {helper_slots(i) + FINISH_STAGES * FINISH_BYTES}; }
    __device__ DQRing dq(int warpgroup) const { return {base + DQ_RINGS + warpgroup * DQRing::BYTES}; }
};

// The thread blocks take tiles in the order of their numbers. With a causal mask later keys are seen by fewer
// queries: in a round of heads whose Q, dO and dQ stay in the L2 cache, tiles with much to do come first. The
// deterministic backward adds to a dQ tile in the order of the numbers, and FIRST_STORES has the first of them store.
// Of a list those with most to do come first.
using KeySchedule = Schedule<KeyTiles<CLUSTER_KEYS>, key_order(DETERMINISTIC || FIRST_STORES), true>;

// ORDERED: a block of the launch before has listed the key tiles of packed sequences (tile_order.cuh), and behind these
// what has each place of query tiles.
static_assert(!ORDERED || PACKED_K && !DETERMINISTIC && !walk::LISTED);

__device__ inline int line_of_queries(const Params& p, int place) {
    return 1 + KeyTiles<CLUSTER_KEYS>::of_head(p) + place;
}
__device__ inline void list_tiles(const Params& p) {
    using Tiles = KeyTiles<CLUSTER_KEYS>;
    order_tiles<Tiles, 128, BY_VISITS, false>(
        p, [&](int place) { return Tiles::placed(p, place, 0); },
        [&](const Head& head, int tile) { return visiting(p, head, tile); });
    for (int place = threadIdx.x; place < QueryTiles<ROWS>::of_head(p); place += 128) {
        HeadTile at = QueryTiles<ROWS>::placed(p, place, 0);
        ListedTile{at.head, at.number, {0, 0}}.store(p, line_of_queries(p, place));
    }
}
__device__ inline HeadTile numbered_queries(const Params& p, int n) {
    if constexpr (!ORDERED) return numbered<QueryTiles<ROWS>>(p, n);
    int places = QueryTiles<ROWS>::of_head(p), q = n / places;
    ListedTile tile = ListedTile::at(p, line_of_queries(p, n % places), q, q / group_of(p));
    return {tile.head, tile.number};
}

// How many numbers a head has.
__device__ inline int key_tiles_of_head(const Params& p) {
    return ORDERED ? AllTiles::of(p).count : KeyTiles<CLUSTER_KEYS>::of_head(p);
}
__device__ inline KeyTile key_tile(const Params& p, int number, int tiles) {
    KeySchedule schedule(p);
    if constexpr (ORDERED) schedule.tiles = tiles;
    TileIndex at = schedule.index(number, Share::count(p), p.together);
    KeyTile t(at.head, at.tile, Range{0, 0});
    if constexpr (ORDERED) {
        ListedTile tile = ListedTile::at(p, 1 + at.tile, 0, 0);
        t.number = tile.number, t.queries = tile.visits;
        t.lengths = ToldLengths<RAGGED>::of(p, tile.head);
        return t;
    }
    if constexpr (RAGGED) {
        HeadTile found = schedule.ordered(of_all_heads<KeyTiles<CLUSTER_KEYS>>(p, at.head, at.tile));
        t.lengths = ToldLengths<RAGGED>::of(p, found.head);
        t.number = found.number;
        if (found.none()) return t;
    }
    Head head = t.head(p);
    if constexpr (!RAGGED) t.number = schedule.listed(head, schedule.ordered(at.tile));
    t.queries = visiting(p, head, t.number);
    for (int h = 1; walk::LISTED && h < group_of(p); h++)
        t.queries.end += Queries(p, head.other(head.q + h), t.keys(p)).count();
    return t;
}

// The key tiles that add to dQ of a tile of queries.
__device__ inline AddingTiles adding_to(const Params& p, const Head& head, int tile_q) {
    return {p, head, head.query_tile<ROWS>(p, tile_q)};
}

// f(head, tile, n, bits) for every query head of the group and query tile that visits the keys; n numbers the query
// tiles of all heads, `bits` says what a block mask leaves of the tile.
template <class F>
__device__ void for_query_tiles(const Params& p, const KeyTile& t, F f) {
    int group = group_of(p), tiles = QueryTiles<ROWS>::of_head(p);
    int first = PACKED_Q ? int(QueryTiles<ROWS>::number(p, t.head(p).other(0), 0)) : 0;
    t.for_heads(p, [&](int h, const Head& head, const Queries& walk) {
#pragma unroll 1
        for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
            int tile = walk.tile(step);
            f(head, tile, (t.kv_head(p) * group + h) * tiles + first + tile,
              walk.template bits<!WIDE || MOVED>(step, t.keys(p)));
        }
    });
}

// Whether so many keys from one on are all of a sequence: then a box of results has nothing of another one.
template <int COUNT>
__device__ bool is_whole(const Params& p, const Head& head, int key) {
    return !PACKED_K || key + COUNT <= head.keys(p);
}
