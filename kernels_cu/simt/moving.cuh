// What the kernels that differentiate the backward know of a query and of a pair.
#pragma once
#include "attention/tangents.cuh"
#include "simt/derivative.cuh"

__device__ inline MovingRow moving_row(const Params& p, const Head& head, int i) {
    const Row row(p, head, i);
    if (i >= head.queries(p)) return {row.lse, row.delta, 0, 0};
    const long long n = head.row_number(p, i);
    return {row.lse, row.delta, p.tlse[n], p.tdelta[n] * kept(p)};
}

// P of a pair, 0 where it is hidden.
__device__ inline Accum seen_probability(Accum s, const MovingRow& row, const Pairs& pairs, bool tested, Pair pair) {
    return tested && !pairs.visible(pair) ? 0 : probability(s, row.lse, pairs, pair);
}

// The products of a tile of queries and one of keys: S, tS, dP and tdP.
__device__ inline void products(ScoreTile& s, ScoreTile& ts, ScoreTile& dp, ScoreTile& tdp, const Params& p,
                                const Head& head, int query, int key, Shared& shared) {
    const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
    const Matrix tq = query_matrix(p, head, p.tq, p.tq_strides, p.dim);
    const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim);
    const Matrix tk = key_matrix(p, head, p.tk, p.tk_strides, p.dim);
    const Matrix v = key_matrix(p, head, p.v, p.v_strides, p.dim_v);
    const Matrix tv = key_matrix(p, head, p.tv, p.tv_strides, p.dim_v);
    const Matrix dout = query_matrix(p, head, p.dout, p.dout_strides, p.dim_v);
    const Matrix tdout = query_matrix(p, head, p.tdout, p.tdout_strides, p.dim_v);
    for_each(ts, [](Accum& x, int, int) { x = 0; });
    for_each(tdp, [](Accum& x, int, int) { x = 0; });
    dot_products(s, q, query, k, key, shared);
    if (config::TQ) add_dot_products(ts, tq, query, k, key, shared);
    if (config::TK) add_dot_products(ts, q, query, tk, key, shared);
    dot_products(dp, dout, query, v, key, shared);
    if (config::TV) add_dot_products(tdp, dout, query, tv, key, shared);
    if (config::TDOUT) add_dot_products(tdp, tdout, query, v, key, shared);
}

// delta, and what it changes by: rowsum(dO * tO + tdO * O) - tdlse.
extern "C" __global__ void __launch_bounds__(config::THREADS)
    attention_backward_jvp_delta(const __grid_constant__ Params p) {
    const long long index = (long long)blockIdx.x * config::THREADS + threadIdx.x;
    const QueryOf at = Sequence::numbered_query(p, index);
    if (at.none(p)) return;
    const Head head = Head::of_q(p, at.batch, at.head);
    const int i = at.query;
    Accum sum = row_product(p, head, i, p.dout, p.dout_strides, p.tout, p.tout_strides);
    if (config::TDOUT) sum = row_product(p, head, i, p.tdout, p.tdout_strides, p.out, p.out_strides, sum);
    if (config::SINKS && sum != sum && only_zeros(p, head.query_row(p.tout, p.tout_strides, i)))
        sum = sum_with_zeros(p, head, i, sum);
    p.delta[index] = row_delta(p, head, i);
    p.tdelta[index] = sum - through_lse(p, p.tdlse, index);
}
