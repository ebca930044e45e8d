// Attention, backward, in plain CUDA: FlashAttention-2's Algorithm 2 (https://arxiv.org/abs/2307.08691), as two kernels.
//
// The paper's loop adds to dQ from many blocks at once, in an order that changes from run to run. Here one kernel owns
// tiles of keys and sums dK and dV in registers, another owns tiles of queries and sums dQ: the scores are computed
// twice, but nothing is added in global memory, so that results are the same bits every time and no workspace in float32
// is needed. With P from the log-sum-exp that the forward kept,
//
//     delta = rowsum(dO * O) - dlse    dP = dO V^T    dS = P * (dP - delta)
//     dV = P^T dO    dK = scale * dS^T Q    dQ = scale * dS K
#include "simt/delta.cuh"

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_dk_dv(const __grid_constant__ Params p) {
    // This block owns OWNED keys, and of the columns of dK and dV the same COLUMNS.
    const int parts = tiles_in(max(max(p.dim, p.dim_v), 1), config::COLUMNS);
    const int column = blockIdx.x % parts * config::COLUMNS;
    // First first: under a causal mask most queries see them.
    const HeadTile at = numbered<KeyTiles<config::OWNED>>(p, blockIdx.x / parts);
    if (config::PACKED_K && at.none()) return;
    Head head = at.head;
    const Range keys = head.key_tile<config::OWNED>(p, at.number);
    const int row = keys.begin;

    const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim);
    const Matrix v = key_matrix(p, head, p.v, p.v_strides, p.dim_v);

    const Dropout dropout(p);

    __shared__ Shared shared;
    ResultTile dk_sum = {}, dv_sum = {};

    // The query heads of the group share these keys, so their gradients add up.
    for (const int end = head.q + group_of(p); head.q < end; ++head.q) {
        const QueryWalk<config::VISITED, config::OWNED> walk(p, head, keys);
        const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
        const Matrix dout = query_matrix(p, head, p.dout, p.dout_strides, p.dim_v);

        for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
            const int query = walk.tile(step) * config::VISITED;
            // Transposed, keys down and queries across: then dV and dK are products of the same kind as O.
            ScoreTile s, dp;
            dot_products(s, k, row, q, query, shared);
            dot_products(dp, v, row, dout, query, shared);

            const Pairs pairs(p, head, walk.bits<false>(step, keys));
            const bool tested = pairs.tests_backward({query, query + config::VISITED}, {row, row + config::OWNED});
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const int query_j = query + score_column_of(j);
                const Row of_query(p, head, query_j);
#pragma unroll
                for (int i = 0; i < M; ++i)
                    differentiate(s[i][j], dp[i][j], of_query, pairs, dropout, tested,
                                  {head.q, query_j, row + row_of(i)});
            }

            add_weighted(dv_sum, s, dout, query, column, tested, shared);
            add_weighted(dk_sum, dp, q, query, column, tested, shared);
        }
    }

    scale_by(dk_sum, p.scale);
    store(all_key_rows(p, head, p.dk, p.dk_strides, p.dim), dk_sum, row, column);
    store(all_key_rows(p, head, p.dv, p.dv_strides, p.dim_v), dv_sum, row, column);
}

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_dq(const __grid_constant__ Params p) {
    // This block owns OWNED queries and COLUMNS columns of dQ, as in the forward.
    const int parts = tiles_in(p.dim, config::COLUMNS);
    const Schedule<QueryTiles<config::OWNED>, Order::LAST_FIRST> schedule(p);
    const int column = blockIdx.x % parts * config::COLUMNS;
    const auto at = schedule.tile(blockIdx.x / parts);
    if (config::PACKED_Q && at.none()) return;
    const Head& head = at.head;
    const Range queries = head.query_tile<config::OWNED>(p, at.number);
    const int row = queries.begin;

    const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
    const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim);
    const Matrix v = key_matrix(p, head, p.v, p.v_strides, p.dim_v);
    const Matrix dout = query_matrix(p, head, p.dout, p.dout_strides, p.dim_v);

    const Dropout dropout(p);
    const KeyWalk<config::VISITED, config::OWNED> walk(p, head, queries);

    __shared__ Shared shared;
    ResultTile dq_sum = {};

    for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
        const int key = walk.tile(step) * config::VISITED;
        ScoreTile s, dp;
        dot_products(s, q, row, k, key, shared);
        dot_products(dp, dout, row, v, key, shared);

        const Pairs pairs(p, head, walk.bits(step, queries));
        const bool tested = walk.tests(p, head, queries, step);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const int query_i = row + row_of(i);
            const Row of_query(p, head, query_i);
#pragma unroll
            for (int j = 0; j < SCORES; ++j)
                differentiate(s[i][j], dp[i][j], of_query, pairs, dropout, tested,
                              {head.q, query_i, key + score_column_of(j)});
        }

        add_weighted(dq_sum, dp, k, key, column, tested, shared);
    }

    scale_by(dq_sum, p.scale);
    store(query_matrix(p, head, p.dq, p.dq_strides, p.dim), dq_sum, row, column);
}
