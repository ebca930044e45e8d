// FlashAttention-3's forward (Shah et al. 2024) for Hopper: FlashAttention-2's algorithm with the three engines of a
// multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of queries. Its first warpgroup only loads: one
// thread asks the copy engine (TMA) for Q, K and V tiles, as far ahead as the rings in shared memory reach. The others each
// own 64 rows: the tensor cores compute S = Q K^T of one key tile and O += P V of the tile before in the background
// (wgmma), and under P V the threads do the softmax of S. O leaves through shared memory, by the copy engine again, where
// there is room for it.
#include "attention/mask.cuh"
#include "attention/schedule.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/ring.cuh"
#include "tile/rows.cuh"
#include "tile/swizzled.cuh"

using namespace config;

constexpr int ROWS = 64 * GROUPS;
constexpr int SPAN = ROWS / PACK;  // rows of one head: where queries are few, heads that share K and V share a tile
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int READERS = 4 * GROUPS;  // warps that read what is loaded

// Per thread. What the loading warpgroup gives away the others take: together no more than at the start.
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int LOADER_REGISTERS = GROUPS == 2 ? 40 : 32;
constexpr int WORKER_REGISTERS = GROUPS == 2 ? 232 : 160;
static_assert(LOADER_REGISTERS + GROUPS * WORKER_REGISTERS <= (GROUPS + 1) * START_REGISTERS);

// Exponentials are taken before their maximum is known (softmax.cuh), where registers allow it. Two warpgroups have some
// to spare for a warp to do what overflowed again by itself; three do it together.
constexpr bool BLIND = DIM <= 128 && DIM_V <= 128;
constexpr bool WARP_VOTE = GROUPS == 2;

// Whether the last O += P V of a tile is done under the first scores of the next: asks for registers and an early Q.
constexpr bool RIDE = GROUPS == 2 && Q_STAGES > 1;

// Whether, where tiles are alike and so their order is fixed, the next tile's Q is asked for in the middle of a tile: all
// thread blocks change heads at once, and it would come late. (Beside three warpgroups the loading thread has no
// registers for that.)
constexpr bool EARLY = RIDE && !LEFT && !RIGHT;

// Whether the output of a tile is stored under the second scores of the next, where those need no element tests. (With a
// lower bound of the keys the compiler would make the products wait for each other.)
constexpr bool UNDER = RIDE && !LEFT && !KEY_MASK;

// Whether the loading thread tells the others all of a tile, so that they need no divisions between two tiles, or only
// its number: beside three warpgroups it has no registers for more, and where tiles are alike there is nothing to gain.
constexpr bool TELL = GROUPS == 2 && (LEFT || RIGHT);

// Whether a warpgroup that sees no more than half of its first key tile computes only that.
constexpr bool HALVES = RIGHT && KEYS == 128;

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
    unsigned q_tiles, k_tiles, v_tiles;
    OTile o_tile;  // only where O_STAGED
    Ring<Q_STAGES, READERS> q;
    Ring<STAGES, READERS> k, v;
    unsigned notes;  // what each slot of Q tells of its tile

    __device__ Shared(unsigned base)
        : q_tiles(base),
          k_tiles(q_tiles + Q_STAGES * QTile::BYTES),
          v_tiles(k_tiles + STAGES * KTile::BYTES),
          o_tile{v_tiles + STAGES * VTile::BYTES},
          q(o_tile.base + (O_STAGED ? OTile::BYTES : 0)),
          k(q.barriers + q.BYTES),
          v(k.barriers + k.BYTES),
          notes(v.barriers + v.BYTES) {}

    __device__ QTile q_tile() const { return {q_tiles + q.stage * QTile::BYTES}; }
    __device__ KTile k_tile() const { return {k_tiles + k.stage * KTile::BYTES}; }
    __device__ VTile v_tile() const { return {v_tiles + v.stage * VTile::BYTES}; }

    // The loading thread tells of a tile, or that there are no more, and the others are told: a batch of -1.
    __device__ void tell(const Tile& tile, int number) const {
        unsigned note = notes + 16 * q.stage;
        if constexpr (TELL) {
            store_shared(note, tile.batch);
            store_shared(note + 4, tile.head);
            store_shared(note + 8, tile.head_k);
            store_shared(note + 12, tile.queries.begin);
        } else {
            store_shared(note, number);
        }
    }
    __device__ void tell_end() const { store_shared(notes + 16 * q.stage, unsigned(-1)); }
    __device__ bool told(Tile& tile, const Schedule<SPAN, PACK>& schedule) const {
        unsigned note = notes + 16 * q.stage;
        if constexpr (TELL) {
            uint4 x = load_shared_16(note);
            int batch = __shfl_sync(~0u, int(x.x), 0), head = __shfl_sync(~0u, int(x.y), 0);
            int head_k = __shfl_sync(~0u, int(x.z), 0), row = __shfl_sync(~0u, int(x.w), 0);
            if (batch == -1) return false;
            tile = {batch, head, head_k, schedule.queries(row)};
        } else {
            int number = __shfl_sync(~0u, int(load_shared(note)), 0);
            if (number == -1) return false;
            tile = schedule.tile(number);
        }
        return true;
    }
};

