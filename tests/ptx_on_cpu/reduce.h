// Twin of ptx/reduce.cuh.
#pragma once

inline void red_add_4(float* address, const float (&x)[4]) {
    if ((unsigned long long)address % 16) on_cpu::fail("red.add of 16 bytes at %p", address);
    for (int i = 0; i < 4; i++) address[i] += x[i];
}
inline void red_add_4(double* address, const double (&x)[4]) {
    for (int i = 0; i < 4; i++) address[32 * i] += x[i];
}
