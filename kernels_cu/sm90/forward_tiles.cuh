// The Hopper forward's tiles in shared memory, what a launch is made of, and the producer: TMA
// brings Q, K and V tiles as far ahead as the rings in shared memory reach.
#pragma once
constexpr int ROWS = 64 * config::WARPGROUPS;  // of a tile of queries

#include "sm90/forward_schedule.cuh"
#include "sm90/long_sums.cuh"
#include "sm90/pair_tiles.cuh"
#include "sm90/tangent_maps.cuh"
#include "sm90/turned_values.cuh"
#include "tile/ring.cuh"
#include "tile/swizzled.cuh"

using namespace config;

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;  // warps that read what is loaded

// Whether threads have registers to spare: no more than two warpgroups compute on a multiprocessor, in BLOCKS thread
// blocks.
constexpr bool ROOMY = WARPGROUPS * BLOCKS < 3;

// Per thread. What the producer warpgroup gives away the consumers take: together no more than at the start.
constexpr int START_REGISTERS = 65536 / (THREADS * BLOCKS) / 8 * 8;
constexpr int PRODUCER_REGISTERS = !ROOMY ? 32 : PAGED ? 56 : 40;
constexpr int CONSUMER_REGISTERS = ((WARPGROUPS + 1) * START_REGISTERS - PRODUCER_REGISTERS) / WARPGROUPS / 8 * 8;

// OWN_Q, where Q has one place in shared memory: each warpgroup gives its rows back with its own last scores of a tile,
// before their softmax, and goes on when it has those of the next tile.
static_assert(!OWN_Q || Q_STAGES == 1 && PACK == 1);
constexpr int Q_PARTS = OWN_Q ? WARPGROUPS : 1;

// Key tiles at the end of a tile's walk that a warpgroup's rows do not see and another's do, at most.
constexpr int BEHIND = walk::BOUND_FIRST ? tiles_in(64 * (WARPGROUPS - 1), KEYS) : 0;

// Whether the next tile is looked at while O of a tile is still to be stored: then that is done under the next tile's
// first scores. It asks for registers, for the next Q to be there, and, since what is behind is passed on after that,
// for rings that hold it.
constexpr bool NEXT_Q = ROOMY && (Q_STAGES > 1 || OWN_Q) && !SHARES && !(PACK > 1 && (SCORE || DIM > 128)) &&
                        BEHIND < STAGES && (!PAIR_ARRAYS || BEHIND <= PAIR_STAGES);

// Whether the next tile's Q is asked for before the end of a tile: all thread blocks may change heads at once, and it
// would come late. (Beside three warpgroups the producer has no registers for that.)
constexpr bool EARLY = ROOMY && Q_STAGES > 1 && !SHARES;

// Whether the producer tells the others all of a tile, so that they need no divisions between two tiles, or only
// its number: beside three warpgroups it has no registers for more. (Of packed queries it has, and they search no
// offsets.)
constexpr bool TELL = (ROOMY || PACKED_Q) && !SHARES && V_PARTS == 1;
constexpr bool TELL_LENGTHS = (TELL || BY_LENGTH) && RAGGED;  // which it has looked up

// Whether a warp beside the producer (the scheduler) takes tiles: to search the offsets of packed sequences, and to
// pass over places of no tile, takes as long as a key tile or two.
constexpr bool SCHEDULED = TELL && PACKED_Q;

using QTile = SwizzledTile<ROWS, DIM>;
using KTile = SwizzledTile<KEYS, DIM>;
using OTile = SwizzledTile<ROWS, DIM_V, Out>;

// Tensor cores take numbers of 8 bits along rows alone: there V comes turned, a row for each of its columns.
template <bool TURNED>
struct Values {
    using Tile = SwizzledTile<KEYS, DIM_V>;
    __device__ static void load(const Params& p, Tile tile, const TensorMap& map, unsigned barrier, int key,
                                const Head& head, const KeyPlace& place, int column) {
        place.load(p, tile, map, barrier, key, head, column);
    }
};
template <>
struct Values<true> {
    using Tile = SwizzledTile<DIM_V, KEYS>;
    __device__ static void load(const Params&, Tile tile, const TensorMap& map, unsigned barrier, int key,
                                const Head& head, const KeyPlace&, int) {
        tile.load(map, barrier, head.at_turned_key(key));
    }
};
constexpr bool TURNED = sizeof(In) == 1;
using VTile = Values<TURNED>::Tile;

// With a tile come those of its tangent (jvp.cu), where there is one; V itself is not asked for where it alone has one.
constexpr bool WITH_V = TQ || TK || !TV;
constexpr int Q_BYTES = (1 + TQ) * QTile::BYTES, K_BYTES = (1 + TK) * KTile::BYTES,
              V_BYTES = (WITH_V + TV) * VTile::BYTES;

