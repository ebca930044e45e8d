// The numbered barriers of a thread block; 0 is __syncthreads.
#pragma once

template <int THREADS>
__device__ void sync_threads(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// To be one of them without waiting for the others.
template <int THREADS>
__device__ void arrive_threads(int number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// As sync_threads, and whether all of them say yes.
template <int THREADS>
__device__ bool all_threads(int number, bool yes) {
    unsigned all;
    asm volatile(
        "{ .reg .pred yes, all; setp.ne.u32 yes, %1, 0; barrier.cta.red.and.pred all, %2, %3, yes; "
        "selp.u32 %0, 1, 0, all; }"
        : "=r"(all)
        : "r"(unsigned(yes)), "r"(number), "n"(THREADS)
        : "memory");
    return all;
}
