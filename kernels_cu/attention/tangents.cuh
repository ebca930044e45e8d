// Tangents: what changes, and by how much, where arrays of a call move. Kernels that are given some ask this beside
// what `Pairs` answers. With z the scores in natural units, lse and delta of a row, and t for what something changes
// by,
//
//     P = exp(z - lse)    dz = P (dP - delta)    tP = P (tz - tlse)    tdz = tP (dP - delta) + P (tdP - tdelta)
#pragma once
#include "attention/pairs.cuh"

// Whether products of Q and K move, scores do, and probabilities.
constexpr bool PRODUCTS_MOVE = config::TQ || config::TK;
constexpr bool SCORES_MOVE = PRODUCTS_MOVE || config::TSCORE || Terms::MOVING > 0;
constexpr bool MOVES = SCORES_MOVE || config::TSINKS;

struct MovingPairs : Pairs {
    using Pairs::Pairs;

    // What a pair's score in natural units changes by, where the product s of Q and K changes by ts.
    __device__ Accum tangent(Accum s, Accum ts, Pair at) const {
        Accum added = Terms::tangent(p, head, at);
        if (config::SCORE)
            return user::tangent(p, natural(s), natural(ts), head.batch, at.head, at.i, at.j, tabled(at)) + added;
        return PRODUCTS_MOVE ? fma(slope(s, at) * p.scale, ts, added) : added;
    }

    // And what its slope changes by.
    __device__ Accum bend(Accum s, Accum ts, Pair at) const {
        if (config::SCORE) {
            Accum x = user::bend(p, natural(s), natural(ts), head.batch, at.head, at.i, at.j, tabled(at));
            return config::NEGATIVE_SCALE ? -x : x;
        }
        if (!config::SOFTCAP || !PRODUCTS_MOVE) return 0;
        Accum t = capped(s);
        return -2 * t * fma(-t, t, Accum(1)) * p.cap_inverse * ts;
    }
    // Whether it may.
    static constexpr bool BENDS = config::SCORE ? user::BENDS : config::SOFTCAP && PRODUCTS_MOVE;
};

// What the sink of a head changes by.
template <class Given>
__device__ Accum sink_tangent(const Given& p, const Head& head) {
    if constexpr (config::TSINKS) return to_float(p.tsinks[real_head(p, head.q) * p.tsinks_strides.head]);
    return 0;
}

// What a query's row is to its pairs: with dropout P / kept stands in the place of P, and lse, delta and tdelta are as
// that asks (`kept` in dropout.cuh).
struct MovingRow {
    Accum lse, delta, tlse, tdelta;
};

// What becomes of a pair that has this probability: tP; the derivatives dz by its score and dx by its product of Q and
// K, but for |scale|; and what these change by. Without a probability all are 0, whatever stands elsewhere.
struct MovedPair {
    Accum tp = 0, dz = 0, tdz = 0, dx = 0, tdx = 0;

    // dp, tdp: products of dO and V, 0 where the pair is dropped.
    __device__ MovedPair(Accum probability, Accum s, Accum ts, Accum dp, Accum tdp, const MovingRow& row,
                         const MovingPairs& pairs, Pair at) {
        if (probability == 0) return;
        Accum rest = dp - row.delta;
        dz = probability * rest, tdz = probability * (tdp - row.tdelta);
        if (MOVES) {
            tp = probability * ((SCORES_MOVE ? pairs.tangent(s, ts, at) : 0) - row.tlse);
            tdz = fma(tp, rest, tdz);
        }
        Accum slope = pairs.slope(s, at);
        dx = slope * dz, tdx = slope * tdz;
        if (MovingPairs::BENDS) tdx = fma(pairs.bend(s, ts, at), dz, tdx);
    }
};
