// Zeros in the Hopper backward's tiles where rows are dead, before products read them: the consumers write them.
#pragma once
#include "attention/dead_rows.cuh"
#include "sm90/backward_tiles.cuh"

// Rows may hold anything where key_mask hides a key, or leaves a query none. (What is dead by position no map knows of
// where that is data; WINDOWS: but for where sequences end.)
constexpr bool CLEARS = KEY_MASK || SHIFTS;

// Which of a block's keys, from `first` on, nobody sees.
__device__ inline DeadRows<KEYS> dead_keys(const Pairs& pairs, int first) {
    if constexpr (!SHIFTS) return unseen_keys<KEYS>(pairs, first);
    Range seen = pairs.head.seen_keys(pairs.p);
    int end = pairs.head.keys(pairs.p);
    return DeadRows<KEYS>([&](int j) {
        bool dead = first + j < seen.begin || first + j >= seen.end || !pairs.key_seen(first + j);
        return dead && (!WINDOWS || first + j < end);
    });
}

// Zeros in K and V of a key tile that has arrived; by all consumers together.
__device__ inline void clear_keys(const Params& p, const Shared& s, const KeyTile& t) {
    if constexpr (CLEARS) {
        Pairs pairs(p, t.head(p));
        int warp = threadIdx.x / 32 - 4;
        DeadRows<KEYS> dead = dead_keys(pairs, s.first_key(t));
        bool any = dead.any();
        if (any) {
            dead.clear<CONSUMER_WARPS>(s.k_tile(), warp);
            dead.clear<CONSUMER_WARPS>(s.v_tile(), warp);
            if (TK) dead.clear<CONSUMER_WARPS>(s.tk_tile(), warp);
        }
        if constexpr (SPLIT_KEYS) {
            DeadRows<KEYS> far = dead_keys(pairs, s.far_key(t));
            far.clear<CONSUMER_WARPS>(s.far_k_tile(), warp);
            any = any || far.any();
        }
        if (!any) return;
        fence_async();
        sync_threads<128 * WARPGROUPS>(1);
    }
}

// Zeros in arrays of a query tile whose numbers have arrived, the arrays at the latest when wait() returns; by each
// consumer for itself, before its products. Behind the first `rows` there are zeros.
template <class F, class... Tiles>
__device__ void clear_queries(unsigned numbers, int warpgroup, int rows, F wait, Tiles... tiles) {
    if constexpr (CLEARS) {
        // Of rows that are dead by position the first is one, or the last.
        if (!KEY_MASK && !__any_sync(~0u, is_blind(numbers, threadIdx.x % 32 < 16 ? 0 : rows - 1))) return;
        DeadRows<ROWS> dead([&](int i) { return i < rows && is_blind(numbers, i); });
        if (!dead.any()) return;
        wait();
        (dead.template clear<4>(tiles, threadIdx.x / 32 % 4), ...);
        fence_async();
        sync_threads<128>(3 + warpgroup);
    }
}
