// Approximate functions of the special-function unit.
#pragma once

// 2^x, at most 2 units in the last place off; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.4426950408889634f;

#define MINUS_INFINITY __int_as_float(0xff800000)
