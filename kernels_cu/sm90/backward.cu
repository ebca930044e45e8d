// FlashAttention-3's backward (Shah et al. 2024) for Hopper: FlashAttention-2's algorithm
// (kernels_cu/sm80/backward.cu) with the engines of a multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of KEYS keys. Its first warpgroup moves
// data (backward_load.cuh): TMA brings K and V, and Q and dO of query tile after query tile of
// every head that shares these keys; dQ leaves by backward_dq.cuh. The other warpgroups compute,
// with the tensor cores in the background (wgmma): backward_narrow.cuh for head dimensions up to 128, where nothing
// else takes registers up to 160, or 192 beside 128 of V; backward_wide.cuh else. There two blocks of a cluster may
// share the work on dQ, above 192 always, and above 256 the columns.
#include "attention/prepare.cuh"
#include "ptx/launch.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_narrow.cuh"
#include "sm90/backward_wide.cuh"

// What each query brings (attention/prepare.cuh), and zeros in the counters and the first sums.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    let_next_kernel_start();
    unsigned number = blockIdx.x - ORDERED;
    if constexpr (ORDERED) {  // a block more, the first to start
        if (blockIdx.x == 0) return list_tiles(p);
    }
    HeadTile at = numbered_heads_first<QueryTiles<ROWS>>(p, number);
    DQCounters(p).begin(p, number);
    if (config::PACKED_Q && at.none()) return;
    prepare_rows<ROWS>(p, at.head, at.number);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
    attention_backward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared s(shared_address(memory));
    if (threadIdx.x == 0) {
        s.init();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
        tma_prefetch(maps.dout);
    }
    wait_for_kernel_before();
    __syncthreads();
    if (CLUSTERED) sync_cluster();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32;
        if (warp >= 2 && warp - 2 < FINISHERS) {
            finish_dq(p, s, warp - 2);
        } else if (threadIdx.x == 0) {
            load(p, maps, s);
        } else if (SENDS_DQ && warp == 1) {
            send_dq(p, maps, s);
        } else if (!WHOLE_DQ && threadIdx.x == 32) {
            add_dq(p, maps, s);
        }
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        if constexpr (WIDE)
            WideConsumer(p, maps, s, warpgroup).run();
        else
            NarrowConsumer(p, maps, s, warpgroup).run();
        if constexpr (Shared::HELPERS > 0) help_to_finish(p, s);
    }
    if (CLUSTERED) sync_cluster();  // shared memory goes with the block
}
