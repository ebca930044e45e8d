// FlashAttention-2 backward (Dao 2023, Algorithm 2) on the tensor cores of Ampere and every GPU after it.
//
// A thread block owns KEYS keys of one key/value head, holds their dK and dV in registers, and loops over the query
// tiles that see them, for every query head that shares them. Scores are computed transposed, S^T = K Q^T, so that
// P^T and dS^T stand in registers exactly as the A operands of dV += P^T dO and dK += dS^T Q; only dS goes through
// shared memory, for dQ += dS K, which many thread blocks add to in global memory (dq_sum).
//
// With COLUMN_WARPS of 2 or 4, that many warps share their keys: each computes the scores of its part of the queries,
// P and dS both go through shared memory, and each warp owns its part of the columns of dK and dV. The tiles of a warp
// are nearer to squares then, so that shared memory, which is what binds, is read less often.
//
// WIDE heads fill shared memory with one stage, and registers with dK and dV: dQ is added up half after half, dK comes before
// dV, and the next Q arrives under dV, the next dO under S (docs/notes/wide-heads.md).
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
constexpr bool SHARE = COLUMN_WARPS > 1;
constexpr int SIZE = sizeof(Accum);  // of lse and delta
constexpr bool ALONG = DIM > 64;  // exponentials are taken along the product for dP (of few steps: slower, measured)
static_assert(KEYS % (16 * KEY_WARPS) == 0 && WARP_QUERIES % 16 == 0 && COLUMN_WARPS % QUERY_WARPS == 0 &&
              DIM % (16 * COLUMN_WARPS) == 0 && DIM_V % (16 * COLUMN_WARPS) == 0 && (!WIDE || (SHARE && STAGES == 1)));

using QTile = OperandTile<ROWS, DIM>;
using DOTile = OperandTile<ROWS, DIM_V>;
using KTile = OperandTile<KEYS, DIM>;
using VTile = OperandTile<KEYS, DIM_V>;
using STile = OperandTile<KEYS, ROWS>;  // P^T or dS^T

// Where things lie in shared memory.
struct Shared {
    static constexpr int V_TILE = KTile::BYTES;
    static constexpr int DS_TILE = V_TILE + VTile::BYTES;
    static constexpr int P_TILE = DS_TILE + STile::BYTES;  // only where P is shared
    static constexpr int RING = SHARE ? P_TILE + STile::BYTES : P_TILE;
    static constexpr int ROW_VALUES = QTile::BYTES + DOTile::BYTES;  // of a stage
    static constexpr int STAGE = ROW_VALUES + 2 * ROWS * SIZE;
    static constexpr int MAXIMA = RING + STAGES * STAGE;  // of the warps, in two parts
    static constexpr int END = MAXIMA + (PARTS == 2 ? 4 * WARPS : 0);
    static_assert(END + 4 <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");  // 4: the ticket

    unsigned base;

    __device__ KTile k_tile() const { return {base}; }
    __device__ VTile v_tile() const { return {base + V_TILE}; }
    __device__ STile ds_tile() const { return {base + DS_TILE}; }
    __device__ STile p_tile() const { return {base + P_TILE}; }
    __device__ QTile q_tile(int stage) const { return {base + RING + stage * STAGE}; }
    __device__ DOTile do_tile(int stage) const { return {q_tile(stage).base + QTile::BYTES}; }
    // -lse of a tile's queries, then minus what is subtracted from dP.
    __device__ unsigned row_values(int stage) const { return q_tile(stage).base + ROW_VALUES; }
};

// Where dead rows may come in a tile with others; behind the live ones of a sequence nothing is loaded. (Of float32 they are 0.)
constexpr bool CLEARS_KEYS = PARTS == 1 && (KEY_MASK || DEAD_KEYS), CLEARS_QUERIES = PARTS == 1 && (KEY_MASK || DEAD_QUERIES);

using Queries = QueryWalk<ROWS, KEYS>;

// A tile of queries of one of the heads that share the block's keys.
struct Step {
    Head head;
    int step;     // in the head's walk
    int end = 0;  // of that, where heads differ
};

// A thread block with the keys of one tile.
struct Block {
    const Params& p;
    Shared s;
    Head keys_head;  // the first of the heads that share the keys
    int tile;        // of keys
    Range keys;
    Queries walk;  // of the first head, or of all
    int end_head;
    int warp, warp_key, column_warp, warp_query;  // the warp's first key and query in a tile
    Accum factor;
    float k_unit, v_unit;
    float p_times;  // what P is multiplied by where it is split; it is at most 1 / kept
    Dropout dropout;
    Accumulator<M, DIM / 8 / COLUMN_WARPS> dk;
    Accumulator<M, DIM_V / 8 / COLUMN_WARPS> dv;