using Pairwise = PairTiles<ROWS>;  // mask and bias
static_assert(!(PAIR_ARRAYS || walk::LISTED || DROPOUT) || PACK == 1);
static_assert(!O_STRIPS || !O_STAGED && SUM_TILES == 0 && Q_STAGES == 1);
static_assert(!TURNED || KEYS % 32 == 0);  // P V takes so many at once
static_assert(V_PARTS == 1 || !(TURNED || BY_LENGTH));

struct TensorMaps : PairMaps, QTangentMap<TQ>, KTangentMap<TK>, VTangentMap<TV> {
    TensorMap q, k, v, out;  // (of tO where there are tangents)
    int map_out;  // 0 where `out` lies as no map can tell
};

// Shared memory, and one thread's place in its rings.
struct Shared {
    using QRing = Ring<Q_STAGES, CONSUMER_WARPS / Q_PARTS>;
    using KVRing = Ring<STAGES, CONSUMER_WARPS>;
    using PairRing = Ring<PAIR_STAGES, CONSUMER_WARPS>;
    using NextRing = Ring<1, 1>;  // from the scheduler to the producer, which says when it wants the next tile

    // Offsets.
    static constexpr int K_TILES = Q_STAGES * Q_BYTES;
    static constexpr int V_TILES = K_TILES + STAGES * K_BYTES;
    static constexpr int O_TILE = V_TILES + STAGES * V_BYTES;
    static constexpr int O_BYTES = O_STAGED ? OTile::BYTES : O_STRIPS ? 4 * WARPGROUPS * Strip::BYTES : 0;
    static constexpr int PAIR_TILES = O_TILE + (O_BYTES > LongSums::BYTES ? O_BYTES : LongSums::BYTES);
    static constexpr int Q_RING = PAIR_TILES + PAIR_STAGES * Pairwise::BYTES;
    static constexpr int K_RING = Q_RING + Q_PARTS * QRing::BYTES;
    static constexpr int V_RING = K_RING + KVRing::BYTES;
    static constexpr int PAIR_RING = V_RING + KVRing::BYTES;
    static constexpr int NOTES = PAIR_RING + (PAIR_ARRAYS ? PairRing::BYTES : 0);
    static constexpr int NOTE_BYTES = TELL_LENGTHS ? 32 : 16;
    static constexpr int NEXT_NOTE = NOTES + NOTE_BYTES * Q_STAGES * Q_PARTS;
    static constexpr int NEXT_RING = NEXT_NOTE + SCHEDULED * NOTE_BYTES;
    static constexpr int END = NEXT_RING + SCHEDULED * NextRing::BYTES;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    unsigned base;
    QRing q;
    KVRing k, v;
    PairRing pairs;
    NextRing next;
    KeyPlace places;  // of who loads

    __device__ Shared(unsigned base)
        : base(base),
          q(base + Q_RING),
          k(base + K_RING),
          v(base + V_RING),
          pairs(base + PAIR_RING),
          next(base + NEXT_RING) {}

    // All barriers, by one thread.
    __device__ void init() {
        for_parts([&](int) { q.init(); });
        k.init();
        v.init();
        if (PAIR_ARRAYS) pairs.init();
        if (SCHEDULED) next.init();
        mbarrier_init_fence();
    }

    __device__ QTile q_tile() const { return {base + q.stage * Q_BYTES}; }
    __device__ KTile k_tile() const { return {base + K_TILES + k.stage * K_BYTES}; }
    __device__ VTile v_tile() const { return {base + V_TILES + v.stage * V_BYTES}; }
    __device__ QTile tq_tile() const { return {q_tile().base + QTile::BYTES}; }
    __device__ KTile tk_tile() const { return {k_tile().base + KTile::BYTES}; }
    __device__ VTile tv_tile() const { return {v_tile().base + WITH_V * VTile::BYTES}; }
    __device__ Pairwise pair_tiles() const { return {base + PAIR_TILES + pairs.stage * Pairwise::BYTES}; }
    // Only where O_STAGED; O_STRIPS; SUM_TILES.
    __device__ OTile o_tile() const { return {base + O_TILE}; }
    __device__ Strip o_strip() const { return {base + O_TILE + (threadIdx.x / 32 - 4) * Strip::BYTES}; }
    __device__ unsigned sums() const { return base + O_TILE; }
    // What the stage of Q tells of its tile; as many notes from the first as its ring is from the first ring (of one
    // stage, else there is one).
    __device__ unsigned note() const {
        return base + NOTES + NOTE_BYTES / 16 * (q.barriers - base - Q_RING) + NOTE_BYTES * q.stage;
    }

