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
#include "attention/mask.cuh"
#include "attention/params.cuh"
#include "attention/score.cuh"
#include "simt/tile.cuh"

extern "C" __global__ void __launch_bounds__(config::THREADS, config::BLOCKS)
    attention_forward(const __grid_constant__ Params p) {
    // Which part of the output is this block's: OWNED queries of a head, COLUMNS of its columns. Where Dv is larger than
    // COLUMNS, several blocks compute the same scores, each for its columns: a register tile cannot be any wider.
    const int parts = ceil_div(max(p.dim_v, 1), config::COLUMNS), tiles = ceil_div(p.seq_q, config::OWNED);
    int index = blockIdx.x;
    const int column = index % parts * config::COLUMNS;
    index /= parts;
    const int row = (tiles - 1 - index % tiles) * config::OWNED;  // last first: under a causal mask they see most keys
    index /= tiles;
    const int head = index % p.heads_q, batch = index / p.heads_q, head_k = head / (p.heads_q / p.heads_k);

    const Matrix q(p.q, p.q_strides, batch, head, p.seq_q, p.dim);
    const Matrix k(p.k, p.k_strides, batch, head_k, p.seq_k, p.dim);
    const Matrix v(p.v, p.v_strides, batch, head_k, p.seq_k, p.dim_v);

    const Mask mask(p, batch);
    const Range queries = {row, min(row + config::OWNED, p.seq_q)};
    const Range keys = mask.keys_of(queries);

    // exp(scale * x) as 2^(factor * x): that is what the hardware has. Were the factor 0, a hidden -inf would become NaN.
    const Accum scale = p.scale, factor = max(scale * LOG2E, SMALLEST);

    __shared__ Shared shared;
    ResultTile o = {};
    Accum top[M], sum[M];  // of each row: the largest score so far, and this thread's part of the sum of P
    for (int i = 0; i < M; ++i) top[i] = -infinity(), sum[i] = 0;

    for (int key = keys.begin; key < keys.end; key += config::VISITED) {
        ScoreTile s;
        dot_products(s, q, row, k, key, shared);

        const bool tested = mask.tests(queries, {key, key + config::VISITED});
        for_each(s, [&](Accum& x, int i, int j) {
            const int query_i = row + row_of(i), key_j = key + score_column_of(j);
            x = tested && !mask.visible(query_i, key_j) ? -infinity() : score(x, batch, head, query_i, key_j);
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

        add_weighted(o, s, v, key, column, tested, shared);
    }

#pragma unroll
    for (int i = 0; i < M; ++i) {
        sum[i] = row_sum(sum[i]);
        const Accum inverse = sum[i] == 0 ? 0 : 1 / sum[i];  // a row that sees no key is 0
        for (Accum& x : o[i]) x *= inverse;

        // One number a row is all that the backward needs of the softmax.
        const int query_i = row + row_of(i);
        if (p.lse != nullptr && column == 0 && threadIdx.x % ACROSS == 0 && query_i < p.seq_q)
            p.lse[((long long)batch * p.heads_q + head) * p.seq_q + query_i] =
                sum[i] == 0 ? -infinity() : top[i] * scale + log(sum[i]);
    }
    store(Matrix(p.out, p.out_strides, batch, head, p.seq_q, p.dim_v), o, row, column);
}
