// Online softmax over the rows of a warp's accumulator (Dao 2023, Algorithm 1), in base 2. Every rounding is written
// out (kernels are compiled without contraction), so that all inlined copies of a function give the same bits.
#pragma once
#include "attention/exact_lse.cuh"
#include "ptx/math.cuh"
#include "ptx/order.cuh"
#include "tile/fragment.cuh"

// How large a probability, taken with a maximum that is out of date, may become: in T, and so that its product with a
// value is far from float32's range.
template <class T>
constexpr float FITS = 0x1p32f;
template <>
constexpr float FITS<half_t> = 0x1p15f;

// Where the largest probability of a row stands when its maximum is raised, as an exponent of 2: of 8 bits, which have
// few binades below 1, in the upper ones. 448 is the largest, and 2^8 what is left to grow.
constexpr Accum TOP = sizeof(Product) == 1 ? 6 : 0;

// Exponents up to which factor * s - factor * maximum may be taken in one step, see row_factor.
constexpr Accum ONE_STEP = sizeof(Accum) == 8 ? 0x1p55 : 0x1p26;

template <int M>
struct OnlineSoftmax {
    Accum factor;         // exp(scale * s) = exp2(factor * s)
    Accum maximum[M][2];  // of the scores, as of the last rescale
    Accum sum[M][2];      // of exp2(factor * (s - maximum)), this lane's columns only
    Accum best[M][2];     // of the scores so far, where lse is to be exact

    __device__ OnlineSoftmax(Accum factor) : factor(factor) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) maximum[m][h] = best[m][h] = MINUS_INFINITY, sum[m][h] = 0;
    }

    // The factor of a row. factor * s - factor * maximum is taken in one step, which would show the rounding of
    // factor * maximum where that is huge. There scores are so far apart that any factor of the size will do: a power
    // of two, which rounds nothing.
    __device__ Accum row_factor(int m, int h) const {
        bool huge = fabs(maximum[m][h] * factor) > ONE_STEP;
        return huge ? leading_bit(factor) : factor;
    }

    // The largest score of each row, and the maximum so far.
    template <int N>
    __device__ void row_maximum(const Accumulator<M, N>& scores, Accum (&largest)[M][2]) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Accum x = maximum[m][h];
