// Dropout in a warp's accumulator. A probability that is dropped gets a minus sign: rounded as `pack2` does where it is
// told that (RELU) it is 0, and the backward has both the probability and the decision in one register.
#pragma once
#include "attention/dropout.cuh"
#include "ptx/math.cuh"
#include "ptx/negate.cuh"
#include "tile/fragment.cuh"

// Of column groups [BEGIN, END) of eight, which come in pairs. The tile starts at multiples of 16.
template <int BEGIN, int END, int M, int N, bool TRANSPOSED, int HEAD_ROWS>
__device__ void drop(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, int batch,
                     const Dropout& dropout) {
    if constexpr (config::DROPOUT) {
        static_assert(BEGIN % 2 == 0 && END % 2 == 0 && END <= N && HEAD_ROWS == 0);
        unsigned lane = threadIdx.x % 32, i = at(0, 0).i, j = at(0, 0).j;
        unsigned below = dropout.below();
#pragma unroll
        for (int m = 0; m < M; m++) {
            if constexpr (!TRANSPOSED) {
                Philox::Side query = dropout.of_query(i / 2 + 8 * m + lane / 4, batch);
#pragma unroll
                for (int n = BEGIN; n < END; n += 2) {
                    unsigned words[4];
                    dropout.philox.words(query, dropout.of_key(j / 4 + 2 * n + lane % 4, at.head), words);
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        Accum* y = x.x[m][n + w / 2] + w % 2 * 2;
                        negate_below(y[0], words[w] << 16, below);
                        negate_below(y[1], words[w], below);
                    }
                }
            } else {
                // The two queries side by side belong to two groups, each of which this lane shares with the one whose
                // key differs in bit 0: each of the two lanes takes one group, and they exchange halves.
                bool odd = lane & 4;
                unsigned mine = odd ? 0x7632 : 0x5410, others = odd ? 0x5410 : 0x7632;
                Philox::Side key = dropout.of_key(j / 4 + 4 * m + lane / 8, at.head);
#pragma unroll
                for (int n = BEGIN; n < END; n += 2) {
                    unsigned words[4];
                    Philox::Side query = dropout.of_query(i / 2 + 4 * n + 2 * (lane % 4) + odd, batch);
                    dropout.philox.words(query, key, words);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        unsigned own = __byte_perm(words[2 * h], words[2 * h + 1], mine);
                        unsigned far = __byte_perm(words[2 * h], words[2 * h + 1], others);
                        far = __shfl_xor_sync(~0u, far, 4);
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            unsigned word = odd == e ? own : far;
                            negate_below(x.x[m][n][2 * h + e], word << 16, below);
                            negate_below(x.x[m][n + 1][2 * h + e], word, below);
                        }
                    }
                }
            }
        }
    }
}
template <int M, int N, bool TRANSPOSED, int HEAD_ROWS>
__device__ void drop(Accumulator<M, N>& x, const Placement<TRANSPOSED, HEAD_ROWS>& at, int batch,
                     const Dropout& dropout) {
    drop<0, N>(x, at, batch, dropout);
}

// dS = P (dP - delta); where P is dropped, -P delta.
__device__ inline Accum derivative(Accum probability, Accum dp, Accum minus_delta) {
    if (config::DROPOUT) return fma(larger(probability, Accum(0)), dp, fabs(probability) * minus_delta);
    return probability * (dp + minus_delta);
}
