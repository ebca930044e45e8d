// The numbered barriers of a thread block; 0 is __syncthreads.
#pragma once

template <int THREADS>
__device__ void sync_threads(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
