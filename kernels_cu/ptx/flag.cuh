// Words in global memory that say that what was written before them can be read.
#pragma once

__device__ inline unsigned long long load_acquire(const unsigned long long* address) {
    unsigned long long x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(address) : "memory");
    return x;
}

__device__ inline void store_release(unsigned long long* address, unsigned long long x) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}

__device__ inline unsigned load_acquire(const unsigned* address) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

__device__ inline void add_release(unsigned* address, unsigned x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
