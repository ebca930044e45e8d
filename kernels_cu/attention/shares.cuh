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

// What the parts of a row weigh in it, as a warp finds it: of part n exp(lse(n) - lse); `count()`: how many there are.
struct PartWeights {
    Accum top, sum = 0, inverse;

    template <class Count, class F>
    __device__ PartWeights(const Params& p, const Head& head, Count count, F lse) {
        int lane = threadIdx.x % 32;
        Accum alone = MINUS_INFINITY;
        if constexpr (SINKS) alone = Pairs(p, head).sink(head.q);
        top = alone;
        for (int n = lane; n < count(); n += 32) top = larger(top, lse(n));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) top = larger(top, __shfl_xor_sync(~0u, top, step));
        if (top == MINUS_INFINITY) top = 0;  // no part has a key that the query sees
        for (int n = lane; n < count(); n += 32) sum += relative(lse(n));
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

// One row of COLUMNS, by a warp; of(head): how many shares there are of its keys.
template <int COLUMNS, class F>
__device__ inline void combine_shares(const Params& p, long long row, F of) {
    static_assert(COLUMNS % 4 == 0);
    int lane = threadIdx.x % 32;
    QueryOf at = Sequence::numbered_query(p, row);
    Head head = Head::of_q(p, at.batch, at.head);
    auto shares = [&] { return of(head); };
    auto lse = [&](int n) { return p.share_lse[share_row(p, n, row)]; };
    PartWeights weight(p, head, shares, lse);
    if (p.lse != nullptr && lane == 0) p.lse[row] = weight.lse();

    constexpr int PASSES = (COLUMNS + 127) / 128;  // of 4 columns for each lane
    struct alignas(16) Four {
        Accum x[4];
    };
    Four result[PASSES] = {};
    for (int first = 0; first < shares(); first += 32) {
        int count = min(32, shares() - first);
        Accum own = lane < count ? weight(lse(first + lane)) : 0;
        const Accum* from = p.share_out + share_row(p, first, row) * COLUMNS + 4 * lane;
        long long next = share_row(p, 1, 0) * COLUMNS;
#pragma unroll 8
        for (int n = 0; n < count; n++, from += next) {
            Accum w = __shfl_sync(~0u, own, n);
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                if (128 * i + 4 * lane >= COLUMNS) continue;
                Four more = *(const Four*)(from + 128 * i);
#pragma unroll
                for (int c = 0; c < 4; c++) result[i].x[c] = fma(w, more.x[c], result[i].x[c]);
            }
        }
    }

    Out* out = head.query_row(p.out, p.out_strides, at.query);
    bool vectors = sizeof(Out) == 2 && (unsigned long long)out % 8 == 0 && p.dim_v % 4 == 0;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        int col = 128 * i + 4 * lane;
        const Accum(&x)[4] = result[i].x;
        if (vectors && col < p.dim_v) {
            if constexpr (sizeof(Out) == 2) *(uint2*)(out + col) = {pack2<Out>(x[0], x[1]), pack2<Out>(x[2], x[3])};
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (col + c < p.dim_v) out[col + c] = from_float<Out>(x[c]);
        }
    }
}

// What is launched where keys are dealt out: a warp for each row.
template <int COLUMNS>
__device__ inline void combine_all_shares(const Params& p) {
    if constexpr (SHARES) {
        wait_for_kernel_before();
        long long row = blockIdx.x * 4ll + threadIdx.x / 32;
        auto of = [&](const Head& head) { return shares_of(p, head); };
        if (row < Sequence::all_query_numbers(p)) combine_shares<COLUMNS>(p, row, of);
    }
}
