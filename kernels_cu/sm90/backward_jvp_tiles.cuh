// What the two kernels of the Hopper backward's tangent have in shared memory: a tile of their own and those that visit
// it, whether of queries or of keys; and the thread that loads them (the producer).
#pragma once
#include "attention/mask.cuh"
#include "attention/schedule.cuh"
#include "attention/tangents.cuh"
#include "ptx/barrier.cuh"
#include "sm90/moving_rows.cuh"
#include "sm90/tangent_maps.cuh"
#include "tile/ring.cuh"
#include "tile/swizzled.cuh"

using namespace config;

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int OWNED = 64 * WARPGROUPS;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 240;
static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= (WARPGROUPS + 1) * (65536 / THREADS / 8 * 8));

struct TensorMaps : QTangentMap<TQ>, KTangentMap<TK>, VTangentMap<TV>, DOTangentMap<TDOUT> {
    TensorMap q, k, v, dout;
    int map_out;
};

// COUNT rows of one side's arrays, in shared memory.
template <bool OF_QUERIES, int COUNT>
struct SideTiles {
    static constexpr bool FIRST_MOVES = OF_QUERIES ? TQ : TK, SECOND_MOVES = OF_QUERIES ? TDOUT : TV;
    static constexpr int BOX = OF_QUERIES ? ROWS : KEYS;  // rows that come at once
    using First = SwizzledTile<COUNT, DIM>;
    using Second = SwizzledTile<COUNT, DIM_V>;
    static constexpr int BYTES = (1 + FIRST_MOVES) * First::BYTES + (1 + SECOND_MOVES) * Second::BYTES;

    unsigned base;

    __device__ First first() const { return {base}; }
    __device__ Second second() const { return {base + First::BYTES}; }
    __device__ First first_tangent() const { return {base + First::BYTES + Second::BYTES}; }
    __device__ Second second_tangent() const { return {first_tangent().base + FIRST_MOVES * First::BYTES}; }

    // All of them, from a row of a head on: BYTES arrive.
    template <class Maps>
    __device__ void load(const Params& p, const Maps& maps, unsigned barrier, int row, const Head& head) const {
        InMap from = OF_QUERIES ? head.at_query(p, row) : head.at_key(p, row);
#pragma unroll 1
        for (int r = 0; r < COUNT; r += BOX) {
            auto fill = [&](auto tile, const TensorMap& map) {
                tile.from(r).load(map, barrier, from.down(r));
            };
            if constexpr (OF_QUERIES) {
                fill(first(), maps.q), fill(second(), maps.dout);
                if constexpr (TQ) fill(first_tangent(), maps.tq);
                if constexpr (TDOUT) fill(second_tangent(), maps.tdout);
            } else {
                fill(first(), maps.k), fill(second(), maps.v);
                if constexpr (TK) fill(first_tangent(), maps.tk);
                if constexpr (TV) fill(second_tangent(), maps.tv);
            }
        }
    }
    // Zeros in what is summed over, by one warpgroup.
    template <class Dead>
    __device__ void clear(const Dead& dead) const {
        int warp = threadIdx.x / 32 % 4;
        dead.template clear<4>(first(), warp);
        if (FIRST_MOVES) dead.template clear<4>(first_tangent(), warp);
        if (!OF_QUERIES) return;
        dead.template clear<4>(second(), warp);
        if (SECOND_MOVES) dead.template clear<4>(second_tangent(), warp);
    }
};

// The numbers of queries lie by tiles of ROWS, those of a kind of two queries side by side, as lanes want them.
__device__ inline float* numbers_of(const Params& p, const Head& head, int tile) {
    return p.numbers + QueryTiles<ROWS>::number(p, head, tile) * (NUMBERS * ROWS);
}
__device__ inline constexpr int place_of(int number, int query) {
    return query / 2 * (2 * NUMBERS) + 2 * number + query % 2;
}