// Of a row of a tile: which of its heads, and which query from its first one on.
__device__ inline int head_of(int row) { return PACK > 1 ? row / SPAN : 0; }
__device__ inline int query_of(int row) { return PACK > 1 ? row % SPAN : row; }

// The key tiles [begin, end) that a query tile visits, from the last to the first: with a causal mask those that need
// element tests come first.
__device__ inline Range key_tiles(const Mask& mask, Range queries) {
    Range keys = mask.keys_of(queries);
    return {keys.begin / KEYS, keys.begin == keys.end ? keys.begin / KEYS : (keys.end + KEYS - 1) / KEYS};
}

// The loading thread. K is always a tile ahead of V, where RIDE over the end of a query tile too.
__device__ inline void load(const Params& p, const TensorMaps& maps, Shared& s) {
    Schedule<SPAN, PACK> schedule(p);
    Tickets tickets{p.counters};
    auto load_k = [&](const Tile& tile, int j) {
        s.k.wait_empty();
        mbarrier_arrive_expect(s.k.full(), KTile::BYTES);
        s.k_tile().load(maps.k, s.k.full(), j * KEYS, tile.head_k, tile.batch);
        s.k.advance();
    };
    auto load_v = [&](const Tile& tile, int j) {
        s.v.wait_empty();
        mbarrier_arrive_expect(s.v.full(), VTile::BYTES);
        s.v_tile().load(maps.v, s.v.full(), j * KEYS, tile.head_k, tile.batch);
        s.v.advance();
    };
    auto load_q = [&](const Tile& tile, int number) {
        s.q.wait_empty();
        s.tell(tile, number);
        mbarrier_arrive_expect(s.q.full(), QTile::BYTES);
        s.q_tile().load(maps.q, s.q.full(), tile.queries.begin, tile.head, tile.batch);
        s.q.advance();
    };
    int total = schedule.total(), number = blockIdx.x;
    bool dynamic = p.counters != nullptr;  // tiles differ in length: each is asked for
    Tile before, next;
    bool early = false;    // Q of the next tile is asked for
    int last_before = -1;  // key tile whose V is still to come, where RIDE
    while (number < total) {
        Tile tile = early ? next : schedule.tile(number);
        Range keys = key_tiles(Mask(p, tile.batch), tile.queries);
        bool any = keys.begin < keys.end;
        if (any) load_k(tile, keys.end - 1);
        if (!early) load_q(tile, number);
        early = false;
        if (RIDE && last_before >= 0) load_v(before, last_before);
        int ticket = number;
        bool asked = !dynamic;
        // Late, since blocks that had little to do so far should ask first; early enough for the answer to come.
        auto ask = [&] {
            if (!asked) ticket = tickets.take(number < gridDim.x);
            asked = true;
        };
        for (int j = keys.end - 1; j > keys.begin; j--) {
            load_k(tile, j - 1);
            if (j <= keys.begin + 2) ask();
            load_v(tile, j);
            int after = number + gridDim.x;
            if (EARLY && !dynamic && !early && j <= keys.begin + 2 && after < total) {
                next = schedule.tile(after);
                load_q(next, after);
                early = true;
            }
        }
        ask();
        if (RIDE)
            before = tile, last_before = any ? keys.begin : -1;
        else if (any)
            load_v(tile, keys.begin);
        if (dynamic) tickets.settle(ticket, total - 1);
        number = gridDim.x + ticket;
    }
    s.q.wait_empty();
    s.tell_end();
    mbarrier_arrive(s.q.full());
    s.q.advance();
    if (RIDE && last_before >= 0) load_v(before, last_before);
}

