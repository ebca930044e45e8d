// FlashAttention-2 forward (Dao 2023, Algorithm 1) on the tensor cores of Ampere and every GPU after it.
//
// A thread block owns ROWS queries of one head; each warp owns ROWS / WARPS of them for good ("split Q"), so the warps
// never exchange anything but the K and V tiles that they load together. K and V come in a ring of two
// tiles: while one is worked on, the next is on its way.
#include "attention/mask.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"

using namespace config;

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = ROWS / WARPS;
constexpr int M = WARP_ROWS / 16;  // row fragments of a warp
static_assert(ROWS % (16 * WARPS) == 0 && KEYS % 16 == 0 && DIM % 16 == 0 && DIM_V % 16 == 0);

using QTile = SharedTile<ROWS, DIM>;
using OTile = SharedTile<ROWS, DIM_V>;  // takes Q's place at the end
using KTile = SharedTile<KEYS, DIM>;
using VTile = SharedTile<KEYS, DIM_V>;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) Element shared[];
    QTile q_tile{shared};
    Element* ring = shared + (QTile::ELEMENTS > OTile::ELEMENTS ? QTile::ELEMENTS : OTile::ELEMENTS);
    auto k_tile = [&](int stage) { return KTile{ring + stage * (KTile::ELEMENTS + VTile::ELEMENTS)}; };
    auto v_tile = [&](int stage) { return VTile{k_tile(stage).data + KTile::ELEMENTS}; };

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
    auto load_keys = [&](int j, int stage) {
        long long row = (long long)j * KEYS;
        load_async<THREADS>(k_tile(stage), k + row * p.k_strides.row, p.k_strides.row, p.seq_k - row, p.dim);
        load_async<THREADS>(v_tile(stage), v + row * p.v_strides.row, p.v_strides.row, p.seq_k - row, p.dim_v);
    };

    const Element* q = p.q + batch * p.q_strides.batch + head * p.q_strides.head + queries.begin * p.q_strides.row;
    load_async<THREADS>(q_tile, q, p.q_strides.row, p.seq_q - queries.begin, p.dim);
    if (first < last) load_keys(last - 1, 0);
    cp_async_commit();

    int warp_row = threadIdx.x / 32 * WARP_ROWS;
    auto q_operand = [&](unsigned(&a)[4], int m, int k) { load_operand(a, q_tile, warp_row + 16 * m, 16 * k); };
    OnlineSoftmax<M> softmax(p.scale);
    Accumulator<M, DIM_V / 8> o;
    o.clear();

    // From the last tile to the first: with a causal mask the tiles that need element tests come first.
    int stage = 0;
    for (int j = last - 1; j >= first; j--) {
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before
        if (j > first) load_keys(j - 1, 1 - stage);
        cp_async_commit();

        Accumulator<M, KEYS / 8> s;
        s.clear();
        mma_ABt<DIM>(s, q_operand, k_tile(stage), 0);

        int row = queries.begin + warp_row;
        bool tests = mask.tests({row, row + WARP_ROWS}, {j * KEYS, (j + 1) * KEYS});
        s.each([&](float& x, int i, int c) { x = score(x, batch, head, row + i, j * KEYS + c); });
        if (tests) {
            s.each([&](float& x, int i, int c) {
                if (!mask.visible(row + i, j * KEYS + c)) x = MINUS_INFINITY;
            });
        }
        softmax(s, o);
        auto p_operand = [&](unsigned(&a)[4], int m, int k) { s.as_operand(a, m, k); };
        mma_AB<KEYS>(o, p_operand, v_tile(stage), 0);
        stage = 1 - stage;
    }
    cp_async_wait<0>();
    softmax.finish(o, p.scale);

    // Out through shared memory, where Q was, for whole rows; where Q's rows have another length than O's, the warps'
    // shares of the two tiles overlap.
    if (DIM != DIM_V || first == last) __syncthreads();
    OTile o_tile{shared};
    o.store(o_tile, warp_row, 0);
    __syncwarp();
    Element* out = p.out + batch * p.out_strides.batch + head * p.out_strides.head + queries.begin * p.out_strides.row;
    store_rows<WARP_ROWS>(o_tile, warp_row, out, p.out_strides.row, p.seq_q - queries.begin, p.dim_v);
    if (p.lse != nullptr && threadIdx.x % 4 == 0) {
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
