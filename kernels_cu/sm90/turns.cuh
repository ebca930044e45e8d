// Warpgroups that compute take turns to issue the products of their scores. Left alone they would fall into step: all
// wait for the tensor cores, then all leave them idle. (FlashAttention-3's "ping-pong", Shah et al. 2024, section 3.1.)
#pragma once
#include "ptx/barrier.cuh"

template <int GROUPS, int FIRST_BARRIER>
struct Turns {
    int group;

    // Once, before the first turn.
    __device__ void start() const {
        if (GROUPS > 1 && group == GROUPS - 1) arrive_threads<256>(FIRST_BARRIER);
    }
    __device__ void wait() const {
        if (GROUPS > 1) sync_threads<256>(FIRST_BARRIER + group);
    }
    __device__ void pass() const {
        if (GROUPS > 1) arrive_threads<256>(FIRST_BARRIER + (group + 1) % GROUPS);
    }
};
