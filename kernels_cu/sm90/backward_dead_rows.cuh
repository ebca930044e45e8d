// Zeros in the Hopper backward's tiles where rows are dead, before products read them: the consumers write them.
#pragma once
#include "attention/dead_rows.cuh"
#include "sm90/backward_tiles.cuh"

// Rows may hold anything where key_mask hides a key, or leaves a query none. (What is dead by position no map knows of;
// where that is data, maps know of all, also of the rows behind a sequence's end.)
constexpr bool CLEARS = KEY_MASK || SHIFTS;

// Which of a block's keys, from `first` on, nobody sees.
__device__ inline DeadRows<KEYS> dead_keys(const Pairs& pairs, int first) {
    if constexpr (!SHIFTS) return unseen_keys<KEYS>(pairs, first);
    Range seen = pairs.head.seen_keys(pairs.p);
    return DeadRows<KEYS>([&](int j) {
        return first + j < seen.begin || first + j >= seen.end || !pairs.key_seen(first + j);
    });
}

// Zeros there, by one of WARPS warps. Of short sequences many rows are dead, most of them at the end of a tile.
// From row `zeros` on there are some.
template <int WARPS, int COUNT, class Tile>
__device__ void clear_rows(DeadRows<COUNT> dead, Tile tile, int warp, int zeros = COUNT) {
    if constexpr (WHOLE_BY_LENGTH) {
        constexpr float ZEROS[4] = {};
        int first = dead.take_end(), thread = 32 * warp + threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < Tile::BYTES / 16; n += 32 * WARPS) {
            int row = (n + thread) / 8 % COUNT;  // eight threads a row of a block, whatever its order
            if (row >= first && row < zeros) store_shared_16(tile.base + 16 * (n + thread), ZEROS);
        }
        if (!dead.any()) return;
    }
    dead.template clear<WARPS>(tile, warp);
}

// Zeros in K and V of a key tile that has arrived; by all consumers together. `filled` (WHOLE_BY_LENGTH): of the tile
// before, behind which there are zeros; then of this one.
__device__ inline void clear_keys(const Params& p, const Shared& s, const KeyTile& t, int& filled) {
    if constexpr (CLEARS) {
        Pairs pairs(p, t.head(p));
        int warp = threadIdx.x / 32 - 4;
        DeadRows<KEYS> dead = dead_keys(pairs, s.first_key(t));
        bool any = dead.any();
        int zeros = max(filled, loaded_keys(pairs.head.keys(p) - s.first_key(t)));
        if (WHOLE_BY_LENGTH) filled = DeadRows<KEYS>(dead).take_end();
        if (any) {
            clear_rows<CONSUMER_WARPS>(dead, s.k_tile(), warp, zeros);
            clear_rows<CONSUMER_WARPS>(dead, s.v_tile(), warp, zeros);
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

__device__ inline void clear_keys(const Params& p, const Shared& s, const KeyTile& t) {
    int filled = KEYS;
    clear_keys(p, s, t, filled);
}

// Zeros in arrays of a query tile whose numbers have arrived, the arrays at the latest when wait() returns; by each
// consumer for itself, before its products.
template <class F, class... Tiles>
__device__ void clear_queries(unsigned numbers, int warpgroup, F wait, Tiles... tiles) {
    if constexpr (CLEARS) {
        // Of rows that are dead by position the first is one, or the last.
        if (!KEY_MASK && !__any_sync(~0u, is_blind(numbers, threadIdx.x % 32 < 16 ? 0 : ROWS - 1))) return;
        DeadRows<ROWS> dead([&](int i) { return is_blind(numbers, i); });
        if (!dead.any()) return;
        wait();
        (clear_rows<4>(dead, tiles, threadIdx.x / 32 % 4), ...);
        fence_async();
        sync_threads<128>(3 + warpgroup);
    }
}
