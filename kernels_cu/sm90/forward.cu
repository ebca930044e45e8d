// FlashAttention-3's forward (Shah et al. 2024) for Hopper: FlashAttention-2's algorithm with the three engines of a
// multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of queries. Its first warpgroup only loads
// (forward_tiles.cuh). The others each own 64 rows: the tensor cores compute S = Q K^T of one key tile and O += P V of
// the tile before in the background (wgmma), and under P V the threads do the softmax of S. O leaves through shared
// memory where there is room for it, by TMA again if there is room for all of it.
#include "attention/dead_rows.cuh"
#include "attention/dropped.cuh"
#include "attention/mask.cuh"
#include "attention/shares.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/forward_steps.cuh"
#include "tile/rows.cuh"

// Whether V may hold anything where key_mask hides keys. (Turned it is 0 there; what is dead by position no map knows
// of.)
constexpr bool CLEARS = KEY_MASK && !TURNED;

// A warpgroup with 64 rows of every tile.
struct Consumer {
    using ScorePlacement = Placement<false, PACK == 1 ? 0 : HEAD_ROWS>;

    const Params& p;
    const TensorMaps& maps;
    Shared& s;
    int warpgroup, first_row, warp_row;  // rows: of the tile

    Tile tile{};               // whose scores are computed
    TileWalk own;              // over the key tiles that the warpgroup's rows see
    bool half = false;         // whether they see no more than the first half of the first one
    OnlineSoftmax<1> softmax;  // of its rows
    Dropout dropout;
    float largest_value = 1;  // of what V is multiplied by
    bool near = true;         // whether soft caps of the tile's keys so far were near 0: then it is asked again
    LongSums sums;            // of O

    // P V is added while the scores after those of P are computed, at the end of a tile while the next tile is looked
    // at.
    Accumulator<1, DIM_V / 8> o;
    Operand<KEYS> probabilities;
    unsigned unseen = 0;  // CLEARS: of the keys of these the lane's own (32 n + lane) that key_mask hides, in bits n

    __device__ Consumer(const Params& p, const TensorMaps& maps, Shared& s, int warpgroup)
        : p(p),
          maps(maps),
          s(s),
          warpgroup(warpgroup),
          first_row(64 * warpgroup),
          warp_row(first_row + threadIdx.x / 32 % 4 * 16),
          softmax(new_softmax()),
          dropout(p) {
        s.of_part(warpgroup);
    }

    __device__ OnlineSoftmax<1> new_softmax() const { return {factor(tile)}; }

    // What turns the scores of a tile to exponents of 2.
    __device__ float factor(const Tile& of) const {
        float x = Pairs(p, of.head).factor();
        if constexpr (DESCALED && !DESCALE_SCORES) {
            x *= row_descale(p, of.head, of.queries.begin + first_row);
            if (x < 1e-30f) x = 1e-30f;  // never 0, as that of Pairs
        }
        return x;
    }

    // Where the warp's rows stand, in a tile of queries.
    __device__ ScorePlacement placement(const Tile& of, int key = 0) const {
        return {of.head.q, of.queries.begin, key, warp_row};
    }

    // How many of a tile's heads share its K and V. What it has beyond them is thrown away.
    __device__ int heads_of(const Tile& of) const { return PACK > 1 ? (of.head.k + 1) * group_of(p) - of.head.q : 1; }
    // The first of them that the warpgroup's rows belong to.
    __device__ int first_head() const { return PACK > 1 ? first_row / HEAD_ROWS : 0; }

    // The queries of the warpgroup's rows; they may lie behind the end.
    __device__ Range queries(const Tile& of) const {
        constexpr int COUNT = HEAD_ROWS % 64 == 0 ? 64 : HEAD_ROWS;
        int begin = of.queries.begin + (COUNT == 64 ? first_row % HEAD_ROWS : 0);
        return {begin, begin + COUNT};
    }
    __device__ Range queries() const { return queries(tile); }
    // The keys that any of them may see.
    __device__ Range keys(const Tile& of) const {
        Range q = queries(of);
        return Band{p, of.head}.keys_of({q.begin, min(q.end, of.head.queries(p))});
    }
    __device__ bool tests(int step, int more = 0) const { return own.tests(p, tile.head, queries(), step, more); }

