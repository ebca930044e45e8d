// Where query tiles are fewer than multiprocessors, the keys that a tile visits are dealt out in shares, each as if it had
// no others (Dao et al. 2023, "Flash-Decoding"). Thread blocks leave O and lse of their share in memory, in float32, and
// `attention_combine` makes one row of each: with lse = log sum exp(lse_n), O = sum exp(lse_n - lse) O_n.
#pragma once
#include "attention/pairs.cuh"

using namespace config;

// The place, among the rows of all shares, of a row of one of them.
__device__ inline long long share_row(const Params& p, int share, long long row) {
    return (long long)share * p.batch * p.heads_q * p.seq_q + row;
}

// One row, by a warp.
__device__ inline void combine_shares(const Params& p, long long row) {
    static_assert(DIM_V % 4 == 0);
    int lane = threadIdx.x % 32;
    Place at = query_place(p, row);
    Head head = Head::of_q(p, at.batch, at.head);
    float alone = MINUS_INFINITY;
    if constexpr (SINKS) alone = Pairs(p, head).sink(head.q);
    auto lse = [&](int n) { return p.share_lse[share_row(p, n, row)]; };
    float top = alone, sum = 0;
    for (int n = lane; n < p.shares; n += 32) top = fmaxf(top, lse(n));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (top == MINUS_INFINITY) top = 0;  // no share has a key that the query sees
    auto weight = [&](float of) { return exp2_approx((of - top) * LOG2_E); };
    for (int n = lane; n < p.shares; n += 32) sum += weight(lse(n));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if constexpr (SINKS) sum += weight(alone);
    float inverse = sum == 0 ? 0 : 1 / sum;
    if (p.lse != nullptr && lane == 0) p.lse[row] = sum == 0 ? MINUS_INFINITY : top + log(sum);

    constexpr int PASSES = (DIM_V + 127) / 128;  // of 4 columns for each lane
    float x[PASSES][4] = {};
    for (int first = 0; first < p.shares; first += 32) {
        int count = min(32, p.shares - first);
        float own = lane < count ? weight(lse(first + lane)) * inverse : 0;
        const float* from = p.share_out + share_row(p, first, row) * DIM_V + 4 * lane;
        long long next = share_row(p, 1, 0) * DIM_V;
#pragma unroll 8
        for (int n = 0; n < count; n++, from += next) {
            float w = __shfl_sync(~0u, own, n);
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                if (128 * i + 4 * lane >= DIM_V) continue;
                float4 more = *(const float4*)(from + 128 * i);
                x[i][0] = fmaf(w, more.x, x[i][0]), x[i][1] = fmaf(w, more.y, x[i][1]);
                x[i][2] = fmaf(w, more.z, x[i][2]), x[i][3] = fmaf(w, more.w, x[i][3]);
            }
        }
    }

    Out* out = head.query_row(p.out, p.out_strides, at.tile);
    bool vectors = (unsigned long long)out % 8 == 0 && p.dim_v % 4 == 0;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        int col = 128 * i + 4 * lane;
        if (vectors && col < p.dim_v) {
            *(uint2*)(out + col) = {pack2<Out>(x[i][0], x[i][1]), pack2<Out>(x[i][2], x[i][3])};
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (col + c < p.dim_v) out[col + c] = from_float<Out>(x[i][c]);
        }
    }
}
