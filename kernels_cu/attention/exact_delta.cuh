// Where one key takes all of a query's probability, its dO * O is its dO * V, and dP - delta is 0. In float32 and
// float64 that shall be so to the bit, as it is in standard attention: dQ and dK are dS times Q and K, and these are
// large there. So rowsum(dO * O) is the diagonal of a product on the tensor cores, whose sums have the order of those
// of dP. (In 16 bits that would show nowhere.)
#pragma once
#include "attention/operands.cuh"
#include "attention/prepare.cuh"
#include "tile/doubles.cuh"

// Sixteen rows of dO or O, of which some may be missing.
template <class T>
struct SixteenRows {
    const T* from;
    long long stride;
    int rows, columns;

    // Two numbers side by side.
    __device__ void pair(int row, int column, T& x, T& y) const {
        const T* at = from + row * stride + column;
        x = row < rows && column < columns ? at[0] : T(0);
        y = row < rows && column + 1 < columns ? at[1] : T(0);
    }

    // What brings a row to the range of float16; by the four lanes that have parts of it.
    __device__ PowerOfTwo power(int row) const {
        float largest = 0;
        for (int column = threadIdx.x % 4 * 2; column < columns; column += 8) {
            T x, y;
            pair(row, column, x, y);
            largest = fmaxf(largest, fmaxf(finite_size(x), finite_size(y)));
        }
#pragma unroll
        for (int lanes = 2; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
        return PowerOfTwo(largest);
    }
};

// An A operand of doubles from there.
template <class T>
__device__ auto operand_of_doubles(const SixteenRows<T>& from) {
    return [=](double (&a)[4], int, int k) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            from.pair(threadIdx.x % 32 / 4 + 8 * h, 8 * k + threadIdx.x % 4 * 2, a[h], a[h + 2]);
    };
}

// O dO^T as V dO^T is taken, by a warp; dO is split with the unit of its tile.
template <class T>
__device__ Accumulator<1, 2> product_of_rows(const SixteenRows<T>& o, const SixteenRows<T>& d, float d_unit) {
    Accumulator<1, 2> sum;
    sum.clear();
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    if constexpr (PARTS == 2) {
        PowerOfTwo powers[2] = {o.power(row), o.power(row + 8)};
        ProductSums<1, 2> sums;
#pragma unroll 4
        for (int k = 0; k < config::DIM_V; k += 16) {
            unsigned a[PARTS][1][4], b[PARTS][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x, y;
                o.pair(row + i % 2 * 8, k + column + i / 2 * 8, x, y);
                split_pair<PARTS>(a[0][0][i], a[PARTS - 1][0][i], x, y, powers[i % 2].times);
                d.pair(row + i / 2 * 8, k + column + i % 2 * 8, x, y);
                split_pair<PARTS>(b[0][i], b[PARTS - 1][i], x, y, 1 / d_unit);
            }
            sums.template multiply<false>(sum, 0, a, b);
        }
        sums.add_to(sum);
        sum.each([&](float& x, int r, int) { x = x * powers[r / 8].unit * d_unit; });
    } else {
        multiply_doubles<config::DIM_V>(
            sum, o, [&](int n, int k, double (&b)[2]) { d.pair(row + 8 * n, 8 * k + column, b[0], b[1]); }, Nothing());
    }
    return sum;
}

// f(i, rowsum(O * dO)) for the queries i of a tile, by a block of 128 threads, of this O and the dO that Of stands for.
template <int SIZE, class Of, class F>
__device__ void for_exact_row_sums(const Params& p, const Head& head, int tile, const In* out, const Strides& strides,
                                   F f) {
    auto given = Of::given(p);
    if constexpr (!EXACT_LSE) {
        auto nothing = [](int) { return 0; };
        for_row_sums<SIZE>(p, head, tile, out, strides, given.array, given.strides, nothing,
                           [&](int i, Accum sum, int) { f(i, sum); });
    } else {
        int lane = threadIdx.x % 32, first = tile * SIZE;
        float d_unit = operand_unit<Of>(p, head, tile);
        for (int i = first + threadIdx.x / 32 * 16; i < first + SIZE; i += 64) {
            int there = head.queries(p) - i;
            SixteenRows<In> o{head.query_row(out, strides, i), strides.row, there, p.dim_v};
            SixteenRows<In> d{head.query_row(given.array, given.strides, i), given.strides.row, there, p.dim_v};
            Accumulator<1, 2> product = product_of_rows(o, d, d_unit);
            if (lane % 4 != lane / 8) continue;  // no part of the diagonal
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Accum sum = lane / 4 % 2 == 0 ? product.x[0][h][2 * h] : product.x[0][h][2 * h + 1];
                f(i + lane / 4 + 8 * h, sum);
            }
        }
    }
}

// As prepare_rows, which it is for 16-bit numbers.
template <int SIZE>
__device__ void prepare_queries(const Params& p, const Head& head, int tile) {
    Accum* rows = prepared_rows<SIZE>(p, head, tile);
    for_exact_row_sums<SIZE, OfDO>(p, head, tile, p.out, p.out_strides,
                                   [&](int i, Accum sum) { write_prepared<SIZE>(p, head, rows, tile * SIZE, i, sum); });
}
