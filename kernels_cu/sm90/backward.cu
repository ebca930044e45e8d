// FlashAttention-3's backward (Shah et al. 2024) for Hopper: FlashAttention-2's algorithm
// (kernels_cu/sm80/backward.cu) with the engines of a multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of KEYS keys. Its first warpgroup moves
// data (backward_tiles.cuh): the copy engine (TMA) brings K and V, and Q and dO of query tile after query tile of
// every head that shares these keys, and adds finished parts of dQ to those in memory. The other warpgroups compute,
// with the tensor cores in the background (wgmma): backward_narrow.cuh for head dimensions up to 128,
// backward_wide.cuh above.
#include "attention/delta.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/backward_narrow.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/backward_wide.cuh"

// Zeros where the dQ of this tile will be summed. For each of its queries, -lse in base 2 and then delta, in `delta`,
// padded to whole tiles: where there is no query, or it saw no key, exp2(s - inf) is 0.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    int tiles = (p.seq_q + ROWS - 1) / ROWS;
    int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % p.heads_q, batch = blockIdx.x / tiles / p.heads_q;
    long long pair = (long long)batch * p.heads_q + head;
    float4* sums = (float4*)(p.dq_sum + blockIdx.x * (long long)DQ_TILE);
    for (int i = threadIdx.x; i < DQ_TILE / 4; i += 128) sums[i] = make_float4(0, 0, 0, 0);
    if (threadIdx.x == 0 && blockIdx.x == 0) *p.counters = 0;
    if (DETERMINISTIC && threadIdx.x < GROUPS) p.counters[1 + blockIdx.x * (long long)GROUPS + threadIdx.x] = 0;
    float* rows = p.delta + blockIdx.x * (long long)(2 * ROWS);
    row_deltas<ROWS>(p, batch, head, tile * ROWS, [&](int i, float delta) {
        float lse = i < p.seq_q ? p.lse[pair * p.seq_q + i] : MINUS_INFINITY;
        rows[i - tile * ROWS] = lse == MINUS_INFINITY ? MINUS_INFINITY : -lse * LOG2_E;
        rows[i - tile * ROWS + ROWS] = delta;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ char memory[];
    Shared s((shared_address(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        s.k.init();
        s.v.init();
        s.q.init();
        s.d.init();
        for (int group = 0; group < GROUPS; group++) s.dq(group).init();
        mbarrier_init_fence();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
        tma_prefetch(maps.dout);
    }
    __syncthreads();
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (group == -1) {
        shrink_registers<MOVER_REGISTERS>();
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) {
            if (warp == 0)
                load_k_q(p, maps, s);
            else if (warp == 1)
                load_v_do(p, maps, s);
            else
                add_dq(p, s, warp - 2);
        }
    } else {
        grow_registers<WORKER_REGISTERS>();
        if constexpr (WIDE)
            work_wide(p, s, group);
        else
            work_narrow(p, s, group);
    }
}

// dQ = scale * dq_sum, from fragment order to rows.
extern "C" __global__ void __launch_bounds__(128) attention_backward_finish(const __grid_constant__ Params p) {
    __shared__ alignas(1024) char shared[QTile::BYTES];
    QTile dq_tile{shared_address(shared)};
    int tiles = (p.seq_q + ROWS - 1) / ROWS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % p.heads_q, batch = blockIdx.x / tiles / p.heads_q;
    float scale = p.scale;
#pragma unroll 4
    for (int f = warp; f < ROWS / 16 * (DIM / 16); f += 4) {
        int row16 = f / (DIM / 16), column16 = f % (DIM / 16);
        Accumulator<1, 2> dq;  // 16 columns, 16 queries
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float4 sum = ((const float4*)dq_fragment(p, blockIdx.x, column16, 2 * row16 + n))[lane];
            float scaled[] = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
#pragma unroll
            for (int e = 0; e < 4; e++) dq.x[0][n][e] = scaled[e];
        }
        Operand<16> rounded;
        rounded.take(dq);
        store_transposed(rounded, dq_tile, 16 * row16, 16 * column16);
    }
    __syncthreads();
    int i0 = tile * ROWS;
    Element* dq = p.dq + batch * p.dq_strides.batch + head * p.dq_strides.head + i0 * p.dq_strides.row;
    store_rows<ROWS / 4>(dq_tile, warp * (ROWS / 4), dq, p.dq_strides.row, p.seq_q - i0, p.dim);
}
