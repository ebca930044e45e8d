// Attention, backward, in plain CUDA: FlashAttention-2's Algorithm 2 (https://arxiv.org/abs/2307.08691), as two kernels
// (simt/backward.cuh). With P from the log-sum-exp that the forward kept,
//
//     delta = rowsum(dO * O) - dlse    dP = dO V^T    dS = P * (dP - delta)
//     dV = P^T dO    dK = scale * dS^T Q    dQ = scale * dS K
#include "simt/backward.cuh"
#include "simt/delta.cuh"

struct Gradients : Products {
    using Pairs = ::Pairs;
    using Queries = QueryArrays;
    using Keys = KeyArrays;
    static __device__ Row row(const Params& p, const Head& head, int i) { return {p, head, i}; }
    static __device__ Result<OutQ> dq(const Params& p) { return {p.dq, p.dq_strides}; }
    static __device__ Result<> dk(const Params& p) { return {p.dk, p.dk_strides}; }
    static __device__ Result<> dv(const Params& p) { return {p.dv, p.dv_strides}; }

    // From S and dP of one pair to P and dS, the derivative with respect to the product, in place.
    __device__ void differentiate(int i, int j, const Row& row, const Pairs& pairs, const Dropout& dropout, bool tested,
                                  Pair pair) {
        const bool hidden = tested && !pairs.visible(pair), keeps = dropout.keeps(pairs.head.batch, pair);
        const Accum x = s[i][j], weight = probability(x, row.lse, pairs, pair);
        dp[i][j] =
            hidden ? 0 : weight * ((keeps ? dp[i][j] : 0) - row.delta) * Pairs::settled(pairs.slope(x, pair), weight);
        s[i][j] = hidden || !keeps ? 0 : weight;
    }
    __device__ void add_dk_dv(ResultTile& dk, ResultTile& dv, const Queries& a, int query, int column, bool tested,
                              Shared& shared) {
        add_weighted(dv, s, a.dout(), query, column, tested, shared);
        add_weighted(dk, dp, a.q(), query, column, tested, shared);
    }
    __device__ void add_dq(ResultTile& dq, const Keys& b, int key, int column, bool tested, Shared& shared) {
        add_weighted(dq, dp, b.k(), key, column, tested, shared);
    }
};

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_dk_dv(const __grid_constant__ Params p) {
    backward_dk_dv<Gradients>(p);
}
extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_dq(const __grid_constant__ Params p) {
    backward_dq<Gradients>(p);
}
