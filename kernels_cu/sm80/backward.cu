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
#include "attention/dropped.cuh"
#include "attention/exact_delta.cuh"
#include "attention/mask.cuh"
#include "attention/operands.cuh"
#include "ptx/flag.cuh"
#include "ptx/reduce.cuh"
#include "tile/doubles.cuh"
#include "tile/rows.cuh"

using namespace config;

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
              DIM % (16 * COLUMN_WARPS) == 0 && DIM_V % (16 * COLUMN_WARPS) == 0);

// dQ of a tile, ROWS x DIM, is shared out among the warps as DQ_ROW_WARPS x DQ_COLUMN_WARPS.
constexpr int DQ_ROW_WARPS = ROWS % 32 == 0 ? ROWS / 32 : 1;
constexpr int DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS;
constexpr int DQ_M = ROWS / 16 / DQ_ROW_WARPS;
constexpr int DQ_N = (DIM / 16 + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS * 2;  // the last warp may have fewer columns
constexpr bool DQ_EVEN = DIM / 16 % DQ_COLUMN_WARPS == 0;
constexpr int DQ_TILE = ROWS * DIM;                                            // numbers of one tile in dq_sum

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

// One fragment of dq_sum is stored as its 32 lanes hold it: four floats of a lane side by side, so that every addition is 16
// bytes wide, or four times a double of each lane.
__device__ inline Accum* dq_fragment(const Params& p, long long tile, int m, int n) {
    constexpr int OF_LANE = SIZE == 8 ? 1 : 4;  // side by side
    return p.dq_sum + tile * DQ_TILE + ((m * (DIM / 8) + n) * (128 / OF_LANE) + threadIdx.x % 32) * OF_LANE;
}
__device__ inline void read_dq(Accumulator<1, 1>& dq, const float* sum) {
    float4 x = *(const float4*)sum;
    dq = {{{{x.x, x.y, x.z, x.w}}}};
}
__device__ inline void read_dq(Accumulator<1, 1>& dq, const double* sum) {
    dq = {{{{sum[0], sum[32], sum[64], sum[96]}}}};
}

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
        return has ? Step{at.head, step, at.end} : first_of({at.head.batch, at.head.q + 1, at.head.k});
    }

    // along(copy of Q, copy of dO), with what else a step brings.
    template <class F>
    __device__ void load_queries(const Step& at, int stage, F along) const {
        int tile_q = walk::LISTED && !has(at) ? 0 : walk.tile(at.step);
        int i = tile_q * ROWS, rows = has(at) ? at.head.live_queries(p).end - i : 0;
        Rows q = operand_rows<OfQ>(p, at.head, i), d = operand_rows<OfDO>(p, at.head, i);
        along(AsyncCopy<THREADS, ROWS, QTile::COLUMNS>(s.q_tile(stage), q.from, q.stride, rows, q.columns),
              AsyncCopy<THREADS, ROWS, DOTile::COLUMNS>(s.do_tile(stage), d.from, d.stride, rows, d.columns));
        constexpr int EACH = VECTOR<Accum>, COPIES = 2 * ROWS / EACH;
        static_assert(COPIES <= THREADS);
        const Accum* values = prepared_rows<ROWS>(p, query_tile_number<ROWS>(p, at.head, tile_q));
        if (threadIdx.x < COPIES) cp_async_16(s.row_values(stage) + 16 * threadIdx.x, values + EACH * threadIdx.x, rows > 0);
    }
    __device__ void load_queries(const Step& at, int stage) const {
        load_queries(at, stage, [](auto q, auto d) { q.all(), d.all(); });
        cp_async_commit();
    }

    // K and V, and the first Q and dO.
    __device__ void load_first() const {
        Rows k = operand_rows<OfK>(p, keys_head, keys.begin), v = operand_rows<OfV>(p, keys_head, keys.begin);
        int rows = keys_head.live_keys(p).end - keys.begin;
        AsyncCopy<THREADS, KEYS, KTile::COLUMNS>(s.k_tile(), k.from, k.stride, rows, k.columns).all();
        AsyncCopy<THREADS, KEYS, VTile::COLUMNS>(s.v_tile(), v.from, v.stride, rows, v.columns).all();
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

    // Q, dO and the queries' numbers of a tile have arrived.
    __device__ void clear_queries(const Head& head, int first, int stage) const {
        if constexpr (CLEARS_QUERIES) {
            if (!KEY_MASK && first >= head.live_queries(p).begin) return;
            int live = head.live_queries(p).begin - first;
            DeadRows<ROWS> dead([&](int i) { return i < live || is_blind(s.row_values(stage), i); });
            if (!dead.any()) return;
            dead.clear<WARPS>(s.q_tile(stage), warp);
            dead.clear<WARPS>(s.do_tile(stage), warp);
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
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before
        clear_queries(at.head, tile_q * ROWS, stage);

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
        dq.clear();
        if (DQ_EVEN || dq_column < DIM / 8) {
            mma_AB<KEYS>(dq, FromTransposed<STile>{s.ds_tile(), 16 * dq_row}, s.k_tile(), 8 * dq_column, Nothing(),
                         k_unit * ds_power.unit);
        }
        long long number = query_tile_number<ROWS>(p, at.head, tile_q);
        if (DETERMINISTIC) wait_for_turn(at.head, tile_q, number);
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
        if constexpr (SHARE) {
            mma_AB<ROWS>(dv, FromShared<STile>{s.p_tile(), warp_key}, s.do_tile(stage),
                         column_warp * (DIM_V / COLUMN_WARPS), [&](int k) { add_dq(k, Constant<2 * STEPS>()); },
                         do_unit / p_times);
            mma_AB<ROWS>(dk, FromShared<STile>{s.ds_tile(), warp_key}, s.q_tile(stage), column_warp * (DIM / COLUMN_WARPS),
                         [&](int k) { add_dq(STEPS + k, Constant<2 * STEPS>()); }, q_unit * ds_power.unit);
        } else {
            mma_AB<ROWS>(dk, FromRegisters<M, WARP_QUERIES / 8>{ds, ds_power.times}, s.q_tile(stage), 0,
                         [&](int k) { add_dq(k, Constant<STEPS>()); }, q_unit * ds_power.unit);
        }
        if (STAGES == 1) {
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

    // Key tiles add to a tile of queries in order.
    __device__ void wait_for_turn(const Head& head, int tile_q, long long number) const {
        unsigned others = KeyWalk<KEYS, ROWS>(p, head, head.query_tile<ROWS>(p, tile_q)).rank(tile);
        if (threadIdx.x == 0)
            while (load_acquire(p.counters + number) != others) __nanosleep(32);
        __syncthreads();
    }

    // dK and dV, through shared memory, where K and V were, for whole rows.
    __device__ void finish() {
        cp_async_wait<0>();
        __syncthreads();
        dk.each([&](Accum& x, int, int) { x *= p.scale; });
        int rows = keys_head.keys(p) - keys.begin;
        Out* dk_rows = keys_head.key_row(p.dk, p.dk_strides, keys.begin);
        Out* dv_rows = keys_head.key_row(p.dv, p.dv_strides, keys.begin);
        if constexpr (PARTS == 2) {
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
    Place at = place(blockIdx.x, query_tiles<ROWS>(p), p.heads_q);
    float4* sums = (float4*)(p.dq_sum + blockIdx.x * (long long)DQ_TILE);
    for (int i = threadIdx.x; i < DQ_TILE / VECTOR<Accum>; i += 128) sums[i] = make_float4(0, 0, 0, 0);
    if (DETERMINISTIC && threadIdx.x == 0) {
        p.counters[blockIdx.x] = 0;
        if (blockIdx.x == 0) p.counters[gridDim.x] = 0;
    }
    prepare_queries<ROWS>(p, Head::of_q(p, at.batch, at.head), at.tile);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    int number = blockIdx.x, tiles = key_tiles<KEYS>(p);
    if (DETERMINISTIC) {
        // Blocks wait for those with smaller numbers: numbers given in the order of starting cannot wait for ever.
        __shared__ int ticket;
        if (threadIdx.x == 0) ticket = atomicAdd(p.counters + (long long)p.batch * p.heads_q * query_tiles<ROWS>(p), 1u);
        __syncthreads();
        number = ticket;
    }
    Place at = place(number, tiles, p.heads_k);
    if (walk::LISTED && !DETERMINISTIC) at = longest_first(number, tiles, p.heads_k, p.batch);
    Head head = Head::of_k(p, at.batch, at.head);
    if (DETERMINISTIC) at.tile = key_tile_in_turn(at.tile, tiles);
    if (walk::LISTED && !DETERMINISTIC) at.tile = Visits::nth(p, head, p.query_lists, tiles, at.tile);
    Block block(p, Shared{shared_address(shared)}, head, at.tile);
    block.load_first();
    int stage = 0;
    for (Step step = block.first(); block.has(step); step = block.next(step)) {
        block.visit(step, stage);
        if (STAGES == 2) stage = 1 - stage;
    }
    block.finish();
}

// dQ = scale * dq_sum, from fragment order to rows.
extern "C" __global__ void __launch_bounds__(128) attention_backward_finish(const __grid_constant__ Params p) {
    constexpr int PART = SIZE == 8 ? 16 : ROWS;  // rows at a time
    using Tile = SharedTile<PART, DIM>;
    __shared__ alignas(16) char shared[PARTS == 2 ? 16 : Tile::BYTES];
    Tile dq_tile{shared_address(shared)};
    Place at = place(blockIdx.x, query_tiles<ROWS>(p), p.heads_q);
    Head head = Head::of_q(p, at.batch, at.head);
    for (int first = 0; first < ROWS; first += PART) {
        int i0 = at.tile * ROWS + first, count = head.queries(p) - i0;
        Out* rows = head.query_row(p.dq, p.dq_strides, i0);
        if (first > 0) __syncthreads();
#pragma unroll 4
        for (int f = threadIdx.x / 32; f < PART / 16 * (DIM / 8); f += 4) {
            int m = f / (DIM / 8), n = f % (DIM / 8);
            Accumulator<1, 1> dq;
            read_dq(dq, dq_fragment(p, blockIdx.x, first / 16 + m, n));
            dq.each([&](Accum& x, int, int) { x *= p.scale; });
            if constexpr (PARTS == 2)
                store_floats(dq, rows, p.dq_strides.row, 16 * m, 8 * n, count, p.dim);
            else
                dq.store(dq_tile, 16 * m, 8 * n);
        }
        if constexpr (PARTS == 1) {
            __syncthreads();
            store_rows<PART / 4>(dq_tile, threadIdx.x / 32 * (PART / 4), rows, p.dq_strides.row, count, p.dim);
        }
    }
}
