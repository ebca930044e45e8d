// FlashAttention-2 forward (Dao 2023, Algorithm 1) on the tensor cores of Ampere and every GPU after it.
//
// A thread block owns ROWS queries of one head; each warp owns its part of them for good ("split Q"), so the warps
// never exchange anything but the K and V tiles that they load together. Where the output is so wide that a warp's
// registers hold only 16 rows of it, or not even these, COLUMN_WARPS warps share rows instead: each takes its part of
// the keys of S and its part of the columns of O, they exchange row maxima and P through shared memory, and K and V are
// read from shared memory less often. Where shared memory has room for 16 keys alone, each of them computes all of S.
// With two STAGES the next K and V tiles are on their way while these are worked on; with one, V arrives under
// S = Q K^T and the next K under the softmax and P V, in half the shared memory, so that two thread blocks share a
// multiprocessor. K and V of 8 bits (EIGHT) arrive as they are, so many STAGES ahead, and become tiles of 16 before
// they are multiplied.
#include "attention/cached.cuh"
#include "attention/shares.cuh"
#include "attention/softmax.cuh"
#include "sm80/query_block.cuh"
#include "tile/bytes.cuh"
#include "tile/doubles.cuh"

constexpr bool LATE_V = STAGES == 1 && !EIGHT;  // V of a tile arrives after its K

// As what K and V arrive.
template <bool BYTES>
struct Arriving {
    using Element = Product;
    using K = KTile;
    using V = VTile;
};
template <>
struct Arriving<true> {
    using Element = Kept;
    using K = ByteTile<KEYS, DIM>;
    using V = ByteTile<KEYS, DIM_V>;
};
using Arrives = Arriving<EIGHT>;

// What P is multiplied by where it is split: at most 2^8 (OnlineSoftmax::raise), it stays below float16's largest.
constexpr float P_TIMES = 0x1p6f;

// One number for each row from each of the warps that share it.
struct Exchange {
    unsigned base;
    int row, column_warp;

    __device__ void put(const Accum (&x)[M][2]) const {
        each([&](int m, int h, unsigned address) {
            if (threadIdx.x % 4 == 0) store_shared_number(address + SIZE * column_warp, x[m][h]);
        });
    }

    template <class F>
    __device__ void combine(Accum (&x)[M][2], F f) const {
        each([&](int m, int h, unsigned address) {
            auto both = load_shared_pair<Accum>(address);
            Accum all = f(both.x, both.y);
            if constexpr (COLUMN_WARPS == 4) {
                auto others = load_shared_pair<Accum>(address + 2 * SIZE);
                all = f(all, f(others.x, others.y));
            }
            x[m][h] = all;
        });
    }

    template <class F>
    __device__ void each(F f) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                f(m, h, base + COLUMN_WARPS * SIZE * (row + 16 * m + 8 * h + threadIdx.x % 32 / 4));
    }
};

// Where things lie in shared memory.
struct Shared {
    static constexpr int RING = QTile::BYTES > OTile::BYTES || PARTS == 2 ? QTile::BYTES : OTile::BYTES;
    static constexpr int STAGE = KTile::BYTES + VTile::BYTES;
    static constexpr int P_TILE = RING + (EIGHT ? 1 : STAGES) * STAGE;
    static constexpr int EXCHANGE = P_TILE + PTile::BYTES;
    static constexpr int BYTES = SPLIT_K ? EXCHANGE + COLUMN_WARPS * SIZE * ROWS : P_TILE;
    static constexpr int SCALES = Arrives::K::BYTES + Arrives::V::BYTES;  // of K's rows and of V's
    static constexpr int END = EIGHT ? BYTES + STAGES * (SCALES + 8 * KEYS) : BYTES;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    unsigned base;

    __device__ QTile q_tile() const { return {base}; }
    __device__ OTile o_tile() const { return {base}; }
    __device__ KTile k_tile(int stage) const { return {base + RING + stage * STAGE}; }
    __device__ VTile v_tile(int stage) const { return {k_tile(stage).base + KTile::BYTES}; }
    __device__ PTile p_tile() const { return {base + P_TILE}; }

