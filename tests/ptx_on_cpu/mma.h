// Twin of ptx/mma.cuh.
#pragma once
#include "ptx_on_cpu/convert.h"

namespace on_cpu {

typedef float Eight __attribute__((vector_size(32)));

// C (16 x 8 N) += A (16 x 16) B (16 x 8 N)
inline void add_product(Eight* c, const float (&a)[16][16], const Eight* b, int n) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < n; j++) {
            Eight sum = c[i * n + j];
            for (int k = 0; k < 16; k++) sum += a[i][k] * b[k * n + j];
            c[i * n + j] = sum;
        }
}

// Two numbers of a register, as row[0] and row[1].
template <class T>
void unpack(float* row, unsigned pair) {
    row[0] = float_of(T(), (unsigned short)pair), row[1] = float_of(T(), (unsigned short)(pair >> 16));
}

// A's fragment of 16 x 16, of which `lanes(l)` is what lane l holds.
template <class T, class F>
void unpack_a(float (&a)[16][16], F lanes) {
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) unpack<T>(&a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8], lanes(l)[i]);
}

template <class T>
void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operands {
        float* d;
        const unsigned* a;
        unsigned b[2];
    } mine{d, a, {b0, b1}};
    together("mma_m16n8k16", mine, [](Operands** lanes) {
        float a[16][16];
        Eight b[16], c[16];
        unpack_a<T>(a, [&](int l) { return lanes[l]->a; });
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 2; i++) {
                float pair[2];
                unpack<T>(pair, lanes[l]->b[i]);
                for (int e = 0; e < 2; e++) b[l % 4 * 2 + 8 * i + e][l / 4] = pair[e];
            }
        auto each = [&](auto f) {
            for (int l = 0; l < 32; l++)
                for (int e = 0; e < 4; e++) f(lanes[l]->d[e], c[l / 4 + e / 2 * 8], l % 4 * 2 + e % 2);
        };
        each([](float x, Eight& row, int col) { row[col] = x; });
        add_product(c, a, b, 1);
        each([](float& x, Eight& row, int col) { x = row[col]; });
    });
}

}  // namespace on_cpu

inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bfloat16_t) {
    on_cpu::mma<bfloat16_t>(d, a, b0, b1);
}
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, half_t) {
    on_cpu::mma<half_t>(d, a, b0, b1);
}

inline void mma_m16n8k8(double (&d)[4], const double (&a)[4], double b0, double b1) {
    struct Operands {
        double* d;
        const double* a;
        double b[2];
    } mine{d, a, {b0, b1}};
    on_cpu::together("mma_m16n8k8", mine, [](Operands** lanes) {
        for (int l = 0; l < 32; l++)
            for (int e = 0; e < 4; e++) {
                int row = l / 4, column = l % 4 * 2 + e % 2;
                for (int k = 0; k < 8; k++)
                    lanes[l]->d[e] += lanes[row * 4 + k % 4]->a[e / 2 + k / 4 * 2] * lanes[column * 4 + k % 4]->b[k / 4];
            }
    });
}
