// dQ of a backward whose thread blocks own keys: many of them add to a tile of it in global memory (dq_sum), and a
// kernel that runs after them makes rows of the sums. Fragments lie there as the lanes of a warp hold them.
#pragma once
#include "attention/walk.cuh"
#include "ptx/flag.cuh"
#include "ptx/reduce.cuh"
#include "tile/doubles.cuh"
#include "tile/rows.cuh"

using namespace config;

// dQ of a tile, ROWS x DIM, is shared out among the warps as DQ_ROW_WARPS x DQ_COLUMN_WARPS.
constexpr int DQ_ROW_WARPS = ROWS % 32 == 0 ? ROWS / 32 : 1;
constexpr int DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS;
constexpr int DQ_M = ROWS / 16 / DQ_ROW_WARPS;
// Of wide heads half of the columns at a time: registers have no room for more beside dK and dV.
constexpr bool WIDE = DIM > 256 || DIM_V > 256;
constexpr int DQ_PARTS = WIDE ? 2 : 1;
// The last may have fewer.
constexpr int DQ_N = (DIM / 16 + DQ_COLUMN_WARPS * DQ_PARTS - 1) / (DQ_COLUMN_WARPS * DQ_PARTS) * 2;
constexpr bool DQ_EVEN = DIM / 16 % (DQ_COLUMN_WARPS * DQ_PARTS) == 0;
constexpr int DQ_TILE = ROWS * DIM;  // numbers of one tile in dq_sum

// One fragment of dq_sum is stored as its 32 lanes hold it: four floats of a lane side by side, so that every addition
// is 16 bytes wide, or four times a double of each lane.
__device__ inline Accum* dq_fragment(const Params& p, long long tile, int m, int n) {
    constexpr int OF_LANE = sizeof(Accum) == 8 ? 1 : 4;  // side by side
    return p.dq_sum + tile * DQ_TILE + ((m * (DIM / 8) + n) * (128 / OF_LANE) + threadIdx.x % 32) * OF_LANE;
}
__device__ inline void read_dq(Accumulator<1, 1>& dq, const Accum* sum) {
    if constexpr (sizeof(Accum) == 8) {
        dq = {{{{sum[0], sum[32], sum[64], sum[96]}}}};
    } else {
        float4 x = *(const float4*)sum;
        dq = {{{{x.x, x.y, x.z, x.w}}}};
    }
}

// What a warp adds to a tile.
struct DqPart {
    int row, column;  // its first fragment
    Accumulator<DQ_M, DQ_N> sum;

    __device__ DqPart(int warp) : row(warp % DQ_ROW_WARPS * DQ_M), column(warp / DQ_ROW_WARPS * DQ_N) { sum.clear(); }

    // unit * S K, from the transpose of S.
    template <class STile, class KTile>
    __device__ void multiply(STile transposed, KTile k, float unit) {
        if (DQ_EVEN || column < DIM / 8)
            mma_AB<KEYS>(sum, FromTransposed<STile>{transposed, 16 * row}, k, 8 * column, Nothing(), unit);
    }

    // To the columns of the next half.
    __device__ void next() {
        column += DQ_COLUMN_WARPS * DQ_N;
        sum.clear();
    }
    // Where it goes.
    __device__ Accum* place(const Params& p, long long tile) const { return dq_fragment(p, tile, row, column); }
    // Add what belongs to a step of STEPS, in order.
    template <int STEPS>
    __device__ void add(Accum* to, int step) const {
        constexpr int FRAGMENTS = DQ_M * DQ_N, EACH = (FRAGMENTS + STEPS - 1) / STEPS;
#pragma unroll
        for (int f = step * EACH; f < (step + 1) * EACH && f < FRAGMENTS; f++) {
            int m = f / DQ_N, n = f % DQ_N;
            if (DQ_EVEN || column + n < DIM / 8) red_add_4(to + 128 * (m * (DIM / 8) + n), sum.x[m][n]);
        }
    }
};

// Before any of them adds to a tile: zeros, and counters of who has.
__device__ inline void clear_dq(const Params& p, int tile) {
    float4* sums = (float4*)(p.dq_sum + tile * (long long)DQ_TILE);
    for (int i = threadIdx.x; i < DQ_TILE / VECTOR<Accum>; i += 128) sums[i] = make_float4(0, 0, 0, 0);
    if (DETERMINISTIC && threadIdx.x == 0) {
        p.counters[tile] = 0;
        if (tile == 0) p.counters[gridDim.x] = 0;
    }
}

// Key tiles add to a tile of queries in order.
__device__ inline void wait_for_turn(const Params& p, const Head& head, int tile_q, long long number, int key_tile) {
    unsigned others = KeyWalk<KEYS, ROWS>(p, head, head.query_tile<ROWS>(p, tile_q)).rank(key_tile);
    if (threadIdx.x == 0)
        while (load_acquire(p.counters + number) != others) __nanosleep(32);
    __syncthreads();
}

// A thread block's number. Blocks wait for those with smaller ones: numbers given in the order of starting cannot wait
// for ever.
__device__ inline int number_in_turn(const Params& p) {
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(p.counters + QueryTiles<ROWS>::count(p), 1u);
    __syncthreads();
    return ticket;
}

// dQ = scale * dq_sum, from fragment order to rows, of the tile that a block of 128 threads has the number of.
template <class T>
__device__ void finish_dq(const Params& p, T* dq, const Strides& strides) {
    constexpr int PART = sizeof(Accum) == 8 || WIDE ? 16 : ROWS;  // rows at a time
    using Tile = SharedTile<PART, DIM>;
    __shared__ alignas(16) char shared[FROM_REGISTERS<T> ? 16 : Tile::BYTES];
    Tile dq_tile{shared_address(shared)};
    auto [head, tile] = numbered<QueryTiles<ROWS>>(p, blockIdx.x);
    if (config::PACKED_Q && tile < 0) return;
    for (int first = 0; first < ROWS; first += PART) {
        int i0 = tile * ROWS + first, count = head.queries(p) - i0;
        T* rows = head.query_row(dq, strides, i0);
        if (first > 0) __syncthreads();
#pragma unroll 4
        for (int f = threadIdx.x / 32; f < PART / 16 * (DIM / 8); f += 4) {
            int m = f / (DIM / 8), n = f % (DIM / 8);
            Accumulator<1, 1> sum;
            read_dq(sum, dq_fragment(p, blockIdx.x, first / 16 + m, n));
            sum.each([&](Accum& x, int, int) { x *= p.scale; });
            if constexpr (FROM_REGISTERS<T>)
                store_floats(sum, rows, strides.row, 16 * m, 8 * n, count, p.dim);
            else
                sum.store(dq_tile, 16 * m, 8 * n);
        }
        if constexpr (!FROM_REGISTERS<T>) {
            __syncthreads();
            store_rows<PART / 4>(dq_tile, threadIdx.x / 32 * (PART / 4), rows, strides.row, count, p.dim);
        }
    }
}