    __device__ unsigned arriving(int stage) const {
        if constexpr (!EIGHT) return k_tile(stage).base;
        return base + BYTES + stage * (SCALES + 8 * KEYS);
    }
    __device__ Arrives::K k_arriving(int stage) const { return {arriving(stage)}; }
    __device__ Arrives::V v_arriving(int stage) const { return {arriving(stage) + Arrives::K::BYTES}; }
    __device__ unsigned k_scales(int stage) const { return arriving(stage) + SCALES; }
    __device__ unsigned v_scales(int stage) const { return k_scales(stage) + 4 * KEYS; }
};

struct Block : QueryBlock<Shared> {
    int share;  // of the keys that its rows see
    Dropout dropout;
    OnlineSoftmax<M> softmax;
    Output o;

    __device__ Block(const Params& p, Shared s, Head head, int tile, int share)
        : QueryBlock<Shared>(p, s, head, tile), share(share), dropout(p), softmax(Pairs(p, head).factor()) {
        if (SHARES) walk = walk.share(share, shares_of(p, head));
        o.clear();
    }

    // The copies of a step's K and V tile; behind the end of the walk there is nothing to read, nor behind the last
    // live key.
    template <class Of, class Tile>
    __device__ auto copy_keys(Tile tile, int step) const {
        int row = walk.tile(step) * KEYS;
        auto from = operand_rows<Of>(p, head, PAGED && PARTS == 1 ? 0 : row);  // pages are looked up
        from.count = walk.has(step) ? head.live_keys(p).end - row : 0;
        if constexpr (PAGED && PARTS == 1) {
            auto in_pages = [this, row](int n) { return paged_operand_row<Of>(p, head, row + n); };
            return RowsCopy<THREADS, KEYS, Tile::COLUMNS, Tile, decltype(in_pages), Arrives::Element>(tile, from,
                                                                                                      in_pages);
        } else {
            return AsyncCopy<THREADS, KEYS, Tile::COLUMNS, Tile, Arrives::Element>(tile, from);
        }
    }
    __device__ auto copy_k(int step, int stage) const {
        return copy_keys<OfK>(s.k_arriving(stage), step);
    }
    __device__ auto copy_v(int step, int stage) const {
        return copy_keys<OfV>(s.v_arriving(stage), step);
    }

    // What rows of 8 bits are multiplied by; 0 of rows that are not there.
    __device__ void copy_scales(int step, int stage) const {
        copy_scales_of<ScalesOfK>(s.k_scales(stage), step);
        copy_scales_of<ScalesOfV>(s.v_scales(stage), step);
    }
    template <class Scales>
    __device__ void copy_scales_of(unsigned to, int step) const {
        if constexpr (Scales::GIVEN) {
            int first = walk.tile(step) * KEYS, count = walk.has(step) ? head.live_keys(p).end - first : 0;
            for (int n = threadIdx.x; n < KEYS; n += THREADS) {
                const float* from = n < count ? Scales::of_row(p, head, first + n) : nullptr;
                cp_async_float(to + 4 * n, from, from != nullptr);
            }
        }
    }
    // The step after one; behind the end of the walk the same.
    __device__ int after(int step) const { return walk.has(step) ? walk.next(step) : step; }
    // The bytes of a stage have arrived: they become the tile that is multiplied.
    template <class K, class V>
    __device__ void widen_keys(K k, V v, int stage) const {
        widen<THREADS, ScalesOfK::GIVEN, Kept>(k, s.k_scales(stage), s.k_tile(0));
        widen<THREADS, ScalesOfV::GIVEN, Kept>(v, s.v_scales(stage), s.v_tile(0));
        __syncthreads();
    }

    // Q, and the first K and V.
    __device__ void load_first() const {
        auto q = operand_rows<OfQ>(p, head, queries.begin);
        q.count = head.queries(p) - queries.begin;
        AsyncCopy<THREADS, ROWS, QTile::COLUMNS>(s.q_tile(), q).all();
        copy_k(walk.start(), 0).all();
        if (!LATE_V) copy_v(walk.start(), 0).all();
        if constexpr (EIGHT) copy_scales(walk.start(), 0);
        cp_async_commit();
        if constexpr (EIGHT && STAGES == 2) {
            int next = after(walk.start());
            copy_k(next, 1).all();
            copy_v(next, 1).all();
            copy_scales(next, 1);
            cp_async_commit();
        }
    }

