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

    // Of p.order, 32 bytes each: first what all have.
    __device__ static uint4* list(const Params& p) { return (uint4*)p.order; }
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
    static constexpr int ONE = 127 << 3;  // of one key, and fewer, as below
    __device__ int size_class(const Params& p) const {
        Range keys = Band{p, head}.keys_of(head.template query_tile<ROWS>(p, number));
        return max(0, int(__float_as_uint(float(keys.end - keys.begin)) >> 20) - ONE);
    }
    __device__ static float keys_of_class(int n) { return __uint_as_float((n + ONE) << 20); }
};

// What the tiles of a list have, of each head.
struct AllTiles {
    int count, most_keys;
    int full;  // so many with most keys have as many as all together

    __device__ static AllTiles of(const Params& p) {
        uint4 x = *(const uint4*)p.order;
        return {int(x.x), int(x.y), int(x.z)};
    }
    __device__ void store(const Params& p) const {
        *(uint4*)p.order = {unsigned(count), unsigned(most_keys), unsigned(full), 0};
    }
};

// How many tiles each class has becomes how many come before its first one. How many there are in all.
template <int CLASSES>
__device__ int count_before(int (&tiles)[CLASSES]) {
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
    return before;
}

// The lanes of a warp that have the same number, of BITS bits, as this one; of those that have one.
template <int BITS>
__device__ unsigned lanes_alike(int number, bool any) {
    unsigned alike = __ballot_sync(~0u, any);
#pragma unroll
    for (int bit = 0; bit < BITS; bit++) {
        unsigned set = __ballot_sync(~0u, number >> bit & 1);
        alike &= number >> bit & 1 ? set : ~set;
    }
    return alike;
}

// Each warp has a stretch of places. Tiles of a class come in the order of these, so that neighbours read the same K
// and V; where later tiles see more keys, these first.
template <int ROWS>
__device__ void order_tiles(const Params& p) {
    using Tiles = QueryTiles<ROWS>;
    using Ordered = OrderedTile<ROWS>;
    constexpr int CLASSES = Ordered::CLASSES, WARPS = ORDER_THREADS / 32;
    __shared__ int before[CLASSES];       // tiles of higher classes
    __shared__ int next[WARPS * CLASSES];  // places in the list
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* own = next + warp * CLASSES;
    auto for_each = [&](auto visit) {
        int places = Tiles::of_head(p), each = 32 * tiles_in(places, ORDER_THREADS);
        for (int first = warp * each; first < min(places, (warp + 1) * each); first += 32) {
            HeadTile found = Tiles::placed(p, max(0, places - 1 - first - lane), 0);
            Ordered tile{found.head, found.number};
            bool any = first + lane < places && !found.none();
            visit(tile, any, any ? tile.size_class(p) : 0);
        }
    };
    for (int n = lane; n < CLASSES; n += 32) own[n] = 0;
    __syncwarp();
    for_each([&](const Ordered&, bool any, int of) {
        if (any) atomicAdd(&own[of], 1);
    });
    __syncthreads();
    if (threadIdx.x < CLASSES) {
        int all = 0;
        for (int n = 0; n < WARPS; n++) all += next[n * CLASSES + threadIdx.x];
        before[threadIdx.x] = all;
    }
    __syncthreads();
    AllTiles all{};
    if (warp == 0) {
        float most = 1, keys = 0;
        for (int n = lane; n < CLASSES; n += 32) {
            keys += before[n] * Ordered::keys_of_class(n);
            if (before[n] > 0) most = Ordered::keys_of_class(n);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            keys += __shfl_xor_sync(~0u, keys, step);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        }
        __syncwarp();
        all = {count_before(before), int(most), int(keys / most)};
    }
    __syncthreads();
    if (threadIdx.x < CLASSES) {
        int place = before[threadIdx.x];
        for (int n = 0; n < WARPS; n++) {
            int& first = next[n * CLASSES + threadIdx.x];
            int count = first;
            first = place;
            place += count;
        }
    }
    __syncthreads();
    for_each([&](const Ordered& tile, bool any, int of) {
        unsigned alike = lanes_alike<8>(of, any);
        int place = own[of];
        __syncwarp();
        if (any) {
            tile.store(p, place + __popc(alike & ((1u << lane) - 1)));
            if (alike >> lane == 1) own[of] = place + __popc(alike);  // the last one of them
        }
        __syncwarp();
    });
    if (threadIdx.x == 0) all.store(p);
}
