// Twin of ptx/math.cuh.
#pragma once

inline float exp2_approx(float x) {
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0.f : y;
}

inline double exp2_approx(double x) {
    double y = std::exp2(x);
    return y < 0x1p-1021 ? 0 : y;
}

inline float reciprocal_approx(float x) { return std::fabs(x) < 0x1p-126f ? INFINITY : 1 / x; }
inline double reciprocal_approx(double x) { return 1 / x; }

inline float log_approx(float x) { return x < 0x1p-126f ? -INFINITY : std::log(x); }
inline double log_approx(double x) { return std::log(x); }

constexpr Accum LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

inline float larger(float x, float y) { return std::fmax(x, y); }
inline double larger(double x, double y) { return x > y ? x : y; }

inline float leading_bit(float x) { return __uint_as_float(__float_as_uint(x) & 0xff800000); }
inline double leading_bit(double x) { return std::ldexp(1.0, std::ilogb(x)); }

#define MINUS_INFINITY __int_as_float(0xff800000)

template <class T>
float hyperbolic_tangent(float x) {
    return std::tanh(x);
}
template <class T>
double hyperbolic_tangent(double x) {
    return std::tanh(x);
}