    __device__ Block(const Params& p, Shared s, Head head, int tile)
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
          v_unit(operand_unit<OfV>(p, head, tile)),
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

    // along(copy of Q, copy of dO), with what else a step brings, which comes with Q where that is before dO.
    template <class F>
    __device__ void load_queries(const Step& at, int stage, F along) const {
        int tile_q = walk::LISTED && !has(at) ? 0 : walk.tile(at.step);
        int i = tile_q * ROWS, rows = has(at) ? at.head.live_queries(p).end - i : 0;
        auto q = operand_rows<OfQ>(p, at.head, i, rows), d = operand_rows<OfDO>(p, at.head, i, rows);
        auto load_values = [&] {
            constexpr int EACH = VECTOR<Accum>, COPIES = 2 * ROWS / EACH;
            static_assert(COPIES <= THREADS);
            const Accum* values = prepared_rows<ROWS>(p, at.head, tile_q);
            if (threadIdx.x < COPIES) cp_async_16(s.row_values(stage) + 16 * threadIdx.x, values + EACH * threadIdx.x, rows > 0);
        };
        if (WIDE) load_values();
        along(AsyncCopy<THREADS, ROWS, QTile::COLUMNS>(s.q_tile(stage), q),
              AsyncCopy<THREADS, ROWS, DOTile::COLUMNS>(s.do_tile(stage), d));
        if (!WIDE) load_values();
    }
    __device__ void load_queries(const Step& at, int stage) const {
        load_queries(at, stage, [](auto q, auto d) {
            q.all();
            if (WIDE) cp_async_commit();
            d.all();
        });
        cp_async_commit();
    }

    // K and V, and the first Q and dO.
    __device__ void load_first() const {
        int rows = keys_head.live_keys(p).end - keys.begin;
        auto k = operand_rows<OfK>(p, keys_head, keys.begin, rows), v = operand_rows<OfV>(p, keys_head, keys.begin, rows);
        AsyncCopy<THREADS, KEYS, KTile::COLUMNS>(s.k_tile(), k).all();
        AsyncCopy<THREADS, KEYS, VTile::COLUMNS>(s.v_tile(), v).all();
        load_queries(first(), 0);
        if constexpr (CLEARS_KEYS) {
            if (!KEY_MASK && keys.begin >= keys_head.live_keys(p).begin) return;
            DeadRows<KEYS> dead = unseen_keys<KEYS>(Pairs(p, keys_head), keys.begin);
            if (!dead.any()) return;
            cp_async_wait<0>();
            __syncthreads();
            dead.clear<WARPS>(s.k_tile(), warp);
            dead.clear<WARPS>(s.v_tile(), warp);
        }
    }

    // These of Q and dO, and the queries' numbers, of a tile have arrived.
    template <bool Q, bool DO>
    __device__ void clear_queries(const Head& head, int first, int stage) const {
        if constexpr (CLEARS_QUERIES) {
            if (!KEY_MASK && first >= head.live_queries(p).begin) return;
            int live = head.live_queries(p).begin - first;
            DeadRows<ROWS> dead([&](int i) { return i < live || is_blind(s.row_values(stage), i); });
            if (!dead.any()) return;
            if (Q) dead.clear<WARPS>(s.q_tile(stage), warp);
            if (DO) dead.clear<WARPS>(s.do_tile(stage), warp);
            __syncthreads();
        }
    }

