// Into how many shares the keys of a head are cut (attention/shares.cuh). Where lengths are data, a sequence may be far
// longer than all others: each is cut by its own length then, in shares of SHARE_TILES key tiles at most.
#pragma once
#include "attention/head.cuh"

using namespace config;

constexpr bool BY_LENGTH = SHARE_TILES > 0;

// Shares of `size` key tiles at most of a sequence that has so many keys; one without any has one.
__device__ inline int shares_of_keys(int keys, int size = BY_LENGTH ? SHARE_TILES : 1) {
    return max(1, tiles_in(tiles_in(keys, KEYS), size));
}
// Into how many the keys of a head are cut.
__device__ inline int shares_of(const Params& p, const Head& head) {
    return BY_LENGTH ? shares_of_keys(head.keys(p)) : p.shares;
}
