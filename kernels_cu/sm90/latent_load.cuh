// What both kernels of latent attention have: how a thread block begins, the warp that loads, and what that tells the
// warpgroups of each piece.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/latent_shares.cuh"

constexpr int LATENT_THREADS = 3 * 128;
// Of a thread that loads, and of one that computes.
constexpr int LOADER_REGISTERS = PAGED ? 56 : 40, LATENT_REGISTERS = PAGED ? 224 : 232;

using LatentQ = SwizzledTile<ROWS, DIM>;

struct LatentMaps {
    TensorMap q, k;
    int none;  // there is no map of a result
};

// What is told of a piece, at an address of shared memory.
struct PieceNote {
    static constexpr int BYTES = 32;

    unsigned at;

    __device__ void tell(const Piece& piece) const {
        store_shared(at, piece.tile.head.batch);
        store_shared(at + 4, piece.tile.head.q);
        store_shared(at + 8, piece.tile.queries.begin);
        store_shared(at + 12, piece.place);
        store_shared(at + 16, piece.keys.begin);
        store_shared(at + 20, piece.keys.end);
    }
    __device__ void tell_end() const { store_shared(at, unsigned(-1)); }
    // False: there is none left.
    __device__ bool told(const Params& p, Piece& piece) const {
        uint4 x = load_shared_16(at), y = load_shared_16(at + 16);
        auto all = [](unsigned word) { return __shfl_sync(~0u, int(word), 0); };
        int batch = all(x.x), row = all(x.z);
        if (batch == -1) return false;
        Head head = Head::of_q(p, batch, all(x.y));
        piece = {{head, {row, min(head.queries(p), row + HEAD_ROWS)}}, {all(y.x), all(y.y)}, all(x.w)};
        return true;
    }
};

// A tile of K, box by box, as the loader asks for it ahead: to come to the L2 cache.
struct CachedK {
    using Tile = SwizzledTile<KEYS, DIM>;

    __device__ CachedK from(int) const { return {}; }
    __device__ void load(const TensorMap& map, unsigned, InMap at) const {
#pragma unroll
        for (int b = 0; b < Tile::BLOCKS; b++)
            tma_prefetch(map, at.column + Tile::WIDTH * b, at.row, at.head, at.batch);
    }
};

// A tile of K in memory, for a warp that has looked up where it lies.
struct KeyTile {
    const Params& p;
    const TensorMap& map;
    const Head& head;
    int key;
    const KeyPlace& places;

    // Columns of it, from `column` on. The first thread has waited for all.
    template <class To>
    __device__ void load(To to, unsigned barrier, int column) const {
        if constexpr (PAGED) {
            places.load(p, to, map, barrier, key, head, column);
        } else {
            __syncwarp();
            if (elected()) to.load(map, barrier, head.at_key(p, key, column));
        }
    }
};

// The producer, a warp: its first thread waits and asks, and one that is elected asks for boxes (ptx/tma.cuh). What a
// kernel's Ring does: load(tile, n), the n-th of a piece, and waits(), whether the next one has no place yet.
template <class Ring, class Shared>
__device__ void load(const Params& p, const LatentMaps& maps, Shared s) {
    TileSchedule schedule(p);
    KeyPlace places;
    Ring ring{s};
    bool first = threadIdx.x == 0;
    unsigned tiles = 0;  // of Q, so far
    auto wait_q = [&] { mbarrier_wait(s.q_empty(), tiles % 2 ^ 1); };
    auto load_piece = [&](const Piece& piece) {
        const Head& head = piece.tile.head;
        TileWalk walk(piece.keys);
        int step = walk.start(), ahead = step, n = 0;
        auto look_up = [&](int step) -> KeyTile {
            int key = walk.tile(step) * KEYS;
            places.look_up(p, head, key);
            return {p, maps.k, head, key, places};
        };
        auto load_k = [&] {
            if constexpr (AHEAD > 0) {
                auto near = [&] { return walk.has(ahead) && walk.after(step) - walk.after(ahead) < AHEAD; };
                bool waits = ring.waits();
                if (!waits) ahead = walk.next(step);
                for (; waits && near(); ahead = walk.next(ahead)) look_up(ahead).load(CachedK{}, 0, 0);
            }
            ring.load(look_up(step), n++);  // (looked up while the place is waited for)
            step = walk.next(step);
        };
        if (walk.has(step)) load_k();
        if (first) {
            wait_q();
            s.note().tell(piece);
            mbarrier_arrive_expect(s.q_full(), LatentQ::BYTES);
        }
        __syncwarp();
        if (elected()) s.q().load(maps.q, s.q_full(), head.at_query(p, piece.tile.queries.begin));
        tiles++;
        while (walk.has(step)) load_k();
    };
    if constexpr (STRETCHES) {
        Piece piece;
        for (Stretch stretch(p, schedule.heads); stretch.next(schedule, piece);) load_piece(piece);
    } else {
        Tickets tickets{p.counters};
        bool dynamic = p.counters != nullptr;
        int total = schedule.total(), number = blockIdx.x;
        while (number < total) {
            Tile tile = schedule.tile(number);
            TileWalk walk(p, tile.head, tile.queries);
            if (SHARES) walk = walk.share(tile.share, p.shares);
            load_piece({tile, walk.tiles, SHARES ? tile.share : Piece::WHOLE});
            int ticket = number;
            if (dynamic) {
                ticket = __shfl_sync(~0u, first ? tickets.take(number < gridDim.x) : 0, 0);
                if (first) tickets.settle(ticket, total - 1);
            }
            number = gridDim.x + ticket;
        }
    }
    if (first) {
        wait_q();
        s.note().tell_end();
        mbarrier_arrive(s.q_full());
    }
}

// A thread block: a warpgroup that loads, and two that compute. (Nothing lets attention_combine start before blocks
// end: started at once it costs 5 us of 40, see docs/notes/wide-heads.md.)
template <class Ring, class Consumer, class Shared>
__device__ void run_block(const Params& p, const LatentMaps& maps, Shared s) {
    if (threadIdx.x == 0) {
        s.init();
        mbarrier_init_fence();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
    }
    __syncthreads();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<LOADER_REGISTERS>();
        if (threadIdx.x < 32) load<Ring>(p, maps, s);
    } else {
        grow_registers<LATENT_REGISTERS>();
        Consumer(p, s, warpgroup).run();
    }
}
