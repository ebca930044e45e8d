// Gradients of the arrays that scores read (attention/array_gradient.cuh), in plain CUDA: OWNED queries by VISITED keys at a
// time.
#include "attention/array_gradient.cuh"
#include "attention/score_gradient.cuh"
#include "simt/derivative.cuh"

using config::OWNED, config::VISITED;

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
    const Share<Of, OWNED, VISITED> share(p, block);
    const Dropout dropout(p);
    Shared& shared = block_memory().shared;
    ScoreTile sums = {};

    for (auto step = share.first(); share.has(step); share.advance(step)) {
        const PairsTile at = step.tile;
        const Matrix q = query_matrix(p, at.head, p.q, p.q_strides, p.dim);
        const Matrix k = key_matrix(p, at.head, p.k, p.k_strides, p.dim);
        const Matrix v = key_matrix(p, at.head, p.v, p.v_strides, p.dim_v);
        const Matrix dout = query_matrix(p, at.head, p.dout, p.dout_strides, p.dim_v);
        const Pairs pairs(p, at.head, at.bits);

        ScoreTile s, dp;
        dot_products(s, q, at.i, k, at.j, shared);
        dot_products(dp, dout, at.i, v, at.j, shared);

        const bool tested = pairs.tests_backward({at.i, at.i + OWNED}, {at.j, at.j + VISITED});
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const Row of_query(p, at.head, at.i + row_of(i));
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const Pair pair = {at.head.q, at.i + row_of(i), at.j + score_column_of(j)};
                const Accum ds = of_score(s[i][j], dp[i][j], of_query, pairs, dropout, tested, pair);
                if (ds != 0) sums[i][j] = fma(ds, Of::change(pairs, pair, s[i][j]), sums[i][j]);
            }
        }
    }

    __syncthreads();
    for_each(sums, [&](Accum x, int i, int j) { shared.weights.at[row_of(i)][score_column_of(j)] = x; });
    __syncthreads();
    write_sums<config::THREADS>(share, [&](int r, int c) { return shared.weights.at[r][c]; }, block_memory().scratch);
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
    if constexpr (WANTED) Share<Of, OWNED, VISITED>(p, 0).template add_parts<128>();
}

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_bias(const __grid_constant__ Params p) {
    gather<config::D_BIAS, OfBias>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_bias_add(const __grid_constant__ Params p) {
    add_parts<config::D_BIAS, OfBias>(p);
}
extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_alibi_slopes(const __grid_constant__ Params p) {
    gather<config::D_ALIBI_SLOPES, OfSlopes>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_alibi_slopes_add(const __grid_constant__ Params p) {
    add_parts<config::D_ALIBI_SLOPES, OfSlopes>(p);
}
extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS) attention_backward_score(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE) gather_reads<false>(p);
}
extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS) attention_backward_score_largest(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE && config::DETERMINISTIC) gather_reads<true>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_score_clear(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE) clear_sum<128>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_score_finish(const __grid_constant__ Params p) {
    if constexpr (config::D_SCORE) finish_sum<128>(p);
}
extern "C" __global__ void __launch_bounds__(256) attention_backward_sinks(const __grid_constant__ Params p) {
    gather_sink<config::D_SINKS, 256>(p, blockIdx.x,
                                       [&](const Head& head, int i) { return -p.delta[head.row_number(p, i)]; });
}
