// The results of a piece of latent attention: rows, or what shares leave in memory, and how that becomes rows.
#pragma once
#include "attention/shares.cuh"
#include "sm90/latent_stretches.cuh"

constexpr int STRIPE = 128, STRIPES = DIM_V / STRIPE;
// BY_SHARES: stripes that a block has of a row, and warps that a stripe has.
constexpr int BLOCK_STRIPES = STRIPES / ROW_BLOCKS, SPLIT = 4 * ROW_BLOCKS;
constexpr int COMBINERS = BY_SHARES ? 32 * SPLIT * BLOCK_STRIPES : 128;

// Rows of a tile of queries, and of how many heads it has some.
using TileRows = Placement<false, PACK == 1 ? 0 : HEAD_ROWS>;
__device__ inline int heads_of(const Params& p, const Head& first) {
    return PACK > 1 ? min(PACK, (first.k + 1) * group_of(p) - first.q) : 1;
}

__device__ inline void add_times(float4& sum, float w, float4 x) {
    sum.x = fmaf(w, x.x, sum.x), sum.y = fmaf(w, x.y, sum.y);
    sum.z = fmaf(w, x.z, sum.z), sum.w = fmaf(w, x.w, sum.w);
}
__device__ inline void store_four(Out* to, float4 x) {
    if ((unsigned long long)to % 8 == 0) {
        *(uint2*)to = {pack2<Out>(x.x, x.y), pack2<Out>(x.z, x.w)};
    } else {
        to[0] = from_float<Out>(x.x), to[1] = from_float<Out>(x.y);
        to[2] = from_float<Out>(x.z), to[3] = from_float<Out>(x.w);
    }
}

// Which row of all that shares leave in memory is row `row` of a tile of queries, or `number` of an array that has a
// number for each query.
__device__ inline long long left_row(const Params& p, int place, int row, long long number) {
    return STRETCHES ? place * (long long)ROWS + row : share_row(p, place, number);
}

// A piece, and where its results go.
struct PieceResults {
    const Params& p;
    Piece piece{};

    __device__ const Head& head() const { return piece.tile.head; }
    __device__ bool cut() const { return SHARES && piece.place != Piece::WHOLE; }
    __device__ bool real(const Pair& x) const {
        return x.head - head().q < heads_of(p, head()) && x.i < head().queries(p);
    }
    // Row `row` of the tile of queries among those that shares leave.
    __device__ long long left(int row, const Pair& x) const { return left_row(p, piece.place, row, row_number(x)); }

    // (To all shares together it is added once.)
    __device__ float sink(const Pairs& pairs, const Pair& x) const {
        return cut() ? MINUS_INFINITY : pairs.sink(x.head);
    }
    __device__ bool takes_lse() const { return cut() || p.lse != nullptr; }
    __device__ void store_lse(int row, const Pair& x, float lse) const {
        if (real(x)) *(cut() ? p.share_lse + left(row, x) : p.lse + row_number(x)) = lse;
    }

   private:
    __device__ long long row_number(const Pair& x) const { return head().other(x.head).row_number(p, x.i); }
};

// A stripe of a row of `parts` parts, by a warp; at(n): which row part n is.
template <class F>
__device__ void combine_stripe(const Params& p, const Head& head, int query, int stripe, int parts, F at) {
    int lane = threadIdx.x % 32;
    auto lse = [&](int n) { return p.share_lse[at(n)]; };
    PartWeights weight(p, head, parts, lse);
    if (p.lse != nullptr && lane == 0 && stripe == 0) p.lse[head.row_number(p, query)] = weight.lse();

    int column = stripe * STRIPE + 4 * lane;
    float4 result{0, 0, 0, 0};
    for (int first = 0; first < parts; first += 32) {
        int count = min(32, parts - first);
        float own = lane < count ? weight(lse(first + lane)) : 0;
#pragma unroll 8
        for (int n = 0; n < count; n++) {
            float w = __shfl_sync(~0u, own, n);
            add_times(result, w, *(const float4*)(p.share_out + (long long)at(first + n) * DIM_V + column));
        }
    }
    store_four(head.query_row(p.out, p.out_strides, query) + column, result);
}