    // A tile of queries.
    __device__ void visit(const Step& at, int stage) {
        Pairs pairs(p, at.head, walk.bits<true>(at.step, keys));
        int tile_q = walk.tile(at.step), i0 = tile_q * ROWS + warp_query, j0 = keys.begin + warp_key;
        Placement<true> placement{at.head.q, i0, j0};
        InMemory<M, true> arrays(pairs, placement);
        Lines<M, true, InMemory<M, true>> lines(pairs, placement, arrays);
        // What the tile's Q, dO and the keys have in memory, while it arrives.
        float q_unit = operand_unit<OfQ>(p, at.head, tile_q), do_unit = operand_unit<OfDO>(p, at.head, tile_q);
        KeysSeen<WARP_KEYS> seen(pairs, j0);
        cp_async_wait<WIDE ? 1 : 0>();
        __syncthreads();  // the tile has arrived (of WIDE, Q), and everybody is done with the one before
        clear_queries<true, !WIDE>(at.head, tile_q * ROWS, stage);

        // S^T = K Q^T. The copies of the next tile ride along from the second step on, where there are steps enough: their
        // addresses are not to be reckoned between the arrival of this tile and its first product.
        Accumulator<M, WARP_QUERIES / 8> probabilities, slopes, ds;
        ColumnVector<WARP_QUERIES / 8> minus_lse, minus_delta;
        unsigned lse_address = s.row_values(stage) + SIZE * warp_query, delta_address = lse_address + SIZE * ROWS;
        if (ALONG) {
            minus_lse.load(lse_address);
            minus_delta.load(delta_address);
        }
        probabilities.clear();
        FromShared<KTile> k_operand{s.k_tile(), warp_key};
        if constexpr (STAGES == 2) {
            load_queries(next(at), 1 - stage, [&](auto next_q, auto next_do) {
                constexpr int LATER = ALONG && DIM / 16 > next_q.PIECES && DIM / 16 > next_do.PIECES, STEPS = DIM / 16 - LATER;
                mma_ABt<DIM, true>(probabilities, k_operand, s.q_tile(stage), warp_query, [&](int k) {
                    if (k < LATER) return;
                    next_q.template part<STEPS>(k - LATER);
                    next_do.template part<STEPS>(k - LATER);
                });
            });
            cp_async_commit();
        } else {
            mma_ABt<DIM, true>(probabilities, k_operand, s.q_tile(stage), warp_query);
        }
        if (PARTS == 2) scale_by_units(probabilities, k_unit, q_unit);

        // dP^T = V dO^T, P^T = exp(S^T - lse)
        auto exponential = [&](Accum& x, int r, int c, Accum& slope) {
            slope = lines.slope(x, r, c);
            x = probability(lines.score(x, r, c), factor, minus_lse[c]);
        };
        auto settle = [&] {
            drop(probabilities, placement, at.head.batch, dropout);
            if (pairs.tests_backward({i0, i0 + WARP_QUERIES}, {j0, j0 + WARP_KEYS})) {
                keep_branch();
                hide(probabilities, placement, pairs, seen, arrays, 0);
            }
            if constexpr (SHARE) probabilities.store<DROPOUT>(s.p_tile(), warp_key, warp_query, p_times);
        };
        if (!ALONG) {
            minus_lse.load(lse_address);
            probabilities.each(exponential, slopes);
            settle();
        }
        if constexpr (WIDE) {
            cp_async_wait<0>();
            __syncthreads();  // dO has arrived
            clear_queries<false, true>(at.head, tile_q * ROWS, stage);
        }
        ds.clear();
        mma_ABt<DIM_V>(ds, FromShared<VTile>{s.v_tile(), warp_key}, s.do_tile(stage), warp_query, [&](int k) {
            if constexpr (ALONG) probabilities.template part<DIM_V / 16>(k, exponential, slopes);
        });
        if (ALONG) settle();

        // dS^T = P^T (dP^T - delta) slope
        if (PARTS == 2) scale_by_units(ds, v_unit, do_unit);
        if (!ALONG) minus_delta.load(delta_address);
        ds.each(
            [&](Accum& x, int, int c, Accum& probability, Accum& slope) {
                x = derivative(probability, x, minus_delta[c]) * Pairs::settled(slope, probability);
            },
            probabilities, slopes);
        PowerOfTwo ds_power(ds_size(ds));
        ds.store(s.ds_tile(), warp_key, warp_query, ds_power.times);
        if constexpr (!SHARE)
            mma_AB<ROWS>(dv, FromRegisters<M, WARP_QUERIES / 8, DROPOUT>{probabilities, p_times}, s.do_tile(stage), 0,
                         Nothing(), do_unit / p_times);
        __syncthreads();

        // dQ += dS K. The additions in memory ride along the products that follow, dV += P^T dO and dK += dS^T Q: in one
        // burst they would hold up the loads of those.
        int dq_row = warp % DQ_ROW_WARPS * DQ_M, dq_column = warp / DQ_ROW_WARPS * DQ_N;  // in fragments
        Accumulator<DQ_M, DQ_N> dq;
        auto multiply_dq = [&] {
            dq.clear();
            if (DQ_EVEN || dq_column < DIM / 8) {
                mma_AB<KEYS>(dq, FromTransposed<STile>{s.ds_tile(), 16 * dq_row}, s.k_tile(), 8 * dq_column, Nothing(),
                             k_unit * ds_power.unit);
            }
        };
        multiply_dq();
        long long number = QueryTiles<ROWS>::number(p, at.head, tile_q);
        if (DETERMINISTIC) wait_for_turn(p, at.head, tile_q, number, tile);
        Accum* dq_sum = dq_fragment(p, number, dq_row, dq_column);
        auto add_dq = [&](int step, auto steps) {
            constexpr int FRAGMENTS = DQ_M * DQ_N, EACH = (FRAGMENTS + steps.value - 1) / steps.value;
#pragma unroll
            for (int f = step * EACH; f < (step + 1) * EACH && f < FRAGMENTS; f++) {
                int m = f / DQ_N, n = f % DQ_N;
                if (DQ_EVEN || dq_column + n < DIM / 8) red_add_4(dq_sum + 128 * (m * (DIM / 8) + n), dq.x[m][n]);
            }
        };
        constexpr int STEPS = ROWS / 16;
        if constexpr (WIDE) {
            mma_AB<ROWS>(dk, FromShared<STile>{s.ds_tile(), warp_key}, s.q_tile(stage), column_warp * (DIM / COLUMN_WARPS),
                         [&](int k) { add_dq(k, Constant<STEPS>()); });
            __syncthreads();  // everybody is done with Q
            dq_column += DQ_COLUMN_WARPS * DQ_N;
            dq_sum = dq_fragment(p, number, dq_row, dq_column);
            multiply_dq();
            load_queries(next(at), stage, [&](auto next_q, auto next_do) {
                mma_AB<ROWS>(dv, FromShared<STile>{s.p_tile(), warp_key}, s.do_tile(stage),
                             column_warp * (DIM_V / COLUMN_WARPS), [&](int k) {
                                 next_q.template part<STEPS>(k);
                                 add_dq(k, Constant<STEPS>());
                             });
                cp_async_commit();
                __syncthreads();  // everybody is done with dO
                next_do.all();
            });
            cp_async_commit();
        } else if constexpr (SHARE) {
            mma_AB<ROWS>(dv, FromShared<STile>{s.p_tile(), warp_key}, s.do_tile(stage),
                         column_warp * (DIM_V / COLUMN_WARPS), [&](int k) { add_dq(k, Constant<2 * STEPS>()); },
                         do_unit / p_times);
            mma_AB<ROWS>(dk, FromShared<STile>{s.ds_tile(), warp_key}, s.q_tile(stage), column_warp * (DIM / COLUMN_WARPS),
                         [&](int k) { add_dq(STEPS + k, Constant<2 * STEPS>()); }, q_unit * ds_power.unit);
        } else {
            mma_AB<ROWS>(dk, FromRegisters<M, WARP_QUERIES / 8>{ds, ds_power.times}, s.q_tile(stage), 0,
                         [&](int k) { add_dq(k, Constant<STEPS>()); }, q_unit * ds_power.unit);
        }
        if (STAGES == 1 && !WIDE) {
            __syncthreads();
            load_queries(next(at), 0);
        }
        if (DETERMINISTIC) {
            __syncthreads();
            if (threadIdx.x == 0) add_release(p.counters + number, 1);
        }
    }

