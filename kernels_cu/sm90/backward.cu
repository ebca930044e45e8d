// FlashAttention-3's backward (Shah et al. 2024) for Hopper: FlashAttention-2's algorithm
// (kernels_cu/sm80/backward.cu) with the engines of a multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of KEYS keys. Its first warpgroup moves
// data (backward_tiles.cuh): the copy engine (TMA) brings K and V, and Q and dO of query tile after query tile of
// every head that shares these keys; dQ leaves by backward_dq.cuh. The other warpgroups compute,
// with the tensor cores in the background (wgmma): backward_narrow.cuh for head dimensions up to 128,
// backward_wide.cuh above; above 192 the two blocks of a cluster share the work on dQ.
#include "attention/delta.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_narrow.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/backward_wide.cuh"

// Zeros in the counters. For each of a tile's queries, -lse in base 2 and then -delta, in `delta`, padded to whole tiles:
// where there is no query, or it saw no key, exp2(s - inf) is 0.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    int tiles = (p.seq_q + ROWS - 1) / ROWS;
    // Heads first: in the usual layout rows of all heads lie side by side.
    int head = blockIdx.x % p.heads_q, tile = blockIdx.x / p.heads_q % tiles, batch = blockIdx.x / p.heads_q / tiles;
    long long pair = (long long)batch * p.heads_q + head;
    DQCounters counters(p);
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) p.counters[0] = *counters.ticket = 0;
        if (blockIdx.x < p.heads_k * p.batch) counters.clear[blockIdx.x] = 0;
        counters.added[blockIdx.x] = 0;
    }
    float* rows = p.delta + (pair * tiles + tile) * (2 * ROWS);
    row_deltas<ROWS>(p, batch, head, tile * ROWS, [&](int i, float delta) {
        float lse = i < p.seq_q ? p.lse[pair * p.seq_q + i] : MINUS_INFINITY;
        rows[i - tile * ROWS] = lse == MINUS_INFINITY ? MINUS_INFINITY : -lse * LOG2_E;
        rows[i - tile * ROWS + ROWS] = -delta;
    });
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared s(shared_address(memory));
    if (threadIdx.x == 0) {
        s.k.init();
        s.v.init();
        s.q.init();
        s.d.init();
        for (int group = 0; group < GROUPS; group++) s.dq(group).init();
        for (int i = 0; i < FINISHERS; i++) s.finish_ring(i).init();
        if (PAIRED) {
            s.far_ds.init();
            s.ticket.init();
        }
        mbarrier_init_fence();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
        tma_prefetch(maps.dout);
    }
    __syncthreads();
    if (PAIRED) sync_cluster();
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (group == -1) {
        shrink_registers<MOVER_REGISTERS>();
        int warp = threadIdx.x / 32;
        if (warp >= 2 && warp - 2 < FINISHERS) {
            finish_dq(p, s, warp - 2);
        } else if (threadIdx.x == 0) {
            load(p, maps, s);
        } else if (threadIdx.x == 32) {
            add_dq(p, s);
        }
    } else {
        grow_registers<WORKER_REGISTERS>();
        if constexpr (WIDE)
            work_wide(p, maps, s, group);
        else
            work_narrow(p, maps, s, group);
    }
    if (PAIRED) sync_cluster();  // shared memory goes with the block
}
