// Attention, backward, as FlashAttention's Algorithm 4 has it (https://arxiv.org/abs/2205.14135): one thread block for
// each head of K and V, keys outermost, and dQ in global memory, read and written at every step.
//
//     for each tile of keys:                      loaded once; dK and dV stay on the chip
//         for each tile of queries that may see one of them:
//             S = Q K^T,  P = exp(S) / exp(lse)   from m and l, which the interface keeps as lse = m + log l
//             dV += P^T dO,  dP = dO V^T,  D = rowsum(dO * O)   D again for every tile of keys
//             dS = P * (dP - D)
//             dQ += scale * dS K,  dK += scale * dS^T Q
//
// Query heads that share keys are walked over by the same block, so that their dK and dV add up on the chip.
#include "attention/mask.cuh"
#include "attention/params.cuh"
#include "attention/score.cuh"
#include "flash1/on_chip.cuh"

struct Tiles {
    Rows q, dout, k, v;  // O comes to the place of Q, and is gone before it
    Weights weights;
    Accum d[TILE];
};
static_assert(sizeof(Tiles) <= config::ON_CHIP, "the launch asks for as much");

extern "C" __global__ void __launch_bounds__(config::THREADS, 1) attention_backward(const __grid_constant__ Params p) {
    const int head_k = blockIdx.x % p.heads_k, batch = blockIdx.x / p.heads_k, group = p.heads_q / p.heads_k;
    const Matrix k(p.k, p.k_strides, batch, head_k, p.seq_k, p.dim);
    const Matrix v(p.v, p.v_strides, batch, head_k, p.seq_k, p.dim_v);
    const Mask mask(p, batch);
    const Accum scale = p.scale;
    Tiles& tiles = *reinterpret_cast<Tiles*>(on_chip);

    for (int head = head_k * group; head < (head_k + 1) * group; ++head)
        clear(between_steps(p.dq, p.dq_strides, p.dq_sum, p, batch, head, p.dim));

    for (int key = 0; key < p.seq_k; key += TILE) {
        __syncthreads();
        tiles.k.load(k, key, 0);
        tiles.v.load(v, key, 0);
        ResultTile dk = {}, dv = {};

        const Range queries = mask.queries_of({key, min(key + TILE, p.seq_k)});
        for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
            const Matrix q(p.q, p.q_strides, batch, head, p.seq_q, p.dim);
            const Matrix<const Element> out(p.out, p.out_strides, batch, head, p.seq_q, p.dim_v);
            const Matrix dout(p.dout, p.dout_strides, batch, head, p.seq_q, p.dim_v);
            const Matrix dq = between_steps(p.dq, p.dq_strides, p.dq_sum, p, batch, head, p.dim);
            const Accum* lse = p.lse + ((long long)batch * p.heads_q + head) * p.seq_q;

            for (int query = queries.begin; query < queries.end; query += TILE) {
                __syncthreads();  // what the step before wrote to memory is there, and nobody reads its tiles any more
                tiles.dout.load(dout, query, 0);
                tiles.q.load(out, query, 0);
                __syncthreads();
                // One thread adds a row, in the order in which add_products adds dP: where one key has all the weight,
                // O is its V, and dP - D is then 0 to the last bit, as it should.
                if (threadIdx.x % ACROSS < M) {
                    const int row = row_of(threadIdx.x % ACROSS);
                    Accum d = 0;
                    for (int c = 0; c < config::COLUMNS; ++c) d += tiles.dout.at[row][c] * tiles.q.at[row][c];
                    tiles.d[row] = d;
                }
                __syncthreads();
                tiles.q.load(q, query, 0);
                __syncthreads();

                ScoreTile s = {}, dp = {};
                add_products(s, tiles.q, tiles.k);
                add_products(dp, tiles.dout, tiles.v);

                const bool tested = mask.tests({query, min(query + TILE, p.seq_q)}, {key, key + TILE});
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    const int query_i = query + row_of(i);
                    const bool inside = query_i < p.seq_q;
                    const Accum d = tiles.d[row_of(i)];
                    // No weight beyond the last query, nor where a query sees no key: exp(s - inf) = 0.
                    const Accum lse_i = inside && lse[query_i] != -infinity() ? lse[query_i] : infinity();
#pragma unroll
                    for (int j = 0; j < SCORES; ++j) {
                        const int key_j = key + score_column_of(j);
                        const bool hidden = tested && !mask.visible(query_i, key_j);
                        const Accum x = score(s[i][j], batch, head, query_i, key_j) * scale;
                        const Accum slope = score_derivative(s[i][j], batch, head, query_i, key_j);
                        s[i][j] = hidden ? 0 : exp2((x - lse_i) * LOG2E);
                        dp[i][j] = hidden ? 0 : s[i][j] * (dp[i][j] - d) * slope;
                    }
                }

                share_transposed(tiles.weights, s);
                __syncthreads();
                add_product(dv, tiles.weights, tiles.dout, tested);

                __syncthreads();
                share_transposed(tiles.weights, dp);
                __syncthreads();
                add_product(dk, tiles.weights, tiles.q, tested);

                __syncthreads();
                share(tiles.weights, dp);
                __syncthreads();
                ResultTile dsk = {}, dq_i;
                add_product(dsk, tiles.weights, tiles.k, tested);
                load(dq_i, dq, query);
                for_each(dq_i, [&](Accum& x, int i, int j) { x += scale * dsk[i][j]; });
                store(dq, dq_i, query, 0);
            }
        }

        for_each(dk, [&](Accum& x, int, int) { x *= scale; });
        store(Matrix(p.dk, p.dk_strides, batch, head_k, p.seq_k, p.dim), dk, key, 0);
        store(Matrix(p.dv, p.dv_strides, batch, head_k, p.seq_k, p.dim_v), dv, key, 0);
    }

    __syncthreads();
    for (int head = head_k * group; head < (head_k + 1) * group; ++head)
        finish(Matrix(p.dq, p.dq_strides, batch, head, p.seq_q, p.dim),
               between_steps(p.dq, p.dq_strides, p.dq_sum, p, batch, head, p.dim));
}
