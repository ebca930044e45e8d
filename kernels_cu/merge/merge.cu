// Attention over parts of the keys becomes attention over all of them: O = sum of exp(lse_n - lse) O_n. A warp has a
// row; what it writes nobody else reads, so that a result may take the place of a part. Bound by memory: each number is
// read and written once. Its Params are its own (cupyflash/gpu/merge.py): axes are those of rows, the one along which
// memory goes on last.
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

constexpr int WARPS = 4, EACH = 4;               // rows of a block, and numbers of a lane
constexpr int TOGETHER = MERGED < 8 ? MERGED : 8;  // parts that are on their way at once

struct alignas(EACH * sizeof(In)) Ins {
    In at[EACH];
};
struct alignas(EACH * sizeof(Out)) Outs {
    Out at[EACH];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_merge(const __grid_constant__ Params p) {
    Number n = Number(blockIdx.x) * WARPS + threadIdx.x / 32, last = p.length[2], middle = p.length[1];
    if (n >= p.length[0] * p.length[1] * p.length[2]) return;
    int lane = threadIdx.x % 32;
    long long i = n / last / middle, j = n / last % middle, k = n % last;
    auto place = [&](const Axes& stride) { return i * stride.at[0] + j * stride.at[1] + k * stride.at[2]; };
    auto lse_of = [&](int part) { return p.lses[part][place(p.lse_strides[STRIDED ? part : 0])]; };
    auto row_of = [&](int part) { return p.outs[part] + place(p.strides[STRIDED ? part : 0]); };

    struct Fetched {
        Ins of[TOGETHER];
    };
    auto fetch = [&](int begin, int column) {
        Fetched some;
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            some.of[n] = Ins{};
            if (begin + n >= MERGED || column >= p.columns) continue;
            const In* from = row_of(begin + n) + column;
            if constexpr (VECTORS) {
                some.of[n] = *(const Ins*)from;
            } else {
#pragma unroll
                for (int c = 0; c < EACH; c++)
                    if (column + c < p.columns) some.of[n].at[c] = from[c];
            }
        }
        return some;
    };
    Fetched some = fetch(0, lane * EACH);  // the first are under way while weights are found

    // A lane has each 32nd part. Of parts that see nothing the weight is 0; where all do lse is -inf, and the result 0.
    // What is NaN makes the sum NaN.
    Accum first_lse = lane < MERGED ? lse_of(lane) : Accum(MINUS_INFINITY), top = first_lse;
    for (int part = lane + 32; part < MERGED; part += 32) top = larger(top, lse_of(part));
    for (int step = 1; step < 32; step *= 2) top = larger(top, __shfl_xor_sync(~0u, top, step));
    Accum base = top == MINUS_INFINITY ? Accum(0) : top;
    Accum first_weight = exp(first_lse - base), sum = first_weight;
    for (int part = lane + 32; part < MERGED; part += 32) sum += exp(lse_of(part) - base);
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    Accum share = sum == 0 ? Accum(0) : 1 / sum;

    Out* to = p.out + place(p.out_strides);
    for (int first = 0; first < p.columns; first += 32 * EACH) {
        int column = first + lane * EACH;
        Accum x[EACH] = {}, weights = first_weight;
        for (int begin = 0; begin < MERGED; begin += TOGETHER) {
            if (begin > 0 || first > 0) some = fetch(begin, column);
            if (begin > 0 && begin % 32 == 0)
                weights = begin + lane < MERGED ? exp(lse_of(begin + lane) - base) : Accum(0);
#pragma unroll
            for (int n = 0; n < TOGETHER; n++) {
                if (begin + n >= MERGED) continue;
                Accum weight = __shfl_sync(~0u, weights, (begin + n) % 32) * share;
#pragma unroll
                for (int c = 0; c < EACH; c++) x[c] = fma(weight, Accum(to_float(some.of[n].at[c])), x[c]);
            }
        }
        if (column >= p.columns) continue;
        Outs outs;
#pragma unroll
        for (int c = 0; c < EACH; c++) outs.at[c] = from_float<Out>(x[c]);
        if constexpr (VECTORS) {
            *(Outs*)(to + column) = outs;
        } else {
            for (int c = 0; c < EACH; c++)
                if (column + c < p.columns) to[column + c] = outs.at[c];
        }
    }
    __syncwarp();  // the lse of a part may lie where that of the result goes
    if (lane == 0) p.lse[place(p.new_lse_strides)] = sum == 0 ? Accum(MINUS_INFINITY) : base + log(sum);
}
