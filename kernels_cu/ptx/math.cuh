// Approximate functions of the special-function unit.
#pragma once

// 2^x, at most 2 units in the last place off; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

#define MINUS_INFINITY __int_as_float(0xff800000)

// tanh(x), as exactly as numbers of T ask: bfloat16 has 8 bits, the special-function unit's tanh 11.
template <class T>
__device__ float hyperbolic_tangent(float x) {
    return tanhf(x);
}
template <>
__device__ inline float hyperbolic_tangent<bfloat16_t>(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <>
__device__ inline float hyperbolic_tangent<half_t>(float x) {
    float y = x * x;  // near 0 a difference would cancel
    float near = x * fmaf(y, fmaf(y, fmaf(y, -17.f / 315, 2.f / 15), -1.f / 3), 1);
    return fabsf(x) < 0.25f ? near : 1 - 2 / (exp2_approx(x * (2 * LOG2_E)) + 1);
}
template <class T>
__device__ double hyperbolic_tangent(double x) {
    return tanh(x);
}
