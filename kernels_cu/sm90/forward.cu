// FlashAttention-3's forward (Shah et al. 2024) for Hopper: FlashAttention-2's algorithm with the three engines of a
// multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of queries. Its first warpgroup only loads: one
// thread asks the copy engine (TMA) for Q, K and V tiles, as far ahead as the rings in shared memory reach. The others each
// own 64 rows: the tensor cores compute S = Q K^T of one key tile and O += P V of the tile before in the background
// (wgmma), and under P V the threads do the softmax of S. O leaves through shared memory, by the copy engine again.
#include "attention/mask.cuh"
#include "attention/schedule.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/ring.cuh"
#include "tile/swizzled.cuh"

using namespace config;

constexpr int ROWS = 64 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int READERS = 4 * GROUPS;  // warps that read what is loaded

// Per thread. What the loading warpgroup gives away the others take: together no more than at the start.
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int LOADER_REGISTERS = GROUPS == 2 ? 24 : 32;
constexpr int WORKER_REGISTERS = GROUPS == 2 ? 240 : 160;
static_assert(LOADER_REGISTERS + GROUPS * WORKER_REGISTERS <= (GROUPS + 1) * START_REGISTERS);

using QTile = SwizzledTile<ROWS, DIM>;
using KTile = SwizzledTile<KEYS, DIM>;
using VTile = SwizzledTile<KEYS, DIM_V>;
using OTile = SwizzledTile<ROWS, DIM_V>;

struct TensorMaps {
    TensorMap q, k, v, out;
    int map_out;  // 0 where `out` lies as no map can tell
};

// Shared memory, and one thread's place in its rings. `gpu/tuning.py` reckons the same size.
struct Shared {
    QTile q_tile;
    unsigned k_tiles, v_tiles;
    OTile o_tile;  // where Q is, where there is no room for both
    Ring<1, READERS> q;
    Ring<STAGES, READERS> k, v;
    unsigned number;  // of the tile that Q belongs to; -1: no more

    __device__ Shared(unsigned base)
        : q_tile{base},
          k_tiles(base + (O_APART ? QTile::BYTES + OTile::BYTES : max(QTile::BYTES, OTile::BYTES))),
          v_tiles(k_tiles + STAGES * KTile::BYTES),
          o_tile{O_APART ? base + QTile::BYTES : base},
          q(v_tiles + STAGES * VTile::BYTES),
          k(q.barriers + q.BYTES),
          v(k.barriers + k.BYTES),
          number(v.barriers + v.BYTES) {}

    __device__ KTile k_tile() const { return {k_tiles + k.stage * KTile::BYTES}; }
    __device__ VTile v_tile() const { return {v_tiles + v.stage * VTile::BYTES}; }
};

// The key tiles [begin, end) that a query tile visits, from the last to the first: with a causal mask those that need
// element tests come first.
__device__ inline Range key_tiles(const Mask& mask, Range queries) {
    Range keys = mask.keys_of(queries);
    return {keys.begin / KEYS, keys.begin == keys.end ? keys.begin / KEYS : (keys.end + KEYS - 1) / KEYS};
}

// The loading thread.
__device__ inline void load(const Params& p, const TensorMaps& maps, Shared& s) {
    Schedule<ROWS> schedule(p);
    Tickets tickets{p.counters};
    int total = schedule.total(), number = blockIdx.x;
    while (number < total) {
        Tile tile = schedule.tile(number);
        Range keys = key_tiles(Mask(p, tile.batch), tile.queries);
        auto load_k = [&](int j) {
            s.k.wait_empty();
            mbarrier_arrive_expect(s.k.full(), KTile::BYTES);
            s.k_tile().load(maps.k, s.k.full(), j * KEYS, tile.head_k, tile.batch);
            s.k.advance();
        };
        auto load_v = [&](int j) {
            s.v.wait_empty();
            mbarrier_arrive_expect(s.v.full(), VTile::BYTES);
            s.v_tile().load(maps.v, s.v.full(), j * KEYS, tile.head_k, tile.batch);
            s.v.advance();
        };
        int j = keys.end - 1;
        if (j >= keys.begin) load_k(j);
        s.q.wait_empty();
        store_shared(s.number, number);
        mbarrier_arrive_expect(s.q.full(), QTile::BYTES);
        s.q_tile.load(maps.q, s.q.full(), tile.queries.begin, tile.head, tile.batch);
        s.q.advance();
        for (; j > keys.begin; j--) {
            load_k(j - 1);
            load_v(j);
        }
        // As late as can be without a wait: blocks that had little to do so far ask first.
        number = gridDim.x + (DYNAMIC ? tickets.next(total - 1, number < gridDim.x) : number);
        if (j >= keys.begin) load_v(j);
    }
    s.q.wait_empty();
    store_shared(s.number, unsigned(-1));
    mbarrier_arrive(s.q.full());
}

