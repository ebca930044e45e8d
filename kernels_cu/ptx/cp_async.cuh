// Copies from global to shared memory that run in the background, in groups.
#pragma once

// 16 bytes, read or zeros. (A size between costs seven more instructions.)
__device__ inline void cp_async_16(unsigned shared, const void* global, bool read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(read ? 16 : 0)
                 : "memory");
}

// A float, or 0.
__device__ inline void cp_async_float(unsigned shared, const float* global, bool read) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(read ? 4 : 0)
                 : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of the thread's last groups are still under way.
template <int PENDING>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
