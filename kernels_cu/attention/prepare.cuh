// What the tensor-core backwards want to know of each query before they start: two numbers, by tiles of queries.
#pragma once
#include "attention/dropout.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// Where those of a tile of SIZE queries lie: SIZE times -lse in base 2, then SIZE times minus what is subtracted from dP.
template <int SIZE>
__device__ Accum* prepared_rows(const Params& p, long long tile_number) {
    return p.delta + tile_number * (2 * SIZE);
}

// Fill them in, by a block of 128 threads: delta = rowsum(dO * O), less the gradient of lse where there is one, since
// dS = P (dP - delta + dlse). Where there is no query, or its lse is -inf (it saw no key, or no finite score),
// exp2(s - inf) is 0. (With dropout: see there.)
template <int SIZE>
__device__ void prepare_rows(const Params& p, const Head& head, int tile) {
    constexpr int LANES = config::DIM_V <= 64 ? 8 : config::DIM_V <= 128 ? 16 : 32;  // of 8 columns, for one row
    int lane = threadIdx.x % LANES, first = tile * SIZE, queries = head.queries(p);
    const Out* o = head.query_row(p.out, p.out_strides);
    const In* d = head.query_row(p.dout, p.dout_strides);
    Accum* rows = prepared_rows<SIZE>(p, query_tile_number<SIZE>(p, head, tile));
#pragma unroll 4
    for (int i = first + threadIdx.x / LANES; i < first + SIZE; i += 128 / LANES) {
        Accum sum = 0;
        int columns = i < queries ? min(p.dim_v - 8 * lane, 8) : 0;
        const Out* oi = o + i * p.out_strides.row + 8 * lane;
        const In* di = d + i * p.dout_strides.row + 8 * lane;
        if (columns == 8) {
            constexpr int READS = 8 * sizeof(In) / 16;
            uint4 a[READS], b[READS];
#pragma unroll
            for (int n = 0; n < READS; n++) a[n] = ((const uint4*)oi)[n], b[n] = ((const uint4*)di)[n];
#pragma unroll
            for (int c = 0; c < 8; c++) sum = fma(to_float(((Out*)a)[c]), to_float(((In*)b)[c]), sum);
        } else {
            for (int c = 0; c < columns; c++) sum = fma(to_float(oi[c]), to_float(di[c]), sum);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) {
            Accum lse = i < queries ? p.lse[head.row_number(p, i)] : MINUS_INFINITY;
            bool any = lse != MINUS_INFINITY;
            rows[i - first] = any ? -lse_of_kept(p, lse) * LOG2_E : MINUS_INFINITY;
            rows[i - first + SIZE] = ((any && p.dlse != nullptr ? p.dlse[head.row_number(p, i)] : 0) - sum) * kept(p);
        }
    }
}
