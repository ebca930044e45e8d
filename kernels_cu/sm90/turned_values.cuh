// V of 8 bits, turned: the tensor cores want the numbers of a column side by side, keys in the order in which a lane of
// the product S = Q K^T holds them (tile/swizzled.cuh, Operand). By a kernel before, into the plan's own memory.
#pragma once
#include "attention/pairs.cuh"
#include "attention/tiles.cuh"
#include "ptx/shared.cuh"

constexpr int TURNED_KEYS = 128;  // of a block; as many are there, zeros where there is no key

// The bytes `n` of four words, as one.
__device__ inline unsigned byte_of_each(const unsigned (&x)[4], int n) {
    unsigned select = n | (n + 4) << 4, low = __byte_perm(x[0], x[1], select), high = __byte_perm(x[2], x[3], select);
    return __byte_perm(low, high, 0x5410);
}

// The keys of a block, zeros for dead ones, by 256 threads: p.turned[batch][head][column][key].
template <int DIM_V, class P>
__device__ void turn_values(const P& p, int block) {
    constexpr int WORDS = DIM_V / 4, PITCH = WORDS + 1;
    __shared__ unsigned words[TURNED_KEYS * PITCH];
    int tiles = KeyTiles<TURNED_KEYS>::of_head(p);
    auto [head, tile] = numbered<KeyTiles<TURNED_KEYS>>(p, block, tiles);
    int first = tile * TURNED_KEYS, keys = head.keys(p) - first;
    Pairs pairs(p, head);
    const unsigned char* v = (const unsigned char*)head.key_row(p.v, p.v_strides, first);
#pragma unroll 4
    for (int n = threadIdx.x; n < TURNED_KEYS * DIM_V / 16; n += 256) {
        int key = n / (DIM_V / 16), column = n % (DIM_V / 16) * 16;
        const unsigned char* from = v + key * p.v_strides.row + column;
        unsigned x[4] = {};
        bool live = key < keys && pairs.is_seen(first + key);
        if (live && column + 16 <= p.dim_v) {
            *(uint4*)x = *(const uint4*)from;
        } else if (live) {
#pragma unroll
            for (int c = 0; c < 16; c++)
                if (column + c < p.dim_v) x[c / 4] |= unsigned(from[c]) << c % 4 * 8;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) words[key * PITCH + column / 4 + i] = x[i];
    }
    __syncthreads();
    unsigned* to =
        (unsigned*)p.turned + ((long long)(head.batch * p.heads_k + head.k) * DIM_V * tiles + tile) * (TURNED_KEYS / 4);
#pragma unroll 4
    for (int n = threadIdx.x; n < TURNED_KEYS / 4 * WORDS; n += 256) {
        int four = n % (TURNED_KEYS / 4), word = n / (TURNED_KEYS / 4);
        int key = four / 4 * 16 + four % 4 * 2;  // with the next, and those eight further
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = words[(key + i / 2 * 8 + i % 2) * PITCH + word];
#pragma unroll
        for (int c = 0; c < 4; c++)
            to[(4 * word + c) * (long long)tiles * (TURNED_KEYS / 4) + four] = byte_of_each(x, c);
    }
}
