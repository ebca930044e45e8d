// The backward's tiles in shared memory, the order in which they are visited, and the threads that move them: copies
// come as far ahead as the rings reach.
#pragma once
#include "attention/mask.cuh"
#include "attention/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/flag.cuh"
#include "ptx/math.cuh"
#include "tile/ring.cuh"
#include "tile/rows.cuh"
#include "tile/swizzled.cuh"

using namespace config;

// The workers share out the columns of dK, dV (backward_wide.cuh), not the keys (backward_narrow.cuh).
constexpr bool WIDE = KEYS < 64 * GROUPS;

constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int WORKERS = 4 * GROUPS;  // warps

// Per thread. What the moving warpgroup gives away the others take: together no more than at the start.
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int MOVER_REGISTERS = GROUPS == 3 ? 32 : ROWS % 64 == 0 ? 40 : 24;
constexpr int WORKER_REGISTERS = GROUPS == 3 ? 160 : ROWS % 64 == 0 ? 232 : 240;
static_assert(MOVER_REGISTERS + GROUPS * WORKER_REGISTERS <= (GROUPS + 1) * START_REGISTERS);

using QTile = SwizzledTile<ROWS, DIM>;
using DOTile = SwizzledTile<ROWS, DIM_V>;
using KTile = SwizzledTile<KEYS, DIM>;
using VTile = SwizzledTile<KEYS, DIM_V>;
using STile = SwizzledTile<ROWS, KEYS>;  // dS, or P

// dQ^T of a tile is computed in parts of 64 columns by PART_ROWS queries. The workers share out its columns, PARTS
// blocks of 64 to each, or where there is one such block, its rows.
constexpr bool SHARE_ROWS = !WIDE && DIM <= 64;
constexpr int PARTS = SHARE_ROWS ? 1 : ((DIM + 63) / 64 + GROUPS - 1) / GROUPS;
constexpr int PART_ROWS = SHARE_ROWS ? ROWS / GROUPS : ROWS;
constexpr int PART_BYTES = 4 * 64 * PART_ROWS;
constexpr int DQ_TILE = ROWS * DIM;  // floats of one tile in dq_sum

struct TensorMaps {
    TensorMap q, k, v, dout;
};

// dq_sum lies in memory as the parts of dQ^T lie in registers, four numbers of a lane side by side: fragments of 16
// columns by 8 queries, PART_ROWS / 8 of them for each 16 columns.
__device__ inline float* dq_fragment(const Params& p, long long tile, int column16, int row8) {
    int part = row8 / (PART_ROWS / 8), n = row8 % (PART_ROWS / 8);
    return p.dq_sum + tile * DQ_TILE + ((part * (DIM / 16) + column16) * (PART_ROWS / 8) + n) * 128;
}

// A tile of keys of a head of K and V, and the query tiles [first, last) that see it. One thread hands it to the others
// through shared memory, as the four words that it is.
struct KeyTile {
    int pair;  // of batch and head; -1: there is no tile any more
    int number, first, last;

    __device__ KeyTile(int pair, int number, int first, int last)
        : pair(pair), number(number), first(first), last(last) {}

    __device__ KeyTile(uint4 words) : KeyTile(words.x, words.y, words.z, words.w) {}

    __device__ void store(unsigned address) const {
        store_shared(address, pair);
        store_shared(address + 4, number);
        store_shared(address + 8, first);
        store_shared(address + 12, last);
    }
};

// Shared memory, and one thread's place in its rings. `gpu/tuning.py` reckons the same size.
struct Shared {
    KTile k_tile;
    VTile v_tile;
    unsigned q_tiles, do_tiles, ds_tiles, p_tile, parts, rows;
    Ring<1, WORKERS + 3> k;  // and the KeyTile that it belongs to, at `tile`: the other movers read that too
    Ring<1, WORKERS> v;
    Ring<STAGES, WORKERS> q;  // with -lse and delta of its rows
    Ring<DO_STAGES, WORKERS> d;
    unsigned dq_rings, tile;

