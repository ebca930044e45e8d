// The thread blocks of a cluster run at the same time and reach each other's shared memory.
#pragma once

// Where an address of shared memory is in block `rank` of the cluster. "Far" addresses are such.
__device__ inline unsigned far_address(unsigned address, unsigned rank) {
    unsigned far;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(address), "r"(rank));
    return far;
}

// All threads of all blocks meet.
__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

// (What is written before is not released: that would be a fence for all of memory, which waits for every addition.)
__device__ inline void mbarrier_arrive_far(unsigned far_barrier) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(far_barrier) : "memory");
}

// Store a word; its bytes count on the barrier beside it.
__device__ inline void store_far(unsigned far, unsigned x, unsigned far_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(far), "r"(x),
                 "r"(far_barrier)
                 : "memory");
}

__device__ inline void store_far_16(unsigned far, uint4 x, unsigned far_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(far),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(far_barrier)
                 : "memory");
}
