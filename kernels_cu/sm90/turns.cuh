// Warpgroups that compute take turns to issue the products of their scores. Left alone they would fall into step: all
// wait for the tensor cores, then all leave them idle. (FlashAttention-3's "ping-pong", Shah et al. 2024, section 3.1.)
#pragma once
#include "ptx/barrier.cuh"

template <int WARPGROUPS, int FIRST_BARRIER>
struct Turns {
    int warpgroup;

    // Once, before the first turn.
    __device__ void start() const {
        if (WARPGROUPS > 1 && warpgroup == WARPGROUPS - 1) arrive_threads<256>(FIRST_BARRIER);
    }
    __device__ void wait() const {
        if (WARPGROUPS > 1) sync_threads<256>(FIRST_BARRIER + warpgroup);
    }
    __device__ void pass() const {
        if (WARPGROUPS > 1) arrive_threads<256>(FIRST_BARRIER + (warpgroup + 1) % WARPGROUPS);
    }
};
