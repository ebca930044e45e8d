// The one place where a score is changed between S = Q K^T and the softmax, and the derivative of that change.
// `s` is the raw dot product; the scale is folded into the exponential (softmax.cuh), so today this is the identity,
// but for a negative scale: the softmax takes the maximum of s, which must then be that of -s.
#pragma once

template <class T>
__device__ T score(T s, int /*batch*/, int /*head*/, int /*i*/, int /*j*/) {
    return config::NEGATIVE_SCALE ? -s : s;
}

// d score / d s, which multiplies dS in the backward.
template <class T>
__device__ T score_derivative(T /*s*/, int /*batch*/, int /*head*/, int /*i*/, int /*j*/) {
    return config::NEGATIVE_SCALE ? T(-1) : T(1);
}
