// Where one key takes all of a query's probability, lse is its score and O its V: in float32 and float64 that shall be
// so to the bit, however large they are, since the backward takes the exponential of the one difference and multiplies
// by the other (of their products with dO). Then the forward takes exponentials of differences to the largest score, so
// that its P is 1, and reckons lse from that score itself; the backward multiplies scores to be in natural units, as
// lse is, before it subtracts. (With fewer bits that would show nowhere.)
#pragma once
#include "ptx/math.cuh"

constexpr bool EXACT_LSE = sizeof(In) >= 4;

// What scores are multiplied by in the backward.
template <class Seam>
__device__ Accum exponent_factor(const Seam& pairs) {
    return EXACT_LSE ? pairs.unit() : pairs.factor();
}
__device__ inline Accum probability(Accum score, Accum exponent_factor, Accum minus_lse) {
    if (EXACT_LSE) return exp2_approx((score * exponent_factor + minus_lse) * LOG2_E);
    return exp2_approx(fma(score, exponent_factor, minus_lse));
}