#pragma unroll
                for (int n = 0; n < N; n++) x = larger(x, larger(scores.x[m][n][2 * h], scores.x[m][n][2 * h + 1]));
                x = larger(x, __shfl_xor_sync(~0u, x, 1));
                largest[m][h] = larger(x, __shfl_xor_sync(~0u, x, 2));
            }
    }

    // Raise the maximum to the largest score, and tell whether the result so far must `shrink` for it. A maximum that
    // grows by less than 2^8 is left alone: the probabilities stay far from overflow, and the result is divided by a
    // sum taken with the same maximum. (What that costs in accuracy, and saves: docs/notes/rescaling.md.)
    __device__ bool raise(const Accum (&largest)[M][2], Accum (&shrink)[M][2]) {
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                grown |= (largest[m][h] - maximum[m][h]) * factor > 8;  // the first time: inf > 8
                if (EXACT_LSE) best[m][h] = larger(best[m][h], largest[m][h]);
            }
        grown = __any_sync(~0u, grown);
        if (grown) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    // (with TOP not a row that is above it: another of the warp may have grown)
                    Accum raised = TOP == 0 ? largest[m][h] : larger(maximum[m][h], largest[m][h] - TOP / factor);
                    // What the other rows of the warp are follows from how a sequence's queries are cut.
                    if (config::BATCH_INVARIANT && !((largest[m][h] - maximum[m][h]) * factor > 8))
                        raised = maximum[m][h];
                    // a row that has seen no key has nothing to rescale, and -inf - -inf would be NaN
                    shrink[m][h] =
                        maximum[m][h] == MINUS_INFINITY ? Accum(0) : exp2_approx((maximum[m][h] - raised) * factor);
                    maximum[m][h] = raised;
                    sum[m][h] *= shrink[m][h];
                }
        }
        return grown;
    }

    template <int N>
    __device__ void scale_rows(Accumulator<M, N>& result, const Accum (&shrink)[M][2]) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    result.x[m][n][2 * h] *= shrink[m][h], result.x[m][n][2 * h + 1] *= shrink[m][h];
    }

    // Both at once.
    template <int N>
    __device__ void rescale(const Accum (&largest)[M][2], Accumulator<M, N>& result) {
        Accum shrink[M][2];
        if (raise(largest, shrink)) scale_rows(result, shrink);
    }

    // Scores become probabilities, not yet divided by their sum.
    template <int N>
    __device__ void exponentiate(Accumulator<M, N>& scores) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Accum factor = row_factor(m, h), top = maximum[m][h] == MINUS_INFINITY ? 0 : maximum[m][h];
                Accum offset = top * -factor;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        Accum& x = scores.x[m][n][e];
                        x = exp2_approx(EXACT_LSE ? (x - top) * factor : fma(x, factor, offset));
                        sum[m][h] += x;
                    }
            }
    }

    // How far the exponents of 2 that were summed are above those of differences to the best score.
    __device__ Accum beyond_best(int m, int h) const {
        bool finite = fabs(maximum[m][h]) < __int_as_float(0x7f800000);
        return finite ? (maximum[m][h] - best[m][h]) * row_factor(m, h) : 0;
    }

    // The same without a look at their maximum, where it was raised before; `added` is to be added to the sum. False
    // where that overflows, or a row has seen no key so far: the scores are lost then, and nothing else has changed.
    // exponent(s, factor, x): factor * s + x, or of what is no score yet its score's. Columns are taken in SLICES, and
    // slice(n) is done before those of slice n.
    template <int SLICES, int N, class F, class G>
    __device__ bool exponentiate_blindly(Accumulator<M, N>& scores, Accum (&added)[M][2], F exponent, G slice) const {
        static_assert(N % SLICES == 0);
        Accum factor[M][2], offset[M][2];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                factor[m][h] = row_factor(m, h);
                offset[m][h] = maximum[m][h] * -factor[m][h];  // -inf gives inf or NaN below
                added[m][h] = 0;
            }
        for_constants<SLICES>([&](auto n_slice) {
            slice(n_slice);
            constexpr int FIRST = N / SLICES * n_slice.value;
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = FIRST; n < FIRST + N / SLICES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        Accum& x = scores.x[m][n][e];
                        x = exp2_approx(exponent(x, factor[m][e / 2], offset[m][e / 2]));
                        added[m][e / 2] += x;
                    }
            if constexpr (SLICES > 1) {  // so that exponentials stay between their slices, more or less
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) mark_changed(added[m][h]);
            }
        });
        bool fits = true;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) fits = fits && added[m][h] <= FITS<Product>;
        return fits;
    }

    __device__ void add(const Accum (&added)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) sum[m][h] += added[m][h];
    }

    // The sums over whole rows.
    __device__ void add_lanes() {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], 1);
                sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], 2);
            }
    }

    // From the sums of whole rows: in `sum` what the result is to be multiplied by, in `maximum` lse. `unit`: of a
    // score, in natural units; `kept`: the share of the result that dropout has kept; sink(row): a logit more in the
    // sum. Rows that saw no key: 0, and the sink or -inf.
    template <class F>
    __device__ void close(Accum unit, Accum kept, F sink) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Accum total = sum[m][h], alone = MINUS_INFINITY;  // lse where nothing but the sink counts
                bool any = total != 0;
                if constexpr (config::SINKS) {
                    alone = sink(Accumulator<M, 1>::row(m, 2 * h));
                    Accum exponent = any ? fma(alone, LOG2_E, maximum[m][h] * -factor) : 127;
                    any = exponent < 127 || total != total;  // (what is NaN has no largest score)
                    total = any ? total + exp2_approx(exponent) : 1;
                }
                sum[m][h] = any ? reciprocal_approx(total * kept) : 0;
                Accum logarithm = EXACT_LSE ? log(total) : log_approx(total);
                if (EXACT_LSE) logarithm += beyond_best(m, h) * LN_2, maximum[m][h] = best[m][h];
                maximum[m][h] = any ? fma(maximum[m][h], unit, logarithm) : alone;
            }
    }
};
