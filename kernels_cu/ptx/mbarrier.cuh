// Barriers in shared memory, 8 bytes each. A phase is over when `count` arrivals have come and all the bytes that were
// announced have arrived; phases are told apart by their parity, 0 for the first.
#pragma once

__device__ inline void mbarrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After the inits, before the block's threads meet: TMA sees them too.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp arrives: one of its lanes, when all are there.
__device__ inline void mbarrier_arrive_warp(unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Arrive, and announce bytes that copies will bring.
__device__ inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait until the phase of this parity is over. (On a new barrier, the phase of parity 1 is.)
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    unsigned over;
    do {
        asm volatile(
            "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!over);
}

// Whether it is. Who is told so still waits, before it reads.
__device__ inline bool mbarrier_test(unsigned barrier, unsigned parity) {
    unsigned over;
    asm volatile(
        "{ .reg .pred over; mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return over != 0;
}
