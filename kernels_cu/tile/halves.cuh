// A number of float32 as two of float16, for the tensor cores: times * x = high + low / 2^11, where high is times * x
// rounded and low what that leaves, 2^11 as large, so that it has as many binades as high. 22 bits together; the
// product of two such numbers is that of the high parts and, 2^11 as large, the two of a high and a low part (after
// Ootomo and Yokota 2022).
#pragma once
#include "ptx/convert.cuh"
#include "tile/shared.cuh"

constexpr float LOW_UNIT = 0x1p-11f;

// The two numbers of a register.
__device__ inline float low_half(unsigned pair) { return to_float(half_t{(unsigned short)pair}); }
__device__ inline float high_half(unsigned pair) { return to_float(half_t{(unsigned short)(pair >> 16)}); }

// Two numbers, rounded to Product (RELU: what is negative is 0), as registers of two: one for each part.
template <bool RELU = false>
__device__ void pack_parts(unsigned (&pairs)[PARTS], float x, float y, float times) {
    if constexpr (PARTS == 2) {
        x = (RELU ? fmaxf(x, 0) : x) * times, y = (RELU ? fmaxf(y, 0) : y) * times;
        unsigned high = pack2<Product>(x, y);
        pairs[0] = high;
        pairs[PARTS - 1] = pack2<Product>((x - low_half(high)) / LOW_UNIT, (y - high_half(high)) / LOW_UNIT);
    } else {
        pairs[0] = pack2<Product, RELU>(x, y);
    }
}
