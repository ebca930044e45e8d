// What the kernels of tangents share: products of two operands, together with their tangents.
#pragma once
#include "attention/operands.cuh"
#include "tile/doubles.cuh"

// An operand of a product, and by what its tile and that of its tangent are to be multiplied.
template <bool MOVES, class Operand>
struct Moved {
    Operand at, tangent;  // (of the second nothing is asked where it does not move)
    float unit, tangent_unit;
};
template <bool MOVES, class Operand>
__device__ Moved<MOVES, Operand> moved(const Operand& at, const Operand& tangent, float unit, float tangent_unit) {
    return {at, tangent, unit, tangent_unit};
}

// sum = A B^T and its tangent, tA B^T + A tB^T, over K. What the two have in common is read once. (`along`, `row`: see
// mma_ABt.)
template <int K, bool TRANSPOSED, int M, int N, bool MOVES_A, bool MOVES_B, class A, class B, class F>
__device__ void multiply_moved(Accumulator<M, N>& sum, Accumulator<M, N>& tangent, const Moved<MOVES_A, A>& a,
                               const Moved<MOVES_B, B>& b, int row, F along) {
    sum.clear();
    tangent.clear();
    if constexpr (PARTS == 2) {
        mma_ABt<K, TRANSPOSED>(sum, a.at, b.at, row, along);
        scale_by_units(sum, a.unit, b.unit);
        if constexpr (MOVES_A) {
            mma_ABt<K, TRANSPOSED>(tangent, a.tangent, b.at, row);
            scale_by_units(tangent, a.tangent_unit, b.unit);
        }
        if constexpr (MOVES_B) {
            Accumulator<M, N> more;
            more.clear();
            mma_ABt<K, TRANSPOSED>(more, a.at, b.tangent, row);
            scale_by_units(more, a.unit, b.tangent_unit);
            tangent.each([](float& x, int, int, float& y) { x += y; }, more);
        }
    } else if constexpr (sizeof(Accum) == 8) {
        int lane = threadIdx.x % 32;
        auto read_a = operand_of_doubles(a.at), read_ta = operand_of_doubles(a.tangent);
        EightByEight<B> at_b(b.at, row + lane / 4, lane % 4 * 2), at_tb(b.tangent, row + lane / 4, lane % 4 * 2);
#pragma unroll
        for (int k = 0; k < K / 8; k++) {
            if (k % 2 == 0) along(k / 2);
            double x[M][4], tx[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                read_a(x[m], m, k);
                if (MOVES_A) read_ta(tx[m], m, k);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                double2 y = load_shared_double2(at_b(n, k));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma_m16n8k8(sum.x[m][n], x[m], y.x, y.y);
                    if (MOVES_A) mma_m16n8k8(tangent.x[m][n], tx[m], y.x, y.y);
                }
            }
#pragma unroll
            for (int n = 0; MOVES_B && n < N; n++) {  // later: each waits for its sum
                double2 ty = load_shared_double2(at_tb(n, k));
#pragma unroll
                for (int m = 0; m < M; m++) mma_m16n8k8(tangent.x[m][n], x[m], ty.x, ty.y);
            }
        }
    } else {
        int lane = threadIdx.x % 32, first = row + lane % 8 + lane / 16 * 8, column = lane / 8 % 2 * 8;
        unsigned base = b.at.address(first, column), tangent_base = b.tangent.address(first, column);
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            along(k);
            unsigned x[M][4], tx[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                a.at(x[m], m, k);
                if (MOVES_A) a.tangent(tx[m], m, k);
            }
            auto multiply = [&](Accumulator<M, N>& to, const unsigned(&x)[M][4], int n, const unsigned(&y)[4]) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) mma_m16n8k16(to.x[m][n + h], x[m], y[2 * h], y[2 * h + 1], Product());
            };
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                unsigned y[4];
                ldmatrix_x4(y, base + 2 * (8 * n * B::PITCH + 16 * k));
                multiply(sum, x, n, y);
                if (MOVES_A) multiply(tangent, tx, n, y);
                if (!MOVES_B) continue;
                ldmatrix_x4(y, tangent_base + 2 * (8 * n * B::PITCH + 16 * k));
                multiply(tangent, x, n, y);
            }
        }
    }
}

// largest_of_block of several numbers at once.
template <int WARPS, int COUNT>
__device__ void largest_of_block(float (&x)[COUNT], unsigned address) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) x[n] = fmaxf(x[n], __shfl_xor_sync(~0u, x[n], lanes));
        if (threadIdx.x % 32 == 0) store_shared(address + (n * WARPS + threadIdx.x / 32) * 4, __float_as_uint(x[n]));
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            x[n] = fmaxf(x[n], __uint_as_float(load_shared(address + (n * WARPS + warp) * 4)));
}
