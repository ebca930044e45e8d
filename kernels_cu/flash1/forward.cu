// Attention, forward, as FlashAttention's Algorithm 1 has it (https://arxiv.org/abs/2205.14135): one thread block for
// each head, keys outermost, and O, l and m in global memory, read and written at every step.
//
//     for each tile of keys:                      loaded once
//         for each tile of queries that may see one of them:
//             S = Q K^T
//             m' = row maximum of S,  P = exp(S - m'),  l' = row sum of P
//             m_new = max(m, m'),  l_new = exp(m - m_new) l + exp(m' - m_new) l'
//             O = (exp(m - m_new) l O + exp(m' - m_new) P V) / l_new
//
// It is here to be compared: simt/forward.cu exchanges the loops, so that O stays in registers, is divided once, and
// every tile of queries has a block of its own.
#include "flash1/on_chip.cuh"

struct Tiles {
    TileRows q, k, v;
    Weights p;
};
static_assert(sizeof(Tiles) <= config::ON_CHIP, "the launch asks for as much");

extern "C" __global__ void __launch_bounds__(config::THREADS, 1) attention_forward(const __grid_constant__ Params p) {
    const Head head = numbered_head<QueryTiles<TILE>>(p, blockIdx.x);
    const Matrix q = query_matrix(p, head, p.q, p.q_strides, p.dim);
    const Matrix k = key_matrix(p, head, p.k, p.k_strides, p.dim);
    const Matrix v = key_matrix(p, head, p.v, p.v_strides, p.dim_v);
    const Matrix o = between_steps(p, head, p.out, p.out_strides, p.o_sum, p.dim_v);
    const long long rows = head.row_number(p);
    const int seq_q = head.queries(p);
    Accum *const m = p.m + rows, *const l = p.l + rows;

    const Pairs pairs(p, head);
    // As in simt/forward.cu: the scale is folded into the exponential, so that m is the largest score without it.
    const Accum factor = pairs.factor();
    Tiles& tiles = *reinterpret_cast<Tiles*>(on_chip);

    clear(o);  // line 2
    for (int i = threadIdx.x; i < seq_q; i += config::THREADS) m[i] = -infinity(), l[i] = 0;

    for (int tile_k = 0; tile_k < head.key_tiles<TILE>(p); ++tile_k) {  // line 5
        const Range keys = head.key_tile<TILE>(p, tile_k);
        const int key = keys.begin;
        __syncthreads();
        tiles.k.load(k, key, 0);  // line 6
        tiles.v.load(v, key, 0);

        const QueryWalk<TILE, TILE> walk(p, head, keys);
        for (int step = walk.start(); walk.has(step); step = walk.next(step)) {  // line 7
            const Range queries = head.query_tile<TILE>(p, walk.tile(step));
            const int query = queries.begin;
            __syncthreads();  // what the step before wrote to memory is there, and nobody reads its tiles any more
            tiles.q.load(q, query, 0);  // line 8
            __syncthreads();

            ScoreTile s = {};
            add_products(s, tiles.q, tiles.k);  // line 9
            const bool tested = pairs.tests(queries, {key, key + TILE});
            for_each(s, [&](Accum& x, int i, int j) {
                const Pair pair = {head.q, query + row_of(i), key + score_column_of(j)};
                x = tested && !pairs.visible(pair) ? -infinity() : pairs.score(x, pair);
            });

            Accum m_new[M], l_new[M], before[M], weight[M];  // `before` of the old O and `weight` of P V in the new
#pragma unroll
            for (int i = 0; i < M; ++i) {
                const int query_i = query + row_of(i);
                const bool inside = query_i < seq_q;
                const Accum m_i = inside ? m[query_i] : -infinity(), l_i = inside ? l[query_i] : 0;

                Accum m_tile = -infinity(), l_tile = 0;  // line 10
                for (Accum x : s[i]) m_tile = max(m_tile, x);
                m_tile = row_max(m_tile);
                // A row that has seen no key has the maximum -inf, and -inf - -inf would be NaN.
                const Accum base = m_tile == -infinity() ? 0 : m_tile;
                for (Accum& x : s[i]) {
                    x = exp2((x - base) * factor);
                    l_tile += x;
                }
                l_tile = row_sum(l_tile);

                m_new[i] = max(m_i, m_tile);  // line 11
                const Accum base_new = m_new[i] == -infinity() ? 0 : m_new[i];
                before[i] = exp2((m_i - base_new) * factor) * l_i;
                weight[i] = exp2((m_tile - base_new) * factor);
                l_new[i] = before[i] + weight[i] * l_tile;
                const Accum divisor = l_new[i] == 0 ? 1 : l_new[i];
                before[i] /= divisor, weight[i] /= divisor;
            }

            store(tiles.p, s);
            __syncthreads();
            ResultTile pv = {}, o_i;
            add_product(pv, tiles.p, tiles.v, tested);

            load(o_i, o, query);  // line 12
            for_each(o_i, [&](Accum& x, int i, int j) { x = before[i] * x + weight[i] * pv[i][j]; });
            store(o, o_i, query, 0);
#pragma unroll
            for (int i = 0; i < M; ++i) {  // line 13
                const int query_i = query + row_of(i);
                if (query_i < seq_q && threadIdx.x % ACROSS == 0) m[query_i] = m_new[i], l[query_i] = l_new[i];
            }
        }
    }

    __syncthreads();
    finish(query_matrix(p, head, p.out, p.out_strides, p.dim_v), o);
    if (p.lse != nullptr)
        for (int i = threadIdx.x; i < seq_q; i += config::THREADS)
            p.lse[rows + i] = l[i] == 0 ? -infinity() : m[i] * pairs.unit() + log(l[i]);
}