// A kernel's own tile and what visits it.
template <bool OWNS_KEYS>
struct Sides {
    static constexpr int VISITED = OWNS_KEYS ? ROWS : KEYS;
    static constexpr int STAGES = OWNS_KEYS ? QUERY_STAGES : KEY_STAGES;
    using Own = SideTiles<!OWNS_KEYS, OWNED>;
    using Visitor = SideTiles<OWNS_KEYS, VISITED>;
    using Ring = ::Ring<STAGES, 4 * WARPGROUPS>;
    static constexpr int NUMBER_BYTES = OWNS_KEYS ? 4 * NUMBERS * ROWS : 0;

    static constexpr int VISITORS = Own::BYTES;
    static constexpr int ROW_NUMBERS = VISITORS + STAGES * Visitor::BYTES;
    static constexpr int RING = ROW_NUMBERS + STAGES * NUMBER_BYTES;
    static constexpr int OWN_BARRIER = RING + Ring::BYTES;
    static constexpr int END = OWN_BARRIER + 8;
    static_assert(END <= (OWNS_KEYS ? SHARED_MEMORY_KEYS : SHARED_MEMORY_QUERIES),
                  "the plan asks for less than the kernel lays out");
    static_assert(OWNED % Own::BOX == 0);

    unsigned base;
    Ring ring;

    __device__ Sides(unsigned base) : base(base), ring(base + RING) {}

    __device__ Own own() const { return {base}; }
    __device__ Visitor visitor() const { return {base + VISITORS + ring.stage * Visitor::BYTES}; }
    __device__ unsigned numbers() const { return base + ROW_NUMBERS + ring.stage * NUMBER_BYTES; }
    __device__ unsigned own_barrier() const { return base + OWN_BARRIER; }
};

// The tile that a thread block owns, and f(head, tile, bits) for each that visits it.
template <bool OWNS_KEYS>
struct OwnTile {
    Head head;
    int first;

    // Long ones first, in rounds of heads that stay in the L2 cache.
    __device__ OwnTile(const Params& p, int number) {
        constexpr Order ORDER = walk::GROWING ? Order::LAST_FIRST : Order::AS_NUMBERED;
        HeadTile at = OWNS_KEYS ? Schedule<KeyTiles<OWNED>, Order::AS_NUMBERED, true>(p).tile(number, p.together)
                                : Schedule<QueryTiles<OWNED>, ORDER, true>(p).tile(number, p.together);
        head = at.head, first = at.number * OWNED;
    }

    template <class F>
    __device__ void for_visitors(const Params& p, F f) const {
        if constexpr (OWNS_KEYS) {
            Range keys{first, min(head.keys(p), first + OWNED)};
#pragma unroll 1
            for (int h = 0; h < group_of(p); h++) {
                Head of = head.other(head.q + h);
                QueryWalk<ROWS, OWNED> walk(p, of, keys);
#pragma unroll 1
                for (int step = walk.start(); walk.has(step); step = walk.next(step))
                    f(of, walk.tile(step), walk.template bits<true>(step, keys));
            }
        } else {
            Range queries{first, min(head.queries(p), first + OWNED)};
            KeyWalk<KEYS, OWNED> walk(p, head, queries);
#pragma unroll 1
            for (int step = walk.start(); walk.has(step); step = walk.next(step))
                f(head, walk.tile(step), walk.bits(step, queries));
        }
    }
};

// The producer.
template <bool OWNS_KEYS, class Maps>
__device__ void load(const Params& p, const Maps& maps, Sides<OWNS_KEYS>& s, const OwnTile<OWNS_KEYS>& tile) {
    using Of = Sides<OWNS_KEYS>;
    mbarrier_arrive_expect(s.own_barrier(), Of::Own::BYTES);
    s.own().load(p, maps, s.own_barrier(), tile.first, tile.head);
    tile.for_visitors(p, [&](const Head& head, int n, TileBits) {
        s.ring.wait_empty();
        mbarrier_arrive_expect(s.ring.full(), Of::Visitor::BYTES + Of::NUMBER_BYTES);
        s.visitor().load(p, maps, s.ring.full(), n * Of::VISITED, head);
        if (OWNS_KEYS) bulk_load(s.numbers(), numbers_of(p, head, n), Of::NUMBER_BYTES, s.ring.full());
        s.ring.advance();
    });
}
