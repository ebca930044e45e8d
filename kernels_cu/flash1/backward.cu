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
#include "flash1/on_chip.cuh"

struct Tiles {
    TileRows q, dout, k, v;  // O comes to the place of Q, and is gone before it
    Weights weights;
    Accum d[TILE];
};
static_assert(sizeof(Tiles) <= config::ON_CHIP, "the launch asks for as much");

extern "C" __global__ void __launch_bounds__(config::THREADS, 1) attention_backward(const __grid_constant__ Params p) {
    const Head first = numbered_head<KeyTiles<TILE>>(p, blockIdx.x);  // of those that share the keys
    const int end = first.q + group_of(p), seq_q = first.queries(p);
    const Matrix k = key_matrix(p, first, p.k, p.k_strides, p.dim);
    const Matrix v = key_matrix(p, first, p.v, p.v_strides, p.dim_v);
    const Accum scale = p.scale;
    Tiles& tiles = *reinterpret_cast<Tiles*>(on_chip);

    for (Head head = first; head.q < end; ++head.q) clear(between_steps(p, head, p.dq, p.dq_strides, p.dq_sum, p.dim));

    for (int tile_k = 0; tile_k < first.key_tiles<TILE>(p); ++tile_k) {
        const Range keys = first.key_tile<TILE>(p, tile_k);
        const int key = keys.begin;
        __syncthreads();
        tiles.k.load(k, key, 0);
        tiles.v.load(v, key, 0);
        ResultTile dk = {}, dv = {};

        const QueryWalk<TILE, TILE> walk(p, first, keys);
        for (Head head = first; head.q < end; ++head.q) {
            const Pairs pairs(p, head);
            const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
            const Matrix out = query_matrix<const In>(p, head, p.out, p.out_strides, p.dim_v);
            const Matrix dout = query_matrix(p, head, p.dout, p.dout_strides, p.dim_v);
            const Matrix dq = between_steps(p, head, p.dq, p.dq_strides, p.dq_sum, p.dim);
            const Accum* lse = p.lse + head.row_number(p);

            for (int step = walk.start(); walk.has(step); step = walk.next(step)) {
                const int query = walk.tile(step) * TILE;
                __syncthreads();  // what the step before wrote to memory is there, and nobody reads its tiles any more
                tiles.dout.load(dout, query, 0);
                tiles.q.load(out, query, 0);
                __syncthreads();
                // One thread adds a row, in the order in which add_products adds dP: where one key has all the weight,
                // O is its V, and dP - D is then 0 to the last bit, as it should.
                if (threadIdx.x % ACROSS < M) {
                    const int row = row_of(threadIdx.x % ACROSS);
                    Accum d = 0;
                    for (int c = 0; c < config::COLUMNS; ++c) d = fma(tiles.dout.at[row][c], tiles.q.at[row][c], d);
                    // dS = P (dP - D + dlse); a row that sees no key has no weight, whatever dlse is.
                    const bool seen = p.dlse != nullptr && query + row < seq_q && lse[query + row] != -infinity();
                    tiles.d[row] = d - (seen ? p.dlse[head.row_number(p, query + row)] : 0);
                }
                __syncthreads();
                tiles.q.load(q, query, 0);
                __syncthreads();

                ScoreTile s = {}, dp = {};
                add_products(s, tiles.q, tiles.k);
                add_products(dp, tiles.dout, tiles.v);

                const bool tested = pairs.tests_backward({query, query + TILE}, {key, key + TILE});
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    const int query_i = query + row_of(i);
                    const bool inside = query_i < seq_q;
                    const Accum d = tiles.d[row_of(i)];
                    // No weight beyond the last query, nor where a query sees no key: exp(s - inf) = 0.
                    const Accum lse_i = inside && lse[query_i] != -infinity() ? lse[query_i] : infinity();
#pragma unroll
                    for (int j = 0; j < SCORES; ++j) {
                        const Pair pair = {head.q, query_i, key + score_column_of(j)};
                        const bool hidden = tested && !pairs.visible(pair);
                        const Accum x = pairs.score(s[i][j], pair) * pairs.unit(), slope = pairs.slope(s[i][j], pair);
                        s[i][j] = hidden ? 0 : exp2((x - lse_i) * LOG2E);
                        dp[i][j] = hidden ? 0 : s[i][j] * (dp[i][j] - d) * slope;
                    }
                }

                store_transposed(tiles.weights, s);
                __syncthreads();
                add_product(dv, tiles.weights, tiles.dout, tested);

                __syncthreads();
                store_transposed(tiles.weights, dp);
                __syncthreads();
                add_product(dk, tiles.weights, tiles.q, tested);

                __syncthreads();
                store(tiles.weights, dp);
                __syncthreads();
                ResultTile dsk = {}, dq_i;
                add_product(dsk, tiles.weights, tiles.k, tested);
                load(dq_i, dq, query);
                for_each(dq_i, [&](Accum& x, int i, int j) { x += scale * dsk[i][j]; });
                store(dq, dq_i, query, 0);
            }
        }

        for_each(dk, [&](Accum& x, int, int) { x *= scale; });
        store(key_matrix(p, first, p.dk, p.dk_strides, p.dim), dk, key, 0);
        store(key_matrix(p, first, p.dv, p.dv_strides, p.dim_v), dv, key, 0);
    }

    __syncthreads();
    for (Head head = first; head.q < end; ++head.q)
        finish(query_matrix(p, head, p.dq, p.dq_strides, p.dim),
               between_steps(p, head, p.dq, p.dq_strides, p.dq_sum, p.dim));
}
