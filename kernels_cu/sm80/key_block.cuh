// What the backward of this family (backward.cu) and its tangent (backward_jvp.cu) have in common: thread blocks that
// own KEYS keys of one head of K and V, and walk over the query tiles that see them, of every query head that shares
// them. Tangents that are given come beside Q, K, V and dO; what is not given has no place in shared memory.
#pragma once
#include "attention/dropped.cuh"
#include "attention/exact_delta.cuh"
#include "attention/mask.cuh"
#include "attention/operands.cuh"
#include "attention/schedule.cuh"
#include "sm80/dq_sums.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int KEY_WARPS = WARPS / COLUMN_WARPS;
constexpr int WARP_KEYS = KEYS / KEY_WARPS;
constexpr int M = WARP_KEYS / 16;  // row fragments of a warp
// Where there are not 16 queries for each, some compute the same scores: wide rows of doubles leave room for so few.
constexpr int QUERY_WARPS = ROWS / 16 < COLUMN_WARPS ? ROWS / 16 : COLUMN_WARPS;
constexpr int WARP_QUERIES = ROWS / QUERY_WARPS;
constexpr bool SPLIT_QUERIES = COLUMN_WARPS > 1;
constexpr int SIZE = sizeof(Accum);  // of lse and delta
static_assert(KEYS % (16 * KEY_WARPS) == 0 && WARP_QUERIES % 16 == 0 && COLUMN_WARPS % QUERY_WARPS == 0 &&
              DIM % (16 * COLUMN_WARPS) == 0 && DIM_V % (16 * COLUMN_WARPS) == 0);

using QTile = OperandTile<ROWS, DIM>;
using DOTile = OperandTile<ROWS, DIM_V>;
using KTile = OperandTile<KEYS, DIM>;
using VTile = OperandTile<KEYS, DIM_V>;
using STile = OperandTile<KEYS, ROWS>;  // P^T, dS^T and others like them
using Scores = Accumulator<M, WARP_QUERIES / 8>;

// Where dead rows may come in a tile with others; behind the live ones of a sequence nothing is loaded. (Of float32
// they are 0.)
constexpr bool CLEARS_KEYS = PARTS == 1 && (KEY_MASK || DEAD_KEYS);
constexpr bool CLEARS_QUERIES = PARTS == 1 && (KEY_MASK || DEAD_QUERIES);

using Queries = QueryWalk<ROWS, KEYS>;

// A tile of queries of one of the heads that share the block's keys.
struct Step {
    Head head;
    int step;     // in the head's walk
    int end = 0;  // of that, where heads differ
};

// A thread block with the keys of one tile. `Shared` says where things lie in shared memory, and how many NUMBERS are
// known of each query.
template <class Shared>
struct KeyBlock {
    const Params& p;
    Shared s;
    Head keys_head;  // the first of the heads that share the keys
    int tile;        // of keys
    Range keys;
    Queries walk;  // of the first head, or of all
    int end_head;
    int warp, warp_key, column_warp, warp_query;  // the warp's first key and query in a tile
    Accum factor;
    float k_unit, tk_unit, v_unit, tv_unit;
    float p_times;  // what P is multiplied by where it is split; it is at most 1 / kept
    Dropout dropout;
    Accumulator<M, DIM / 8 / COLUMN_WARPS> dk;
    Accumulator<M, DIM_V / 8 / COLUMN_WARPS> dv;

    __device__ KeyBlock(const Params& p, Shared s, Head head, int tile)
        : p(p),
          s(s),
          keys_head(head),
          tile(tile),
          keys(head.key_tile<KEYS>(p, tile)),
          walk(p, head, keys),
          end_head(head.q + (walk::LISTED || walk.count() > 0 ? group_of(p) : 0)),
          warp(threadIdx.x / 32),
          warp_key(warp % KEY_WARPS * WARP_KEYS),
          column_warp(warp / KEY_WARPS),
          warp_query((QUERY_WARPS == COLUMN_WARPS ? column_warp : column_warp % QUERY_WARPS) * WARP_QUERIES),
          factor(exponent_factor(Pairs(p, head))),
          k_unit(operand_unit<OfK>(p, head, tile)),
          tk_unit(operand_unit<OfTK>(p, head, tile)),
          v_unit(operand_unit<OfV>(p, head, tile)),
          tv_unit(operand_unit<OfTV>(p, head, tile)),
          p_times(PowerOfTwo(1 / kept(p)).times),
          dropout(p) {
        dk.clear();
        dv.clear();
    }

