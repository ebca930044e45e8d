// What the backward kernels of this family know of a pair: P and dS.
#pragma once
#include "attention/dead_rows.cuh"
#include "simt/probability.cuh"

// What a pair needs to know of its query: two numbers.
struct Row {
    Accum lse, delta;

    __device__ Row(const Params& p, const Head& head, int i)
        : lse(row_lse(p, head, i)), delta(i < head.queries(p) ? p.delta[head.row_number(p, i)] * kept(p) : 0) {}
};

// The derivative with respect to its score.
__device__ inline Accum of_score(Accum s, Accum dp, const Row& row, const Pairs& pairs, const Dropout& dropout,
                                 bool tested, Pair pair) {
    if (tested && !pairs.visible(pair)) return 0;
    return probability(s, row.lse, pairs, pair) * ((dropout.keeps(pairs.head.batch, pair) ? dp : 0) - row.delta);
}

// s = A B^T, s += A B^T, of queries (A) and keys (B). KEYS_DOWN: transposed.
template <bool KEYS_DOWN>
__device__ void add_pair_products(ScoreTile& s, const Matrix<const In>& a, int query, const Matrix<const In>& b,
                                  int key, Shared& shared) {
    if constexpr (KEYS_DOWN)
        add_dot_products(s, b, key, a, query, shared);
    else
        add_dot_products(s, a, query, b, key, shared);
}
template <bool KEYS_DOWN>
__device__ void pair_products(ScoreTile& s, const Matrix<const In>& a, int query, const Matrix<const In>& b, int key,
                              Shared& shared) {
    for_each(s, [](Accum& x, int, int) { x = 0; });
    add_pair_products<KEYS_DOWN>(s, a, query, b, key, shared);
}

// The arrays of a head, made where they are needed: kept over a loop they would take registers that sums need.
struct QueryArrays {
    const Params& p;
    const Head& head;

    __device__ QueryArrays(const Params& p, const Head& head) : p(p), head(head) {}
    __device__ Matrix<const In> q() const { return query_matrix(p, head, p.q, p.q_strides, p.dim); }
    __device__ Matrix<const In> dout() const { return query_matrix(p, head, p.dout, p.dout_strides, p.dim_v); }
};
struct KeyArrays {
    const Params& p;
    const Head& head;

    __device__ KeyArrays(const Params& p, const Head& head) : p(p), head(head) {}
    __device__ Matrix<const In> k() const { return key_matrix(p, head, p.k, p.k_strides, p.dim); }
    __device__ Matrix<const In> v() const { return key_matrix(p, head, p.v, p.v_strides, p.dim_v); }
};

// S and dP of a tile of queries and one of keys.
struct Products {
    ScoreTile s, dp;

    template <bool KEYS_DOWN>
    __device__ void multiply(const QueryArrays& a, int query, const KeyArrays& b, int key, Shared& shared) {
        pair_products<KEYS_DOWN>(s, a.q(), query, b.k(), key, shared);
        pair_products<KEYS_DOWN>(dp, a.dout(), query, b.v(), key, shared);
    }
};

// sum + the product of two rows of a query. One thread adds a row, in the order in which dot_products adds dP: where
// one key has all the weight, O is its V, and dP - delta is then 0 to the last bit, as it should.
template <class A, class B>
__device__ Accum row_product(const Params& p, const Head& head, int i, const A* a, const Strides& a_strides, const B* b,
                             const Strides& b_strides, Accum sum = 0) {
    a = head.query_row(a, a_strides, i), b = head.query_row(b, b_strides, i);
    for (int c = 0; c < p.dim_v; ++c) sum = fma(to_float(a[c]), to_float(b[c]), sum);
    return sum;
}

// What of a gradient of lse, or of its tangent, reaches a query: a row that sees no key has no weight, whatever it is.
__device__ inline Accum through_lse(const Params& p, const Accum* of_lse, long long row) {
    return of_lse != nullptr && p.lse[row] != -infinity() ? of_lse[row] : 0;
}

// dS = P (dP - delta) has dlse in delta.
__device__ inline Accum row_delta(const Params& p, const Head& head, int i) {
    Accum sum = row_product(p, head, i, p.dout, p.dout_strides, p.out, p.out_strides);
    if (config::SINKS) sum = sum_with_zeros(p, head, i, sum);
    return sum - through_lse(p, p.dlse, head.row_number(p, i));
}

__device__ inline void scale_by(ResultTile& tile, Accum scale) {
    for_each(tile, [=](Accum& x, int, int) { x *= scale; });
}
