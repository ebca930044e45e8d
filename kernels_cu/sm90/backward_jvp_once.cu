// The tangent of attention's backward for Hopper, as sm90/backward_jvp.cu has it, in one kernel: a thread block has
// each product of a pair of tiles once, 10 in the place of 15, and adds to tdQ in memory as the backward
// (sm90/backward.cu) does to dQ: its tiles, loads and sums are these. Consumers: backward_moving.cuh for head
// dimensions up to 128, backward_moving_wide.cuh above.
#include "ptx/setmaxnreg.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_moving.cuh"
#include "sm90/backward_moving_wide.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attention_backward_jvp_prepare(const __grid_constant__ Params p, const __grid_constant__ TensorMaps) {
    HeadTile at = numbered_heads_first<QueryTiles<ROWS>>(p, blockIdx.x);
    DQCounters(p).begin(p, blockIdx.x);
    float* to = row_numbers(p, QueryTiles<ROWS>::number(p, at.head, at.number));
    for_numbers<ROWS>(p, at.head, at.number, [&](int number, int r, float x) { to[number * ROWS + r] = x; });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_backward_jvp(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared s(shared_address(memory));
    if (threadIdx.x == 0) s.init();
    __syncthreads();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32;
        if (warp >= 2 && warp - 2 < FINISHERS)
            finish_dq(p, s, warp - 2);
        else if (threadIdx.x == 0)
            load(p, maps, s);
        else if (threadIdx.x == 32)
            add_dq(p, maps, s);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        if constexpr (!WIDE)
            MovingConsumer(p, s, warpgroup).run();
        else if (warpgroup == 0)
            MovingWideConsumer<true>(p, s).run();
        else
            MovingWideConsumer<false>(p, s).run();
        if constexpr (Shared::HELPERS > 0) help_to_finish(p, s);
    }
}
