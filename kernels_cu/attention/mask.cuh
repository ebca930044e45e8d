// The mask answers three questions and nothing else in a kernel knows about visibility: which key tiles does a query
// tile visit, which query tiles does a key tile visit, and may query i see key j (asked only in tiles that need it).
#pragma once
#include "attention/params.cuh"

// At the start of a branch that a whole warp takes or not: keeps the compiler from computing both sides always.
__device__ inline void keep_branch() { __syncwarp(); }

struct Range {
    int begin, end;
};

struct Mask {
    const Params& p;
    const unsigned char* keys;  // this batch's row of key_mask

    __device__ Mask(const Params& p, int batch) : p(p), keys(p.mask + (config::KEY_MASK ? batch * p.mask_batch : 0)) {}

    // Keys that any query of [q.begin, q.end) may see.
    __device__ Range keys_of(Range q) const {
        int begin = config::LEFT ? max(0, q.begin + p.diagonal - p.left) : 0;
        int end = config::RIGHT ? min(p.seq_k, q.end + p.diagonal + p.right) : p.seq_k;
        return {begin, max(begin, end)};
    }

    // Queries that may see any key of [k.begin, k.end).
    __device__ Range queries_of(Range k) const {
        int begin = config::RIGHT ? max(0, k.begin - p.diagonal - p.right) : 0;
        int end = config::LEFT ? min(p.seq_q, k.end - p.diagonal + p.left) : p.seq_q;
        return {begin, max(begin, end)};
    }

    // Whether some pair of this tile may be hidden, so that its elements must be tested.
    __device__ bool tests(Range q, Range k) const {
        return config::KEY_MASK || k.end > p.seq_k || (config::RIGHT && k.end - 1 > q.begin + p.diagonal + p.right) ||
               (config::LEFT && k.begin < q.end - 1 + p.diagonal - p.left);
    }

    __device__ bool visible(int i, int j) const { return in_band(i, j) && (!config::KEY_MASK || keys[j]); }

    // The part of it that positions decide.
    __device__ bool in_band(int i, int j) const {
        return j < p.seq_k && (!config::RIGHT || j <= i + p.diagonal + p.right) &&
               (!config::LEFT || j >= i + p.diagonal - p.left);
    }

    // The part that key_mask decides, for 32 keys from j on, as bits. To be asked by a whole warp.
    __device__ unsigned kept(int j) const {
        j += threadIdx.x % 32;
        return __ballot_sync(~0u, j < p.seq_k && keys[j]);
    }
};
