// The tangents of these gradients (simt/array_gradient.cu).
#include "attention/array_gradient.cuh"
#include "simt/moving.cuh"

using config::OWNED, config::VISITED;

template <class Of>
__device__ void add_tile(ScoreTile& sums, const Params& p, const PairsTile& at, const Dropout& dropout,
                         Shared& shared) {
    MovingProducts tile;
    tile.multiply<false>(MovingQueryArrays(p, at.head), at.i, MovingKeyArrays(p, at.head), at.j, shared);

    const MovingPairs pairs(p, at.head, at.bits);
    const bool tested = pairs.tests_backward({at.i, at.i + OWNED}, {at.j, at.j + VISITED});
#pragma unroll
    for (int i = 0; i < M; ++i) {
        const MovingRow of_query = moving_row(p, at.head, at.i + row_of(i));
#pragma unroll
        for (int j = 0; j < SCORES; ++j) {
            const Pair pair = {at.head.q, at.i + row_of(i), at.j + score_column_of(j)};
            const bool keeps = dropout.keeps(at.head.batch, pair);
            const Accum x = tile.s[i][j], tx = tile.ts[i][j];
            const Accum dp = keeps ? tile.dp[i][j] : 0, tdp = keeps ? tile.tdp[i][j] : 0;
            const Accum weight = seen_probability(x, of_query, pairs, tested, pair);
            const MovedPair moved(weight, x, tx, dp, tdp, of_query, pairs, pair);
            if (moved.tdz != 0) sums[i][j] = fma(moved.tdz, Of::change(pairs, pair, x), sums[i][j]);
            if (moved.dz != 0) sums[i][j] = fma(moved.dz, Of::bend(pairs, pair, x, tx), sums[i][j]);
        }
    }
}

__device__ inline Accum of_sink(const Params& p, const Head& head, int i) {
    const long long n = head.row_number(p, i);
    return -fma(sink_tangent(p, head) - p.tlse[n], p.delta[n], p.tdelta[n]);
}

#include "simt/gather.cuh"
