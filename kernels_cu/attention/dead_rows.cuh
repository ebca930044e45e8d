// Keys that no query sees and queries that see no key may hold anything. Their probabilities are 0, but 0 times NaN is
// NaN: where they come in a tile with others, and what brings the tile does not leave them out, zeros take their place.
#pragma once
#include "attention/pairs.cuh"
#include "ptx/shared.cuh"

// Which of a tile's COUNT rows are dead, a bit for each; by whole warps.
template <int COUNT>
struct DeadRows {
    static constexpr int WORDS = (COUNT + 31) / 32;
    unsigned bits[WORDS];

    template <class F>
    __device__ DeadRows(F dead) {
#pragma unroll
        for (int n = 0; n < WORDS; n++) {
            int row = 32 * n + threadIdx.x % 32;
            bits[n] = __ballot_sync(~0u, row < COUNT && dead(row));
        }
    }

    __device__ bool any() const {
        unsigned all = 0;
#pragma unroll
        for (int n = 0; n < WORDS; n++) all |= bits[n];
        return all != 0;
    }

    // Zeros there, by one of WARPS warps, 16 bytes after the other whichever row they are of: the faster one where all
    // are dead, as in tiles of padding. (The backward, which does so once for a tile of keys, spills with it.)
    template <int WARPS, class Tile>
    __device__ void clear_many(Tile tile, int warp) const {
        constexpr int EACH = 16 / sizeof(Product), PIECES = Tile::COLUMNS / EACH;
        constexpr float ZEROS[4] = {};
#pragma unroll
        for (int n = 0; n < WORDS; n++) {
            if (bits[n] == 0) continue;
#pragma unroll 1
            for (int piece = 32 * warp + threadIdx.x % 32; piece < 32 * PIECES; piece += 32 * WARPS) {
                int row = piece / PIECES;
                if (bits[n] >> row & 1) store_shared_16(tile.address(32 * n + row, piece % PIECES * EACH), ZEROS);
            }
        }
    }

    // The same row after row.
    template <int WARPS, class Tile>
    __device__ void clear(Tile tile, int warp) const {
        constexpr int EACH = 16 / sizeof(Product);
        constexpr float ZEROS[4] = {};
        unsigned own = 0;
        for (int i = 0; i < 32; i += WARPS) own |= 1u << i;
        own <<= warp;
#pragma unroll
        for (int n = 0; n < WORDS; n++)
#pragma unroll 1
            for (unsigned rest = bits[n] & own; rest != 0; rest &= rest - 1) {
                int row = 32 * n + __ffs(rest) - 1;
                for (int column = threadIdx.x % 32 * EACH; column < Tile::COLUMNS; column += 32 * EACH)
                    store_shared_16(tile.address(row, column), ZEROS);
            }
    }
};

// Of COUNT keys from `first` on. (Those behind the last live one nobody loads.)
template <int COUNT>
__device__ DeadRows<COUNT> unseen_keys(const Pairs& pairs, int first) {
    Range live = pairs.head.live_keys(pairs.p);
    return DeadRows<COUNT>(
        [&](int j) { return first + j < live.begin || (first + j < live.end && !pairs.key_seen(first + j)); });
}

// Whether the i-th query of those whose numbers (attention/prepare.cuh) lie in shared memory sees no key, or is none.
__device__ inline bool is_blind(unsigned numbers, int i) {
    return load_shared_number(numbers + sizeof(Accum) * i, Accum()) == MINUS_INFINITY;
}

template <class T>
__device__ bool only_zeros(const Params& p, const T* row) {
    for (int c = 0; c < p.dim_v; c++)
        if (to_float(row[c]) != 0) return false;
    return true;
}

// rowsum(dO * O) of a query, given as added up. One that sees nothing has zeros in O: then it is 0, whatever dO is.
__device__ inline Accum sum_with_zeros(const Params& p, const Head& head, int i, Accum sum) {
    return sum == sum || !only_zeros(p, head.query_row(p.out, p.out_strides, i)) ? sum : 0;
}