    __device__ Shared(unsigned base)
        : k_tile{base},
          v_tile{base + KTile::BYTES},
          q_tiles(v_tile.base + VTile::BYTES),
          do_tiles(q_tiles + STAGES * QTile::BYTES),
          ds_tiles(do_tiles + DO_STAGES * DOTile::BYTES),
          p_tile(ds_tiles + DS_STAGES * STile::BYTES),
          parts(p_tile + (WIDE ? STile::BYTES : 0)),
          rows(parts + GROUPS * PART_BYTES),
          k(rows + STAGES * 8 * ROWS),
          v(k.barriers + k.BYTES),
          q(v.barriers + v.BYTES),
          d(q.barriers + q.BYTES),
          dq_rings(d.barriers + d.BYTES),
          tile(dq_rings + GROUPS * Ring<1, 1, 4>::BYTES) {}

    // For the moving threads that do not read K. Each is alone in its warp.
    __device__ KeyTile next_tile() {
        k.wait_full();
        uint4 words = load_shared_16(tile);
        mbarrier_arrive(k.empty());
        k.advance();
        return words;
    }

    // For whole warps, after a wait for K. (The shuffles tell the compiler that all lanes have the same.)
    __device__ KeyTile this_tile() const {
        uint4 words = load_shared_16(tile);
        return {__shfl_sync(~0u, int(words.x), 0), __shfl_sync(~0u, int(words.y), 0), __shfl_sync(~0u, int(words.z), 0),
                __shfl_sync(~0u, int(words.w), 0)};
    }

    __device__ QTile q_tile() const { return {q_tiles + q.stage * QTile::BYTES}; }
    __device__ DOTile do_tile() const { return {do_tiles + d.stage * DOTile::BYTES}; }
    __device__ unsigned row_values() const { return rows + q.stage * 8 * ROWS; }
    __device__ unsigned part(int group) const { return parts + group * PART_BYTES; }
    __device__ Ring<1, 1, 4> dq(int group) const { return {dq_rings + group * Ring<1, 1, 4>::BYTES}; }
};

__device__ inline int key_tiles(const Params& p) { return (p.seq_k + KEYS - 1) / KEYS; }

// The thread blocks take tiles in the order of their numbers. With a causal mask later keys are seen by fewer
// queries: in a group of heads whose Q, dO and dQ stay in the L2 cache, tiles with much to do come first. The
// deterministic backward adds to a dQ tile in the order of the numbers: there those of the last keys come first,
// since they begin where the diagonal is and nobody needs to wait.
__device__ inline KeyTile key_tile(const Params& p, int number) {
    int tiles = key_tiles(p), pairs = p.heads_k * p.batch, together = 1;
    if (RIGHT) {
        constexpr float CACHE = 32 << 20;
        float bytes = float(p.seq_q) * (p.heads_q / p.heads_k) * (6 * p.dim + 2 * p.dim_v);
        together = max(1, min(pairs, int(CACHE / bytes)));
    }
    int first = number / (together * tiles) * together, place = number - first * tiles;
    int heads = min(together, pairs - first);
    int pair = first + place % heads, tile = place / heads;
    if (RIGHT && DETERMINISTIC) tile = tiles - 1 - tile;
    Range queries = Mask(p, 0).queries_of({tile * KEYS, min(p.seq_k, (tile + 1) * KEYS)});
    bool seen = queries.begin < queries.end;
    return {pair, tile, seen ? queries.begin / ROWS : 0, seen ? (queries.end + ROWS - 1) / ROWS : 0};
}

// How many key tiles add to the dQ of a query tile before tile `number` does.
__device__ inline int turn(const Params& p, int number, int tile_q) {
    Range keys = Mask(p, 0).keys_of({tile_q * ROWS, min(p.seq_q, (tile_q + 1) * ROWS)});
    return RIGHT ? (keys.end + KEYS - 1) / KEYS - 1 - number : number - keys.begin / KEYS;
}

// f(head, i, n) for every query head of the group and query tile that sees the keys; n numbers the query tiles of all
// heads.
template <class F>
__device__ void query_tiles(const Params& p, const KeyTile& t, F f) {
    int group = p.heads_q / p.heads_k, tiles = (p.seq_q + ROWS - 1) / ROWS;
#pragma unroll 1
    for (int h = 0; h < group; h++)
#pragma unroll 1
        for (int i = t.first; i < t.last; i++) f(t.pair % p.heads_k * group + h, i, (t.pair * group + h) * tiles + i);
}

