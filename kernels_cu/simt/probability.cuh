// P of a pair, from the log-sum-exp that the forward kept.
#pragma once
#include "simt/tile.cuh"

// The lse of a query; where no pair of it has weight infinity: exp(s - inf) = 0.
__device__ inline Accum row_lse(const Params& p, const Head& head, int i) {
    if (i >= head.queries(p)) return infinity();
    Accum lse = p.lse[head.row_number(p, i)];
    return lse == -infinity() ? infinity() : lse_of_kept(p, lse);  // -inf where a query sees no key
}

// From the product of Q and K (with dropout P / kept).
__device__ inline Accum probability(Accum s, Accum lse, const Pairs& pairs, Pair pair) {
    return exp2((pairs.score(s, pair) * pairs.unit() - lse) * LOG2E);
}
