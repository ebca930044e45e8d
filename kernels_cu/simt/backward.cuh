// The two kernels of a backward, in plain CUDA. `Of` says what is computed of a tile of pairs: of the backward itself
// in simt/backward.cu, of its tangent in simt/backward_jvp.cu.
//
// The paper's loop adds to dQ from many blocks at once, in an order that changes from run to run. Here one kernel owns
// tiles of keys and sums dK and dV in registers, another owns tiles of queries and sums dQ: the scores are computed
// twice, but nothing is added in global memory. So results are the same bits every time, and no workspace in float32 is
// needed.
#pragma once
#include "simt/derivative.cuh"

// A result: where its rows are.
template <class T = Out>
struct Result {
    T* at;
    const Strides& strides;
};

template <class Of>
__device__ void backward_dk_dv(const Params& p) {
    // This block owns OWNED keys, and of the columns of dK and dV the same COLUMNS.
    const int parts = tiles_in(max(max(p.dim, p.dim_v), 1), config::COLUMNS);
    const int column = blockIdx.x % parts * config::COLUMNS;
    // First first: under a causal mask most queries see them.
    const HeadTile at = numbered<KeyTiles<config::OWNED>>(p, blockIdx.x / parts);
    if (config::PACKED_K && at.none()) return;
    Head head = at.head;
    const Range keys = head.key_tile<config::OWNED>(p, at.number);
    const int row = keys.begin;

    const typename Of::Keys of_keys(p, head);
    const Dropout dropout(p);

    __shared__ Shared shared;
    ResultTile dk_sum = {}, dv_sum = {};

    // The query heads of the group share these keys, so their gradients add up.
    for (const int end = head.q + group_of(p); head.q < end; ++head.q) {
        const QueryWalk<config::VISITED, config::OWNED> walk(p, head, keys);
        const typename Of::Queries of_queries(p, head);

        for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
            const int query = walk.tile(step) * config::VISITED;
            // Transposed, keys down and queries across: then dV and dK are products of the same kind as O.
            Of tile;
            tile.template multiply<true>(of_queries, query, of_keys, row, shared);

            const typename Of::Pairs pairs(p, head, walk.bits<false>(step, keys));
            const bool tested = pairs.tests_backward({query, query + config::VISITED}, {row, row + config::OWNED});
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const int query_j = query + score_column_of(j);
                const auto of_query = Of::row(p, head, query_j);
#pragma unroll
                for (int i = 0; i < M; ++i)
                    tile.differentiate(i, j, of_query, pairs, dropout, tested, {head.q, query_j, row + row_of(i)});
            }

            tile.add_dk_dv(dk_sum, dv_sum, of_queries, query, column, tested, shared);
        }
    }

    scale_by(dk_sum, p.scale);
    const Result<> dk = Of::dk(p), dv = Of::dv(p);
    store(all_key_rows(p, head, dk.at, dk.strides, p.dim), dk_sum, row, column);
    store(all_key_rows(p, head, dv.at, dv.strides, p.dim_v), dv_sum, row, column);
}

template <class Of>
__device__ void backward_dq(const Params& p) {
    // This block owns OWNED queries and COLUMNS columns of dQ, as in the forward.
    const int parts = tiles_in(p.dim, config::COLUMNS);
    const Schedule<QueryTiles<config::OWNED>, Order::LAST_FIRST> schedule(p);
    const int column = blockIdx.x % parts * config::COLUMNS;
    const HeadTile at = schedule.tile(blockIdx.x / parts);
    if (config::PACKED_Q && at.none()) return;
    const Head head = at.head;
    const Range queries = head.query_tile<config::OWNED>(p, at.number);
    const int row = queries.begin;

    const typename Of::Queries of_queries(p, head);
    const typename Of::Keys of_keys(p, head);
    const Dropout dropout(p);
    const KeyWalk<config::VISITED, config::OWNED> walk(p, head, queries);

    __shared__ Shared shared;
    ResultTile dq_sum = {};

    for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
        const int key = walk.tile(step) * config::VISITED;
        Of tile;
        tile.template multiply<false>(of_queries, row, of_keys, key, shared);

        const typename Of::Pairs pairs(p, head, walk.bits(step, queries));
        const bool tested = walk.tests(p, head, queries, step);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const int query_i = row + row_of(i);
            const auto of_query = Of::row(p, head, query_i);
#pragma unroll
            for (int j = 0; j < SCORES; ++j)
                tile.differentiate(i, j, of_query, pairs, dropout, tested, {head.q, query_i, key + score_column_of(j)});
        }

        tile.add_dq(dq_sum, of_keys, key, column, tested, shared);
    }

    scale_by(dq_sum, p.scale);
    const auto dq = Of::dq(p);
    store(query_matrix(p, head, dq.at, dq.strides, p.dim), dq_sum, row, column);
}
