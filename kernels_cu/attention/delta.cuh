// delta = rowsum(dO * O), what the backward subtracts from dP.
#pragma once
#include "attention/params.cuh"
#include "ptx/convert.cuh"

// f(row, delta) for ROWS rows of a head from `first` on, each by one thread of a block of 128; 0 beyond the last query.
template <int ROWS, class F>
__device__ void row_deltas(const Params& p, int batch, int head, int first, F f) {
    constexpr int LANES = config::DIM_V <= 64 ? 8 : config::DIM_V <= 128 ? 16 : 32;  // of 8 columns, for one row
    int lane = threadIdx.x % LANES;
    const Element* o = p.out + batch * p.out_strides.batch + head * p.out_strides.head;
    const Element* d = p.dout + batch * p.dout_strides.batch + head * p.dout_strides.head;
#pragma unroll 4
    for (int i = first + threadIdx.x / LANES; i < first + ROWS; i += 128 / LANES) {
        float sum = 0;
        int columns = i < p.seq_q ? min(p.dim_v - 8 * lane, 8) : 0;
        const Element *oi = o + i * p.out_strides.row + 8 * lane, *di = d + i * p.dout_strides.row + 8 * lane;
        if (columns == 8) {
            uint4 a = *(const uint4*)oi, b = *(const uint4*)di;
#pragma unroll
            for (int c = 0; c < 8; c++) sum += to_float(((Element*)&a)[c]) * to_float(((Element*)&b)[c]);
        } else {
            for (int c = 0; c < columns; c++) sum += to_float(oi[c]) * to_float(di[c]);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) f(i, sum);
    }
}
