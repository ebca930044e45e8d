// The tangent of attention's backward, in plain CUDA: what its results change by where the arrays of the call move. As
// the backward it is two kernels (simt/backward.cu). With dX the derivative by the product of Q and K, f' and f" those of
// the soft cap or score function (attention/tangents.cuh has the rest),
//
//     tdelta = rowsum(dO * tO + tdO * O) - tdlse    tdP = dO tV^T + tdO V^T    dX = f' dS    tdX = f' tdS + f" tS dS
//     tdQ = scale * (tdX K + dX tK)    tdK = scale * (tdX^T Q + dX^T tQ)    tdV = tP^T dO + P^T tdO
#include "simt/moving.cuh"

// From S, tS, dP and tdP of one pair to tP, dX, tdX and P, in place.
__device__ inline void differentiate(Accum& s, Accum& ts, Accum& dp, Accum& tdp, const MovingRow& row,
                                     const MovingPairs& pairs, const Dropout& dropout, bool tested, Pair pair) {
    const bool keeps = dropout.keeps(pairs.head.batch, pair);
    const Accum weight = seen_probability(s, row, pairs, tested, pair);
    const MovedPair moved(weight, s, ts, keeps ? dp : 0, keeps ? tdp : 0, row, pairs, pair);
    s = keeps ? moved.tp : 0;
    ts = moved.dx, dp = moved.tdx;
    tdp = keeps ? weight : 0;
}

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_jvp_dk_dv(const __grid_constant__ Params p) {
    const int parts = tiles_in(max(max(p.dim, p.dim_v), 1), config::COLUMNS);
    const int column = blockIdx.x % parts * config::COLUMNS;
    const HeadTile at = numbered<KeyTiles<config::OWNED>>(p, blockIdx.x / parts);
    if (config::PACKED_K && at.none()) return;
    Head head = at.head;
    const Range keys = head.key_tile<config::OWNED>(p, at.number);
    const int row = keys.begin;

    const Dropout dropout(p);

    __shared__ Shared shared;
    ResultTile dk_sum = {}, dv_sum = {};

    for (const int end = head.q + group_of(p); head.q < end; ++head.q) {
        const QueryWalk<config::VISITED, config::OWNED> walk(p, head, keys);
        const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
        const Matrix tq = query_matrix(p, head, p.tq, p.tq_strides, p.dim);
        const Matrix dout = query_matrix(p, head, p.dout, p.dout_strides, p.dim_v);
        const Matrix tdout = query_matrix(p, head, p.tdout, p.tdout_strides, p.dim_v);

        for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
            // Made anew for each tile: kept over the loop they would take registers that sums need.
            const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim);
            const Matrix tk = key_matrix(p, head, p.tk, p.tk_strides, p.dim);
            const Matrix v = key_matrix(p, head, p.v, p.v_strides, p.dim_v);
            const Matrix tv = key_matrix(p, head, p.tv, p.tv_strides, p.dim_v);
            const int query = walk.tile(step) * config::VISITED;
            ScoreTile s, ts = {}, dp, tdp = {};
            dot_products(s, k, row, q, query, shared);
            if (config::TQ) add_dot_products(ts, k, row, tq, query, shared);
            if (config::TK) add_dot_products(ts, tk, row, q, query, shared);
            dot_products(dp, v, row, dout, query, shared);
            if (config::TV) add_dot_products(tdp, tv, row, dout, query, shared);
            if (config::TDOUT) add_dot_products(tdp, v, row, tdout, query, shared);

            const MovingPairs pairs(p, head, walk.bits<false>(step, keys));
            const bool tested = pairs.tests_backward({query, query + config::VISITED}, {row, row + config::OWNED});
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const int query_j = query + score_column_of(j);
                const MovingRow of_query = moving_row(p, head, query_j);
#pragma unroll
                for (int i = 0; i < M; ++i)
                    differentiate(s[i][j], ts[i][j], dp[i][j], tdp[i][j], of_query, pairs, dropout, tested,
                                  {head.q, query_j, row + row_of(i)});
            }

            if (MOVES) add_weighted(dv_sum, s, dout, query, column, tested, shared);
            if (config::TDOUT) add_weighted(dv_sum, tdp, tdout, query, column, tested, shared);
            add_weighted(dk_sum, dp, q, query, column, tested, shared);
            if (config::TQ) add_weighted(dk_sum, ts, tq, query, column, tested, shared);
        }
    }

    scale_by(dk_sum, p.scale);
    store(all_key_rows(p, head, p.tdk, p.tdk_strides, p.dim), dk_sum, row, column);
    store(all_key_rows(p, head, p.tdv, p.tdv_strides, p.dim_v), dv_sum, row, column);
}

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_backward_jvp_dq(const __grid_constant__ Params p) {
    const int parts = tiles_in(p.dim, config::COLUMNS);
    const Schedule<QueryTiles<config::OWNED>, Order::LAST_FIRST> schedule(p);
    const int column = blockIdx.x % parts * config::COLUMNS;
    const HeadTile at = schedule.tile(blockIdx.x / parts);
    if (config::PACKED_Q && at.none()) return;
    const Head head = at.head;
    const Range queries = head.query_tile<config::OWNED>(p, at.number);
    const int row = queries.begin;

    const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim);
    const Matrix tk = key_matrix(p, head, p.tk, p.tk_strides, p.dim);

    const Dropout dropout(p);
    const KeyWalk<config::VISITED, config::OWNED> walk(p, head, queries);

    __shared__ Shared shared;
    ResultTile dq_sum = {};

    for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
        const int key = walk.tile(step) * config::VISITED;
        ScoreTile s, ts, dp, tdp;
        products(s, ts, dp, tdp, p, head, row, key, shared);

        const MovingPairs pairs(p, head, walk.bits(step, queries));
        const bool tested = walk.tests(p, head, queries, step);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const int query_i = row + row_of(i);
            const MovingRow of_query = moving_row(p, head, query_i);
#pragma unroll
            for (int j = 0; j < SCORES; ++j)
                differentiate(s[i][j], ts[i][j], dp[i][j], tdp[i][j], of_query, pairs, dropout, tested,
                              {head.q, query_i, key + score_column_of(j)});
        }

        add_weighted(dq_sum, dp, k, key, column, tested, shared);
        if (config::TK) add_weighted(dq_sum, ts, tk, key, column, tested, shared);
    }

    scale_by(dq_sum, p.scale);
    store(query_matrix(p, head, p.tdq, p.tdq_strides, p.dim), dq_sum, row, column);
}
