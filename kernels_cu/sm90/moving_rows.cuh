// What the kernels of the Hopper backward's tangent know of a query, and of a pair.
#pragma once
#include "attention/dead_rows.cuh"
#include "attention/dropout.cuh"
#include "attention/tangents.cuh"
#include "ptx/convert.cuh"
#include "tile/rows.cuh"

// Of each query four numbers: -lse as an exponent of 2 (of P / kept), and minus delta, tlse and tdelta, the second and
// the last times what is kept.
enum Number { LSE, DELTA, TLSE, TDELTA, NUMBERS };

// put(number, row, value) for those of a tile of SIZE queries, by a block of 128 threads, a row by LANES of them, each
// with 8 columns.
template <int SIZE, class F>
__device__ void for_numbers(const Params& p, const Head& head, int tile, F put) {
    constexpr int LANES = config::DIM_V <= 64 ? 8 : config::DIM_V <= 128 ? 16 : 32;
    const Out *o = head.query_row(p.out, p.out_strides), *t = head.query_row(p.tout, p.tout_strides);
    const In* d = head.query_row(p.dout, p.dout_strides);
    const In* td = config::TDOUT ? head.query_row(p.tdout, p.tdout_strides) : nullptr;
    int column = threadIdx.x % LANES * 8, columns = min(p.dim_v - column, 8);
    // sum += rowsum(a b) of a row.
    auto row_sum = [&](float& sum, const Out* a, const In* b) {
        uint4 x = make_uint4(0, 0, 0, 0), y = x;
        if (columns == 8) {
            x = *(const uint4*)(a + column), y = *(const uint4*)(b + column);
        } else {
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (c < columns) ((Out*)&x)[c] = a[column + c], ((In*)&y)[c] = b[column + c];
        }
#pragma unroll
        for (int c = 0; c < 8; c++) sum = fma(to_float(((const Out*)&x)[c]), to_float(((const In*)&y)[c]), sum);
    };
#pragma unroll 4
    for (int r = threadIdx.x / LANES; r < SIZE; r += 128 / LANES) {
        int i = tile * SIZE + r;
        bool there = i < head.queries(p);
        float delta = 0, tdelta = 0;
        if (there) {
            row_sum(delta, o + i * p.out_strides.row, d + i * p.dout_strides.row);
            row_sum(tdelta, t + i * p.tout_strides.row, d + i * p.dout_strides.row);
            if constexpr (config::TDOUT) row_sum(tdelta, o + i * p.out_strides.row, td + i * p.tdout_strides.row);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            delta += __shfl_xor_sync(~0u, delta, step), tdelta += __shfl_xor_sync(~0u, tdelta, step);
        if (threadIdx.x % LANES != 0) continue;
        float lse = there ? p.lse[head.row_number(p, i)] : MINUS_INFINITY;
        bool sees = lse != MINUS_INFINITY;
        Pairs pairs(p, head);
        if (config::SINKS && sees && lse == pairs.sink(head.q)) sees = pairs.sees(i);
        if (sees) {
            long long n = head.row_number(p, i);
            if (p.dlse != nullptr) delta -= p.dlse[n];
            if (p.tdlse != nullptr) tdelta -= p.tdlse[n];
            put(LSE, r, -lse_of_kept(p, lse) * LOG2E);
            put(DELTA, r, -delta * kept(p));
            put(TLSE, r, -p.tlse[n]);
            put(TDELTA, r, -tdelta * kept(p));
        } else {  // whatever stands in its row
            put(LSE, r, MINUS_INFINITY);
            put(DELTA, r, 0), put(TLSE, r, 0), put(TDELTA, r, 0);
        }
    }
}

// What a pair's probability changes by, from that (below 0 where it is dropped), the slope of its score, tS and its
// query's numbers.
__device__ inline float moved_probability(const Params& p, float weight, float slope, float ts,
                                          const float (&of)[NUMBERS]) {
    return fabs(weight) * (PRODUCTS_MOVE ? fma(slope * p.scale, ts, of[TLSE]) : of[TLSE]);
}

// The derivative by its score (0 where nobody asks) and what that changes by, in the place of dP and tdP.
__device__ inline void move_pair(float weight, float tp, float& dp, float& tdp, const float (&of)[NUMBERS]) {
    bool dropped = config::DROPOUT && weight < 0;
    float probability = fabs(weight);
    float rest = MOVES ? (dropped ? 0 : dp) + of[DELTA] : 0;
    float moved = (dropped || !(config::TV || config::TDOUT) ? 0 : tdp) + of[TDELTA];
    dp = probability * rest, tdp = probability * moved;
    if (MOVES) tdp = fma(tp, rest, tdp);
}

// A warp's rows of a result, from row `first` of `rows` on; of its columns those from FIRST_COLUMN on.
template <int FIRST_COLUMN = 0, int COUNT>
__device__ void store_result(const Accumulator<1, COUNT>& x, Out* to, const Strides& strides, int first, int rows,
                             int columns) {
    store_rows(x, aligned(to, strides.row, columns), columns - FIRST_COLUMN, [&](int row) {
        int i = first + row;
        return i < rows ? to + i * strides.row + FIRST_COLUMN : nullptr;
    });
}