    // To the ring of a warpgroup's rows of Q, where each has its own; all are at the same place in them.
    __device__ void of_part(int part) { q.barriers = base + Q_RING + (OWN_Q ? part : 0) * QRing::BYTES; }
    template <class F>
    __device__ void for_parts(F f) {
#pragma unroll 1
        for (int part = 0; part < Q_PARTS; part++) {
            of_part(part);
            f(part);
        }
    }

    // The producer tells of a tile, or that there are no more, and the others are told: a batch of -1.
    __device__ void tell(const Params& p, const Tile& tile, int number) const {
        if constexpr (TELL) {
            store_tile(p, note(), tile);
        } else if constexpr (BY_LENGTH) {
            store_shared(note(), tile.head.number());
            store_shared(note() + 4, tile.head.q);
            store_shared(note() + 8, tile.queries.begin);
            store_shared(note() + 12, tile.share);
            store_lengths(p, note(), tile.head);
        } else {
            store_shared(note(), number);
        }
    }
    // TELL: a note, and what it says with what lanes of a warp have in common `settled`.
    __device__ static void store_tile(const Params& p, unsigned note, const Tile& tile) {
        store_shared(note, RAGGED ? tile.head.number() : tile.head.batch);
        store_shared(note + 4, tile.head.q);
        store_shared(note + 8, tile.head.k);
        store_shared(note + 12, tile.queries.begin);
        if (RAGGED) store_lengths(p, note, tile.head);
    }
    __device__ static void store_lengths(const Params& p, unsigned note, const Head& head) {
        store_shared(note + 16, head.first_query());
        store_shared(note + 20, head.queries(p));
        store_shared(note + 24, head.first_key());
        store_shared(note + 28, head.keys(p));
    }
    template <class F>
    __device__ static bool load_tile(const Params& p, unsigned note, Tile& tile, F settled) {
        uint4 x = load_shared_16(note);
        Head head = told_head(p, note, settled(x.x), settled(x.y), settled(x.z), settled);
        int row = settled(x.w);
        if (head.batch == -1) return false;
        tile = {head, {row, min(head.queries(p), row + HEAD_ROWS)}};
        return true;
    }
    template <class F>
    __device__ static Head told_head(const Params& p, unsigned note, int n, int q, int k, F settled) {
        if constexpr (!RAGGED) return Head::of(p, n, q, k);
        uint4 x = load_shared_16(note + 16);
        int first_q = settled(x.x), first_k = settled(x.z);
        return Head::told(p, n, q, k, {first_q, first_q + settled(x.y)}, {first_k, first_k + settled(x.w)});
    }
    __device__ void tell_end() const { store_shared(note(), unsigned(-1)); }
    __device__ bool told(const Params& p, Tile& tile, const TileSchedule& schedule) const {
        if constexpr (TELL) {
            return load_tile(p, note(), tile, [](unsigned word) { return __shfl_sync(~0u, int(word), 0); });
        } else if constexpr (BY_LENGTH) {
            uint4 x = load_shared_16(note());
            auto all = [](unsigned word) { return __shfl_sync(~0u, int(word), 0); };
            int q = all(x.y), row = all(x.z);
            Head head = told_head(p, note(), all(x.x), q, q / group_of(p), all);
            if (head.batch == -1) return false;
            tile = {head, {row, min(head.queries(p), row + HEAD_ROWS)}, all(x.w)};
        } else {
            int number = __shfl_sync(~0u, int(load_shared(note())), 0);
            if (number == -1) return false;
            tile = schedule.tile(number);
        }
        return true;
    }

    // The producer: whether the scheduler has found the next tile, which that is (or that there is none), and that the
    // one after it is wanted.
    __device__ bool next_is_there() const {
        bool there = mbarrier_test(next.full(), next.parity);
        return LOADERS > 1 ? __shfl_sync(~0u, there, 0) : there;
    }
    __device__ bool take_next(const Params& p, Tile& tile) const {
        next.wait_full();
        bool found = load_tile(p, base + NEXT_NOTE, tile, [](unsigned word) { return int(word); });
        if (LOADERS > 1) __syncwarp();
        return found;
    }
    __device__ void ask_next() {
        if (leads()) mbarrier_arrive(next.empty());
        next.advance();
    }
};

