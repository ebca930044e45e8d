// What score functions of the user's own are made of, beside C's operators and mathematics. cupyflash/gpu/score.py
// writes them.
#pragma once
#include "attention/origin.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// The nearest to n of 0, ..., length - 1: whatever a pair asks for, what is read is there.
__device__ inline int nearest(int n, long long length) {
    return min(max(n, 0), int(length < 0x7fffffff ? length : 0x7fffffff) - 1);
}
__device__ inline long long nearest(long long n, long long length) { return min(max(n, 0LL), length - 1); }

// Integers, of which what does not fit comes in at the other end, as in NumPy and PyTorch; C leaves that open.
namespace whole {
__device__ inline unsigned bits(int x) { return unsigned(x); }
__device__ inline unsigned long long bits(long long x) { return (unsigned long long)x; }
template <class T>
__device__ T add(T x, T y) {
    return T(bits(x) + bits(y));
}
template <class T>
__device__ T sub(T x, T y) {
    return T(bits(x) - bits(y));
}
template <class T>
__device__ T mul(T x, T y) {
    return T(bits(x) * bits(y));
}
template <class T>
__device__ T neg(T x) {
    return T(0 - bits(x));
}
template <class T>
__device__ T abs(T x) {
    return x < 0 ? neg(x) : x;
}
// Beyond all bits 0 comes of it, or the sign.
template <class T>
__device__ T shl(T x, T y) {
    return bits(y) < 8 * sizeof(T) ? T(bits(x) << y) : 0;
}
template <class T>
__device__ T shr(T x, T y) {
    return x >> (bits(y) < 8 * sizeof(T) ? y : T(8 * sizeof(T) - 1));
}
}  // namespace whole

// A pair of a part as the whole has it. (Behind the last one too, where a sum may not fit.)
__device__ inline void of_whole(const Params& p, int& b, int& h, int& i, int& j) {
    if constexpr (config::PLACED) {
        Origin at = Origin::of(p);
        b = whole::add(b, at.batch), h = whole::add(h, at.head), i = whole::add(i, at.query), j = whole::add(j, at.key);
    }
}

// Division of integers as Python has it, rounding down; by 0 it is 0, and so is its remainder.
template <class T>
__device__ T floor_divide(T x, T y) {
    if (y == 0) return 0;
    if (y == -1) return whole::neg(x);
    T q = x / y;
    return q - (x % y != 0 && (x < 0) != (y < 0));
}
template <class T>
__device__ T modulo(T x, T y) {
    return y == 0 || y == -1 ? 0 : x - y * floor_divide(x, y);
}

// And as C has it.
template <class T>
__device__ T divide(T x, T y) {
    return y == 0 ? 0 : y == -1 ? whole::neg(x) : x / y;
}
template <class T>
__device__ T remainder(T x, T y) {
    return y == 0 || y == -1 ? 0 : x % y;
}

__device__ inline Accum sigmoid(Accum x) { return 1 / (1 + exp(-x)); }