    // What is hidden from all rows of the warpgroup it only passes on.
    __device__ void pass(int tiles) {
        for (; tiles > 0; tiles--) {
            s.k.pass();
            s.v.pass();
            if (PAIR_ARRAYS) s.pairs.pass();
        }
    }

    // S = Q K^T, or its first columns, in the background.
    template <int N>
    __device__ void start_scores(Accumulator<1, N>& scores) const {
        // Else the addresses of its rows of Q are held in uniform registers, and more than there are (192 / 128
        // columns).
        mark_read(warpgroup);
        QTile q = s.q_tile();
        KTile k = s.k_tile();
        if constexpr (STAGES == 1 && !TURNED) {  // and those of K, which never moves
            mark_changed(q.base);
            mark_changed(k.base);
        }
        start_ABt<DOT>(scores, q, first_row, k);
    }

    // Products become scores, hidden ones -inf.
    template <int N>
    __device__ void mask(Accumulator<1, N>& scores, int step, bool tests) {
        Pairs pairs(p, tile.head, own.bits(step, tile.queries));
        int tile_k = own.tile(step);
        ScorePlacement at = placement(tile, own.tile(step) * KEYS);
        descale_scores(scores, p, tile.head, tile.queries.begin + first_row, tile_k * KEYS);
        if (PAIR_ARRAYS) s.pairs.wait_full();
        if constexpr (PAIR_ARRAYS && Q_ENDS) clear_pairs();
        InTiles<false, Pairwise> arrays(s.pair_tiles(), warp_row, 0);
        score(scores, at, pairs, arrays);
        if (tests) {
            KeysSeen<8 * N> seen(pairs, tile_k * KEYS);
            if constexpr (CLEARS) {
                int lane = threadIdx.x % 32, keys = tile.head.keys(p) - tile_k * KEYS;
                unseen = 0;
#pragma unroll
                for (int n = 0; n < 8 * N; n += 32) unseen |= unsigned(n + lane < keys && !seen[n + lane]) << n / 32;
            }
            hide(scores, at, pairs, seen, arrays, MINUS_INFINITY);
        }
        if (PAIR_ARRAYS) {
            s.pairs.release();
            s.pairs.advance();
        }
    }

    // Start O += P V.
    __device__ void add_values(bool half) {
        s.v.wait_full();
        if constexpr (CLEARS) clear_values();
        if (CUT_FIRST && half)
            start_values<CUT_FIRST ? KEYS / 2 : KEYS>();
        else
            start_values<KEYS>();
    }
    // Zeros in V of unseen keys, whatever the other warpgroups have done there: the product is this one's.
    __device__ void clear_values() {
        DeadRows<KEYS> dead([&](int key) { return unseen >> key / 32 & 1; });
        if (!dead.any()) return;
        dead.clear_many<4>(s.v_tile(), threadIdx.x / 32 % 4);
        fence_async();
        sync_threads<128>(1 + warpgroup);
    }
    // And of mask and bias behind the end of a sequence, as tensor maps have them behind that of an array: for the
    // votes of a warp's rows. No row's bits follow from another sequence.
    __device__ void clear_pairs() {
        int begin = max(warp_row, tile.head.queries(p) - tile.queries.begin);
        if (begin >= warp_row + 16) return;
        s.pair_tiles().clear(begin, warp_row + 16);
        fence_async();  // what the next tile overwrites
        __syncwarp();
    }
    // Of V, or K, of a tile that has keys that no query sees by position, or others behind the end, which no map leaves
    // out: the first of a walk, or the last.
    __device__ bool hangs_over(int step) const {
        if (!K_ENDS || (PACKED_K && !walk::BOUND_FIRST)) return false;
        Range live = tile.head.live_keys(p);
        return (!PACKED_K && live.end < (own.tile(step) + 1) * KEYS) ||
               (walk::BOUND_FIRST && own.tile(step) * KEYS < live.begin);
    }
    __device__ bool ends_a_walk(int step) const {
        return K_ENDS && walk::BOUND_FIRST && own.after(step) == 0 && hangs_over(step);
    }
    template <class Tile>
    __device__ void clear_keys(int step, Tile of) {
        Range live = tile.head.live_keys(p);
        int first = own.tile(step) * KEYS;
        DeadRows<KEYS> dead(
            [&](int key) { return first + key >= live.end || (walk::BOUND_FIRST && first + key < live.begin); });
        dead.template clear_many<4>(of, threadIdx.x / 32 % 4);
        fence_async();
        sync_threads<128>(1 + warpgroup);
    }
    template <int COUNT>
    __device__ void start_values() {
        if constexpr (TURNED)
            start_AB_turned<COUNT>(o, probabilities, s.v_tile());
        else
            start_AB<COUNT>(o, probabilities, s.v_tile());
    }

