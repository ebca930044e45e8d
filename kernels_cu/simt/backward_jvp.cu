// The tangent of attention's backward, in plain CUDA: what its results change by where the arrays of the call move. As
// the backward it is two kernels (simt/backward.cuh). With dX the derivative by the product of Q and K, f' and f" those
// of the soft cap or score function (attention/tangents.cuh has the rest),
//
//     tdelta = rowsum(dO * tO + tdO * O) - tdlse    tdP = dO tV^T + tdO V^T    dX = f' dS    tdX = f' tdS + f" tS dS
//     tdQ = scale * (tdX K + dX tK)    tdK = scale * (tdX^T Q + dX^T tQ)    tdV = tP^T dO + P^T tdO
#include "simt/backward.cuh"
#include "simt/moving.cuh"

struct GradientTangents : MovingProducts {
    using Pairs = MovingPairs;
    using Queries = MovingQueryArrays;
    using Keys = MovingKeyArrays;
    static __device__ MovingRow row(const Params& p, const Head& head, int i) { return moving_row(p, head, i); }
    static __device__ Result<> dq(const Params& p) { return {p.tdq, p.tdq_strides}; }
    static __device__ Result<> dk(const Params& p) { return {p.tdk, p.tdk_strides}; }
    static __device__ Result<> dv(const Params& p) { return {p.tdv, p.tdv_strides}; }

    // From S, tS, dP and tdP of one pair to tP, dX, tdX and P, in place.
    __device__ void differentiate(int i, int j, const MovingRow& row, const Pairs& pairs, const Dropout& dropout,
                                  bool tested, Pair pair) {
        const bool keeps = dropout.keeps(pairs.head.batch, pair);
        const Accum weight = seen_probability(s[i][j], row, pairs, tested, pair);
        const MovedPair moved(weight, s[i][j], ts[i][j], keeps ? dp[i][j] : 0, keeps ? tdp[i][j] : 0, row, pairs, pair);
        s[i][j] = keeps ? moved.tp : 0;
        ts[i][j] = moved.dx, dp[i][j] = moved.tdx;
        tdp[i][j] = keeps ? weight : 0;
    }
    __device__ void add_dk_dv(ResultTile& dk, ResultTile& dv, const Queries& a, int query, int column, bool tested,
                              Shared& shared) {
        if (MOVES) add_weighted(dv, s, a.dout(), query, column, tested, shared);
        if (config::TDOUT) add_weighted(dv, tdp, a.tdout(), query, column, tested, shared);
        add_weighted(dk, dp, a.q(), query, column, tested, shared);
        if (config::TQ) add_weighted(dk, ts, a.tq(), query, column, tested, shared);
    }
    __device__ void add_dq(ResultTile& dq, const Keys& b, int key, int column, bool tested, Shared& shared) {
        add_weighted(dq, dp, b.k(), key, column, tested, shared);
        if (config::TK) add_weighted(dq, ts, b.tk(), key, column, tested, shared);
    }
};

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_jvp_dk_dv(const __grid_constant__ Params p) {
    backward_dk_dv<GradientTangents>(p);
}
extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_jvp_dq(const __grid_constant__ Params p) {
    backward_dq<GradientTangents>(p);
}
