// Approximate functions: of the special-function unit, and in double precision of what arithmetic there is.
#pragma once

// 2^x, at most 2 units in the last place off; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x in [-1/2, 1/2] as a polynomial, of least relative error (2^-55) among those that are 1 at 0; the highest power
// first. In constant memory, where arithmetic takes an operand from: as numbers in the code they would be moved to
// registers.
static __constant__ double POWER[12] = {
    0x1.c0638527edf34p-32, 0x1.e605f979c7a5dp-28, 0x1.b54167a0b9061p-24, 0x1.62bfd49ed0adfp-20,
    0x1.ffcbee3b0af8cp-17, 0x1.4309130961163p-13, 0x1.5d87fe7bbbe07p-10, 0x1.3b2ab6fba1e1cp-7,
    0x1.c6b08d7048f31p-5,  0x1.ebfbdff82c598p-3,  0x1.62e42fefa39f3p-1,  1,
};

// 2^x in double precision, less than 1 unit in the last place off; results below 2^-1021 are 0, beyond 2^1021 infinite.
// x is taken apart into an integer and a rest in [-1/2, 1/2]; to the exponent of the rest's power the integer is added.
// What does not fit is told by the upper half of x, on the pipe for integers.
__device__ inline double exp2_approx(double x) {
    constexpr double ROUND = 0x1.8p52;  // added to, a number has its nearest integer in its last bits
    double shifted = x + ROUND, rest = x - (shifted - ROUND);
    double y = POWER[0];
#pragma unroll
    for (int n = 1; n < 12; n++) y = fma(y, rest, POWER[n]);
    unsigned high = __double2hiint(x), size = high & 0x7fffffff;
    bool fits = size < 0x408fe800;                                       // |x| < 1021
    bool below = high - 0xc08fe800 <= 0xfff00000 - 0xc08fe800;           // x <= -1021, and not NaN
    unsigned other = below ? 0 : size > 0x7ff00000 ? size : 0x7ff00000;  // NaN, or infinity
    high = __double2hiint(y) + (__double2loint(shifted) << 20);
    return __hiloint2double(fits ? high : other, fits ? __double2loint(y) : 0);
}

// 1 / x, at most a unit in the last place off; what is below 2^-126 counts as 0. In double precision exact.
__device__ inline float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline double reciprocal_approx(double x) { return 1 / x; }

constexpr Accum LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// log(x), at most 2^-22 off near 1, elsewhere 2^-22 of itself; what is below 2^-126 counts as 0. In double precision
// exact.
__device__ inline float log_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * float(LN_2);
}
__device__ inline double log_approx(double x) { return log(x); }

// The larger of two; which one of a number and NaN is not said.
__device__ inline float larger(float x, float y) { return fmaxf(x, y); }
__device__ inline double larger(double x, double y) { return x > y ? x : y; }

// A positive number without the bits behind its first.
__device__ inline float leading_bit(float x) { return __uint_as_float(__float_as_uint(x) & 0xff800000); }
__device__ inline double leading_bit(double x) { return __hiloint2double(__double2hiint(x) & 0xfff00000, 0); }

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
    return fabsf(x) < 0.25f ? near : 1 - 2 / (exp2_approx(x * float(2 * LOG2_E)) + 1);
}
template <class T>
__device__ double hyperbolic_tangent(double x) {
    return tanh(x);
}
