// Additions in global memory whose result nobody waits for, and the flags that order them.
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

__device__ inline unsigned load_acquire(const unsigned* address) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

__device__ inline void add_release(unsigned* address, unsigned x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
