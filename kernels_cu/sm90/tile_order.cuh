// In which order tiles of packed sequences start, a prompt's beside those of tokens that have long caches: one thread
// block makes a list of them before. Those that visit most come first, whoever they belong to, so that none is left for
// the end that takes longer than all others; and nobody searches for the sequence of a tile.
#pragma once
#include "attention/tiles.cuh"
#include "attention/walk.cuh"

using namespace config;

constexpr int ORDER_THREADS = 1024;  // of the forward's

// A tile, of one head as of another, as a line of p.order has it.
struct ListedTile {
    Head head;     // number 0 of its sequence
    int number;    // -1: none
    Range visits;  // of the other side

    __device__ static uint4* line(const Params& p, int n) { return (uint4*)p.order + 2 * n; }
    __device__ static ListedTile at(const Params& p, int n, int q, int k) {
        uint4 of = line(p, n)[0], lengths = line(p, n)[1];
        Range rows_q{int(lengths.x), int(lengths.y)}, rows_k{int(lengths.z), int(lengths.w)};
        return {Head::told(p, int(of.x), q, k, rows_q, rows_k), int(of.y), {int(of.z), int(of.w)}};
    }
    __device__ void store(const Params& p, int n) const {
        unsigned first_q = head.first_query(), first_k = head.first_key();
        line(p, n)[0] = {unsigned(head.number()), unsigned(number), unsigned(visits.begin), unsigned(visits.end)};
        line(p, n)[1] = {first_q, first_q + head.queries(p), first_k, first_k + head.keys(p)};
    }

    // Tiles of a class visit as much as each other, but for an eighth.
    static constexpr int CLASSES = 256;
    static constexpr int ONE = 127 << 3;  // of one, and none, as below
    __device__ int size_class() const {
        return max(0, int(__float_as_uint(float(visits.end - visits.begin)) >> 20) - ONE);
    }
    __device__ static float size_of_class(int n) { return __uint_as_float((n + ONE) << 20); }
};

// What the tiles of a list have, of each head: its first line.
struct AllTiles {
    int count, most;  // that one visits
    int full;         // so many that visit most visit as much as all together

    __device__ static AllTiles of(const Params& p) {
        uint4 x = *(const uint4*)p.order;
        return {int(x.x), int(x.y), int(x.z)};
    }
    __device__ void store(const Params& p) const {
        *(uint4*)p.order = {unsigned(count), unsigned(most), unsigned(full), 0};
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

// Behind that line. Each warp has a stretch of places. Tiles of a class (BY_VISITS, else all) come in the order of
// these, or (FROM_LAST) the other way round, so that neighbours read the same of the other side. placed(place): the
// tile of head 0 there; visits(head, number): of a tile.
template <class Tiles, int THREADS, bool BY_VISITS, bool FROM_LAST, class Placed, class F>
__device__ void order_tiles(const Params& p, Placed placed, F visits) {
    constexpr int CLASSES = ListedTile::CLASSES, WARPS = THREADS / 32;
    __shared__ int before[CLASSES];        // tiles of higher classes
    __shared__ int next[WARPS * CLASSES];  // lines
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* own = next + warp * CLASSES;
    int places = Tiles::of_head(p), each = 32 * tiles_in(places, THREADS);
    ListedTile tile{};  // looked for again where a thread has more than one place
    auto for_each = [&](bool again, auto visit) {
        for (int first = warp * each; first < min(places, (warp + 1) * each); first += 32) {
            if (!again || each > 32) {
                int place = min(places - 1, first + lane);
                HeadTile found = placed(FROM_LAST ? places - 1 - place : place);
                tile = {found.head, found.number, {0, 0}};
                if (first + lane >= places) tile.number = -1;
                if (tile.number >= 0) tile.visits = visits(tile.head, tile.number);
            }
            visit(tile, tile.number >= 0, BY_VISITS ? tile.size_class() : 0);
        }
    };
    for (int n = lane; n < CLASSES; n += 32) own[n] = 0;
    __syncwarp();
    for_each(false, [&](const ListedTile&, bool any, int of) {
        if (any) atomicAdd(&own[of], 1);
    });
    __syncthreads();
    for (int of = threadIdx.x; of < CLASSES; of += THREADS) {
        int all = 0;
        for (int n = 0; n < WARPS; n++) all += next[n * CLASSES + of];
        before[of] = all;
    }
    __syncthreads();
    AllTiles all{};
    if (warp == 0) {
        float most = 1, sum = 0;
        for (int n = lane; n < CLASSES; n += 32) {
            sum += before[n] * ListedTile::size_of_class(n);
            if (before[n] > 0) most = ListedTile::size_of_class(n);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        }
        __syncwarp();
        all = {count_before(before), int(most), int(sum / most)};
    }
    __syncthreads();
    for (int of = threadIdx.x; of < CLASSES; of += THREADS) {
        int line = 1 + before[of];
        for (int n = 0; n < WARPS; n++) {
            int& first = next[n * CLASSES + of];
            int count = first;
            first = line;
            line += count;
        }
    }
    __syncthreads();
    for_each(true, [&](const ListedTile& tile, bool any, int of) {
        unsigned alike = lanes_alike<8>(of, any);
        int line = own[of];
        __syncwarp();
        if (any) {
            tile.store(p, line + __popc(alike & ((1u << lane) - 1)));
            if (alike >> lane == 1) own[of] = line + __popc(alike);  // the last one of them
        }
        __syncwarp();
    });
    if (threadIdx.x == 0) all.store(p);
}
