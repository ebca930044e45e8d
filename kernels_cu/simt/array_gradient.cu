// Gradients of the arrays that scores read: what a tile of pairs adds is dS times what the score changes by.
#include "attention/array_gradient.cuh"
#include "simt/delta.cuh"

using config::OWNED, config::VISITED;

template <class Of>
__device__ void add_tile(ScoreTile& sums, const Params& p, const PairsTile& at, const Dropout& dropout,
                         Shared& shared) {
    Products tile;
    tile.multiply<false>(QueryArrays(p, at.head), at.i, KeyArrays(p, at.head), at.j, shared);

    const Pairs pairs(p, at.head, at.bits);
    const bool tested = pairs.tests_backward({at.i, at.i + OWNED}, {at.j, at.j + VISITED});
#pragma unroll
    for (int i = 0; i < M; ++i) {
        const Row of_query(p, at.head, at.i + row_of(i));
#pragma unroll
        for (int j = 0; j < SCORES; ++j) {
            const Pair pair = {at.head.q, at.i + row_of(i), at.j + score_column_of(j)};
            const Accum ds = of_score(tile.s[i][j], tile.dp[i][j], of_query, pairs, dropout, tested, pair);
            if (ds != 0) sums[i][j] = fma(ds, Of::change(pairs, pair, tile.s[i][j]), sums[i][j]);
        }
    }
}

__device__ inline Accum of_sink(const Params& p, const Head& head, int i) { return -p.delta[head.row_number(p, i)]; }

#include "simt/gather.cuh"
