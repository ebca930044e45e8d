// Additions in global memory whose result nobody waits for.
#pragma once

// Four consecutive floats, 16-byte aligned.
__device__ inline void red_add_4(float* address, const float (&x)[4]) {
    if constexpr (config::VECTOR_RED) {  // Hopper and later
        asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                     "f"(x[3])
                     : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) atomicAdd(address + i, x[i]);
    }
}

// Four doubles, 32 elements apart: a warp's lie side by side.
__device__ inline void red_add_4(double* address, const double (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) atomicAdd(address + 32 * i, x[i]);
}
