// Twin of ptx/mbarrier.cuh.
#pragma once

namespace on_cpu {

struct alignas(8) Mbarrier {
    unsigned count : 15, pending : 15, parity : 1, unknown : 1;
    int bytes;  // announced and not arrived

    void settle() {
        if (pending == 0 && bytes == 0) parity ^= 1, pending = count;
    }
    void arrive() {
        if (pending == 0) fail("more arrive on an mbarrier than the %u it counts", count);
        pending--;
        settle();
    }
    void complete(int arrived) {
        bytes -= arrived;
        settle();
    }
};

inline Mbarrier& mbarrier(unsigned address) {
    Mbarrier& barrier = shared<Mbarrier>(address);
    if (barrier.unknown) fail("the mbarrier at %u was not initialised", address);
    return barrier;
}

}  // namespace on_cpu

inline void mbarrier_init(unsigned barrier, int count) {
    on_cpu::shared<on_cpu::Mbarrier>(barrier) = {unsigned(count), unsigned(count), 0, 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(unsigned barrier) {
    on_cpu::mbarrier(barrier).arrive();
    on_cpu::release("mbarrier_arrive");
}
inline void mbarrier_arrive_warp(unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
    on_cpu::mbarrier(barrier).bytes += bytes;
    on_cpu::mbarrier(barrier).arrive();
}
inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    on_cpu::Mbarrier& b = on_cpu::mbarrier(barrier);
    on_cpu::wait_until("mbarrier_wait (address, parity)", [&b, parity] { return b.parity != parity; }, barrier, parity);
}
inline bool mbarrier_test(unsigned barrier, unsigned parity) { return on_cpu::mbarrier(barrier).parity != parity; }