// The thread that deals out the tiles, and loads K and Q.
__device__ inline void load_k_q(const Params& p, const TensorMaps& maps, Shared& s) {
    int number = atomicAdd(p.counters, 1);
    while (number < key_tiles(p) * p.heads_k * p.batch) {
        KeyTile t = key_tile(p, number);
        s.k.wait_empty();
        t.store(s.tile);
        int batch = t.pair / p.heads_k, head_k = t.pair % p.heads_k;
        if (t.first < t.last) {
            mbarrier_arrive_expect(s.k.full(), KTile::BYTES);
            s.k_tile.load(maps.k, s.k.full(), t.number * KEYS, head_k, batch);
        } else {
            mbarrier_arrive(s.k.full());
        }
        s.k.advance();
        query_tiles(p, t, [&](int head, int i, int n) {
            s.q.wait_empty();
            mbarrier_arrive_expect(s.q.full(), QTile::BYTES + 8 * ROWS);
            s.q_tile().load(maps.q, s.q.full(), i * ROWS, head, batch);
            bulk_load(s.row_values(), p.delta + n * (2ll * ROWS), 8 * ROWS, s.q.full());
            s.q.advance();
        });
        number = atomicAdd(p.counters, 1);  // not before: blocks that had little to do so far ask first
    }
    s.k.wait_empty();
    KeyTile(-1, 0, 0, 0).store(s.tile);
    mbarrier_arrive(s.k.full());
}

// The thread that loads V and dO.
__device__ inline void load_v_do(const Params& p, const TensorMaps& maps, Shared& s) {
    while (true) {
        KeyTile t = s.next_tile();
        if (t.pair == -1) break;
        int batch = t.pair / p.heads_k, head_k = t.pair % p.heads_k;
        if (t.first < t.last) {
            s.v.wait_empty();
            mbarrier_arrive_expect(s.v.full(), VTile::BYTES);
            s.v_tile.load(maps.v, s.v.full(), t.number * KEYS, head_k, batch);
            s.v.advance();
        }
        query_tiles(p, t, [&](int head, int i, int) {
            s.d.wait_empty();
            mbarrier_arrive_expect(s.d.full(), DOTile::BYTES);
            s.do_tile().load(maps.dout, s.d.full(), i * ROWS, head, batch);
            s.d.advance();
        });
    }
}

// A thread that adds parts of dQ to memory: those of every other worker from `first` on.
__device__ inline void add_dq(const Params& p, Shared& s, int first) {
    Ring<1, 1, 4> dq = s.dq(first);
    while (true) {
        KeyTile t = s.next_tile();
        if (t.pair == -1) break;
        query_tiles(p, t, [&](int, int i, int n) {
            Ring<1, 1, 4> before = dq;
#pragma unroll
            for (int group = first; group < GROUPS; group += 2) {
                dq = before;
                dq.barriers = s.dq(group).barriers;
                unsigned* counter = p.counters + 1 + n * (long long)GROUPS + group;
                if (DETERMINISTIC) {
                    unsigned others = turn(p, t.number, i);
                    while (load_acquire(counter) != others) {
                    }
                }
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    int column16 = SHARE_ROWS ? 0 : 4 * (group * PARTS + part);
                    int row8 = SHARE_ROWS ? group * (PART_ROWS / 8) : 0;
                    int bytes = 4 * PART_ROWS * min(DIM - 16 * column16, 64);
                    dq.wait_full();
                    if (bytes > 0) bulk_add(dq_fragment(p, n, column16, row8), s.part(group), bytes);
                    tma_commit();
                    if (DETERMINISTIC)
                        tma_wait();
                    else
                        tma_wait_read();
                    mbarrier_arrive(dq.empty());
                    dq.advance();
                }
                if (DETERMINISTIC) add_release(counter, 1);
            }
        });
    }
}

// A worker's part of dQ^T, to the thread that adds it to memory.
__device__ inline void hand_over(const Accumulator<1, PART_ROWS / 8>& dq, unsigned part, Ring<1, 1, 4>& ring) {
    ring.wait_empty();
#pragma unroll
    for (int n = 0; n < PART_ROWS / 8; n++)
        store_shared_16(part + ((threadIdx.x / 32 % 4 * (PART_ROWS / 8) + n) * 32 + threadIdx.x % 32) * 16, dq.x[0][n]);
    fence_async();
    ring.filled();
    ring.advance();
}
