// Twin of ptx/math.cuh.
#pragma once

inline float exp2_approx(float x) {
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0.f : y;
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

#define MINUS_INFINITY __int_as_float(0xff800000)