// A warpgroup with 64 rows of every tile.
struct Worker {
    const Params& p;
    const TensorMaps& maps;
    Shared& s;
    int group, first_row, warp_row;  // rows: of the tile

    Tile tile{};               // whose scores are computed
    Range own{};               // of its key tiles those that the warpgroup's rows see
    bool half = false;         // whether they see no more than the first half of the first one
    OnlineSoftmax<1> softmax;  // of its rows

    // P V is added while the scores after those of P are computed: those of the next key tile, or of the next tile.
    Accumulator<1, DIM_V / 8> o;
    Operand<KEYS> probabilities;

    __device__ Worker(const Params& p, const TensorMaps& maps, Shared& s, int group)
        : p(p),
          maps(maps),
          s(s),
          group(group),
          first_row(64 * group),
          warp_row(first_row + threadIdx.x / 32 % 4 * 16),
          softmax(p.scale) {}

    // What is hidden from all rows of the warpgroup it only passes on.
    __device__ void pass(int tiles) {
        for (; tiles > 0; tiles--) {
            s.k.pass();
            s.v.pass();
        }
    }

    // How many of a tile's heads share its K and V. What it has beyond them is thrown away.
    __device__ int heads_of(const Tile& tile) const {
        return PACK > 1 ? (tile.head_k + 1) * (p.heads_q / p.heads_k) - tile.head : 1;
    }

    // The queries of the warpgroup's rows; they may lie behind the end.
    __device__ Range queries() const {
        constexpr int COUNT = SPAN % 64 == 0 ? 64 : SPAN;
        int begin = tile.queries.begin + (COUNT == 64 ? first_row % SPAN : 0);
        return {begin, begin + COUNT};
    }
    __device__ bool tests(const Mask& mask, int j, int keys = KEYS) const {
        return mask.tests(queries(), {j * KEYS, j * KEYS + keys});
    }

    // Scores of key tile j as the softmax wants them.
    template <int N>
    __device__ void see(Accumulator<1, N>& scores, const Mask& mask, int j, bool tests) const {
        int i0 = tile.queries.begin, j0 = j * KEYS;
        scores.each([&](float& x, int i, int c) {
            int row = warp_row + i;
            x = score(x, tile.batch, tile.head + head_of(row), i0 + query_of(row), j0 + c);
        });
        if (tests) {
            unsigned kept[(8 * N + 31) / 32];
#pragma unroll
            for (int n = 0; KEY_MASK && n < (8 * N + 31) / 32; n++) kept[n] = mask.kept(j0 + 32 * n);
            scores.each([&](float& x, int i, int c) {
                bool hidden = !mask.in_band(i0 + query_of(warp_row + i), j0 + c);
                if (hidden || (KEY_MASK && !(kept[c / 32] >> c % 32 & 1))) x = MINUS_INFINITY;
            });
        }
    }

    // Start O += P V.
    __device__ void add_values(bool half) {
        s.v.wait_full();
        if (HALVES && half)
            start_AB<HALVES ? KEYS / 2 : KEYS>(o, probabilities, s.v_tile());
        else
            start_AB<KEYS>(o, probabilities, s.v_tile());
    }

    __device__ void values_added() {
        wgmma_wait<0>();
        changed(o);
        s.v.release();
        s.v.advance();
    }