    // The largest of the block's dS, for the power of two with which they are split.
    template <int N>
    __device__ float ds_size(Accumulator<M, N>& ds) const {
        if constexpr (PARTS == 2) {
            float largest = 0;
            ds.each([&](float& x, int, int) { largest = fmaxf(largest, finite_size(x)); });
            return largest_of_block<WARPS>(largest, s.base + Shared::MAXIMA);
        }
        return 1;
    }

    // dK and dV, through shared memory, where K and V were, for whole rows.
    __device__ void finish() {
        cp_async_wait<0>();
        __syncthreads();
        dk.each([&](Accum& x, int, int) { x *= p.scale; });
        int rows = keys_head.key_rows(p) - keys.begin;
        Out* dk_rows = keys_head.key_row(p.dk, p.dk_strides, keys.begin);
        Out* dv_rows = keys_head.key_row(p.dv, p.dv_strides, keys.begin);
        if constexpr (FROM_REGISTERS) {
            store_floats(dk, dk_rows, p.dk_strides.row, warp_key, column_warp * (DIM / COLUMN_WARPS), rows, p.dim);
            store_floats(dv, dv_rows, p.dv_strides.row, warp_key, column_warp * (DIM_V / COLUMN_WARPS), rows, p.dim_v);
        } else {
            dk.store(s.k_tile(), warp_key, column_warp * (DIM / COLUMN_WARPS));
            dv.store(s.v_tile(), warp_key, column_warp * (DIM_V / COLUMN_WARPS));
            __syncthreads();
            constexpr int OUT_ROWS = KEYS / WARPS;
            store_rows<OUT_ROWS>(s.k_tile(), warp * OUT_ROWS, dk_rows, p.dk_strides.row, rows, p.dim);
            store_rows<OUT_ROWS>(s.v_tile(), warp * OUT_ROWS, dv_rows, p.dv_strides.row, rows, p.dim_v);
        }
    }
};

// Launched where there are two parts.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) attention_split(const __grid_constant__ Params p) {
    if constexpr (PARTS == 2) split_operands<OfQ, OfK, OfV, OfDO>(p, blockIdx.x);
}

// What each query brings (attention/exact_delta.cuh); zeros where the dQ of this tile will be summed.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    HeadTile at = numbered<QueryTiles<ROWS>>(p, blockIdx.x);
    clear_dq(p, blockIdx.x);
    if (config::PACKED_Q && at.none()) return;
    prepare_queries<ROWS>(p, at.head, at.number);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    Schedule<KeyTiles<KEYS>, key_order(DETERMINISTIC)> schedule(p);
    int number = blockIdx.x;
    if (DETERMINISTIC) number = number_in_turn(p);
    HeadTile at = schedule.tile(number);
    if (config::PACKED_K && at.none()) return;
    Block block(p, Shared{shared_address(shared)}, at.head, at.number);
    block.load_first();
    int stage = 0;
    for (Step step = block.first(); block.has(step); step = block.next(step)) {
        block.visit(step, stage);
        if (STAGES == 2) stage = 1 - stage;
    }
    block.finish();
}

extern "C" __global__ void __launch_bounds__(128) attention_backward_finish(const __grid_constant__ Params p) {
    finish_dq(p, p.dq, p.dq_strides);
}
