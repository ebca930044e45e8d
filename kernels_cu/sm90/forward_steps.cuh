// A warpgroup's ways through a key tile of the Hopper forward: the softmax of S = Q K^T, and under it O += P V of the
// tile before. `LookedAt` takes exponentials when the maximum of S is known, `Together` and `Sliced` before it is
// (softmax.cuh): the one under all of P V, the other between slices of it.
#pragma once
#include "attention/softmax.cuh"
#include "sm90/descale.cuh"
#include "sm90/forward_tiles.cuh"

// Exponentials are taken before their maximum is known (softmax.cuh), where registers allow it and the maximum is not
// expected to grow. Two warpgroups have some to spare for a warp to do what overflowed again by itself; three do it
// together. (With dropout and slopes, or a seed in memory, they do not.)
constexpr bool BLIND =
    !TURNED && DIM <= 192 && DIM_V <= 128 && !GROWING_SCORES && !PAIR_ARRAYS && !(DROPOUT && (ALIBI_SLOPES || SEED));
constexpr bool WARP_VOTE = ROOMY;

// Whether O += P V is issued in slices of 16 keys between these exponentials, SLICES_AHEAD of them with S. At 128
// columns that costs power, and pays only where a block has one tile, a long one (LONE), whose warpgroups may stay in
// step. (With what else is between exponentials the compiler would make the products wait for each other.)
constexpr bool SLICED = BLIND && !NEAR_CAPS && !DROPOUT && ((DIM < 128 && DIM_V <= 96) || LONE);
constexpr int SLICES_AHEAD = 2;

// Whether a warpgroup that sees no more than half of its first key tile computes only that.
constexpr bool CUT_FIRST = walk::TESTS_FIRST && KEYS == 128 && !walk::LISTED;
static_assert((CUT_FIRST ? KEYS / 2 : KEYS) / 16 >= SLICES_AHEAD);

// S of a step, and what all ways do with it. (References: with members in their place the compiler orders instructions
// in another way.)
template <class Consumer>
struct Step {
    Consumer& w;
    int step;
    const typename Consumer::ScorePlacement& at;
    bool tests, last;  // whether elements need tests; whether the warpgroup gives Q back with its scores
    Accumulator<1, KEYS / 8>& scores;
    float (&shrink)[1][2];  // where a maximum has `grown`, what O is to be multiplied by
    bool& grown;

    // Start O += P V, and wait for S.
    __device__ void add_values() {
        w.add_values(w.half);
        wgmma_wait<1>();
        changed(scores);
        if (last) w.release_q();
    }

    // Products become probabilities.
    __device__ void look() {
        float largest[1][2];
        w.mask(scores, step, tests);
        w.softmax.row_maximum(scores, largest);
        grown = w.softmax.raise(largest, shrink);
        w.softmax.exponentiate(scores);
        drop(scores, at, w.tile.head.batch, w.dropout);
        weigh(scores, w.p, w.tile.head, w.own.tile(step) * KEYS, w.largest_value);
    }
};

// The maximum first.
struct LookedAt {
    template <class Step>
    __device__ static void run(Step& x) {
        if constexpr (SLICED) x.add_values();
        x.w.release_k();
        x.look();
    }
};

// Exponentials first.
struct Blind {
    // What `exponentiate_blindly` takes of a score.
    __device__ static float exponent_of(float s, float factor, float x) { return fmaf(s, factor, x); }

    // With what they add to the sums of rows; where they do not fit, S is computed again and looked at.
    template <class Step>
    __device__ static void settle(Step& x, const float (&added)[1][2], bool fits) {
        auto& w = x.w;
        drop(x.scores, x.at, w.tile.head.batch, w.dropout);
        if constexpr (WARP_VOTE) {
            if (__builtin_expect(__all_sync(~0u, fits), true)) {
                w.softmax.add(added);
            } else {
                warp_ABt<DOT>(x.scores, w.s.q_tile(), w.warp_row, w.s.k_tile());
                x.look();
            }
        } else {
            if (__builtin_expect(all_threads<128>(1 + w.warpgroup, fits), true)) {
                w.softmax.add(added);
            } else {
                w.start_scores(x.scores);
                wgmma_wait<0>();
                changed(w.o);
                changed(x.scores);
                x.look();
            }
        }
        w.release_k();
    }
};

// All of P V is under way.
struct Together : Blind {
    template <class Step>
    __device__ static void run(Step& x) {
        auto& w = x.w;
        float added[1][2];
        bool fits;
        if constexpr (NEAR_CAPS) {  // capped on the way
            Pairs pairs(w.p, w.tile.head);
            w.near = w.near && near_zero(x.scores, pairs);
            as_near(w.near, [&](auto how) {
                auto exponent = [&](float s, float, float x) { return pairs.capped_and<decltype(how)::value>(s, x); };
                fits = w.softmax.template exponentiate_blindly<1>(x.scores, added, exponent, [](auto) {});
            });
        } else {
            w.mask(x.scores, x.step, false);
            fits = w.softmax.template exponentiate_blindly<1>(x.scores, added, exponent_of, [](auto) {});
        }
        settle(x, added, fits);
    }
};

// P V is issued between exponentials, but for its first slices.
struct Sliced : Blind {
    template <class Step>
    __device__ static void run(Step& x) {
        auto& w = x.w;
        float added[1][2];
        bool fits;
        w.s.v.wait_full();
        w.template start_values<16 * SLICES_AHEAD>();
        wgmma_wait<1>();
        changed(x.scores);
        w.mask(x.scores, x.step, false);
        if (CUT_FIRST && w.half)
            fits = exponentiate_and_add<CUT_FIRST ? KEYS / 2 : KEYS>(w, x.scores, added);
        else
            fits = exponentiate_and_add<KEYS>(w, x.scores, added);
        settle(x, added, fits);
    }

    // Exponentials, and between them O += P V of the first COUNT keys of the tile before, but for SLICES_AHEAD: a warp
    // that issues a product stands still while the one before runs.
    template <int COUNT, class Consumer, int N>
    __device__ static bool exponentiate_and_add(Consumer& w, Accumulator<1, N>& scores, float (&added)[1][2]) {
        auto values = w.s.v_tile();
        wgmma_fence();
        bool fits = w.softmax.template exponentiate_blindly<COUNT / 16>(scores, added, exponent_of, [&](auto part) {
            constexpr int n = part.value + SLICES_AHEAD;
            if constexpr (n < COUNT / 16) wgmma(w.o.x[0], w.probabilities.x[n], values.down_columns(n), Product());
        });
        wgmma_commit();
        return fits;
    }
};
