// FlashAttention-2 forward (Dao 2023, Algorithm 1) on the tensor cores of Ampere and every GPU after it.
//
// A thread block owns ROWS queries of one head; each warp owns its part of them for good ("split Q"), so the warps never
// exchange anything but the K and V tiles that they load together. Where the output is so wide that a warp's registers
// hold only 16 rows of it, two warps share 32 rows instead (COLUMN_WARPS = 2): each takes half of the keys of S and half
// of the columns of O, they exchange row maxima and P through shared memory, and K and V are read from shared memory a
// third less often. With two STAGES
// the next K and V tiles are on their way while these are worked on; with one, V arrives under S = Q K^T and the next
// K under the softmax and P V, in half the shared memory, so that two thread blocks share a multiprocessor.
#include "attention/mask.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"

using namespace config;

constexpr int THREADS = 32 * WARPS;
constexpr int ROW_WARPS = WARPS / COLUMN_WARPS;
constexpr int WARP_ROWS = ROWS / ROW_WARPS;
constexpr int WARP_KEYS = KEYS / COLUMN_WARPS, WARP_COLUMNS = DIM_V / COLUMN_WARPS;
constexpr bool SHARE = COLUMN_WARPS == 2;
constexpr int M = WARP_ROWS / 16;  // row fragments of a warp
static_assert(ROWS % (16 * ROW_WARPS) == 0 && WARP_KEYS % 16 == 0 && DIM % 16 == 0 && WARP_COLUMNS % 16 == 0 && (STAGES == 1 || STAGES == 2));

using QTile = SharedTile<ROWS, DIM>;
using OTile = SharedTile<ROWS, DIM_V>;  // takes Q's place at the end
using KTile = SharedTile<KEYS, DIM>;
using VTile = SharedTile<KEYS, DIM_V>;
using PTile = SharedTile<ROWS, KEYS>;  // only where P is shared

// The warps that share rows wait for each other.
__device__ inline void sync_sharers(int row_warp) {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + row_warp) : "memory");
}

// One float for each row from each of the two warps that share it.
struct Exchange {
    unsigned base;
    int row, column_warp;

    __device__ void put(const float (&x)[M][2]) const {
        each([&](int m, int h, unsigned address) {
            if (threadIdx.x % 4 == 0) store_shared(address + 4 * column_warp, __float_as_uint(x[m][h]));
        });
    }

    template <class F>
    __device__ void combine(float (&x)[M][2], F f) const {
        each([&](int m, int h, unsigned address) {
            float2 both = load_shared_float2(address);
            x[m][h] = f(both.x, both.y);
        });
    }

