// K and V of 8 bits beside Q of 16 (EIGHT): what the numbers of their rows are multiplied by when they are widened,
// read where a row of one number would lie. It may be the same for all rows of a head.
#pragma once
#include "attention/head.cuh"

// Where that of row j lies in `scales`; null: in no page.
__device__ inline const float* scale_of_row(const Params& p, const Head& head, const float* scales,
                                            const PairStrides& s, int j) {
    Strides rows{s.batch, s.key, s.head};
    if constexpr (config::PAGED) return head.paged_row(p, scales, rows, j);
    return head.key_row(scales, rows, j);
}

// Those of K and of V, if they are given. (Templates, because not every plan's Params has them.)
struct ScalesOfK {
    static constexpr bool GIVEN = config::EIGHT && config::K_DESCALE;
    template <class P>
    __device__ static const float* of_row(const P& p, const Head& head, int j) {
        return scale_of_row(p, head, p.k_descale, p.k_descale_strides, j);
    }
};
struct ScalesOfV {
    static constexpr bool GIVEN = config::EIGHT && config::V_DESCALE;
    template <class P>
    __device__ static const float* of_row(const P& p, const Head& head, int j) {
        return scale_of_row(p, head, p.v_descale, p.v_descale_strides, j);
    }
};