    __device__ void values_added() {
        wgmma_wait<0>();
        changed(o);
        s.v.release();
        s.v.advance();
    }

    // O so far, where sums are long.
    __device__ void put_away() {
        sums.put_away(s.sums(), warpgroup, o, [&] {
            if (!O_STAGED) return;  // else the tile before leaves from there
            if (threadIdx.x % 128 == 0) tma_wait_read();
            sync_threads<128>(1 + warpgroup);
        });
    }

    __device__ void release_k() {
        s.k.release();
        s.k.advance();
    }

    __device__ void release_q() {
        s.q.release();
        s.q.advance();
    }

    // The first key tile of a tile; `between` is done while its scores are computed.
    template <int N, class F>
    __device__ void first(F between) {
        int step = own.start();
        Accumulator<1, N> scores;
        // No product is under way; but said in another block of instructions alone, the compiler would not see it.
        if constexpr (NEXT_Q) {
            wgmma_wait<0>();
            changed(o);
        }
        if (NEAR_CAPS && hangs_over(step)) clear_keys(step, s.k_tile());  // a warp votes on all of its products
        start_scores(scores);
        between();
        wgmma_wait<0>();
        changed(scores);
        release_k();
        if (OWN_Q && own.after(step) == 0) release_q();
        mask(scores, step, tests(step));
        float largest[1][2], shrink[1][2];
        softmax.row_maximum(scores, largest);
        softmax.raise(largest, shrink);
        softmax.exponentiate(scores);
        drop(scores, placement(tile, own.tile(step) * KEYS), tile.head.batch, dropout);
        weigh(scores, p, tile.head, own.tile(step) * KEYS, largest_value);
        if (own.after(step) > 0) s.k.wait_full();
        probabilities.template take<0, KEYS, DROPOUT>(scores);
        if (hangs_over(step)) {
            s.v.wait_full();
            clear_keys(step, s.v_tile());
        }
    }

    // A key tile, whose K is there: S = Q K^T, its softmax, and O += P V of the tile before. The next K is waited for
    // before P V is: that branch also keeps the compiler from moving the softmax behind the wait for P V.
    __device__ void visit(int step, bool tests) {
        Accumulator<1, KEYS / 8> scores;
        if (NEAR_CAPS && ends_a_walk(step)) clear_keys(step, s.k_tile());
        start_scores(scores);
        bool last = OWN_Q && own.after(step) == 0;
        ScorePlacement at = placement(tile, own.tile(step) * KEYS);
        float shrink[1][2];
        bool grown = false, full = SUM_TILES > 0 && sums.full(own.after(step));
        Step<Consumer> x{*this, step, at, tests, last, scores, shrink, grown};
        if constexpr (!SLICED) x.add_values();
        if (tests || !BLIND || last)  // (the last scores cannot be computed again)
            LookedAt::run(x);
        else if constexpr (SLICED)
            Sliced::run(x);
        else if constexpr (BLIND)
            Together::run(x);
        half = false;
        if (own.after(step) > 0) s.k.wait_full();
        values_added();
        changed(scores);
        if (__builtin_expect(grown || full, false)) {
            if (grown) softmax.scale_rows(o, shrink);
            if constexpr (SUM_TILES > 0) {
                if (grown) sums.scale_rows(s.sums(), warpgroup, o, shrink);
                if (full) put_away();
            }
        }
        probabilities.template take<0, KEYS, DROPOUT>(scores);
        if (ends_a_walk(step)) {
            s.v.wait_full();
            clear_keys(step, s.v_tile());
        }
    }

