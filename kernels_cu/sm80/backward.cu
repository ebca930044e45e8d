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
#include "attention/delta.cuh"
#include "attention/mask.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"
#include "ptx/flag.cuh"
#include "ptx/reduce.cuh"

using namespace config;

constexpr int THREADS = 32 * WARPS;
constexpr int KEY_WARPS = WARPS / COLUMN_WARPS;
constexpr int WARP_KEYS = KEYS / KEY_WARPS;
constexpr int M = WARP_KEYS / 16;  // row fragments of a warp
constexpr int WARP_QUERIES = ROWS / COLUMN_WARPS;
constexpr bool SHARE = COLUMN_WARPS > 1;
constexpr bool ALONG = DIM > 64;  // exponentials are taken along the product for dP (of few steps: slower, measured)
static_assert(KEYS % (16 * KEY_WARPS) == 0 && WARP_QUERIES % 16 == 0 && DIM % (16 * COLUMN_WARPS) == 0 &&
              DIM_V % (16 * COLUMN_WARPS) == 0);

// dQ of a tile, ROWS x DIM, is shared out among the warps as DQ_ROW_WARPS x DQ_COLUMN_WARPS.
constexpr int DQ_ROW_WARPS = ROWS % 32 == 0 ? ROWS / 32 : 1;
constexpr int DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS;
constexpr int DQ_M = ROWS / 16 / DQ_ROW_WARPS;
constexpr int DQ_N = (DIM / 16 + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS * 2;  // the last warp may have fewer columns
constexpr bool DQ_EVEN = DIM / 16 % DQ_COLUMN_WARPS == 0;
constexpr int DQ_TILE = ROWS * DIM;                                            // floats of one tile in dq_sum

using QTile = SharedTile<ROWS, DIM>;
using DOTile = SharedTile<ROWS, DIM_V>;
using KTile = SharedTile<KEYS, DIM>;
using VTile = SharedTile<KEYS, DIM_V>;
using STile = SharedTile<KEYS, ROWS>;  // P^T or dS^T

// One fragment of dq_sum is stored as its 32 lanes hold it, so that every addition is 16 bytes wide.
__device__ inline float* dq_fragment(const Params& p, long long tile, int m, int n) {
    return p.dq_sum + tile * DQ_TILE + ((m * (DIM / 8) + n) * 32 + threadIdx.x % 32) * 4;
}

// delta = rowsum(dO * O); zeros where the dQ of this tile will be summed.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    int tiles = (p.seq_q + ROWS - 1) / ROWS;
    int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % p.heads_q, batch = blockIdx.x / tiles / p.heads_q;
    long long pair = (long long)batch * p.heads_q + head;
    float4* sums = (float4*)(p.dq_sum + blockIdx.x * (long long)DQ_TILE);
    for (int i = threadIdx.x; i < DQ_TILE / 4; i += 128) sums[i] = make_float4(0, 0, 0, 0);
    if (DETERMINISTIC && threadIdx.x == 0) {
        p.counters[blockIdx.x] = 0;
        if (blockIdx.x == 0) p.counters[gridDim.x] = 0;
    }
    row_deltas<ROWS>(p, batch, head, tile * ROWS, [&](int i, float delta) {
        if (i < p.seq_q) p.delta[pair * p.seq_q + i] = delta;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    KTile k_tile{shared_address(shared)};
    VTile v_tile{k_tile.base + KTile::BYTES};
    STile ds_tile{v_tile.base + VTile::BYTES};
    STile p_tile{ds_tile.base + STile::BYTES};  // only where P is shared
    constexpr int STAGE_BYTES = QTile::BYTES + DOTile::BYTES + 2 * ROWS * 4;
    unsigned ring = ds_tile.base + (SHARE ? 2 : 1) * STile::BYTES;
    auto q_tile = [&](int stage) { return QTile{ring + stage * STAGE_BYTES}; };
    auto do_tile = [&](int stage) { return DOTile{q_tile(stage).base + QTile::BYTES}; };
    auto lse_row = [&](int stage) { return do_tile(stage).base + DOTile::BYTES; };  // ROWS floats, then as many of delta

    int tiles = (p.seq_k + KEYS - 1) / KEYS, tiles_q = (p.seq_q + ROWS - 1) / ROWS;
    int block = blockIdx.x;
    if (DETERMINISTIC) {
        // Blocks wait for those with smaller numbers: numbers given in the order of starting cannot wait for ever.
        __shared__ int ticket;
        if (threadIdx.x == 0) ticket = atomicAdd(p.counters + (long long)p.batch * p.heads_q * tiles_q, 1u);
        __syncthreads();
        block = ticket;
    }
    int tile = block % tiles, head_k = block / tiles % p.heads_k, batch = block / tiles / p.heads_k;
    int group = p.heads_q / p.heads_k;
    Range keys{tile * KEYS, min(p.seq_k, (tile + 1) * KEYS)};
    Mask mask(p, batch);
    Range queries = mask.queries_of(keys);
    int first = queries.begin / ROWS, last = (queries.end + ROWS - 1) / ROWS;  // query tiles [first, last)
    if (queries.begin == queries.end) last = first;
    int head = head_k * group, end_head = head + group;
    if (first == last) head = end_head;  // no query sees these keys

    auto load_queries = [&](int head, int tile_q, int stage, auto along) {
        int i = tile_q * ROWS, rows = head < end_head ? p.seq_q - i : 0;
        const Element* q = p.q + batch * p.q_strides.batch + head * p.q_strides.head + i * p.q_strides.row;
        const Element* d = p.dout + batch * p.dout_strides.batch + head * p.dout_strides.head + i * p.dout_strides.row;
        along(AsyncCopy<THREADS, ROWS, DIM>(q_tile(stage), q, p.q_strides.row, rows, p.dim),
              AsyncCopy<THREADS, ROWS, DIM_V>(do_tile(stage), d, p.dout_strides.row, rows, p.dim_v));
        long long row = ((long long)batch * p.heads_q + head) * p.seq_q + i;
#pragma unroll
        for (int start = 0; start < 2 * ROWS; start += THREADS) {
            int r = start + threadIdx.x;
            cp_async_4(lse_row(stage) + 4 * r, (r < ROWS ? p.lse : p.delta) + row + r % ROWS, r % ROWS < rows,
                       r < 2 * ROWS);
        }
    };

    const Element* k = p.k + batch * p.k_strides.batch + head_k * p.k_strides.head + keys.begin * p.k_strides.row;
    const Element* v = p.v + batch * p.v_strides.batch + head_k * p.v_strides.head + keys.begin * p.v_strides.row;
    AsyncCopy<THREADS, KEYS, DIM>(k_tile, k, p.k_strides.row, p.seq_k - keys.begin, p.dim).all();
    AsyncCopy<THREADS, KEYS, DIM_V>(v_tile, v, p.v_strides.row, p.seq_k - keys.begin, p.dim_v).all();
    auto at_once = [](auto q, auto d) { q.all(), d.all(); };
    load_queries(head, first, 0, at_once);
    cp_async_commit();

    int warp = threadIdx.x / 32;
    int warp_key = warp % KEY_WARPS * WARP_KEYS, column_warp = warp / KEY_WARPS;
    int warp_query = column_warp * WARP_QUERIES;
    float factor = float(p.scale * 1.4426950408889634);
    Accumulator<M, DIM / 8 / COLUMN_WARPS> dk;
    Accumulator<M, DIM_V / 8 / COLUMN_WARPS> dv;
    dk.clear();
    dv.clear();

    int stage = 0;
    for (int tile_q = first; head < end_head;) {
        int i0 = tile_q * ROWS;
        int next_tile = tile_q + 1 < last ? tile_q + 1 : first, next_head = next_tile == first ? head + 1 : head;
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before

        // S^T = K Q^T. The copies of the next tile ride along from the second step on, where there are steps enough: their
        // addresses are not to be reckoned between the arrival of this tile and its first product.
        Accumulator<M, WARP_QUERIES / 8> s, ds;
        ColumnVector<WARP_QUERIES / 8> lse, delta;
        if (ALONG) {
            lse.load(lse_row(stage) + 4 * warp_query);
            delta.load(lse_row(stage) + 4 * (ROWS + warp_query));
        }
        s.clear();
        FromShared<KTile> k_operand{k_tile, warp_key};
        if constexpr (STAGES == 2) {
            load_queries(next_head, next_tile, 1 - stage, [&](auto next_q, auto next_do) {
                constexpr int LATER = ALONG && DIM / 16 > next_q.PIECES && DIM / 16 > next_do.PIECES, STEPS = DIM / 16 - LATER;
                mma_ABt<DIM>(s, k_operand, q_tile(stage), warp_query, [&](int k) {
                    if (k < LATER) return;
                    next_q.template part<STEPS>(k - LATER);
                    next_do.template part<STEPS>(k - LATER);
                });
            });
            cp_async_commit();
        } else {
            mma_ABt<DIM>(s, k_operand, q_tile(stage), warp_query);
        }

        // dP^T = V dO^T, P^T = exp(S^T - lse)
        auto exponential = [&](float& x, int j, int i) {
            x = score(x, batch, head, i0 + warp_query + i, keys.begin + warp_key + j);
            x = exp2_approx(x * factor - lse[i] * LOG2_E);
        };
        auto settle = [&] {
            if (mask.tests({i0 + warp_query, i0 + warp_query + WARP_QUERIES},
                           {keys.begin + warp_key, keys.begin + warp_key + WARP_KEYS})) {
                keep_branch();
                s.each([&](float& x, int j, int i) {
                    if (!mask.visible(i0 + warp_query + i, keys.begin + warp_key + j)) x = 0;
                });
            }
            if constexpr (SHARE) s.store(p_tile, warp_key, warp_query);
        };
        if (!ALONG) {
            lse.load(lse_row(stage) + 4 * warp_query);
            s.each(exponential);
            settle();
        }
        ds.clear();
        mma_ABt<DIM_V>(ds, FromShared<VTile>{v_tile, warp_key}, do_tile(stage), warp_query, [&](int k) {
            if constexpr (ALONG) s.template part<DIM_V / 16>(k, exponential);
        });
        if (ALONG) settle();

        // dS^T = P^T (dP^T - delta)
        if (!ALONG) delta.load(lse_row(stage) + 4 * (ROWS + warp_query));
        ds.zip(s, [&](float& x, float probability, int j, int i) {
            x = probability * (x - delta[i]) *
                score_derivative(0.f, batch, head, i0 + warp_query + i, keys.begin + warp_key + j);
        });
        ds.store(ds_tile, warp_key, warp_query);
        if constexpr (!SHARE) mma_AB<ROWS>(dv, FromRegisters<M, WARP_QUERIES / 8>{s}, do_tile(stage), 0);
        __syncthreads();

        // dQ += dS K. The additions in memory ride along the products that follow: in one burst they would hold up the
        // loads of those.
        int dq_row = warp % DQ_ROW_WARPS * DQ_M, dq_column = warp / DQ_ROW_WARPS * DQ_N;  // in fragments
        Accumulator<DQ_M, DQ_N> dq;
        dq.clear();
        if (DQ_EVEN || dq_column < DIM / 8) {
            mma_AB<KEYS>(dq, FromTransposed<STile>{ds_tile, 16 * dq_row}, k_tile, 8 * dq_column);
        }
        long long sum = ((long long)batch * p.heads_q + head) * tiles_q + tile_q;
        if (DETERMINISTIC) {  // in the order of the key tiles
            unsigned turn = tile - mask.keys_of({i0, min(p.seq_q, i0 + ROWS)}).begin / KEYS;
            if (threadIdx.x == 0)
                while (load_acquire(p.counters + sum) != turn) __nanosleep(32);
            __syncthreads();
        }
        float* dq_sum = dq_fragment(p, sum, dq_row, dq_column);
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
            mma_AB<ROWS>(dv, FromShared<STile>{p_tile, warp_key}, do_tile(stage), column_warp * (DIM_V / COLUMN_WARPS),
                         [&](int k) { add_dq(k, Constant<2 * STEPS>()); });
            mma_AB<ROWS>(dk, FromShared<STile>{ds_tile, warp_key}, q_tile(stage), column_warp * (DIM / COLUMN_WARPS),
                         [&](int k) { add_dq(STEPS + k, Constant<2 * STEPS>()); });
        } else {
            mma_AB<ROWS>(dk, FromRegisters<M, WARP_QUERIES / 8>{ds}, q_tile(stage), 0,
                         [&](int k) { add_dq(k, Constant<STEPS>()); });
        }
        if (STAGES == 1) {
            __syncthreads();
            load_queries(next_head, next_tile, 0, at_once);
            cp_async_commit();
        }
        if (DETERMINISTIC) {
            __syncthreads();
            if (threadIdx.x == 0) add_release(p.counters + sum, 1);
        }
        tile_q = next_tile, head = next_head;
        if (STAGES == 2) stage = 1 - stage;
    }
    cp_async_wait<0>();
    __syncthreads();

    // Out through shared memory, where K and V were, for whole rows.
    float scale = p.scale;
    dk.each([&](float& x, int, int) { x *= scale; });
    dk.store(k_tile, warp_key, column_warp * (DIM / COLUMN_WARPS));
    dv.store(v_tile, warp_key, column_warp * (DIM_V / COLUMN_WARPS));
    __syncthreads();
    Element* dk_out = p.dk + batch * p.dk_strides.batch + head_k * p.dk_strides.head + keys.begin * p.dk_strides.row;
    Element* dv_out = p.dv + batch * p.dv_strides.batch + head_k * p.dv_strides.head + keys.begin * p.dv_strides.row;
    constexpr int SHARE_ROWS = KEYS / WARPS;
    store_rows<SHARE_ROWS>(k_tile, warp * SHARE_ROWS, dk_out, p.dk_strides.row, p.seq_k - keys.begin, p.dim);
    store_rows<SHARE_ROWS>(v_tile, warp * SHARE_ROWS, dv_out, p.dv_strides.row, p.seq_k - keys.begin, p.dim_v);
}

// dQ = scale * dq_sum, from fragment order to rows.
extern "C" __global__ void __launch_bounds__(128) attention_backward_finish(const __grid_constant__ Params p) {
    __shared__ alignas(16) char shared[QTile::BYTES];
    QTile dq_tile{shared_address(shared)};
    int tiles = (p.seq_q + ROWS - 1) / ROWS;
    int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % p.heads_q, batch = blockIdx.x / tiles / p.heads_q;
    float scale = p.scale;
#pragma unroll 4
    for (int f = threadIdx.x / 32; f < ROWS / 16 * (DIM / 8); f += 4) {
        int m = f / (DIM / 8), n = f % (DIM / 8);
        float4 sum = *(const float4*)dq_fragment(p, blockIdx.x, m, n);
        Accumulator<1, 1> dq{{{{sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale}}}};
        dq.store(dq_tile, 16 * m, 8 * n);
    }
    __syncthreads();
    int i0 = tile * ROWS;
    Element* dq = p.dq + batch * p.dq_strides.batch + head * p.dq_strides.head + i0 * p.dq_strides.row;
    store_rows<ROWS / 4>(dq_tile, threadIdx.x / 32 * (ROWS / 4), dq, p.dq_strides.row, p.seq_q - i0, p.dim);
}
