// Attention, backward, in plain CUDA: FlashAttention-2's Algorithm 2 (https://arxiv.org/abs/2307.08691), as two kernels.
//
// The paper's loop adds to dQ from many blocks at once, in an order that changes from run to run. Here one kernel owns
// tiles of keys and sums dK and dV in registers, another owns tiles of queries and sums dQ: the scores are computed
// twice, but nothing is added in global memory, so that results are the same bits every time and no workspace in float32
// is needed. With P from the log-sum-exp that the forward kept,
//
//     delta = rowsum(dO * O)    dP = dO V^T    dS = P * (dP - delta)
//     dV = P^T dO    dK = scale * dS^T Q    dQ = scale * dS K
#include "attention/mask.cuh"
#include "attention/params.cuh"
#include "attention/score.cuh"
#include "simt/tile.cuh"

// What a pair needs to know of its query: two numbers.
struct Row {
    Accum lse, delta;

    __device__ Row(const Params& p, int batch, int head, int i) : lse(infinity()), delta(0) {
        if (i >= p.seq_q) return;  // exp(s - inf) = 0: beyond the last query there is no weight
        const long long at = ((long long)batch * p.heads_q + head) * p.seq_q + i;
        delta = p.delta[at];
        if (p.lse[at] != -infinity()) lse = p.lse[at];  // -inf where a query sees no key: no weight either
    }
};

// From S and dP of one pair to P and dS, in place.
__device__ inline void differentiate(Accum& s, Accum& dp, const Row& row, const Params& p, bool hidden, int batch,
                                     int head, int i, int j) {
    const Accum weight = exp2((score(s, batch, head, i, j) * Accum(p.scale) - row.lse) * LOG2E);
    dp = hidden ? 0 : weight * (dp - row.delta) * score_derivative(s, batch, head, i, j);
    s = hidden ? 0 : weight;
}

__device__ inline void scale_by(ResultTile& tile, Accum scale) {
    for_each(tile, [=](Accum& x, int, int) { x *= scale; });
}

extern "C" __global__ void __launch_bounds__(config::THREADS)
    attention_backward_delta(const __grid_constant__ Params p) {
    const long long index = (long long)blockIdx.x * config::THREADS + threadIdx.x;  // in (B, Hq, Sq)
    if (index >= (long long)p.batch * p.heads_q * p.seq_q) return;
    const int i = index % p.seq_q, head = index / p.seq_q % p.heads_q, batch = index / p.seq_q / p.heads_q;
    const Matrix dout(p.dout, p.dout_strides, batch, head, p.seq_q, p.dim_v);
    const Matrix out(p.out, p.out_strides, batch, head, p.seq_q, p.dim_v);
    // One thread adds a row, in the order in which dot_products adds dP: where one key has all the weight, O is its V,
    // and dP - delta is then 0 to the last bit, as it should.
    Accum sum = 0;
    for (int c = 0; c < p.dim_v; ++c) sum += to_float(dout.at[i * dout.stride + c]) * to_float(out.at[i * out.stride + c]);
    p.delta[index] = sum;
}

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_dk_dv(const __grid_constant__ Params p) {
    // This block owns OWNED keys, and of the columns of dK and dV the same COLUMNS.
    const int parts = ceil_div(max(max(p.dim, p.dim_v), 1), config::COLUMNS), tiles = ceil_div(p.seq_k, config::OWNED);
    int index = blockIdx.x;
    const int column = index % parts * config::COLUMNS;
    index /= parts;
    const int row = index % tiles * config::OWNED;  // first first: under a causal mask most queries see them
    index /= tiles;
    const int head_k = index % p.heads_k, batch = index / p.heads_k;

    const Mask mask(p, batch);
    const Range keys = {row, min(row + config::OWNED, p.seq_k)};
    const Range queries = mask.queries_of(keys);

    __shared__ Shared shared;
    ResultTile dk_sum = {}, dv_sum = {};

    // The query heads of the group share these keys, so their gradients add up.
    const int group = p.heads_q / p.heads_k;
    for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
        const Matrix k(p.k, p.k_strides, batch, head_k, p.seq_k, p.dim);
        const Matrix v(p.v, p.v_strides, batch, head_k, p.seq_k, p.dim_v);
        const Matrix q(p.q, p.q_strides, batch, head, p.seq_q, p.dim);
        const Matrix dout(p.dout, p.dout_strides, batch, head, p.seq_q, p.dim_v);

        for (int query = queries.begin; query < queries.end; query += config::VISITED) {
            // Transposed, keys down and queries across: then dV and dK are products of the same kind as O.
            ScoreTile s, dp;
            dot_products(s, k, row, q, query, shared);
            dot_products(dp, v, row, dout, query, shared);

            const bool tested = mask.tests({query, min(query + config::VISITED, p.seq_q)}, {row, row + config::OWNED});
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const int query_j = query + score_column_of(j);
                const Row of_query(p, batch, head, query_j);
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    const int key_i = row + row_of(i);
                    const bool hidden = tested && !mask.visible(query_j, key_i);
                    differentiate(s[i][j], dp[i][j], of_query, p, hidden, batch, head, query_j, key_i);
                }
            }

            add_weighted(dv_sum, s, dout, query, column, tested, shared);
            add_weighted(dk_sum, dp, q, query, column, tested, shared);
        }
    }

    scale_by(dk_sum, p.scale);
    store(Matrix(p.dk, p.dk_strides, batch, head_k, p.seq_k, p.dim), dk_sum, row, column);
    store(Matrix(p.dv, p.dv_strides, batch, head_k, p.seq_k, p.dim_v), dv_sum, row, column);
}

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_dq(const __grid_constant__ Params p) {
    // This block owns OWNED queries and COLUMNS columns of dQ, as in the forward.
    const int parts = ceil_div(p.dim, config::COLUMNS), tiles = ceil_div(p.seq_q, config::OWNED);
    int index = blockIdx.x;
    const int column = index % parts * config::COLUMNS;
    index /= parts;
    const int row = (tiles - 1 - index % tiles) * config::OWNED;
    index /= tiles;
    const int head = index % p.heads_q, batch = index / p.heads_q, head_k = head / (p.heads_q / p.heads_k);

    const Matrix q(p.q, p.q_strides, batch, head, p.seq_q, p.dim);
    const Matrix k(p.k, p.k_strides, batch, head_k, p.seq_k, p.dim);
    const Matrix v(p.v, p.v_strides, batch, head_k, p.seq_k, p.dim_v);
    const Matrix dout(p.dout, p.dout_strides, batch, head, p.seq_q, p.dim_v);

    const Mask mask(p, batch);
    const Range queries = {row, min(row + config::OWNED, p.seq_q)};
    const Range keys = mask.keys_of(queries);

    __shared__ Shared shared;
    ResultTile dq_sum = {};

    for (int key = keys.begin; key < keys.end; key += config::VISITED) {
        ScoreTile s, dp;
        dot_products(s, q, row, k, key, shared);
        dot_products(dp, dout, row, v, key, shared);

        const bool tested = mask.tests(queries, {key, key + config::VISITED});
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const int query_i = row + row_of(i);
            const Row of_query(p, batch, head, query_i);
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const int key_j = key + score_column_of(j);
                const bool hidden = tested && !mask.visible(query_i, key_j);
                differentiate(s[i][j], dp[i][j], of_query, p, hidden, batch, head, query_i, key_j);
            }
        }

        add_weighted(dq_sum, dp, k, key, column, tested, shared);
    }

    scale_by(dq_sum, p.scale);
    store(Matrix(p.dq, p.dq_strides, batch, head, p.seq_q, p.dim), dq_sum, row, column);
}