// The scheduler, a warp.
__device__ inline void schedule_tiles(const Params& p, Shared& s) {
    TileSchedule schedule(p);
    Tickets tickets{p.counters};
    int total = schedule.total(), number = blockIdx.x;
    bool first = threadIdx.x % 32 == 0;
    auto take = [&] {
        int ticket = number;
        if (p.counters != nullptr) {
            if (first) {
                ticket = tickets.take(number < gridDim.x);
                tickets.settle(ticket, total - 1);
            }
            ticket = __shfl_sync(~0u, ticket, 0);
        }
        number = gridDim.x + ticket;
    };
    while (true) {
        Tile tile{};
        for (; number < total; take()) {
            tile = schedule.tile<true>(number);
            if (!tile.none()) break;
        }
        bool more = number < total;
        if (first) {
            if (more)
                s.store_tile(p, s.base + s.NEXT_NOTE, tile);
            else
                store_shared(s.base + s.NEXT_NOTE, unsigned(-1));
            mbarrier_arrive(s.next.full());
        }
        s.next.advance();
        if (!more) break;
        if (first) s.next.wait_empty();  // not before: blocks that had little to do so far ask first
        __syncwarp();
        take();
    }
}

// O_STAGED: a warpgroup's rows of a result, rounded, from `column` on: in a box or, where no map can tell how the array
// lies, row by row.
template <class T>
__device__ void store_staged(const Params& p, const TensorMaps& maps, Shared& s, const Accumulator<1, DIM_V / 8>& o,
                             int warpgroup, const Tile& tile, T* array, const Strides& strides, int column = 0) {
    bool storer = threadIdx.x % 128 == 0;
    int first_row = 64 * warpgroup, warp_row = first_row + threadIdx.x / 32 % 4 * 16;
    if (storer) tma_wait_read();
    sync_threads<128>(1 + warpgroup);
    store_rounded(o, s.o_tile(), warp_row, 0);
    if (maps.map_out) {
        fence_async();
        sync_threads<128>(1 + warpgroup);
        if (storer) {
            InMap at = tile.head.to_query(tile.queries.begin + first_row, column);
            if constexpr (PACKED_Q)
                s.o_tile().from(first_row).store(
                    maps.out, at.in_window(tile.queries.end - tile.queries.begin - first_row));
            else
                s.o_tile().from(first_row).store(maps.out, at);
            tma_commit();
        }
    } else {  // the warp's rows are its own
        __syncwarp();
        T* out = tile.head.query_row(array, strides, tile.queries.begin) + column;
        store_rows<16, true>(s.o_tile(), warp_row, out, strides.row, tile.head.queries(p) - tile.queries.begin,
                             p.dim_v - column);
    }
}