    __device__ Step first() const { return first_of(keys_head); }
    // The first step of a head, or of the next one that has any.
    __device__ Step first_of(Head head) const {
        for (; walk::LISTED && head.q < end_head; head.q++) {
            Queries own(p, head, keys);
            if (own.count() > 0) return {head, own.start(), own.end()};
        }
        return {head, walk.start()};
    }
    __device__ bool has(const Step& at) const { return at.head.q < end_head; }
    __device__ Step next(const Step& at) const {
        int step = walk.next(at.step);
        bool has = walk::LISTED ? step < at.end : walk.has(step);
        return has ? Step{at.head, step, at.end} : first_of(at.head.other(at.head.q + 1));
    }

    template <class Of, class Tile>
    __device__ auto copy_queries(const Step& at, Tile tile, int i, int rows) const {
        return AsyncCopy<THREADS, ROWS, Tile::COLUMNS>(tile, operand_rows<Of>(p, at.head, i, rows));
    }
    // along(copies of Q, dO and their tangents), with what else a step brings, which comes with Q where that is before
    // dO.
    template <class F>
    __device__ void load_queries(const Step& at, int stage, F along) const {
        int tile_q = walk::LISTED && !has(at) ? 0 : walk.tile(at.step);
        int i = tile_q * ROWS, rows = has(at) ? at.head.live_queries(p).end - i : 0;
        auto q = copy_queries<OfQ>(at, s.q_tile(stage), i, rows);
        auto d = copy_queries<OfDO>(at, s.do_tile(stage), i, rows);
        auto load_values = [&] {
            constexpr int EACH = VECTOR<Accum>, COPIES = Shared::NUMBERS * ROWS / EACH;
            static_assert(COPIES <= THREADS);
            const Accum* values = Shared::numbers(p, QueryTiles<ROWS>::number(p, at.head, tile_q));
            if (threadIdx.x < COPIES)
                cp_async_16(s.row_values(stage) + 16 * threadIdx.x, values + EACH * threadIdx.x, rows > 0);
        };
        if (WIDE) load_values();
        auto with_d = [&](auto... others) {
            if constexpr (TDOUT)
                along(q, d, copy_queries<OfTDO>(at, s.tdo_tile(stage), i, rows), others...);
            else
                along(q, d, others...);
        };
        if constexpr (TQ)
            with_d(copy_queries<OfTQ>(at, s.tq_tile(stage), i, rows));
        else
            with_d();
        if (!WIDE) load_values();
    }
    __device__ void load_queries(const Step& at, int stage) const {
        load_queries(at, stage, [](auto q, auto... others) {
            q.all();
            if (WIDE) cp_async_commit();
            (others.all(), ...);
        });
        cp_async_commit();
    }

    template <class Of, class Tile>
    __device__ void load_keys(Tile tile) const {
        int rows = keys_head.live_keys(p).end - keys.begin;
        AsyncCopy<THREADS, KEYS, Tile::COLUMNS>(tile, operand_rows<Of>(p, keys_head, keys.begin, rows)).all();
    }
    // K and V, and the first Q and dO. Of V dead rows need not be cleared where there are tangents: without a
    // probability (MovedPair) nothing is asked of products.
    __device__ void load_first() const {
        load_keys<OfK>(s.k_tile());
        load_keys<OfV>(s.v_tile());
        if constexpr (TK) load_keys<OfTK>(s.tk_tile());
        if constexpr (TV) load_keys<OfTV>(s.tv_tile());
        load_queries(first(), 0);
        if constexpr (CLEARS_KEYS) {
            if (!KEY_MASK && keys.begin >= keys_head.live_keys(p).begin) return;
            DeadRows<KEYS> dead = unseen_keys<KEYS>(Pairs(p, keys_head), keys.begin);
            if (!dead.any()) return;
            cp_async_wait<0>();
            __syncthreads();
            dead.clear<WARPS>(s.k_tile(), warp);
            if constexpr (TK) dead.clear<WARPS>(s.tk_tile(), warp);
            if constexpr (Shared::CLEARS_V) dead.clear<WARPS>(s.v_tile(), warp);
        }
    }