    // When the last probabilities of the tile are taken: its lse, and what O is to be multiplied by.
    __device__ void close() {
        softmax.add_lanes();
        Pairs pairs(p, tile.head);
        ScorePlacement at = placement(tile);
        float out_scale = TURNED ? p.out_scale * value_descale(p, tile.head, keys(tile)) : 1;
        // (Where unit() is 0 the factor is not, and TOP / factor, which is in the maximum, must go from lse.)
        float unit = TURNED ? factor(tile) * LN2 : pairs.unit();
        softmax.close(unit, kept(p) / out_scale, [&](int r) -> float {
            if constexpr (SHARES) return MINUS_INFINITY;  // it is added once, to all shares
            return pairs.sink(at(r, 0).head);
        });
        int heads = heads_of(tile), queries = tile.head.queries(p);
        float* lse = p.lse;
        if constexpr (SHARES) lse = p.share_lse + share_row(p, tile.share, 0);
        if (lse != nullptr && threadIdx.x % 4 == 0 && (V_PARTS == 1 || tile.part == 0)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Pair x = at(8 * h + threadIdx.x % 32 / 4, 0);
                if (x.head - tile.head.q < heads && x.i < queries) lse[row_number(tile, x)] = softmax.maximum[0][h];
            }
        }
    }

    // O of a tile, which is closed and whole.
    __device__ void store(const Tile& of, const OnlineSoftmax<1>& softmax, const LongSums& sums) {
        if constexpr (SUM_TILES > 0) sums.collect(s.sums(), warpgroup, o);
        softmax.scale_rows(o, softmax.sum);
        ScorePlacement at = placement(of);
        int heads = heads_of(of), queries = of.head.queries(p), column = first_column(of);
        if constexpr (SHARES) {
            store_float_rows(o, true, DIM_V, [&](int row) -> float* {
                Pair x = at(row, 0);
                bool real = x.head - of.head.q < heads && x.i < queries;
                return real ? p.share_out + share_row(p, of.share, row_number(of, x)) * (V_PARTS * DIM_V) + column
                            : nullptr;
            });
        } else if constexpr (FROM_REGISTERS<>) {
            bool pairs = p.dim_v % 2 == 0 && p.out_strides.row % 2 == 0 && p.out_strides.head % 2 == 0;
            Out* out = of.head.query_row(p.out, p.out_strides) + column;
            store_float_rows(o, pairs && (unsigned long long)out % 8 == 0, p.dim_v - column, [&](int row) -> Out* {
                Pair x = at(row, 0);
                int n = x.head - of.head.q;
                return n < heads && x.i < queries ? out + n * p.out_strides.head + x.i * p.out_strides.row : nullptr;
            });
        } else if constexpr (O_STAGED) {
            store_staged(p, maps, s, o, warpgroup, of, p.out, p.out_strides, column);
        } else {
            const Strides& to = p.out_strides;
            Out* out = of.head.query_row(p.out, to) + column;
            bool vectors = (PACK == 1 || to.head % 8 == 0) && aligned(out, to.row, p.dim_v - column);
            auto target = [&](int row) {
                Pair x = at(row, 0);
                int n = x.head - of.head.q;
                return n < heads && x.i < queries ? out + n * to.head + x.i * to.row : nullptr;
            };
            if constexpr (O_STRIPS)
                store_rows_through(s.o_strip(), o, vectors, p.dim_v - column, target);
            else
                store_rows(o, vectors, p.dim_v - column, target);
        }
    }
    __device__ long long row_number(const Tile& of, const Pair& x) const {
        return of.head.other(x.head).row_number(p, x.i);
    }

    __device__ void run() {
        TileSchedule schedule(p);
        Tile before{};  // whose output is `owed`, where NEXT_Q, with
        OnlineSoftmax<1> softmax_before = softmax;
        LongSums sums_before{};
        TileWalk all;    // of the tile, all warpgroups'
        bool more, any;  // whether there is a tile, and keys that this warpgroup sees
        bool owed = false;
        auto turn = [&] {  // to the next tile
            s.q.wait_full();
            if (NEXT_Q) before = tile, softmax_before = softmax, sums_before = sums;
            more = s.told(p, tile, schedule);
            Range q{queries().begin, min(queries().end, tile.head.queries(p))};
            Range keys = Band{p, tile.head}.keys_of(q);
            all = walk_of(p, tile);
            any = more && q.begin < q.end && first_head() < heads_of(tile) && keys.begin < keys.end;
            own = all.part(keys, any);
            if (SHARES) own = all.common(own);
            if (walk::LISTED || SHARES) any = any && own.count() > 0;
            half = CUT_FIRST && any && keys.end <= own.tile(own.start()) * KEYS + KEYS / 2;
            softmax = new_softmax();
            near = true;
            sums = {};
            if (V_BLOCKS && more) largest_value = value_descale(p, tile.head, keys);
        };
        auto store_owed = [&] {
            if (NEXT_Q && owed) store(before, softmax_before, sums_before);
        };
        turn();
        while (NEXT_Q || more) {
            if (any) {
                pass(all.before(own));
                s.k.wait_full();
                if (CUT_FIRST && half)
                    first<CUT_FIRST ? KEYS / 16 : KEYS / 8>(store_owed);
                else
                    first<KEYS / 8>(store_owed);
                o.clear();
                int step = own.next(own.start());
                // A row that saw nothing of the tile before has no maximum yet: where one may be, the key after this
                // tile is hidden from it.
                if constexpr (walk::TESTS_ANY || walk::TESTS_LAST || walk::LISTED) {
                    for (; own.has(step); step = own.next(step)) visit(step, tests(step, 1));
                } else {
                    if (walk::TESTS_FIRST)
                        for (; own.has(step) && tests(step, 1); step = own.next(step)) visit(step, true);
                    for (; own.has(step); step = own.next(step)) visit(step, false);
                }
                if (!OWN_Q) release_q();
                int behind = all.behind(own);
                add_values(half);
                if constexpr (NEXT_Q) {
                    close();
                    turn();
                }
                values_added();
                pass(behind);
            } else {
                store_owed();
                if (NEXT_Q && !more) break;
                o.clear();
                pass(all.count());
                release_q();
                if constexpr (NEXT_Q) {
                    close();
                    turn();
                }
            }
            owed = true;
            if constexpr (!NEXT_Q) {
                close();
                store(tile, softmax, sums);
                turn();
            }
        }
        if (O_STAGED && threadIdx.x % 128 == 0) tma_wait_read();  // shared memory goes with the block
    }
};

