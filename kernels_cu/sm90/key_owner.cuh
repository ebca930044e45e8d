// What a consumer of the Hopper backward, or of its tangent, has at hand where it owns 64 keys of every tile.
#pragma once
#include "sm90/backward_dead_rows.cuh"
#include "sm90/backward_dq.cuh"

struct KeyOwner {
    const Params& p;
    Shared& s;
    int warpgroup, first_key;  // of the warpgroup's keys in a tile
    float factor;
    Dropout dropout;
    unsigned steps = 0;  // one number tells the place in every ring: registers are scarce here
    unsigned own;        // where numbers of the thread's queries lie among those of a tile, in bytes
    Shared::DQRing dq_ring;

    __device__ KeyOwner(const Params& p, Shared& s, int warpgroup)
        : p(p),
          s(s),
          warpgroup(warpgroup),
          first_key(64 * warpgroup),
          factor(Pairs(p, Head{}).factor()),
          dropout(p),
          own(column_offset()),
          dq_ring(s.dq(warpgroup)) {}

    __device__ static int warp() { return threadIdx.x / 32 % 4; }
};
