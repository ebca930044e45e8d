// The tangent of attention's forward, in plain CUDA, from the O and lse that it left:
//
//     tS = tQ K^T + Q tK^T    P = exp(S - lse)    W = P * (tS - c)
//     tlse = rowsum(W) / rowsum(P) + c    tO = W V + P tV - rowsum(W) O
//
// (tS stands for what the scores change by.) There is no maximum, and nothing is rescaled: c may be any number of the
// row's own. With the mean of tS over the first tile that has weight (attention/shift.cuh) W stays small where tangents
// have something in common, and with it what is rounded in O. rowsum(P) is 1, but for what rounds lse.
#include "attention/shift.cuh"
#include "attention/tangents.cuh"
#include "simt/probability.cuh"

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_jvp(const __grid_constant__ Params p) {
    // This block owns OWNED queries and COLUMNS columns of tO, as in the forward.
    const int parts = tiles_in(max(p.dim_v, 1), config::COLUMNS);
    const Schedule<QueryTiles<config::OWNED>, Order::LAST_FIRST> schedule(p);
    const int column = blockIdx.x % parts * config::COLUMNS;
    const HeadTile at = schedule.tile(blockIdx.x / parts);
    if (config::PACKED_Q && at.none()) return;
    const Head head = at.head;
    const Range queries = head.query_tile<config::OWNED>(p, at.number);
    const int row = queries.begin;

    // The arrays of the head, made where they are needed: kept over the loop they would take registers that sums need.
    const auto of_queries = [&](const In* x, const Strides& strides) {
        return query_matrix(p, head, x, strides, p.dim);
    };
    const auto of_keys = [&](const In* x, const Strides& strides, int columns) {
        return key_matrix(p, head, x, strides, columns);
    };

    const Dropout dropout(p);
    const KeyWalk<config::VISITED, config::OWNED> walk(p, head, queries);

    __shared__ Shared shared;
    ResultTile o = {};
    Accum sum[M], total[M], centre[M];  // of each row: this thread's parts of rowsum(W) and rowsum(P), and c
    unsigned centred = 0;               // a bit for each that has its c
    for (int i = 0; i < M; ++i) sum[i] = total[i] = centre[i] = 0;

    for (int step = walk.start(); (SCORES_MOVE || config::TV) && walk.has(step); step = walk.next(step)) {
        const int key = walk.tile(step) * config::VISITED;
        ScoreTile s, ts = {};
        dot_products(s, of_queries(p.q, p.q_strides), row, of_keys(p.k, p.k_strides, p.dim), key, shared);
        if (config::TQ)
            add_dot_products(ts, of_queries(p.tq, p.tq_strides), row, of_keys(p.k, p.k_strides, p.dim), key, shared);
        if (config::TK)
            add_dot_products(ts, of_queries(p.q, p.q_strides), row, of_keys(p.tk, p.tk_strides, p.dim), key, shared);

        const MovingPairs pairs(p, head, walk.bits(step, queries));
        const bool tested = walk.tests(p, head, queries, step);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const Accum lse = row_lse(p, head, row + row_of(i));
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const Pair pair = {head.q, row + row_of(i), key + score_column_of(j)};
                const Accum weight = tested && !pairs.visible(pair) ? 0 : probability(s[i][j], lse, pairs, pair);
                // Where there is no weight, tangents may be anything.
                ts[i][j] = SCORES_MOVE && weight != 0 ? pairs.tangent(s[i][j], ts[i][j], pair) : 0;
                s[i][j] = weight;
            }
            if (SCORES_MOVE && __any_sync(~0u, !(centred >> i & 1))) {
                Accum weights = 0, mean = 0;
#pragma unroll
                for (int j = 0; j < SCORES; ++j) weights += s[i][j], mean = fma(s[i][j], ts[i][j], mean);
                weights = row_sum(weights), mean = row_sum(mean);
                if (!(centred >> i & 1) && weights > NO_WEIGHT) centre[i] = mean / weights, centred |= 1u << i;
            }
#pragma unroll
            for (int j = 0; j < SCORES; ++j) {
                const Pair pair = {head.q, row + row_of(i), key + score_column_of(j)};
                ts[i][j] = s[i][j] * (ts[i][j] - centre[i]);
                sum[i] += ts[i][j], total[i] += s[i][j];
                if (!dropout.keeps(head.batch, pair)) s[i][j] = ts[i][j] = 0;
            }
        }

        if (SCORES_MOVE) add_weighted(o, ts, of_keys(p.v, p.v_strides, p.dim_v), key, column, tested, shared);
        if (config::TV) add_weighted(o, s, of_keys(p.tv, p.tv_strides, p.dim_v), key, column, tested, shared);
    }

    const Pairs pairs(p, head);
    const Matrix out = query_matrix(p, head, p.out, p.out_strides, p.dim_v);
#pragma unroll
    for (int i = 0; i < M; ++i) {
        const int query = row + row_of(i);
        sum[i] = row_sum(sum[i]) * kept(p), total[i] = row_sum(total[i]) * kept(p);
        if (query >= head.queries(p)) continue;
        const long long n = head.row_number(p, query);
        if (config::SINKS) {
            const Accum weight = exp2((pairs.sink(head.q) - p.lse[n]) * LOG2E);
            if (weight > 0) sum[i] = fma(weight, sink_tangent(p, head) - centre[i], sum[i]), total[i] += weight;
        }
        if (column == 0 && threadIdx.x % ACROSS == 0)
            p.tlse[n] = centre[i] + (SCORES_MOVE && sum[i] != 0 ? sum[i] / total[i] : sum[i]);
        if (sum[i] == 0) continue;  // a row that sees nothing is 0, whatever stands in O
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int c = column + result_column_of(j);
            if (c < p.dim_v) o[i][j] = fma(-sum[i], to_float(out.at[query * out.stride + c]), o[i][j]);
        }
    }
    store(query_matrix(p, head, p.tout, p.tout_strides, p.dim_v), o, row, column);
}
