// TMA moves boxes of a 4-dimensional array (column, row, head, batch), and consecutive bytes. What a
// box has outside of the array is read as zeros. It is not written either, but along a row only from the next 16 bytes
// on: a store fills the last 16 of which a row has some (triton-lang/triton#11583). So rows of a result that end in
// between have no map (gpu/tensormap.py).
#pragma once

// How an array lies in memory and what its boxes are: made by the driver (gpu/tensormap.py), opaque.
struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ inline void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Ask for a box to come to the L2 cache. Nobody is told when it has.
__device__ inline void tma_prefetch(const TensorMap& map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Whether this is the one thread of a warp, all of whose threads are here, that asks for boxes. (Of one that is chosen
// otherwise ptxas does not know that it is alone, and asks in a loop over threads: a box then takes some 90 cycles.)
__device__ inline bool elected() {
    unsigned yes;
    asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }" : "=r"(yes));
    return yes;
}

// Load a box; its bytes, also those outside of the array, count on the barrier.
__device__ inline void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int column, int row, int head,
                                int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Store a box, or not: a branch in its place would make the compiler take addresses for different in different lanes.
__device__ inline void tma_store(const TensorMap& map, unsigned shared, int column, int row, int head, int batch,
                                 bool yes = true) {
    asm volatile(
        "{ .reg .pred yes; setp.ne.u32 yes, %6, 0; "
        "@yes cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1]; }" ::"l"(&map),
        "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(unsigned(yes))
        : "memory");
}

// The same of a map of windows (gpu/tensormap.py). Its fifth axis takes an address back by 2^30 rows.
__device__ inline void tma_load_window(unsigned shared, const TensorMap& map, unsigned barrier, int column, int row,
                                       int head, int entry) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(entry), "r"(1 << 30)
        : "memory");
}
__device__ inline void tma_store_window(const TensorMap& map, unsigned shared, int column, int row, int head,
                                        int entry) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(shared), "r"(column), "r"(row), "r"(head), "r"(entry), "r"(1 << 30)
        : "memory");
}

// Copy consecutive bytes, a multiple of 16 and so aligned; they count on the barrier.
__device__ inline void bulk_load(unsigned shared, const void* global, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Add consecutive floats of shared memory to those in global memory; bytes as above.
__device__ inline void bulk_add(float* global, unsigned shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

// Copy them there.
__device__ inline void bulk_store(float* global, unsigned shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}

// The thread's stores since the last commit become one group.
__device__ inline void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until the thread's stores have read shared memory.
__device__ inline void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Wait until they have been written, but for the last PENDING groups.
template <int PENDING = 0>
__device__ void tma_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Between a thread's own stores to shared memory and their use by TMA or wgmma.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Between stores to global memory by threads and by TMA, with a flag in between.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