// Where blocks have stretches: at each place as many of the rows as there are parts of them, by PLACE_BLOCKS blocks. So
// all have as much to do, be the parts few or many.
constexpr int PLACE_WARPS = PLACE_BLOCKS * COMBINERS / 32;

__device__ inline void combine_place(const Params& p, int place, int warp) {
    PlaceNote note = PlaceNote::read(p, place);
    if (note.parts == 0) return;
    Head head = Head::of_q(p, note.batch, note.head);
    Range rows = Range{0, heads_of(p, head) * HEAD_ROWS}.share(note.part, note.parts);
    for (int n = STRIPES * rows.begin + warp; n < STRIPES * rows.end; n += PLACE_WARPS) {
        int row = n / STRIPES;
        Pair at = TileRows{head.q, 0, 0}(row, 0);
        if (at.i >= head.queries(p)) continue;
        int first = note.origin(p, place) * ROWS + row, next = 2 * ROWS * p.columns;
        combine_stripe(p, head.other(at.head), at.i, n % STRIPES, note.parts,
                       [&](int part) { return first + part * next + (part == 0) * ROWS; });
    }
}

// Where each tile has as many shares: a row by a block, a stripe of it by a warp; or (BY_SHARES, where rows are few and
// so shares many) by ROW_BLOCKS blocks, and every SPLIT-th share of a stripe by a warp.
__device__ inline void combine_by_stripes(const Params& p, long long row, int stripe) {
    QueryOf at = Sequence::numbered_query(p, row);
    combine_stripe(p, Head::of_q(p, at.batch, at.head), at.query, stripe, p.shares,
                   [&](int n) { return share_row(p, n, row); });
}

__device__ inline void combine_by_shares(const Params& p, long long row, int block) {
    __shared__ float4 parts[SPLIT][32 * BLOCK_STRIPES];
    int lane = threadIdx.x % 32, own = threadIdx.x / 32 % BLOCK_STRIPES, of = threadIdx.x / 32 / BLOCK_STRIPES;
    int stripe = block * BLOCK_STRIPES + own;
    int shares = p.shares;
    QueryOf at = Sequence::numbered_query(p, row);
    Head head = Head::of_q(p, at.batch, at.head);
    auto lse = [&](int n) { return p.share_lse[share_row(p, n, row)]; };
    PartWeights weight(p, head, shares, lse);
    if (p.lse != nullptr && block == 0 && threadIdx.x == 0) p.lse[row] = weight.lse();

    float4 result{0, 0, 0, 0};
    const float* from = p.share_out + row * DIM_V + stripe * STRIPE + 4 * lane;
    long long next = share_row(p, 1, 0) * DIM_V;
#pragma unroll 8
    for (int n = of; n < shares; n += SPLIT) {
        float w = weight(lse(n));
        add_times(result, w, *(const float4*)(from + n * next));
    }
    parts[of][own * 32 + lane] = result;
    __syncthreads();
    if (of > 0) return;
#pragma unroll
    for (int n = 1; n < SPLIT; n++) {
        float4 x = parts[n][own * 32 + lane];
        result.x += x.x, result.y += x.y, result.z += x.z, result.w += x.w;
    }
    store_four(head.query_row(p.out, p.out_strides, at.query) + stripe * STRIPE + 4 * lane, result);
}

// Launched where keys are dealt out in shares.
extern "C" __global__ void __launch_bounds__(COMBINERS, 1024 / COMBINERS)
    attention_combine(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    int warp = threadIdx.x / 32;
    if constexpr (STRETCHES)
        combine_place(p, blockIdx.x / PLACE_BLOCKS, blockIdx.x % PLACE_BLOCKS * 4 + warp);
    else if constexpr (SHARES && BY_SHARES)
        combine_by_shares(p, blockIdx.x / ROW_BLOCKS, blockIdx.x % ROW_BLOCKS);
    else if constexpr (SHARES)
        combine_by_stripes(p, blockIdx.x, warp);
}