    template <class F>
    __device__ void each(F f) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) f(m, h, base + 8 * (row + 16 * m + 8 * h + threadIdx.x % 32 / 4));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    QTile q_tile{shared_address(shared)};
    unsigned ring = q_tile.base + (QTile::BYTES > OTile::BYTES ? QTile::BYTES : OTile::BYTES);
    auto k_tile = [&](int stage) { return KTile{ring + stage * (KTile::BYTES + VTile::BYTES)}; };
    auto v_tile = [&](int stage) { return VTile{k_tile(stage).base + KTile::BYTES}; };

    // Which tile: the tiles of a head one after the other, so that they share its K and V in the cache; with a causal
    // mask the last queries, which see the most keys, first.
    int tiles = (p.seq_q + ROWS - 1) / ROWS;
    int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % p.heads_q, batch = blockIdx.x / tiles / p.heads_q;
    if (RIGHT) tile = tiles - 1 - tile;
    int head_k = head / (p.heads_q / p.heads_k);
    Range queries{tile * ROWS, min(p.seq_q, (tile + 1) * ROWS)};
    Mask mask(p, batch);
    Range keys = mask.keys_of(queries);
    int first = keys.begin / KEYS, last = (keys.end + KEYS - 1) / KEYS;  // key tiles [first, last)
    if (keys.begin == keys.end) last = first;

    const Element* k = p.k + batch * p.k_strides.batch + head_k * p.k_strides.head;
    const Element* v = p.v + batch * p.v_strides.batch + head_k * p.v_strides.head;
    auto copy_k = [&](int j, int stage) {
        long long row = (long long)j * KEYS;
        return AsyncCopy<THREADS, KEYS, DIM>(k_tile(stage), k + row * p.k_strides.row, p.k_strides.row,
                                             j < first ? 0 : int(p.seq_k - row), p.dim);
    };
    auto copy_v = [&](int j, int stage) {
        long long row = (long long)j * KEYS;
        return AsyncCopy<THREADS, KEYS, DIM_V>(v_tile(stage), v + row * p.v_strides.row, p.v_strides.row,
                                               j < first ? 0 : int(p.seq_k - row), p.dim_v);
    };

    const Element* q = p.q + batch * p.q_strides.batch + head * p.q_strides.head + queries.begin * p.q_strides.row;
    AsyncCopy<THREADS, ROWS, DIM>(q_tile, q, p.q_strides.row, p.seq_q - queries.begin, p.dim).all();
    copy_k(last - 1, 0).all();
    if (STAGES == 2) copy_v(last - 1, 0).all();
    cp_async_commit();

    int row_warp = threadIdx.x / 32 % ROW_WARPS, column_warp = threadIdx.x / 32 / ROW_WARPS;
    int warp_row = row_warp * WARP_ROWS, warp_key = column_warp * WARP_KEYS;
    PTile p_tile{ring + STAGES * (KTile::BYTES + VTile::BYTES)};
    Exchange exchange{p_tile.base + PTile::BYTES, warp_row, column_warp};
    OnlineSoftmax<M> softmax(p.scale);
    Accumulator<M, WARP_COLUMNS / 8> o;
    o.clear();

    // From the last tile to the first: with a causal mask the tiles that need element tests come first.
    int stage = 0;
    for (int j = last - 1; j >= first; j--) {
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before

        Accumulator<M, WARP_KEYS / 8> s;
        s.clear();
        FromShared<QTile> q_operand{q_tile, warp_row};
        if constexpr (STAGES == 1) {
            auto next_v = copy_v(j, 0);
            mma_ABt<DIM>(s, q_operand, k_tile(stage), warp_key, [&](int k) { next_v.template part<(DIM + 31) / 32>(k); });
        } else {
            auto next_k = copy_k(j - 1, 1 - stage);
            auto next_v = copy_v(j - 1, 1 - stage);
            mma_ABt<DIM>(s, q_operand, k_tile(stage), warp_key, [&](int k) {
                next_k.template part<DIM / 16>(k);
                next_v.template part<DIM / 16>(k);
            });
        }
        cp_async_commit();

        int row = queries.begin + warp_row, key = j * KEYS + warp_key;
        bool tests = mask.tests({row, row + WARP_ROWS}, {key, key + WARP_KEYS});
        s.each([&](float& x, int i, int c) { x = score(x, batch, head, row + i, key + c); });
        if (tests) {
            keep_branch();
            s.each([&](float& x, int i, int c) {
                if (!mask.visible(row + i, key + c)) x = MINUS_INFINITY;
            });
        }
        float largest[M][2];
        softmax.row_maximum(s, largest);
        if (SHARE) exchange.put(largest);
        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();  // V has arrived, and everybody is done with K
        } else if (SHARE) {
            sync_sharers(row_warp);
        }
        if (SHARE) exchange.combine(largest, [](float x, float y) { return fmaxf(x, y); });
        softmax.rescale(largest, o);
        softmax.exponentiate(s);
        auto next_k = copy_k(j - 1, 0);
        auto along = [&](int k) {
            if (STAGES == 1) next_k.template part<KEYS / 16>(k);
        };
        if constexpr (SHARE) {
            s.store(p_tile, warp_row, warp_key);
            sync_sharers(row_warp);
            mma_AB<KEYS>(o, FromShared<PTile>{p_tile, warp_row}, v_tile(stage), column_warp * WARP_COLUMNS, along);
        } else {
            mma_AB<KEYS>(o, FromRegisters<M, WARP_KEYS / 8>{s}, v_tile(stage), 0, along);
        }
        cp_async_commit();
        if (STAGES == 2) stage = 1 - stage;
    }
    cp_async_wait<0>();
    softmax.add_lanes();
    if (SHARE) {
        __syncthreads();  // everybody is done with Q and the exchange
        exchange.put(softmax.sum);
        sync_sharers(row_warp);
        exchange.combine(softmax.sum, [](float x, float y) { return x + y; });
    }
    softmax.finish(o, p.scale);

    // Out through shared memory, where Q was, for whole rows; where Q's rows have another length than O's, the warps'
    // shares of the two tiles overlap.
    if (DIM != DIM_V || first == last) __syncthreads();
    OTile o_tile{q_tile.base};
    o.store(o_tile, warp_row, column_warp * WARP_COLUMNS);
    if (SHARE) sync_sharers(row_warp);
    __syncwarp();
    constexpr int OUT_ROWS = WARP_ROWS / COLUMN_WARPS;
    Element* out = p.out + batch * p.out_strides.batch + head * p.out_strides.head + queries.begin * p.out_strides.row;
    store_rows<OUT_ROWS>(o_tile, warp_row + column_warp * OUT_ROWS, out, p.out_strides.row, p.seq_q - queries.begin,
                         p.dim_v);
    if (p.lse != nullptr && threadIdx.x % 4 == 0 && column_warp == 0) {
        Accum* lse = p.lse + ((long long)batch * p.heads_q + head) * p.seq_q;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int i = queries.begin + warp_row + 16 * m + 8 * h + threadIdx.x % 32 / 4;
                if (i < p.seq_q) lse[i] = softmax.maximum[m][h];
            }
    }
}
