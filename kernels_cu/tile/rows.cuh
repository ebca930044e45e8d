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

// Whether a lane writes what it holds of a result, and not through shared memory, which has tiles of rounded numbers.
template <class T = Out>
constexpr bool FROM_REGISTERS = sizeof(T) == 4 || config::ADDS;

// A number of a result, or with what is there, rounded once.
template <class T>
__device__ void put_result(T* to, Accum x) {
    if constexpr (config::ADDS) x += to_float(*to);
    *to = from_float<T>(x);
}

// The same of as many as 16 bytes hold, and are aligned.
template <class T, class F>
__device__ void put_results(T* to, F value) {
    struct alignas(16) Vector {
        T at[16 / sizeof(T)];
    } x;
    if constexpr (config::ADDS) x = *(const Vector*)to;
#pragma unroll
    for (int c = 0; c < 16 / sizeof(T); c++) {
        Accum result = value(c);
        if constexpr (config::ADDS) result += to_float(x.at[c]);
        x.at[c] = from_float<T>(result);
    }
    *(Vector*)to = x;
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
            if (vectors && !config::ADDS) {
                *(Two*)(to + col) = {x, y};
            } else {
                put_result(to + col, x);
                if (col + 1 < cols) put_result(to + col + 1, y);
            }
        }
    }
}

// The same of an accumulator that stands at (row, col) of `rows` rows of `cols` numbers.
template <int M, int N, class T>
__device__ void store_floats(const Accumulator<M, N>& sum, T* to, long long stride, int row, int col, int rows,
                             int cols) {
    bool vectors = (unsigned long long)to % 8 == 0 && stride % 2 == 0 && cols % 2 == 0;
    store_float_rows(sum, vectors, cols - col,
                     [&](int r) -> T* { return row + r < rows ? to + (row + r) * stride + col : nullptr; });
}

// Two numbers rounded to T, the first in the lowest bits.
template <class T, class From>
__device__ unsigned rounded_pair(From x, From y) {
    if constexpr (sizeof(T) == 1)
        return pack4(x, y, From(0), From(0));
    else
        return pack2<T>(x, y);
}

// Rounded, one by one, where they are not aligned for more.
template <int N, class F>
__device__ void store_one_by_one(const Accumulator<1, N>& sum, int cols, F at) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        auto* to = at(sum.row(0, 2 * h));
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned two = rounded_pair<Out>(sum.x[0][n][2 * h], sum.x[0][n][2 * h + 1]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int col = sum.column(n, e);
                if (to != nullptr && col < cols) to[col].bits = decltype(to->bits)(two >> 8 * sizeof(Out) * e);
            }
        }
    }
}

// Rounded. A row of `cols` elements begins at(row), null where there is none. Where they are so aligned (`vectors`, of
// all lanes) a lane writes eight of it at once, the four lanes of a row 32.
template <int N, class F>
__device__ void store_rows(const Accumulator<1, N>& sum, bool vectors, int cols, F at) {
    static_assert(N % 2 == 0);
    // (By a vote the compiler knows that lanes do not part, here and at the shuffles.)
    if (!__all_sync(~0u, vectors)) return store_one_by_one(sum, cols, at);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        auto* to = at(threadIdx.x % 32 / 4 + 8 * h);
#pragma unroll
        for (int n = 0; n < N; n += 4) {
            unsigned w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = n + i < N ? rounded_pair<Out>(sum.x[0][n + i][2 * h], sum.x[0][n + i][2 * h + 1]) : 0;
            transpose_quad(w);
            int col = 8 * (n + threadIdx.x % 4);
            if (to == nullptr || col >= cols) continue;
            if constexpr (sizeof(Out) == 1)
                *(uint2*)(to + col) = uint2{w[0] | w[1] << 16, w[2] | w[3] << 16};
            else
                *(uint4*)(to + col) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}
