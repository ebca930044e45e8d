// What tells thread blocks of the Hopper backward how far sums of dQ are.
#pragma once
#include "sm90/backward_tiles.cuh"

// How far dQ is, in `counters` behind the ticket: heads of K and V (their shares) take the room in dq_sum in turn.
struct DQCounters {
    unsigned *ticket, *clear, *added, *left;
    int tiles;  // of queries, for one head of K and V, or the most of a share

    __device__ DQCounters(const Params& p) {
        ticket = p.counters + 1;          // who turns the next tile of queries, or part of one, to rows
        clear = ticket + 1;               // of a share, tiles of queries (parts) in whose place are zeros
        added = clear + Share::count(p);  // thread blocks, with a key tile each, that have added to a tile of queries
        tiles = Share::most_tiles(p);
        // SHARES: of a consumer's keys, shares that left their sums.
        left = added + QueryTiles<ROWS>::of_head(p) * p.heads_q * p.batch;
    }

    // As it is at first, by a launch with a block of 128 threads for each tile of queries, which has its number: zeros
    // in all counters, and where the sums of the first `cleared` shares will be, whose tickets are taken.
    __device__ void begin(const Params& p, unsigned number) const {
        static_assert(DQ_TILE % 512 == 0);
        unsigned places = p.cleared * tiles, blocks = gridDim.x - ORDERED;
        for (unsigned i = number; i < places; i += blocks) {
            float4* sums = (float4*)(p.dq_sum + (long long)i * DQ_TILE) + threadIdx.x;
#pragma unroll
            for (int n = 0; n < DQ_TILE / 512; n++) sums[128 * n] = make_float4(0, 0, 0, 0);
        }
        if (threadIdx.x != 0) return;
        if (number == 0) p.counters[0] = 0, *ticket = places * FINISH_PARTS;
        if (number < Share::count(p)) clear[number] = number < p.cleared ? tiles * FINISH_PARTS : 0;
        added[number] = 0;
        int divided = SHARES ? p.heads_k * p.batch - p.whole_heads : 0;  // heads
        int sums = KeyTiles<CLUSTER_KEYS>::of_head(p) * divided * CLUSTER * WARPGROUPS;
        for (int i = number; i < sums; i += blocks) left[i] = 0;
    }

    // The first tile of a share's sums, less that of its queries.
    __device__ int shift(const Params& p, int share) const {
        return SHARES ? share % p.resident * tiles - Share(p, share).first(p) : (share % p.resident - share) * tiles;
    }

    // Wait until there are zeros where the sums of a share will be. Before, sums of a share of an earlier round lie
    // there (resident >= 2 * together): all its tickets are taken, and none of them waits for one that came later.
    __device__ void wait_for_room(int share) const {
        while (load_acquire(clear + share) != tiles * FINISH_PARTS) {
        }
        fence_async_global();
    }
};
