// What score functions of the user's own are made of, beside C's operators and mathematics. cupyflash/gpu/score.py writes them.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// The nearest to n of 0, ..., length - 1: whatever a pair asks for, what is read is there.
__device__ inline int nearest(int n, long long length) {
    return min(max(n, 0), int(length < 0x7fffffff ? length : 0x7fffffff) - 1);
}
__device__ inline long long nearest(long long n, long long length) { return min(max(n, 0LL), length - 1); }

// Division of integers as Python has it, rounding down; by 0 it is 0, and so is its remainder.
template <class T>
__device__ T floor_divide(T x, T y) {
    if (y == 0) return 0;
    T q = x / y;
    return q - (x % y != 0 && (x < 0) != (y < 0));
}
template <class T>
__device__ T modulo(T x, T y) {
    return y == 0 ? 0 : x - y * floor_divide(x, y);
}

// And as C has it.
template <class T>
__device__ T divide(T x, T y) {
    return y == 0 ? 0 : x / y;
}
template <class T>
__device__ T remainder(T x, T y) {
    return y == 0 ? 0 : x % y;
}

__device__ inline Accum sigmoid(Accum x) { return 1 / (1 + exp(-x)); }
