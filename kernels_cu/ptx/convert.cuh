// Conversions between memory formats and the types sums are kept in, rounding to nearest even.
#pragma once

// bfloat16 is the upper half of a float.
__device__ inline float to_float(bfloat16_t x) { return __uint_as_float(unsigned(x.bits) << 16); }

__device__ inline float to_float(half_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ inline float to_float(float8_t x) {
#if __CUDA_ARCH__ >= 890
    unsigned pair;  // of float16
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)x.bits));
    return to_float(half_t{(unsigned short)pair});
#else
    // Where float16 has exponent and mantissa its bits mean 2^-8 of what they mean here; but for NaN.
    unsigned size = x.bits & 0x7f;
    float y = to_float(half_t{(unsigned short)((x.bits & 0x80) << 8 | size << 7)}) * 256;
    return size == 0x7f ? __int_as_float(0x7fffffff) : y;
#endif
}

__device__ inline float to_float(integer8_t x) { return x.bits; }

// float and double are computed in as they are.
__device__ inline float to_float(float x) { return x; }
__device__ inline double to_float(double x) { return x; }

// Integers are rounded to towards 0; NaN becomes 0, and what is too large the largest.
template <class T>
__device__ T truncated(float x);
template <>
__device__ inline int truncated<int>(float x) {
    return __float2int_rz(x);
}
template <>
__device__ inline long long truncated<long long>(float x) {
    return __float2ll_rz(x);
}
template <class T>
__device__ T truncated(double x);
template <>
__device__ inline int truncated<int>(double x) {
    return __double2int_rz(x);
}
template <>
__device__ inline long long truncated<long long>(double x) {
    return __double2ll_rz(x);
}

template <class T>
__device__ T from_float(float x);

template <>
__device__ inline half_t from_float<half_t>(float x) {
    half_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <>
__device__ inline bfloat16_t from_float<bfloat16_t>(float x) {
    bfloat16_t y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // Adding just under half of the last kept bit, or half where that bit is odd, makes truncation round to even.
    unsigned bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
    return y;
}

template <>
__device__ inline float from_float<float>(float x) {
    return x;
}

// What is too large becomes 448.
template <>
__device__ inline float8_t from_float<float8_t>(float x) {
#if __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return {(unsigned char)pair};
#else
    float size = fminf(fabsf(x), 448);
    unsigned bits = __float_as_uint(size), last = bits >> 20 & 1;
    // From 2^-6 the exponent's bias is 120 less, and rounding as that of bfloat16; below all are multiples of 2^-9.
    bits = size < 0x1p-6f ? __float2int_rn(size * 0x1p9f) : ((bits + 0x7ffff + last) >> 20) - (120 << 3);
    return {(unsigned char)(x != x ? 0x7f : bits | __float_as_uint(x) >> 31 << 7)};
#endif
}

// What is too large becomes 127, NaN 0.
template <>
__device__ inline integer8_t from_float<integer8_t>(float x) {
    int n = __float2int_rn(x);
    return {(signed char)(n < -127 ? -127 : n > 127 ? 127 : n)};
}

template <class T>
__device__ T from_float(double x);

template <>
__device__ inline double from_float<double>(double x) {
    return x;
}

template <>
__device__ inline float from_float<float>(double x) {
    return float(x);
}

// Two floats as one register of two 16-bit numbers, `low` in the lower half: how tensor cores take them. With RELU what
// is negative becomes 0.
template <class T, bool RELU = false>
__device__ unsigned pack2(float low, float high);

#if __CUDA_ARCH__ >= 800
template <>
__device__ inline unsigned pack2<half_t, false>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <>
__device__ inline unsigned pack2<half_t, true>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <>
__device__ inline unsigned pack2<bfloat16_t, false>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <>
__device__ inline unsigned pack2<bfloat16_t, true>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

#if __CUDA_ARCH__ >= 800
// Four numbers of 8 bits that lie side by side as numbers of 16, with SCALED times a float, rounded once.
template <class To, class From, bool SCALED>
__device__ uint2 widen4(unsigned four, float times) {
    auto number = [=](int n) { return to_float(From{decltype(From::bits)(four >> 8 * n)}) * (SCALED ? times : 1); };
    return {pack2<To>(number(0), number(1)), pack2<To>(number(2), number(3))};
}
#endif

#if __CUDA_ARCH__ >= 890
template <>
__device__ inline uint2 widen4<half_t, float8_t, false>(unsigned four, float) {
    uint2 x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x.x) : "h"((unsigned short)four));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x.y) : "h"((unsigned short)(four >> 16)));
    return x;
}

// Four floats as one register of four numbers of 8 bits, the first in the lowest byte; what is too large becomes 448.
template <bool RELU = false>
__device__ unsigned pack4(float a, float b, float c, float d) {
    unsigned short low, high;
    if (RELU) {
        asm("cvt.rn.satfinite.relu.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.relu.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    }
    return low | unsigned(high) << 16;
}
#endif
