// In which order tiles of packed sequences start, a prompt's beside those of tokens that have long caches: one thread
// block makes a list of them before the forward. Those with most keys come first, whoever they belong to, so that none
// is left for the end that takes longer than all others; and nobody searches for the sequence of a tile.
#pragma once
#include "attention/walk.cuh"

using namespace config;

constexpr int ORDER_THREADS = 1024;

// A tile of queries, of one head as of another.
template <int ROWS>
struct OrderedTile {
    Head head;  // number 0 of its sequence
    int number;

    // Of p.order, 32 bytes each: first how many there are.
    __device__ static uint4* list(const Params& p) { return (uint4*)p.order; }
    __device__ static int count(const Params& p) { return p.order[0]; }
    __device__ static OrderedTile at(const Params& p, int place, int q, int k) {
        uint4 of = list(p)[2 * place + 2], lengths = list(p)[2 * place + 3];
        Range rows_q{int(lengths.x), int(lengths.y)}, rows_k{int(lengths.z), int(lengths.w)};
        return {Head::told(p, int(of.x), q, k, rows_q, rows_k), int(of.y)};
    }
    __device__ void store(const Params& p, int place) const {
        unsigned first_q = head.first_query(), first_k = head.first_key();
        list(p)[2 * place + 2] = {unsigned(head.number()), unsigned(number), 0, 0};
        list(p)[2 * place + 3] = {first_q, first_q + head.queries(p), first_k, first_k + head.keys(p)};
    }

    // Tiles of a class have as many keys as each other, but for an eighth.
    static constexpr int CLASSES = 256;
    __device__ int size_class(const Params& p) const {
        Range keys = Band{p, head}.keys_of(head.template query_tile<ROWS>(p, number));
        constexpr int ONE = 127 << 3;  // as below, of one key
        return max(0, int(__float_as_uint(float(keys.end - keys.begin)) >> 20) - ONE);
    }
};

// How many tiles each class has becomes how many come before its first one.
template <int CLASSES>
__device__ void count_before(int (&tiles)[CLASSES]) {
    int lane = threadIdx.x % 32, before = 0;
    for (int first = CLASSES - 32; first >= 0; first -= 32) {
        int own = tiles[first + lane], sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int higher = __shfl_sync(~0u, sum, min(31, lane + step));
            if (lane + step < 32) sum += higher;
        }
        tiles[first + lane] = before + sum - own;
        before += __shfl_sync(~0u, sum, 0);
    }
}

template <int ROWS>
__device__ void order_tiles(const Params& p) {
    using Tiles = QueryTiles<ROWS>;
    using Ordered = OrderedTile<ROWS>;
    __shared__ int next[Ordered::CLASSES];
    auto for_each = [&](auto visit) {
        // (Where later tiles see more keys, these first within a class, too.)
        for (int place = Tiles::of_head(p) - 1 - int(threadIdx.x); place >= 0; place -= ORDER_THREADS) {
            HeadTile found = Tiles::placed(p, place, 0);
            Ordered tile{found.head, found.number};
            if (!found.none()) visit(tile, next[tile.size_class(p)]);
        }
    };
    if (threadIdx.x < Ordered::CLASSES) next[threadIdx.x] = 0;
    __syncthreads();
    for_each([&](const Ordered&, int& count) { atomicAdd(&count, 1); });
    __syncthreads();
    if (threadIdx.x < 32) count_before(next);
    __syncthreads();
    for_each([&](const Ordered& tile, int& place) { tile.store(p, atomicAdd(&place, 1)); });
    __syncthreads();
    if (threadIdx.x == 0) p.order[0] = next[0];  // behind the last of the last class
}
