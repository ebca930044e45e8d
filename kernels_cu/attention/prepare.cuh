// What the tensor-core backwards want to know of each query before they start: two numbers, by tiles of queries.
#pragma once
#include "attention/dead_rows.cuh"
#include "attention/dropout.cuh"
#include "attention/exact_lse.cuh"
#include "attention/tiles.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// Where those of a tile of SIZE queries lie: SIZE times -lse, then SIZE times minus what is subtracted from dP.
template <int SIZE>
__device__ Accum* prepared_rows(const Params& p, long long tile_number) {
    return p.delta + tile_number * (2 * SIZE);
}
template <int SIZE>
__device__ Accum* prepared_rows(const Params& p, const Head& head, int tile) {
    return prepared_rows<SIZE>(p, QueryTiles<SIZE>::number(p, head, tile));
}

// What the caller has of a query beside its rows: lse, and the gradient of that.
struct GivenOfQuery {
    Accum lse, dlse;

    __device__ static GivenOfQuery of(const Params& p, const Head& head, int i) {
        if (i >= head.queries(p)) return {MINUS_INFINITY, 0};
        long long row = head.row_number(p, i);
        return {p.lse[row], p.dlse != nullptr ? p.dlse[row] : 0};
    }
};

// Fill in those of query i, from its sum = rowsum(dO * O): delta is that, less the gradient of lse where there is one,
// since dS = P (dP - delta + dlse). Where there is no query, or its lse is -inf (it saw no key, or no finite score),
// exp2(s - inf) is 0, and so is delta, whatever dO holds there. With a sink lse is that; those that key_mask leaves no
// key, or positions where these are data, are told from others here, as by lse -inf elsewhere. (With dropout: see
// there.)
template <int SIZE>
__device__ void write_prepared(const Params& p, const Head& head, Accum* rows, int first, int i, Accum sum,
                               const GivenOfQuery& given) {
    Accum lse = given.lse;
    bool any = lse != MINUS_INFINITY, sees = any;
    if constexpr (config::SINKS) {
        if (any) sum = sum_with_zeros(p, head, i, sum);
        Pairs pairs(p, head);
        if ((config::KEY_MASK || SHIFTS) && any && lse == pairs.sink(head.q)) sees = pairs.sees(i);
    }
    rows[i - first] = sees ? -lse_of_kept(p, lse) * (EXACT_LSE ? 1 : LOG2_E) : MINUS_INFINITY;
    rows[i - first + SIZE] = any ? (given.dlse - sum) * kept(p) : 0;
}
template <int SIZE>
__device__ void write_prepared(const Params& p, const Head& head, Accum* rows, int first, int i, Accum sum) {
    write_prepared<SIZE>(p, head, rows, first, i, sum, GivenOfQuery::of(p, head, i));
}

// The largest number up to `most` that n is a multiple of.
constexpr int largest_divisor(int n, int most) { return n % most == 0 ? most : largest_divisor(n, most - 1); }

// f(i, rowsum(O * dO), known(i)) for the queries i of a tile, by a block of 128 threads, of 16-bit numbers (others:
// exact_delta.cuh). O and dO: these two arrays. (Known beforehand: memory answers to all at once.)
template <int SIZE, class Known, class F>
__device__ void for_row_sums(const Params& p, const Head& head, int tile, const In* out, const Strides& out_strides,
                             const In* dout, const Strides& dout_strides, Known known, F f) {
    constexpr int LANES = config::DIM_V <= 64 ? 8 : config::DIM_V <= 128 ? 16 : 32;  // of 8 columns, for one row
    constexpr int PIECES = (config::DIM_V + 8 * LANES - 1) / (8 * LANES);            // of a row
    int lane = threadIdx.x % LANES, first = tile * SIZE, queries = head.queries(p);
    const In* o = head.query_row(out, out_strides);
    const In* d = head.query_row(dout, dout_strides);
    // Rows at once: the time is that of memory to answer.
    constexpr int STEP = 128 / LANES, EACH = largest_divisor(SIZE / STEP, 8 / PIECES);
    static_assert(SIZE % STEP == 0);
    bool vectors = p.dim_v % 8 == 0;
    for (int i = first + threadIdx.x / LANES; i < first + SIZE; i += EACH * STEP) {
        float own = 0;  // of the row that the lane writes
        auto of_own = known(i + min(lane, EACH - 1) * STEP);
        auto take = [&](int r, float sum) {
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == r) own = sum;
        };
        if (vectors) {
            uint4 a[EACH][PIECES], b[EACH][PIECES];
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                int row = i + r * STEP;
#pragma unroll
                for (int n = 0; n < PIECES; n++) {
                    int column = 8 * (lane + LANES * n);
                    a[r][n] = b[r][n] = make_uint4(0, 0, 0, 0);
                    if (row >= queries || column >= p.dim_v) continue;
                    a[r][n] = *(const uint4*)(o + row * out_strides.row + column);
                    b[r][n] = *(const uint4*)(d + row * dout_strides.row + column);
                }
            }
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                float sum = 0;
#pragma unroll
                for (int n = 0; n < PIECES; n++)
#pragma unroll
                    for (int c = 0; c < 8; c++)
                        sum = fma(to_float(((const In*)&a[r][n])[c]), to_float(((const In*)&b[r][n])[c]), sum);
                take(r, sum);
            }
        } else {  // the same, a row after the other: seldom, so in few instructions
#pragma unroll 1
            for (int r = 0; r < EACH; r++) {
                int row = i + r * STEP;
                float sum = 0;
#pragma unroll 1
                for (int column = 8 * lane; column < p.dim_v; column += 8 * LANES) {
                    In x[8] = {}, y[8] = {};
                    int columns = row < queries ? p.dim_v - column : 0;
                    const In* oi = o + row * out_strides.row + column;
                    const In* di = d + row * dout_strides.row + column;
#pragma unroll
                    for (int c = 0; c < 8; c++)
                        if (c < columns) x[c] = oi[c], y[c] = di[c];
#pragma unroll
                    for (int c = 0; c < 8; c++) sum = fma(to_float(x[c]), to_float(y[c]), sum);
                }
                take(r, sum);
            }
        }
        if (lane < EACH) f(i + lane * STEP, own, of_own);
    }
}

// All of them, by a block of 128 threads.
template <int SIZE>
__device__ void prepare_rows(const Params& p, const Head& head, int tile) {
    Accum* rows = prepared_rows<SIZE>(p, head, tile);
    for_row_sums<SIZE>(
        p, head, tile, p.out, p.out_strides, p.dout, p.dout_strides,
        [&](int i) { return GivenOfQuery::of(p, head, i); },
        [&](int i, Accum sum, const GivenOfQuery& given) {
            write_prepared<SIZE>(p, head, rows, tile * SIZE, i, sum, given);
        });
}
