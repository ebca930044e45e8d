// The kernels that sum what arrays get (attention/array_gradient.cuh), in plain CUDA: OWNED queries by VISITED keys at
// a time. Who includes this has said what a tile of pairs adds, `add_tile`, and what a sink gets of a query but for its
// probability, `of_sink`.
#pragma once
#include "attention/array_gradient.cuh"
#include "attention/score_gradient.cuh"
#include "simt/derivative.cuh"

// One for all arrays that a kernel sums for: what a template declares is laid out once for each of its instances.
struct Memory {
    Shared shared;
    Accum scratch[OWNED];
};
__device__ inline Memory& block_memory() {
    __shared__ Memory memory;
    return memory;
}

template <class Of>
__device__ void gather_pairs(const Params& p, int block) {
    const SummedTiles<Of, OWNED, VISITED> tiles(p, block);
    const Dropout dropout(p);
    Shared& shared = block_memory().shared;
    ScoreTile sums = {};

    for (auto step = tiles.first(); tiles.has(step); tiles.advance(step))
        add_tile<Of>(sums, p, step.tile, dropout, shared);

    __syncthreads();
    for_each(sums, [&](Accum x, int i, int j) { shared.weights.at[row_of(i)][score_column_of(j)] = x; });
    __syncthreads();
    write_sums<config::THREADS>(tiles, [&](int r, int c) { return shared.weights.at[r][c]; }, block_memory().scratch);
}

// Kernels of arrays whose gradients nobody asks for are empty.
template <bool WANTED, class Of>
__device__ void gather(const Params& p) {
    if constexpr (WANTED) gather_pairs<Of>(p, blockIdx.x);
}
template <bool LARGEST>
__device__ void gather_reads(const Params& p) {
    for_read<LARGEST>(p, blockIdx.x, [&](auto of, int block) { gather_pairs<decltype(of)>(p, block); });
}
template <bool WANTED, class Of>
__device__ void add_parts(const Params& p) {
    if constexpr (WANTED) SummedTiles<Of, OWNED, VISITED>(p, 0).template add_parts<128>();
}

#define KERNELS(ARRAY, WANTED, OF)                                                               \
    extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)                \
        attention_backward_##ARRAY(const __grid_constant__ Params p) {                           \
        gather<WANTED, OF>(p);                                                                   \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                            \
        attention_backward_##ARRAY##_add(const __grid_constant__ Params p) {                     \
        add_parts<WANTED, OF>(p);                                                                \
    }
ARRAYS_OVER_PAIRS(KERNELS)

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_score(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE) gather_reads<false>(p);
}
extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_score_largest(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE && config::DETERMINISTIC) gather_reads<true>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_score_clear(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE) clear_sum<128>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_score_finish(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE) finish_sum<128>(p);
}
extern "C" __global__ void __launch_bounds__(256) attention_backward_sinks(const __grid_constant__ Params p) {
    gather_sink<config::D_SINKS, 256>(p, blockIdx.x, [&](const Head& head, int i) { return of_sink(p, head, i); });
}
