// Twin of ptx/cluster.cuh. A far address is marked as such.
#pragma once
#include "ptx_on_cpu/mbarrier.h"

namespace on_cpu {

constexpr unsigned FAR = 1u << 31;

inline char* at_far(unsigned far, unsigned bytes) {
    unsigned rank = far >> 24 & 127;
    if (!(far & FAR) || rank >= now.cluster) fail("%#x is no address in a cluster", far);
    Block& block = me->block->cluster[rank];
    if (block.left == 0) fail("writes to the shared memory of block %u, which has ended", block.number);
    return at(block, far & ~FAR, bytes, bytes);
}

template <class T>
void store_later(unsigned far, T x, unsigned far_barrier) {
    T* to = (T*)at_far(far, sizeof(T));
    auto* barrier = (Mbarrier*)at_far(far_barrier, 8);
    Block* block = &me->block->cluster[far >> 24 & 127];
    in_background([=] {
        *to = x;
        note_store(*block, far, sizeof(T), ANOTHER_BLOCK);
        barrier->complete(sizeof(T));
    });
}

}  // namespace on_cpu

inline unsigned far_address(unsigned address, unsigned rank) {
    return address & on_cpu::OFFSET | rank << 24 | on_cpu::FAR;
}
inline void sync_cluster() {
    on_cpu::Block& first = *on_cpu::me->block->cluster;
    on_cpu::meet(first.whole_cluster, on_cpu::now.threads * on_cpu::now.cluster, "sync_cluster");
}
inline void mbarrier_arrive_far(unsigned far_barrier) {
    ((on_cpu::Mbarrier*)on_cpu::at_far(far_barrier, 8))->arrive();
    on_cpu::release("mbarrier_arrive_far");
}
inline void store_far(unsigned far, unsigned x, unsigned far_barrier) { on_cpu::store_later(far, x, far_barrier); }
inline void store_far_16(unsigned far, uint4 x, unsigned far_barrier) { on_cpu::store_later(far, x, far_barrier); }