    __device__ void release_k() {
        s.k.release();
        s.k.advance();
    }

    // The first key tile of a tile; RIDING: under it O += P V of the tile before.
    template <int N, bool RIDING>
    __device__ void first(const Mask& mask, bool half_before) {
        int j = own.end - 1;
        Accumulator<1, N> scores;
        start_ABt<DIM>(scores, s.q_tile(), first_row, s.k_tile());
        if constexpr (RIDING) {
            add_values(half_before);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        changed(scores);
        release_k();
        see(scores, mask, j, tests(mask, j));
        float largest[1][2], shrink[1][2];
        softmax.row_maximum(scores, largest);
        softmax.raise(largest, shrink);
        softmax.exponentiate(scores);
        if (RIDING) softmax.settle();
        if (j > own.begin) s.k.wait_full();
        if (RIDING) values_added();
        changed(scores);
        probabilities.take(scores);
    }

    // S = Q K^T of tile j, whose K is there, and under O += P V of the tile before its softmax. The next K is waited
    // for before P V is: that branch, where there is one, also keeps the compiler from moving the softmax behind the
    // wait for P V.
    template <class F>
    __device__ void visit(const Mask& mask, int j, bool tests, F between) {
        Accumulator<1, KEYS / 8> scores;
        start_ABt<DIM>(scores, s.q_tile(), first_row, s.k_tile());
        between();
        add_values(half);
        half = false;
        wgmma_wait<1>();
        changed(scores);
        float largest[1][2], shrink[1][2];
        bool grown = false;
        auto look = [&] {
            see(scores, mask, j, tests);
            softmax.row_maximum(scores, largest);
            grown = softmax.raise(largest, shrink);
            softmax.exponentiate(scores);
        };
        if (tests || !BLIND) {
            release_k();
            look();
        } else {
            see(scores, mask, j, false);
            float added[1][2];
            bool fits = softmax.exponentiate_blindly(scores, added);
            if constexpr (WARP_VOTE) {
                if (__builtin_expect(__all_sync(~0u, fits), true)) {
                    softmax.add(added);
                } else {
                    warp_ABt<DIM>(scores, s.q_tile(), warp_row, s.k_tile());
                    look();
                }
            } else {
                if (__builtin_expect(all_threads<128>(1 + group, fits), true)) {
                    softmax.add(added);
                } else {
                    start_ABt<DIM>(scores, s.q_tile(), first_row, s.k_tile());
                    wgmma_wait<0>();
                    changed(o);
                    changed(scores);
                    look();
                }
            }
            release_k();
        }
        if (j > own.begin) s.k.wait_full();
        values_added();
        changed(scores);
        if (__builtin_expect(grown, false)) softmax.scale_rows(o, shrink);
        probabilities.take(scores);
    }

    __device__ void store(const Tile& tile, OnlineSoftmax<1>& softmax) {
        softmax.add_lanes();
        softmax.finish(o, p.scale);
        int i0 = tile.queries.begin, heads = heads_of(tile);
        if (O_STAGED && maps.map_out) {
            bool storer = threadIdx.x % 128 == 0;
            if (storer) tma_wait_read();
            sync_threads<128>(1 + group);
            store_rounded(o, s.o_tile, warp_row, 0);
            fence_async();
            sync_threads<128>(1 + group);
            if (storer) {
                s.o_tile.store(maps.out, first_row, i0 + first_row, tile.head, tile.batch);
                tma_commit();
            }
        } else {
            const Strides& to = p.out_strides;
            Element* out = p.out + tile.batch * to.batch + tile.head * to.head;
            bool vectors = (PACK == 1 || to.head % 8 == 0) && aligned(out, to.row, p.dim_v);
            store_rows(o, vectors, p.dim_v, [&](int row) {
                int n = head_of(warp_row + row), i = i0 + query_of(warp_row + row);
                return n < heads && i < p.seq_q ? out + n * to.head + i * to.row : nullptr;
            });
        }
        if (p.lse != nullptr && threadIdx.x % 4 == 0) {
            Accum* lse = p.lse + ((long long)tile.batch * p.heads_q + tile.head) * p.seq_q;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = warp_row + 8 * h + threadIdx.x % 32 / 4, n = head_of(row), i = i0 + query_of(row);
                if (n < heads && i < p.seq_q) lse[n * (long long)p.seq_q + i] = softmax.maximum[0][h];
            }
        }
    }

