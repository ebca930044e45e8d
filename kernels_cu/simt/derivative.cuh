// What the backward kernels of this family know of a pair: P and dS.
#pragma once
#include "attention/dead_rows.cuh"
#include "simt/tile.cuh"

// What a pair needs to know of its query: two numbers.
struct Row {
    Accum lse, delta;

    __device__ Row(const Params& p, const Head& head, int i) : lse(infinity()), delta(0) {
        if (i >= head.queries(p)) return;  // exp(s - inf) = 0: beyond the last query there is no weight
        const long long at = head.row_number(p, i);
        delta = p.delta[at] * kept(p);
        if (p.lse[at] != -infinity())
            lse = lse_of_kept(p, p.lse[at]);  // -inf where a query sees no key: no weight either
    }
};

// P of a pair from its product of Q and K (with dropout P / kept).
__device__ inline Accum probability(Accum s, const Row& row, const Pairs& pairs, Pair pair) {
    return exp2((pairs.score(s, pair) * pairs.unit() - row.lse) * LOG2E);
}

// The derivative with respect to its score.
__device__ inline Accum of_score(Accum s, Accum dp, const Row& row, const Pairs& pairs, const Dropout& dropout,
                                 bool tested, Pair pair) {
    if (tested && !pairs.visible(pair)) return 0;
    return probability(s, row, pairs, pair) * ((dropout.keeps(pairs.head.batch, pair) ? dp : 0) - row.delta);
}

// From S and dP of one pair to P and dS, the derivative with respect to the product, in place.
__device__ inline void differentiate(Accum& s, Accum& dp, const Row& row, const Pairs& pairs, const Dropout& dropout,
                                     bool tested, Pair pair) {
    const bool hidden = tested && !pairs.visible(pair), keeps = dropout.keeps(pairs.head.batch, pair);
    const Accum weight = probability(s, row, pairs, pair);
    dp = hidden ? 0 : weight * ((keeps ? dp : 0) - row.delta) * Pairs::settled(pairs.slope(s, pair), weight);
    s = hidden || !keeps ? 0 : weight;
}

extern "C" __global__ void __launch_bounds__(config::THREADS)
    attention_backward_delta(const __grid_constant__ Params p) {
    const long long index = (long long)blockIdx.x * config::THREADS + threadIdx.x;
    const Place at = query_place(p, index);
    if (at.batch >= p.batch) return;
    const Head head = Head::of_q(p, at.batch, at.head);
    const In* dout = head.query_row(p.dout, p.dout_strides, at.tile);
    const Out* out = head.query_row(p.out, p.out_strides, at.tile);
    // One thread adds a row, in the order in which dot_products adds dP: where one key has all the weight, O is its V,
    // and dP - delta is then 0 to the last bit, as it should.
    Accum sum = 0;
    for (int c = 0; c < p.dim_v; ++c) sum = fma(to_float(dout[c]), to_float(out[c]), sum);
    if (config::SINKS) sum = sum_with_zeros(p, head, at.tile, sum);
    // dS = P (dP - delta + dlse); a row that sees no key has no weight, whatever dlse is.
    const bool seen = p.dlse != nullptr && p.lse[index] != -infinity();
    p.delta[index] = sum - (seen ? p.dlse[index] : 0);
}