    // These of Q and dO, and the queries' numbers, of a tile have arrived.
    template <bool Q = true, bool DO = true>
    __device__ void clear_queries(const Head& head, int first, int stage) const {
        if constexpr (CLEARS_QUERIES) {
            if (!KEY_MASK && first >= head.live_queries(p).begin) return;
            int live = head.live_queries(p).begin - first;
            DeadRows<ROWS> dead([&](int i) { return i < live || is_blind(s.row_values(stage), i); });
            if (!dead.any()) return;
            if (Q) dead.clear<WARPS>(s.q_tile(stage), warp);
            if (DO) dead.clear<WARPS>(s.do_tile(stage), warp);
            if constexpr (TQ) dead.clear<WARPS>(s.tq_tile(stage), warp);
            if constexpr (TDOUT) dead.clear<WARPS>(s.tdo_tile(stage), warp);
            __syncthreads();
        }
    }

    // This warp is done with the tile of queries that has this number.
    __device__ void leave(const Step& at, long long number) const {
        if (STAGES == 1 && !WIDE) {
            __syncthreads();
            load_queries(next(at), 0);
        }
        if (DETERMINISTIC) {
            __syncthreads();
            if (threadIdx.x == 0) add_release(p.counters + number, 1);
        }
    }

    // dK and dV, through shared memory, where K and V were, for whole rows.
    __device__ void finish(Out* to_dk, const Strides& dk_strides, Out* to_dv, const Strides& dv_strides) {
        cp_async_wait<0>();
        __syncthreads();
        dk.each([&](Accum& x, int, int) { x *= p.scale; });
        int rows = keys_head.key_rows(p) - keys.begin;
        Out* dk_rows = keys_head.key_row(to_dk, dk_strides, keys.begin);
        Out* dv_rows = keys_head.key_row(to_dv, dv_strides, keys.begin);
        if constexpr (FROM_REGISTERS<>) {
            store_floats(dk, dk_rows, dk_strides.row, warp_key, column_warp * (DIM / COLUMN_WARPS), rows, p.dim);
            store_floats(dv, dv_rows, dv_strides.row, warp_key, column_warp * (DIM_V / COLUMN_WARPS), rows, p.dim_v);
        } else {
            dk.store(s.k_tile(), warp_key, column_warp * (DIM / COLUMN_WARPS));
            dv.store(s.v_tile(), warp_key, column_warp * (DIM_V / COLUMN_WARPS));
            __syncthreads();
            constexpr int OUT_ROWS = KEYS / WARPS;
            store_rows<OUT_ROWS>(s.k_tile(), warp * OUT_ROWS, dk_rows, dk_strides.row, rows, p.dim);
            store_rows<OUT_ROWS>(s.v_tile(), warp * OUT_ROWS, dv_rows, dv_strides.row, rows, p.dim_v);
        }
    }
};

// The kernel: a block visits the steps of its tile of keys.
template <class Block>
__device__ void visit_queries(const Params& p) {
    extern __shared__ __align__(16) char shared[];
    Schedule<KeyTiles<KEYS>, key_order(DETERMINISTIC), config::PORTIONS> schedule(p);
    int number = blockIdx.x;
    if (DETERMINISTIC) number = number_in_turn(p);
    HeadTile at = schedule.tile(number);
    if (config::PACKED_K && at.none()) return;
    Block block(p, {shared_address(shared)}, at.head, at.number);
    block.load_first();
    int stage = 0;
    for (Step step = block.first(); block.has(step); step = block.next(step)) {
        block.visit(step, stage);
        if (STAGES == 2) stage = 1 - stage;
    }
    block.finish();
}
