// A ring of STAGES stages in shared memory that one thread (or FILLERS warps) fills and WARPS warps read. Each stage
// has two barriers: "full", on which the bytes of a fill arrive, and "empty", on which every warp says that it is done
// with them. Either side keeps its own place in the ring.
#pragma once
#include "ptx/mbarrier.cuh"

template <int STAGES, int WARPS, int FILLERS = 1>
struct Ring {
    static constexpr int BYTES = 16 * STAGES;

    unsigned barriers;  // address of STAGES full and STAGES empty barriers
    int stage = 0;
    unsigned parity = 0;

    __device__ Ring(unsigned barriers) : barriers(barriers) {}

    __device__ void init() const {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(barriers + 8 * i, FILLERS);
            mbarrier_init(barriers + 8 * (STAGES + i), WARPS);
        }
    }

    __device__ unsigned full() const { return barriers + 8 * stage; }
    __device__ unsigned empty() const { return barriers + 8 * (STAGES + stage); }

    // The filling thread: wait until the stage is free.
    __device__ void wait_empty() const { mbarrier_wait(empty(), parity ^ 1); }

    // The same where the reading thread says first when the stage may be filled.
    __device__ void wait_turn() const { mbarrier_wait(empty(), parity); }

    // A filling warp, where warps fill by themselves: say that it is done.
    __device__ void filled() const { mbarrier_arrive_warp(full()); }

    // A reading warp: wait until the stage is full; and say that the warp is done with it.
    __device__ void wait_full() const { mbarrier_wait(full(), parity); }
    __device__ void release() const { mbarrier_arrive_warp(empty()); }

    // To the place that n advances from the start lead to.
    __device__ void go_to(unsigned n) { stage = n % STAGES, parity = n / STAGES % 2; }

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    // A reading warp that has no use for the stage.
    __device__ void pass() {
        wait_full();
        release();
        advance();
    }
};
