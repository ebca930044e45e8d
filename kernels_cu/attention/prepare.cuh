// What the tensor-core backwards want to know of each query before they start: two numbers, by tiles of queries.
#pragma once
#include "attention/dropout.cuh"
#include "attention/exact_lse.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// Where those of a tile of SIZE queries lie: SIZE times -lse, then SIZE times minus what is subtracted from dP.
template <int SIZE>
__device__ Accum* prepared_rows(const Params& p, long long tile_number) {
    return p.delta + tile_number * (2 * SIZE);
}

// Eight numbers that begin at a multiple of 16 bytes.
template <class T>
__device__ void load_8(const T* from, float (&x)[8]) {
    uint4 vector = *(const uint4*)from;
#pragma unroll
    for (int c = 0; c < 8; c++) x[c] = to_float(((const T*)&vector)[c]);
}

// Fill in those of query i, from its sum = rowsum(dO * O): delta is that, less the gradient of lse where there is one, since
// dS = P (dP - delta + dlse). Where there is no query, or its lse is -inf (it saw no key, or no finite score),
// exp2(s - inf) is 0. (With dropout: see there.)
template <int SIZE>
__device__ void write_prepared(const Params& p, const Head& head, Accum* rows, int first, int i, Accum sum) {
    bool there = i < head.queries(p);
    Accum lse = there ? p.lse[head.row_number(p, i)] : MINUS_INFINITY;
    bool any = lse != MINUS_INFINITY;
    rows[i - first] = any ? -lse_of_kept(p, lse) * (EXACT_LSE ? 1 : LOG2_E) : MINUS_INFINITY;
    rows[i - first + SIZE] = ((any && p.dlse != nullptr ? p.dlse[head.row_number(p, i)] : 0) - sum) * kept(p);
}

// All of them, by a block of 128 threads, of 16-bit numbers (others: exact_delta.cuh).
template <int SIZE>
__device__ void prepare_rows(const Params& p, const Head& head, int tile) {
    constexpr int LANES = config::DIM_V <= 64 ? 8 : config::DIM_V <= 128 ? 16 : 32;  // of 8 columns, for one row
    int lane = threadIdx.x % LANES, first = tile * SIZE, queries = head.queries(p);
    const Out* o = head.query_row(p.out, p.out_strides);
    const In* d = head.query_row(p.dout, p.dout_strides);
    Accum* rows = prepared_rows<SIZE>(p, query_tile_number<SIZE>(p, head, tile));
#pragma unroll 4
    for (int i = first + threadIdx.x / LANES; i < first + SIZE; i += 128 / LANES) {
        float sum = 0;
        int columns = i < queries ? min(p.dim_v - 8 * lane, 8) : 0;
        const Out* oi = o + i * p.out_strides.row + 8 * lane;
        const In* di = d + i * p.dout_strides.row + 8 * lane;
        if (columns == 8) {
            float a[8], b[8];
            load_8(oi, a), load_8(di, b);
#pragma unroll
            for (int c = 0; c < 8; c++) sum = fma(a[c], b[c], sum);
        } else {
            for (int c = 0; c < columns; c++) sum = fma(to_float(oi[c]), to_float(di[c]), sum);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) write_prepared<SIZE>(p, head, rows, first, i, sum);
    }
}
