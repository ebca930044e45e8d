// The kernel that runs before those of the backward.
#pragma once
#include "simt/derivative.cuh"

extern "C" __global__ void __launch_bounds__(config::THREADS)
    attention_backward_delta(const __grid_constant__ Params p) {
    const long long index = (long long)blockIdx.x * config::THREADS + threadIdx.x;
    const QueryOf at = Sequence::numbered_query(p, index);
    if (at.none(p)) return;
    p.delta[index] = row_delta(p, Head::of_q(p, at.batch, at.head), at.query);
}