    __device__ void run() {
        Schedule<SPAN, PACK> schedule(p);
        enum { NOTHING, OUTPUT, VALUES } owed = NOTHING;  // of the tile before: its output; before it the last O += P V
        while (true) {
            s.q.wait_full();
            Tile before = tile;
            bool more = s.told(tile, schedule);
            if (!RIDE && !more) break;
            OnlineSoftmax<1> softmax_before = softmax;
            bool half_before = half;
            Mask mask(p, tile.batch);
            int begin = queries().begin, end = min(queries().end, p.seq_q);
            Range keys = key_tiles(mask, tile.queries), seen = mask.keys_of({begin, end});
            bool any = more && begin < end && head_of(first_row) < heads_of(tile) && seen.begin < seen.end;
            own = any ? Range{seen.begin / KEYS, (seen.end + KEYS - 1) / KEYS} : Range{keys.begin, keys.begin};
            softmax = OnlineSoftmax<1>(p.scale);

            // V comes in the order of the key tiles, hidden ones too.
            if (RIDE && owed == VALUES && (!any || own.end < keys.end)) {
                add_values(half_before);
                values_added();
                owed = OUTPUT;
            }
            if (more && owed != VALUES) pass(keys.end - own.end);
            // (With RIDE not in a thread block's first tile: less to compile.)
            half = HALVES && (!RIDE || owed == VALUES) && seen.end <= (own.end - 1) * KEYS + KEYS / 2;
            if (any) {
                s.k.wait_full();
                constexpr int HALF = HALVES ? KEYS / 16 : KEYS / 8;
                if (RIDE && owed == VALUES) {
                    if (HALVES && half)
                        first<HALF, true>(mask, half_before);
                    else
                        first<KEYS / 8, true>(mask, half_before);
                } else if constexpr (HALVES && !RIDE) {
                    if (half)
                        first<HALF, false>(mask, half_before);
                    else
                        first<KEYS / 8, false>(mask, half_before);
                } else {
                    first<KEYS / 8, false>(mask, half_before);
                }
            }
            int j = own.end - 2;
            bool under = UNDER && owed != NOTHING && any && j >= own.begin && !(RIGHT && tests(mask, j, KEYS + 1));
            if (!under) {
                if (RIDE && owed != NOTHING) store(before, softmax_before);
                if (!more) break;
                o.clear();
            }
            if (any) {
                // A row that saw nothing of the tile before has no maximum yet: where one may be, the key after this
                // tile is hidden from it.
                if (KEY_MASK || RIGHT)
                    for (; j >= own.begin && tests(mask, j, KEYS + 1); j--) visit(mask, j, true, [] {});
                if (!KEY_MASK)
                    for (; j >= own.begin && !(LEFT && tests(mask, j)); j--) {
                        visit(mask, j, false, [&] {
                            if (!UNDER || !under) return;
                            store(before, softmax_before);
                            o.clear();
                            under = false;
                        });
                    }
                if (!KEY_MASK && LEFT)
                    for (; j >= own.begin; j--) visit(mask, j, true, [] {});
            }
            s.q.release();
            s.q.advance();
            owed = RIDE && any && own.begin == keys.begin ? VALUES : OUTPUT;
            if (any && owed != VALUES) {
                add_values(half);
                values_added();
            }
            pass(own.begin - keys.begin);
            if (!RIDE) store(tile, softmax);
        }
        if (O_STAGED && threadIdx.x % 128 == 0) tma_wait_read();  // shared memory goes with the block
    }
};

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
        Worker(p, maps, s, group).run();
    }
}