    __device__ void clear_values(int tile, int stage) const {
        clear_dead_keys(tile,
                        [&](const DeadRows<KEYS>& dead) { dead.clear<WARPS>(s.v_tile(stage), threadIdx.x / 32); });
    }

    // Products become scores, hidden ones -inf.
    __device__ void mask(Accumulator<M, WARP_KEYS / 8>& scores, int step, const KeysSeen<WARP_KEYS>& seen) const {
        Pairs pairs(p, head, walk.bits(step, queries));
        int row = queries.begin + warp_row, key = walk.tile(step) * KEYS + warp_key;
        Placement<> at{head.q, row, key};
        bool tests = pairs.tests({row, row + WARP_ROWS}, {key, key + WARP_KEYS});
        InMemory<M, false> arrays(pairs, at);
        score(scores, at, pairs, arrays);
        if (tests) {
            keep_branch();
            hide(scores, at, pairs, seen, arrays, MINUS_INFINITY);
        }
    }

    // A tile of keys, under whose products the next K and V are on their way.
    __device__ void visit(int step, int arrived) {
        Exchange exchange{s.base + Shared::EXCHANGE, warp_row, column_warp};
        int next = walk.next(step), tile = walk.tile(step), stage = EIGHT ? 0 : arrived;
        // What the tile's K, V and keys have in memory, while it arrives.
        float k_unit = operand_unit<OfK>(p, head, tile), v_unit = operand_unit<OfV>(p, head, tile);
        KeysSeen<WARP_KEYS> seen(Pairs(p, head), tile * KEYS + warp_key);
        cp_async_wait<EIGHT ? STAGES - 1 : 0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before
        if constexpr (EIGHT) widen_keys(s.k_arriving(arrived), s.v_arriving(arrived), arrived);
        if (!LATE_V) clear_values(tile, stage);

        // S = Q K^T
        Accumulator<M, WARP_KEYS / 8> scores;
        scores.clear();
        FromShared<QTile> q_operand{s.q_tile(), warp_row};
        if constexpr (LATE_V) {
            auto next_v = copy_v(step, 0);
            mma_ABt<DIM>(scores, q_operand, s.k_tile(stage), warp_key,
                         [&](int k) { next_v.template part<(DIM + 31) / 32>(k); });
        } else {
            int later = EIGHT && STAGES == 2 ? after(next) : next, into = EIGHT ? arrived : 1 - stage;
            auto next_k = copy_k(later, into);
            auto next_v = copy_v(later, into);
            if constexpr (EIGHT) copy_scales(later, into);
            mma_ABt<DIM>(scores, q_operand, s.k_tile(stage), warp_key, [&](int k) {
                next_k.template part<DIM / 16>(k);
                next_v.template part<DIM / 16>(k);
            });
        }
        cp_async_commit();
        if (PARTS == 2) scale_by_units(scores, q_unit, k_unit);

        mask(scores, step, seen);

        // Online softmax
        Accum largest[M][2];
        softmax.row_maximum(scores, largest);
        if (SPLIT_K) exchange.put(largest);
        if (LATE_V) {
            cp_async_wait<0>();
            __syncthreads();  // V has arrived, and everybody is done with K
            clear_values(tile, stage);
        } else if (SPLIT_K) {
            sync_row_warps();
        }
        if (SPLIT_K) exchange.combine(largest, [](Accum x, Accum y) { return larger(x, y); });
        softmax.rescale(largest, o);
        softmax.exponentiate(scores);
        Placement<> at{head.q, queries.begin + warp_row, tile * KEYS + warp_key};
        drop(scores, at, head.batch, dropout);

        // O += P V
        auto next_k = copy_k(next, 0);
        auto along = [&](int k) {
            if (LATE_V) next_k.template part<KEYS / 16>(k);
        };
        float unit = v_unit / P_TIMES;
        if constexpr (SPLIT_K) {
            scores.store<DROPOUT>(s.p_tile(), warp_row, warp_key, P_TIMES);
            sync_row_warps();
            mma_AB<KEYS>(o, FromShared<PTile>{s.p_tile(), warp_row}, s.v_tile(stage), column_warp * WARP_COLUMNS, along,
                         unit);
        } else {
            mma_AB<KEYS>(o, FromRegisters<M, WARP_KEYS / 8, DROPOUT>{scores, P_TIMES}, s.v_tile(stage),
                         AGAIN ? column_warp * WARP_COLUMNS : 0, along, unit);
        }
        if (!EIGHT) cp_async_commit();
    }