// A warpgroup with 64 rows of every tile.
__device__ inline void work(const Params& p, const TensorMaps& maps, Shared& s, int group) {
    Schedule<ROWS> schedule(p);
    int first_row = 64 * group, warp_row = first_row + threadIdx.x / 32 % 4 * 16;  // of the tile
    bool storer = threadIdx.x % 128 == 0;
    while (true) {
        s.q.wait_full();
        int number = __shfl_sync(~0u, int(load_shared(s.number)), 0);
        if (number == -1) break;
        Tile tile = schedule.tile(number);
        Mask mask(p, tile.batch);
        Range keys = key_tiles(mask, tile.queries);
        int row = tile.queries.begin + first_row;

        OnlineSoftmax<1> softmax(p.scale);
        Accumulator<1, DIM_V / 8> o;
        Operand<KEYS> probabilities;
        o.clear();

        // Scores of key tile j as the softmax wants them.
        auto see = [&](Accumulator<1, KEYS / 8>& scores, int j, bool tests) {
            int i0 = tile.queries.begin + warp_row, j0 = j * KEYS;
            scores.each([&](float& x, int i, int c) { x = score(x, tile.batch, tile.head, i0 + i, j0 + c); });
            if (tests) {
                unsigned kept[(KEYS + 31) / 32];
#pragma unroll
                for (int n = 0; KEY_MASK && n < (KEYS + 31) / 32; n++) kept[n] = mask.kept(j0 + 32 * n);
                scores.each([&](float& x, int i, int c) {
                    if (!mask.in_band(i0 + i, j0 + c) || (KEY_MASK && !(kept[c / 32] >> c % 32 & 1))) x = MINUS_INFINITY;
                });
            }
        };
        auto tests = [&](int j) { return mask.tests({row, row + 64}, {j * KEYS, (j + 1) * KEYS}); };
        // S = Q K^T of tile j, whose K is there, and under O += P V of the tile before its softmax. The next K is waited
        // for before P V is: that branch also keeps the compiler from moving the softmax behind the wait for P V.
        auto visit = [&](int j, bool tests) {
            Accumulator<1, KEYS / 8> scores;
            start_ABt<DIM>(scores, s.q_tile, first_row, s.k_tile());
            s.v.wait_full();
            start_AB(o, probabilities, s.v_tile());
            wgmma_wait<1>();
            changed(scores);
            s.k.release();
            s.k.advance();
            see(scores, j, tests);
            float largest[1][2], shrink[1][2];
            softmax.row_maximum(scores, largest);
            bool grown = softmax.raise(largest, shrink);
            softmax.exponentiate(scores);
            if (j > keys.begin) s.k.wait_full();
            wgmma_wait<0>();
            changed(o);
            changed(scores);
            s.v.release();
            s.v.advance();
            if (grown) softmax.scale_rows(o, shrink);
            probabilities.take(scores);
        };

        int j = keys.end - 1;
        if (j >= keys.begin) {
            Accumulator<1, KEYS / 8> scores;
            s.k.wait_full();
            start_ABt<DIM>(scores, s.q_tile, first_row, s.k_tile());
            wgmma_wait<0>();
            changed(scores);
            s.k.release();
            s.k.advance();
            see(scores, j, tests(j));
            float largest[1][2], shrink[1][2];
            softmax.row_maximum(scores, largest);
            softmax.raise(largest, shrink);
            softmax.exponentiate(scores);
            probabilities.take(scores);
            if (j > keys.begin) s.k.wait_full();
            j--;

            if (KEY_MASK || RIGHT)
                for (; j >= keys.begin && tests(j); j--) visit(j, true);
            if (!KEY_MASK)
                for (; j >= keys.begin && !(LEFT && tests(j)); j--) visit(j, false);
            if (!KEY_MASK && LEFT)
                for (; j >= keys.begin; j--) visit(j, true);
        }
        if (O_APART) s.q.release();
        if (keys.begin < keys.end) {
            s.v.wait_full();
            start_AB(o, probabilities, s.v_tile());
            softmax.add_lanes();
            wgmma_wait<0>();
            changed(o);
            s.v.release();
            s.v.advance();
        }
        softmax.finish(o, p.scale);

        // Out through shared memory. The rows of the tile are this warpgroup's own, be they Q's or O's of the tile before.
        if (O_APART && storer) tma_wait_read();
        sync_threads<128>(1 + group);
        store_rounded(o, s.o_tile, warp_row);
        fence_async();
        if (maps.map_out) {
            sync_threads<128>(1 + group);
            if (storer) {
                s.o_tile.store(maps.out, first_row, row, tile.head, tile.batch);
                tma_commit();
                if (!O_APART) tma_wait_read();
            }
        } else {
            __syncwarp();
            Element* out = p.out + tile.batch * p.out_strides.batch + tile.head * p.out_strides.head +
                           tile.queries.begin * p.out_strides.row;
            store_rows<16>(s.o_tile, warp_row, out, p.out_strides.row, p.seq_q - tile.queries.begin, p.dim_v);
        }
        __syncwarp();
        if (!O_APART) s.q.release();
        s.q.advance();
        if (p.lse != nullptr && threadIdx.x % 4 == 0) {
            Accum* lse = p.lse + ((long long)tile.batch * p.heads_q + tile.head) * p.seq_q;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int i = tile.queries.begin + warp_row + 8 * h + threadIdx.x % 32 / 4;
                if (i < p.seq_q) lse[i] = softmax.maximum[0][h];
            }
        }
    }
    if (storer) tma_wait_read();  // shared memory goes with the block
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ char memory[];
    Shared s((shared_address(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        s.q.init();
        s.k.init();
        s.v.init();
        mbarrier_init_fence();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
    }
    __syncthreads();
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (group == -1) {
        shrink_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) load(p, maps, s);
    } else {
        grow_registers<WORKER_REGISTERS>();
        work(p, maps, s, group);
    }
}
