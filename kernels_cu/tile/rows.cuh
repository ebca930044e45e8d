// A warp's 16 rows of an accumulator, rounded, straight to global memory.
#pragma once
#include "tile/fragment.cuh"

// The four lanes that hold a row exchange 32-bit words, as a 4 x 4 matrix is transposed.
__device__ inline void transpose_quad(unsigned (&w)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            unsigned got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + step], step);
            if (upper)
                w[i] = got;
            else
                w[i + step] = got;
        }
    }
}

// As registers hold them, two at a time where they are so aligned.
template <int M, int N, class F>
__device__ void store_float_rows(const Accumulator<M, N>& sum, bool vectors, int cols, F at) {
    struct alignas(2 * sizeof(Accum)) Two {
        Accum x, y;
    };
#pragma unroll
    for (int line = 0; line < 2 * M; line++) {
        int m = line / 2, h = line % 2;
        auto* to = at(sum.row(m, 2 * h));
#pragma unroll
        for (int n = 0; n < N; n++) {
            int col = sum.column(n, 0);
            Accum x = sum.x[m][n][2 * h], y = sum.x[m][n][2 * h + 1];
            if (to == nullptr || col >= cols) continue;
            if (vectors) {
                *(Two*)(to + col) = {x, y};
            } else {
                to[col] = x;
                if (col + 1 < cols) to[col + 1] = y;
            }
        }
    }
}

// The same of an accumulator that stands at (row, col) of `rows` rows of `cols` numbers.
template <int M, int N, class T>
__device__ void store_floats(const Accumulator<M, N>& sum, T* to, long long stride, int row, int col, int rows, int cols) {
    bool vectors = (unsigned long long)to % 8 == 0 && stride % 2 == 0 && cols % 2 == 0;
    store_float_rows(sum, vectors, cols - col, [&](int r) -> T* { return row + r < rows ? to + (row + r) * stride + col : nullptr; });
}

// Eight numbers of a row from `col` on, of 16 or 8 bits.
template <class T, class W>
__device__ void store_eight(T* to, int col, int cols, bool vectors, const W& words) {
    constexpr int EACH = 4 / sizeof(T);  // in a word
    if (to == nullptr || col >= cols) return;
    if (vectors) {
        *(W*)(to + col) = words;
    } else {
        const unsigned* w = (const unsigned*)&words;
#pragma unroll
        for (int c = 0; c < 8; c++)
            if (col + c < cols) to[col + c].bits = decltype(T::bits)(w[c / EACH] >> 8 * sizeof(T) * (c % EACH));
    }
}

// A row of `cols` elements begins at(row), null where there is none. A lane writes eight of it at once, where they are
// so aligned (`vectors`), the four lanes of a row 32.
template <int N, class F>
__device__ void store_rows(const Accumulator<1, N>& sum, bool vectors, int cols, F at) {
    static_assert(N % 4 == 0);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        auto* to = at(threadIdx.x % 32 / 4 + 8 * h);
#pragma unroll
        for (int n = 0; n < N; n += 4) {
            unsigned w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&f)[4] = sum.x[0][n + i];
                if constexpr (sizeof(Out) == 1)
                    w[i] = pack4(f[2 * h], f[2 * h + 1], 0, 0);
                else
                    w[i] = pack2<Out>(f[2 * h], f[2 * h + 1]);
            }
            transpose_quad(w);
            int col = 8 * (n + threadIdx.x % 4);
            if constexpr (sizeof(Out) == 1)
                store_eight(to, col, cols, vectors, uint2{w[0] | w[1] << 16, w[2] | w[3] << 16});
            else
                store_eight(to, col, cols, vectors, make_uint4(w[0], w[1], w[2], w[3]));
        }
    }
}
