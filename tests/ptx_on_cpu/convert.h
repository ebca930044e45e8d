// Twin of ptx/convert.cuh.
#pragma once

namespace on_cpu {

inline float half_to_float(unsigned short x) {
    static const std::vector<float> table = [] {
        std::vector<float> all(1 << 16);
        for (unsigned h = 0; h < 1 << 16; h++) {
            int exponent = h >> 10 & 31, mantissa = h & 1023;
            float y = exponent == 31
                          ? (mantissa ? NAN : INFINITY)
                          : std::ldexp(float(exponent ? 1024 + mantissa : mantissa), std::max(exponent, 1) - 25);
            all[h] = h >> 15 ? -y : y;
        }
        return all;
    }();
    return table[x];
}

inline unsigned short float_to_half(float x) {
    unsigned short sign = __float_as_uint(x) >> 31 << 15;
    float y = std::fabs(x);
    if (x != x) return 0x7fff;
    if (y == 0) return sign;
    if (y >= 65520) return sign | 0x7c00;
    int exponent;
    std::frexp(y, &exponent);  // y < 2^exponent
    int last = std::max(exponent - 11, -24);
    unsigned n = unsigned(std::nearbyint(std::ldexp(y, -last)));  // a multiple of 2^last; 1024 and more are normal
    return sign | (n + ((last + 24) << 10));
}

// e4m3: a bias of 7, no infinities, NaN where all other bits are set.
inline float float8_to_float(unsigned char x) {
    int exponent = x >> 3 & 15, mantissa = x & 7;
    float y = exponent == 15 && mantissa == 7 ? NAN
                                              : std::ldexp(float(exponent ? 8 + mantissa : mantissa), std::max(exponent, 1) - 10);
    return x >> 7 ? -y : y;
}

// What is too large becomes 448.
inline unsigned char float_to_float8(float x) {
    unsigned char sign = __float_as_uint(x) >> 31 << 7;
    float y = std::min(std::fabs(x), 448.0f);
    if (x != x) return 0x7f;
    if (y == 0) return sign;
    int exponent;
    std::frexp(y, &exponent);  // y < 2^exponent
    int last = std::max(exponent - 4, -9);
    return sign | (unsigned(std::nearbyint(std::ldexp(y, -last))) + ((last + 9) << 3));  // a multiple of 2^last
}

inline float float_of(float8_t, unsigned short bits) { return float8_to_float(bits); }
inline float float_of(half_t, unsigned short bits) { return half_to_float(bits); }
inline float float_of(bfloat16_t, unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

}  // namespace on_cpu

inline float to_float(float8_t x) { return on_cpu::float8_to_float(x.bits); }
inline float to_float(integer8_t x) { return x.bits; }
inline float to_float(bfloat16_t x) { return on_cpu::float_of(x, x.bits); }
inline float to_float(half_t x) { return on_cpu::float_of(x, x.bits); }
inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }

template <class T>
T truncated(double x) {
    constexpr double LARGEST = double(std::numeric_limits<T>::max());
    if (x != x) return 0;
    if (x >= LARGEST) return std::numeric_limits<T>::max();
    return x <= -LARGEST - 1 ? std::numeric_limits<T>::min() : T(x);
}

template <class T>
T from_float(float x);
template <>
inline half_t from_float<half_t>(float x) {
    return {on_cpu::float_to_half(x)};
}
template <>
inline bfloat16_t from_float<bfloat16_t>(float x) {
    // Adding just under half of the last kept bit, or half where that bit is odd, makes truncation round to even.
    unsigned bits = __float_as_uint(x);
    return {(unsigned short)(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline float8_t from_float<float8_t>(float x) {
    return {on_cpu::float_to_float8(x)};
}
template <>
inline integer8_t from_float<integer8_t>(float x) {
    return {(signed char)(x != x ? 0 : std::nearbyint(std::min(std::max(x, -127.0f), 127.0f)))};
}
template <class T>
T from_float(double x);
template <>
inline double from_float<double>(double x) {
    return x;
}

template <>
inline float from_float<float>(double x) {
    return float(x);
}

template <class T, bool RELU = false>
unsigned pack2(float low, float high) {
    if (RELU) low = low < 0 ? 0 : low, high = high < 0 ? 0 : high;
    return from_float<T>(low).bits | unsigned(from_float<T>(high).bits) << 16;
}

template <class To, class From, bool SCALED>
uint2 widen4(unsigned four, float times) {
    auto number = [=](int n) { return to_float(From{decltype(From::bits)(four >> 8 * n)}) * (SCALED ? times : 1); };
    return {pack2<To>(number(0), number(1)), pack2<To>(number(2), number(3))};
}

template <bool RELU = false>
unsigned pack4(float a, float b, float c, float d) {
    unsigned x = 0, shift = 0;
    for (float y : {a, b, c, d}) x |= unsigned(on_cpu::float_to_float8(RELU && y < 0 ? 0 : y)) << shift, shift += 8;
    return x;
}
