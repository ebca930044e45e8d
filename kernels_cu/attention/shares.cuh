// Where query tiles are fewer than multiprocessors, the keys that a tile visits are dealt out in shares, each as if it
// had no others (Dao et al. 2023, "Flash-Decoding"). Thread blocks leave O and lse of their share in memory, unrounded,
// and `attention_combine` makes one row of each: with lse = log sum exp(lse_n), O = sum exp(lse_n - lse) O_n.
#pragma once
#include "attention/pairs.cuh"
#include "attention/share_count.cuh"
#include "attention/tiles.cuh"
#include "ptx/launch.cuh"
#include "tile/rows.cuh"

using namespace config;

// The place, among the rows of all shares, of a row of one of them.
__device__ inline long long share_row(const Params& p, int share, long long row) {
    return Sequence::all_query_numbers(p, share) + row;
}

// What the `count` parts of a row weigh in it, as a warp finds it: of part n exp(lse(n) - lse).
struct PartWeights {
    Accum top, sum = 0, inverse;

    template <class F>
    __device__ PartWeights(const Params& p, const Head& head, int count, F lse) {
        int lane = threadIdx.x % 32;
        Accum alone = MINUS_INFINITY;
        if constexpr (SINKS) alone = Pairs(p, head).sink(head.q);
        top = alone;
        for (int n = lane; n < count; n += 32) top = larger(top, lse(n));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) top = larger(top, __shfl_xor_sync(~0u, top, step));
        if (top == MINUS_INFINITY) top = 0;  // no part has a key that the query sees
        for (int n = lane; n < count; n += 32) sum += relative(lse(n));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if constexpr (SINKS) sum += relative(alone);
        inverse = sum == 0 ? 0 : 1 / sum;
    }
    __device__ Accum operator()(Accum lse) const { return relative(lse) * inverse; }
    __device__ Accum lse() const { return sum == 0 ? MINUS_INFINITY : top + log(sum); }

   private:
    // To the part with the largest.
    __device__ Accum relative(Accum lse) const { return exp2_approx((lse - top) * LOG2_E); }
};

// Part `part` of a row of COLUMNS, by a warp: LANES of it have 4 columns each, of one share, the next ones of the next
// share, and so on.
template <int COLUMNS, int LANES>
__device__ inline void combine_shares(const Params& p, long long row, int part) {
    static_assert(COLUMNS % 4 == 0);
    QueryOf at = Sequence::numbered_query(p, row);
    Head head = Head::of_q(p, at.batch, at.head);
    int shares = shares_of(p, head), lane = threadIdx.x % 32, col = 4 * (part * LANES + lane % LANES);
    auto lse = [&](int n) { return p.share_lse[share_row(p, n, row)]; };
    PartWeights weight(p, head, shares, lse);
    if (p.lse != nullptr && part == 0 && lane == 0) p.lse[row] = weight.lse();

    struct alignas(16) Four {
        Accum x[4];
    };
    Four result = {};
    if (col < COLUMNS) {
#pragma unroll 8
        for (int n = lane / LANES; n < shares; n += 32 / LANES) {
            Accum w = weight(lse(n));
            Four more = *(const Four*)(p.share_out + share_row(p, n, row) * COLUMNS + col);
#pragma unroll
            for (int c = 0; c < 4; c++) result.x[c] = fma(w, more.x[c], result.x[c]);
        }
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2)
#pragma unroll
        for (int c = 0; c < 4; c++) result.x[c] += __shfl_xor_sync(~0u, result.x[c], step);
    if (lane >= LANES) return;

    Out* out = head.query_row(p.out, p.out_strides, at.query) + col;
    bool vectors = sizeof(Out) == 2 && (unsigned long long)out % 8 == 0 && p.dim_v % 4 == 0;
    const Accum(&x)[4] = result.x;
    if (vectors && col < p.dim_v) {
        if constexpr (sizeof(Out) == 2) *(uint2*)out = {pack2<Out>(x[0], x[1]), pack2<Out>(x[2], x[3])};
    } else {
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (col + c < p.dim_v) out[c] = from_float<Out>(x[c]);
    }
}

// What is launched where keys are dealt out: so many warps as it takes for each row, four of a block.
template <int COLUMNS, int LANES>
__device__ inline void combine_by_lanes(const Params& p) {
    constexpr int PARTS = tiles_in(COLUMNS, 4 * LANES);
    long long warp = blockIdx.x * 4ll + threadIdx.x / 32;
    if (warp / PARTS < Sequence::all_query_numbers(p))
        combine_shares<COLUMNS, LANES>(p, warp / PARTS, int(warp % PARTS));
}
template <int COLUMNS>
__device__ inline void combine_all_shares(const Params& p, int lanes) {
    if constexpr (SHARES) {
        wait_for_kernel_before();
        switch (lanes) {
            case 4: return combine_by_lanes<COLUMNS, 4>(p);
            case 8: return combine_by_lanes<COLUMNS, 8>(p);
            case 16: return combine_by_lanes<COLUMNS, 16>(p);
            default: return combine_by_lanes<COLUMNS, 32>(p);
        }
    }
}
