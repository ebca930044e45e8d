// A 64-bit word in global memory that says that what was written before it can be read.
#pragma once

__device__ inline unsigned long long load_acquire(const unsigned long long* address) {
    unsigned long long x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(address) : "memory");
    return x;
}

__device__ inline void store_release(unsigned long long* address, unsigned long long x) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}
