// What the host hands to every kernel, by value. gpu/launch.py packs it; the two must list the same fields.
#pragma once

// Distances in elements between batches, between rows (positions in the sequence) and between heads.
struct Strides {
    long long batch, row, head;
};

struct Params {
    const Element *q, *k, *v;
    Element* out;
    Accum* lse;  // (B, Hq, Sq), natural logarithm; null in the forward where nobody asked
    const Element* dout;
    Element *dq, *dk, *dv;
    Accum* delta;               // (B, Hq, Sq), rowsum(dO * O); in sm90, -lse in base 2 and minus that, by tiles
    float* dq_sum;              // float32 dQ in the order of the accumulator fragments
    Accum *m, *l;               // (B, Hq, Sq), FlashAttention-1: largest score and sum of each row so far
    float* o_sum;               // (B, Hq, Sq, Dv), FlashAttention-1: O between the steps
    unsigned* counters;         // tickets, and how far the tiles of dQ are
    const unsigned char* mask;  // key_mask (B, Sk): 1 where the key may be attended

    Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
    long long mask_batch;

    double scale;  // multiplies Q K^T
    float scale_float;
    int batch, heads_q, heads_k, seq_q, seq_k, dim, dim_v;
    int diagonal, left, right;  // query i sees keys i + diagonal - left .. i + diagonal + right
    int together, kept;         // sm90 backward: heads of K, V dealt out as one; heads that dq_sum has room for
};