    // O divided by the sums, and lse.
    __device__ void finish() {
        Exchange exchange{s.base + Shared::EXCHANGE, warp_row, column_warp};
        cp_async_wait<0>();
        softmax.add_lanes();
        if (SPLIT_K) {
            __syncthreads();  // everybody is done with Q and the exchange
            exchange.put(softmax.sum);
            sync_row_warps();
            exchange.combine(softmax.sum, [](Accum x, Accum y) { return x + y; });
        }
        Pairs pairs(p, head);
        softmax.close(pairs.unit(), kept(p), [&](int) -> Accum {
            if constexpr (SHARES) return MINUS_INFINITY;  // it is added once, to all shares
            return pairs.sink(head.q);
        });
        softmax.scale_rows(o, softmax.sum);
        if (EIGHT) o.each([&](Accum& x, int, int) { x *= p.out_scale; });

        store_result();
        Accum* lse = p.lse;
        if constexpr (SHARES) lse = p.share_lse + share_row(p, share, 0);
        if (lse != nullptr && threadIdx.x % 4 == 0 && column_warp == 0) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int i = queries.begin + warp_row + 16 * m + 8 * h + threadIdx.x % 32 / 4;
                    if (i < head.queries(p)) lse[head.row_number(p, i)] = softmax.maximum[m][h];
                }
        }
    }

    __device__ void store_result() {
        int rows = head.queries(p) - queries.begin;
        Out* out = head.query_row(p.out, p.out_strides, queries.begin);
        if constexpr (SHARES) {
            Accum* to = p.share_out + share_row(p, share, head.row_number(p, queries.begin)) * DIM_V +
                        column_warp * WARP_COLUMNS;
            store_float_rows(o, true, WARP_COLUMNS, [&](int r) -> Accum* {
                return warp_row + r < rows ? to + (warp_row + r) * DIM_V : nullptr;
            });
        } else if constexpr (FROM_REGISTERS<>) {
            store_floats(o, out, p.out_strides.row, warp_row, column_warp * WARP_COLUMNS, rows, p.dim_v);
        } else {
            // Through shared memory, where Q was, for whole rows; where Q's rows have another length than O's, the
            // warps' shares of the two tiles overlap.
            if (AGAIN || DIM != DIM_V || walk.count() == 0) __syncthreads();
            o.store(s.o_tile(), warp_row, column_warp * WARP_COLUMNS);
            if (COLUMN_WARPS > 1) sync_row_warps();
            __syncwarp();
            constexpr int OUT_ROWS = WARP_ROWS / COLUMN_WARPS;
            store_rows<OUT_ROWS>(s.o_tile(), warp_row + column_warp * OUT_ROWS, out, p.out_strides.row, rows, p.dim_v);
        }
    }
};

// Launched where there are two parts.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) attention_split(const __grid_constant__ Params p) {
    if constexpr (PARTS == 2) split_operands<OfQ, OfK, OfV>(p, blockIdx.x);
}

// Launched where keys are dealt out in shares.
extern "C" __global__ void __launch_bounds__(128) attention_combine(const __grid_constant__ Params p) {
    combine_all_shares<DIM_V>(p, p.combine_lanes);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Params p) {
    let_next_kernel_start();
    wait_for_kernel_before();
    QuerySchedule schedule(p);
    int number = blockIdx.x, share = 0;
    if constexpr (BY_LENGTH) {  // every tile's first one before the second of any: some have no more
        int tiles = gridDim.x / p.shares;
        share = number / tiles, number %= tiles;
    } else if constexpr (SHARES) {
        share = number % p.shares, number /= p.shares;
    }
    HeadTile tile = schedule.tile(number);
    if (BY_LENGTH && share >= shares_of(p, tile.head)) return;
    visit_keys<Block>(p, tile, share);
}
