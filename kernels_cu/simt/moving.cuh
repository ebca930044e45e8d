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

struct MovingQueryArrays : QueryArrays {
    using QueryArrays::QueryArrays;
    __device__ Matrix<const In> tq() const { return query_matrix(p, head, p.tq, p.tq_strides, p.dim); }
    __device__ Matrix<const In> tdout() const { return query_matrix(p, head, p.tdout, p.tdout_strides, p.dim_v); }
};
struct MovingKeyArrays : KeyArrays {
    using KeyArrays::KeyArrays;
    __device__ Matrix<const In> tk() const { return key_matrix(p, head, p.tk, p.tk_strides, p.dim); }
    __device__ Matrix<const In> tv() const { return key_matrix(p, head, p.tv, p.tv_strides, p.dim_v); }
};

// S, tS, dP and tdP of a tile of queries and one of keys; dP where probabilities move, else nobody asks for it.
struct MovingProducts : Products {
    ScoreTile ts = {}, tdp = {};

    template <bool KEYS_DOWN>
    __device__ void multiply(const MovingQueryArrays& a, int query, const MovingKeyArrays& b, int key, Shared& shared) {
        pair_products<KEYS_DOWN>(s, a.q(), query, b.k(), key, shared);
        if (config::TQ) add_pair_products<KEYS_DOWN>(ts, a.tq(), query, b.k(), key, shared);
        if (config::TK) add_pair_products<KEYS_DOWN>(ts, a.q(), query, b.tk(), key, shared);
        for_each(dp, [](Accum& x, int, int) { x = 0; });
        if (MOVES) add_pair_products<KEYS_DOWN>(dp, a.dout(), query, b.v(), key, shared);
        if (config::TV) add_pair_products<KEYS_DOWN>(tdp, a.dout(), query, b.tv(), key, shared);
        if (config::TDOUT) add_pair_products<KEYS_DOWN>(tdp, a.tdout(), query, b.v(), key, shared);
    }
};

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