// The producer, LOADERS threads. K is a tile ahead of V, with NEXT_Q over the end of a tile of queries, too. (A
// template since not all kernels have maps of tangents.)
template <class Maps>
__device__ void load(const Params& p, const Maps& maps, Shared& s) {
    TileSchedule schedule(p);
    Tickets tickets{p.counters};
    auto take = [&](bool first) {
        int ticket = leads() ? tickets.take(first) : 0;
        return LOADERS == 1 ? ticket : __shfl_sync(~0u, ticket, 0);
    };
    auto load_k = [&](const Tile& tile, int tile_k) {
        s.places.look_up(p, tile.head, tile_k * KEYS);  // (while the stage is waited for)
        if (leads()) {
            s.k.wait_empty();
            mbarrier_arrive_expect(s.k.full(), K_BYTES);
        }
        auto fill = [&](KTile to, const TensorMap& map) {
            s.places.load(p, to, map, s.k.full(), tile_k * KEYS, tile.head);
        };
        fill(s.k_tile(), maps.k);
        if constexpr (TK) fill(s.tk_tile(), maps.tk);
        s.k.advance();
    };
    auto load_v = [&](const Tile& tile, int tile_k) {
        s.places.look_up(p, tile.head, tile_k * KEYS);
        if (leads()) {
            s.v.wait_empty();
            mbarrier_arrive_expect(s.v.full(), V_BYTES);
        }
        auto fill = [&](VTile to, const TensorMap& map) {
            Values<TURNED>::load(p, to, map, s.v.full(), tile_k * KEYS, tile.head, s.places, first_column(tile));
        };
        if constexpr (WITH_V) fill(s.v_tile(), maps.v);
        if constexpr (TV) fill(s.tv_tile(), maps.tv);
        s.v.advance();
    };
    auto load_pairs = [&](const Tile& tile, int tile_k) {
        if constexpr (PAIR_ARRAYS) {
            if (leads()) {
                s.pairs.wait_empty();
                s.pair_tiles().load(p, maps, s.pairs.full(), tile.head, tile.queries.begin, tile_k * KEYS);
            }
            s.pairs.advance();
        }
    };
    auto load_q = [&](const Tile& tile, int number) {
        s.for_parts([&](int part) {
            if (!leads()) return;
            s.q.wait_empty();
            s.tell(p, tile, number);
            mbarrier_arrive_expect(s.q.full(), Q_BYTES / Q_PARTS);
            int first = ROWS / Q_PARTS * part;
            InMap at = tile.head.at_query(p, tile.queries.begin + first);
            if constexpr (PACKED_Q)
                s.q_tile().from(first).load(
                    maps.q, s.q.full(), at.in_window(tile.queries.end - tile.queries.begin - first));
            else
                s.q_tile().from(first).load(maps.q, s.q.full(), at);
            if constexpr (TQ) s.tq_tile().from(first).load(maps.tq, s.q.full(), at);
        });
        s.q.advance();
    };
    SharesInTurn shares(p, schedule);
    int total = schedule.total(), number = blockIdx.x;
    bool dynamic = p.counters != nullptr;  // tiles differ in length: each is asked for
    Tile before, next;
    int last_before = -1;  // with NEXT_Q: the key tile of `before` whose V is still to come
    bool early = false;    // Q of the next tile is asked for
    bool more = SCHEDULED && s.take_next(p, next);
    auto load_before = [&] {
        if (NEXT_Q && last_before >= 0) load_v(before, last_before);
    };
    while (SCHEDULED ? more : BY_LENGTH ? shares.has(number) : number < total) {
        Tile tile = SCHEDULED || early ? next : BY_LENGTH ? shares.tile() : schedule.tile(number);
        if (!SCHEDULED && tile.none()) {
            int ticket = dynamic ? take(number < gridDim.x) : number;
            if (dynamic && leads()) tickets.settle(ticket, total - 1);
            number = gridDim.x + ticket;
            continue;
        }
        TileWalk walk = walk_of(p, tile);
        int step = walk.start();
        bool any = walk.has(step);
        int ticket = number;
        bool asked = !SCHEDULED && !dynamic, known = false;
        // Late, since blocks that had little to do so far should ask first; early enough for the answer to come.
        constexpr int LATE = SCHEDULED ? 4 : EARLY ? 3 : 2;
        auto ask = [&] {
            if (!asked) {
                if constexpr (SCHEDULED)
                    s.ask_next();
                else
                    ticket = take(number < gridDim.x);
            }
            asked = true;
        };
        auto look = [&](bool wait) {
            if (!SCHEDULED || known || !(wait || s.next_is_there())) return;
            more = s.take_next(p, next);
            known = true;
        };
        if (SCHEDULED && walk.after(step) <= LATE) ask();
        if (any) load_k(tile, walk.tile(step));
        load_before();
        if (!early) load_q(tile, number);
        early = false;
        if (any) load_pairs(tile, walk.tile(step));
        for (; walk.after(step) > 0; step = walk.next(step)) {
            load_k(tile, walk.tile(walk.next(step)));
            if (walk.after(step) <= LATE) ask();
            load_v(tile, walk.tile(step));
            load_pairs(tile, walk.tile(walk.next(step)));
            int after = gridDim.x + ticket;
            if constexpr (SCHEDULED) {
                if (EARLY && !early && walk.after(step) <= 2) {
                    look(false);
                    early = known && more;
                    if (early) load_q(next, after);
                }
            } else if (EARLY && !early && walk.after(step) <= 2 && after < total) {
                next = schedule.tile(after);
                if (!next.none()) load_q(next, after);
                early = !next.none();
            }
        }
        ask();
        look(false);
        last_before = -1;
        if (NEXT_Q && (known || !SCHEDULED))
            before = tile, last_before = any ? walk.tile(step) : -1;
        else if (any)
            load_v(tile, walk.tile(step));
        look(true);
        if (!SCHEDULED && !BY_LENGTH && dynamic && leads()) tickets.settle(ticket, total - 1);
        number = gridDim.x + ticket;
    }
    // (How many there are is known when there are no more: who took the last ticket comes here with it.)
    if (BY_LENGTH && dynamic && leads()) tickets.settle(number - int(gridDim.x), shares.total() - 1);
    load_before();
    s.for_parts([&](int) {
        if (!leads()) return;
        s.q.wait_empty();
        s.tell_end();
        mbarrier_arrive(s.q.full());
    });
}

// Of the first warpgroup.
template <class Maps>
__device__ void produce(const Params& p, const Maps& maps, Shared& s) {
    if (threadIdx.x < LOADERS)
        load(p, maps, s);
    else if (SCHEDULED && threadIdx.x / 32 == 1)
        schedule_tiles(p, s);
}
