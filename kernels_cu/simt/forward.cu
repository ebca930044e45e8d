// Attention, forward, in plain CUDA: FlashAttention-2's Algorithm 1 (https://arxiv.org/abs/2307.08691), tile by tile.
//
//     for each tile of queries (one thread block):
//         for each tile of keys that one of them may see:
//             S = Q K^T                        scores
//             P = exp(S - max of S so far)     online softmax: what was summed under a smaller maximum is shrunk
//             O = shrink * O + P V
//         O = O / sum of P
//
// float32 and float64 (float16 and bfloat16 are computed in float32), any head dimension. simt/tile.cuh has the tiles.
#include "simt/tile.cuh"

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_forward(const __grid_constant__ Params p) {
    // Which part of the output is this block's: OWNED queries of a head, COLUMNS of its columns. Where Dv is larger
    // than COLUMNS, several blocks compute the same scores, each for its columns: a register tile cannot be any wider.
    const int parts = tiles_in(max(p.dim_v, 1), config::COLUMNS);
    const Schedule<QueryTiles<config::OWNED>, Order::LAST_FIRST> schedule(p);  // under a causal mask they see most keys
    const int column = blockIdx.x % parts * config::COLUMNS;
    const HeadTile at = schedule.tile(blockIdx.x / parts);
    if (config::PACKED_Q && at.none()) return;
    const Head head = at.head;
    const Range queries = head.query_tile<config::OWNED>(p, at.number);
    const int row = queries.begin;

    const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
    const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim, Scaled<ScalesOfK>{p, head});
    const Matrix v = key_matrix(p, head, p.v, p.v_strides, p.dim_v, Scaled<ScalesOfV>{p, head});

    const Dropout dropout(p);
    const KeyWalk<config::VISITED, config::OWNED> walk(p, head, queries);
    const Accum factor = Pairs(p, head).factor();  // exp(scale * x) as 2^(factor * x): that is what the hardware has

    __shared__ Shared shared;
    ResultTile o = {};
    Accum top[M], sum[M];  // of each row: the largest score so far, and this thread's part of the sum of P
    for (int i = 0; i < M; ++i) top[i] = -infinity(), sum[i] = 0;

    for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
        const int key = walk.tile(step) * config::VISITED;
        ScoreTile s;
        dot_products(s, q, row, k, key, shared);

        const Pairs pairs(p, head, walk.bits(step, queries));
        const bool tested = walk.tests(p, head, queries, step);
        for_each(s, [&](Accum& x, int i, int j) {
            const Pair pair = {head.q, row + row_of(i), key + score_column_of(j)};
            x = tested && !pairs.visible(pair) ? -infinity() : pairs.score(x, pair);
        });

#pragma unroll
        for (int i = 0; i < M; ++i) {
            Accum largest = top[i];
            for (Accum x : s[i]) largest = max(largest, x);
            largest = row_max(largest);
            // A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
            const Accum base = largest == -infinity() ? 0 : largest;
            const Accum shrink = exp2((top[i] - base) * factor);
            top[i] = largest;
            sum[i] *= shrink;
            for (Accum& x : o[i]) x *= shrink;
            for (Accum& x : s[i]) {
                x = exp2((x - base) * factor);
                sum[i] += x;
            }
        }

        if (config::DROPOUT)
            for_each(s, [&](Accum& x, int i, int j) {
                if (!dropout.keeps(head.batch, {head.q, row + row_of(i), key + score_column_of(j)})) x = 0;
            });

        add_weighted(o, s, v, key, column, tested, shared);
    }

    const Pairs pairs(p, head);
#pragma unroll
    for (int i = 0; i < M; ++i) {
        sum[i] = row_sum(sum[i]);
        const int query_i = row + row_of(i);
        Accum alone = -infinity();  // lse where nothing but the sink counts
        bool any = sum[i] != 0;     // a row that sees no key is 0
        if (config::SINKS) {
            alone = pairs.sink(head.q);
            const Accum exponent = any ? alone * LOG2E - top[i] * factor : 127;
            any = exponent < 127 || sum[i] != sum[i];  // (what is NaN has no largest score)
            sum[i] = any ? sum[i] + exp2(exponent) : 1;
        }
        Accum inverse = any ? 1 / (sum[i] * kept(p)) : 0;
        if (config::EIGHT) inverse *= p.out_scale;
        for (Accum& x : o[i]) x *= inverse;

        // One number a row is all that the backward needs of the softmax.
        if (p.lse != nullptr && column == 0 && threadIdx.x % ACROSS == 0 && query_i < head.queries(p))
            p.lse[head.row_number(p, query_i)] = any ? top[i] * pairs.unit() + log(sum[i]) : alone;
    }
    store(query_matrix(p, head, p.out, p.out_strides, p.dim_v), o, row, column);
}
