// What numbers of 8 bits are multiplied by: those of an array, of a head, or of each block of 128 rows. Of Q and K a
// part of the softmax's factor where it can be; of V, where blocks differ, P is weighed by it, over the largest of the
// head.
#pragma once
#include "attention/pairs.cuh"
#include "tile/fragment.cuh"

constexpr int DESCALE_ROWS = 128;
constexpr bool DESCALED = config::Q_DESCALE || config::K_DESCALE;
// Whether products are multiplied before anything else is made of them.
constexpr bool DESCALE_SCORES = DESCALED && (SCORED || config::K_BLOCKS);

// (Templates: Params of inputs that have more bits know of none of this.)
template <class P>
__device__ float q_descale(const P& p, const Head& head, int i) {
    if constexpr (config::Q_DESCALE) {
        const PairStrides& s = p.q_descale_strides;
        return p.q_descale[head.batch * s.batch + head.q * s.head + i / DESCALE_ROWS * s.query];
    }
    return 1;
}
template <class T>
__device__ float key_descale(const T* descale, const PairStrides& s, const Head& head, int block) {
    return descale[head.batch * s.batch + head.k * s.head + block * s.key];
}

// Those of a tile's keys, which lie in no more than two blocks.
struct KeyDescales {
    float first, second;
    int boundary;  // of the columns

    template <class P, class T>
    __device__ KeyDescales(const P& p, const T* descale, const PairStrides& s, const Head& head, int key) {
        int block = key / DESCALE_ROWS, last = (head.keys(p) - 1) / DESCALE_ROWS;
        boundary = (block + 1) * DESCALE_ROWS - key;
        first = key_descale(descale, s, head, block);
        second = key_descale(descale, s, head, min(block + 1, last));
    }

    template <int N>
    __device__ void multiply(Accumulator<1, N>& x, float by) const {
        float a = first * by, b = second * by;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float own = 8 * n < boundary ? a : b;
#pragma unroll
            for (int e = 0; e < 4; e++) x.x[0][n][e] *= own;
        }
    }
};

// Of the scores of a query's row, where keys are alike.
template <class P>
__device__ float row_descale(const P& p, const Head& head, int i) {
    float x = q_descale(p, head, min(i, head.queries(p) - 1));
    if constexpr (config::K_DESCALE && !config::K_BLOCKS) x *= key_descale(p.k_descale, p.k_descale_strides, head, 0);
    return x;
}

// Products of rows from i on with the keys of a tile.
template <int N, class P>
__device__ void descale_scores(Accumulator<1, N>& scores, const P& p, const Head& head, int i, int key) {
    if constexpr (DESCALE_SCORES) {
        float rows = row_descale(p, head, i);
        if constexpr (config::K_BLOCKS)
            KeyDescales(p, p.k_descale, p.k_descale_strides, head, key).multiply(scores, rows);
        else
            scores.each([&](float& x, int, int) { x *= rows; });
    }
}

// The largest for these keys of a head's values; by a warp.
template <class P>
__device__ float value_descale(const P& p, const Head& head, Range keys) {
    float largest = config::V_DESCALE ? 0 : 1;
    if constexpr (config::V_BLOCKS) {
        for (int block = keys.begin / DESCALE_ROWS + threadIdx.x % 32; block * DESCALE_ROWS < keys.end; block += 32)
            largest = fmaxf(largest, key_descale(p.v_descale, p.v_descale_strides, head, block));
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    } else if constexpr (config::V_DESCALE) {
        largest = key_descale(p.v_descale, p.v_descale_strides, head, 0);
    }
    return largest;
}

// Probabilities of the keys of a tile, where V's blocks differ.
template <int N, class P>
__device__ void weigh(Accumulator<1, N>& probabilities, const P& p, const Head& head, int key, float largest) {
    if constexpr (config::V_BLOCKS)
        KeyDescales(p, p.v_descale, p.v_descale_strides, head, key)
            .multiply(probabilities, largest > 0 ? 1 / largest : 0);
}