// Launched before, where V is to be turned, and where packed sequences differ in length.
extern "C" __global__ void __launch_bounds__(256) attention_turn(const __grid_constant__ Params p) {
    if constexpr (TURNED) turn_values<DIM_V>(p, blockIdx.x);
}
extern "C" __global__ void __launch_bounds__(ORDER_THREADS) attention_order(const __grid_constant__ Params p) {
    let_next_kernel_start();
    if constexpr (ORDERED)
        order_tiles<QueryTiles<HEAD_ROWS>, ORDER_THREADS, BY_VISITS, true>(
            p, [&](int place) { return QueryTiles<HEAD_ROWS>::placed_of_all(p, place, 0); },
            [&](const Head& head, int tile) { return Band{p, head}.keys_of(head.query_tile<HEAD_ROWS>(p, tile)); });
}

// Launched where keys are dealt out in shares.
extern "C" __global__ void __launch_bounds__(128) attention_combine(const __grid_constant__ Params p) {
    combine_all_shares<V_PARTS * DIM_V>(p, p.combine_lanes);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared s(shared_address(memory));
    if (threadIdx.x == 0) {
        s.init();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
    }
    __syncthreads();
    let_next_kernel_start();
    wait_for_kernel_before();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<PRODUCER_REGISTERS>();
        produce(p, maps, s);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer(p, maps, s, warpgroup).run();
    }
}
