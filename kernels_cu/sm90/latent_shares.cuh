// Keys of latent attention in shares: of what size, and a row made of them. O is wide, so that a share leaves much in
// memory: sequences are cut where some thread block would have more to do than others, and no more.
#pragma once
#include "attention/shares.cuh"
#include "sm90/forward_schedule.cuh"

// How many key tiles a share has. BY_LENGTH, by what there is to do in all, of which each multiprocessor should have as
// much: a warp sums it up. What one block can do beside the others is not cut; else shares are half as long as what
// each has, or SHARE_TILES.
struct ShareSize {
    int tiles = 1;

    __device__ ShareSize(const Params& p) {
        if constexpr (!BY_LENGTH) return;
        float sum = 0;
        int longest = 0;
        for (int n = threadIdx.x % 32; n < p.batch; n += 32) {
            int own = tiles_in(Head::of(p, n, 0, 0).keys(p), KEYS);
            sum += own;
            longest = max(longest, own);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            longest = max(longest, __shfl_xor_sync(~0u, longest, step));
        }
        int each = int(fminf(sum * p.wide / p.processors, 1 << 24)) + 1;
        tiles = max(longest <= each + each / 8 ? longest : tiles_in(each, 2), SHARE_TILES);
    }

    __device__ int shares(const Params& p, const Head& head) const {
        if constexpr (!SHARES) return 1;
        return BY_LENGTH ? shares_of_keys(head.keys(p), tiles) : p.shares;
    }
};

// Over the key tiles of a tile of queries, or of its share.
__device__ inline TileWalk share_of(const Params& p, const Tile& tile, int shares) {
    TileWalk walk(p, tile.head, tile.queries);
    return SHARES ? walk.share(tile.share, shares) : walk;
}

// What shares have left becomes a row: by a warp, or (BY_BLOCKS, where rows are few and so shares many) by a block, of
// which a warp has a fourth of the columns and every fourth share. What has one share is written.
constexpr int SPLIT = 4, STRIPE = DIM_V / SPLIT, COMBINERS = BY_BLOCKS ? 32 * SPLIT * SPLIT : 128;

__device__ inline void combine_by_warp(const Params& p, long long row) {
    if (row >= Sequence::all_query_numbers(p)) return;
    QueryOf at = Sequence::numbered_query(p, row);
    int shares = ShareSize(p).shares(p, Head::of_q(p, at.batch, at.head));
    if (shares > 1) combine_shares<DIM_V>(p, row, [=](const Head&) { return shares; });
}

__device__ inline void combine_by_block(const Params& p, long long row) {
    __shared__ float4 parts[SPLIT][DIM_V / 4];
    int lane = threadIdx.x % 32, stripe = threadIdx.x / 32 % SPLIT, of = threadIdx.x / 32 / SPLIT;
    QueryOf at = Sequence::numbered_query(p, row);
    Head head = Head::of_q(p, at.batch, at.head);
    int shares = ShareSize(p).shares(p, head);
    if (shares == 1) return;
    auto lse = [&](int n) { return p.share_lse[share_row(p, n, row)]; };
    float alone = MINUS_INFINITY;
    if constexpr (SINKS) alone = Pairs(p, head).sink(head.q);
    float top = alone, sum = 0;
    for (int n = lane; n < shares; n += 32) top = larger(top, lse(n));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = larger(top, __shfl_xor_sync(~0u, top, step));
    if (top == MINUS_INFINITY) top = 0;  // no share has a key that the query sees
    auto weight = [&](float of) { return exp2_approx((of - top) * LOG2_E); };
    for (int n = lane; n < shares; n += 32) sum += weight(lse(n));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if constexpr (SINKS) sum += weight(alone);
    float inverse = sum == 0 ? 0 : 1 / sum;
    if (p.lse != nullptr && threadIdx.x == 0) p.lse[row] = sum == 0 ? MINUS_INFINITY : top + log(sum);

    float4 result{0, 0, 0, 0};
    const float* from = p.share_out + row * DIM_V + stripe * STRIPE + 4 * lane;
    long long next = share_row(p, 1, 0) * DIM_V;
#pragma unroll 8
    for (int n = of; n < shares; n += SPLIT) {
        float w = weight(lse(n)) * inverse;
        float4 x = *(const float4*)(from + n * next);
        result.x = fmaf(w, x.x, result.x), result.y = fmaf(w, x.y, result.y);
        result.z = fmaf(w, x.z, result.z), result.w = fmaf(w, x.w, result.w);
    }
    parts[of][stripe * 32 + lane] = result;
    __syncthreads();
    if (of > 0) return;
#pragma unroll
    for (int n = 1; n < SPLIT; n++) {
        float4 x = parts[n][stripe * 32 + lane];
        result.x += x.x, result.y += x.y, result.z += x.z, result.w += x.w;
    }
    Out* out = head.query_row(p.out, p.out_strides, at.query) + stripe * STRIPE + 4 * lane;
    if ((unsigned long long)out % 8 == 0) {
        *(uint2*)out = {pack2<Out>(result.x, result.y), pack2<Out>(result.z, result.w)};
    } else {
        out[0] = from_float<Out>(result.x), out[1] = from_float<Out>(result.y);
        out[2] = from_float<Out>(result.z), out[3] = from_float<Out>(result.w);
    }
}
