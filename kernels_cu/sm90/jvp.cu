// The tangent of attention's forward along tangents of Q, K and V, for Hopper, from the O and lse that the forward
// left:
//
//     tS = tQ K^T + Q tK^T    w = P (scale slope tS - c)    tO = w V + P tV - rowsum(w) O    tlse = rowsum(w) + c
//
// c is any number of a row's own. The mean over the first key tile that has weight (attention/shift.cuh) keeps w small
// where all keys share a tangent, which rounding w would show. P is known from lse, as in the backward: there is no
// maximum to look for.
//
// As in the forward the first warpgroup only loads (forward_tiles.cuh) and the others each own 64 queries. Tensor cores
// work in the background: on tS under the exponentials of S, and (AHEAD) on what the tile before adds to tO under all
// that follows.
#include "attention/dead_rows.cuh"
#include "attention/dropped.cuh"
#include "attention/mask.cuh"
#include "attention/shift.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/forward_tiles.cuh"
#include "sm90/turns.cuh"
#include "tile/rows.cuh"

constexpr bool WEIGHED = TQ || TK;  // whether scores have a tangent: else tO = P tV
constexpr int PRODUCTS = TQ + TK;   // that make it
constexpr int ADDED_PRODUCTS = WEIGHED + TV;
static_assert(PACK == 1 && !SHARES && !NEXT_Q && SUM_TILES == 0);

// Whether V may hold anything where key_mask hides keys. (What is dead by position no map knows of.)
constexpr bool CLEARS = KEY_MASK;

// A warpgroup with 64 rows of every tile.
struct Consumer {
    using Scores = Accumulator<1, KEYS / 8>;

    const Params& p;
    const TensorMaps& maps;
    Shared& s;
    int warpgroup, first_row, warp_row;  // rows: of the tile

    Tile tile{};
    TileWalk own;  // over the key tiles that the warpgroup's rows see
    Dropout dropout;
    Turns<TURNS ? WARPGROUPS : 1, 1 + WARPGROUPS> turns;
    float factor;
    bool near = true;     // whether soft caps of the tile's keys so far were near 0: then it is asked again
    unsigned unseen = 0;  // CLEARS: of the keys of these the lane's own (32 n + lane) that key_mask hides, in bits n

    // Of the lane's two rows.
    float minus_lse[2], centre[2], sum[2];  // exponents of 2; c; rowsum(w), of the lane's own columns
    unsigned waiting = 0;                   // those that have no c so far, as bits

    Accumulator<1, DIM_V / 8> o;
    Operand<KEYS> probabilities, weights;
    Operand<HELD ? DOT : 16> held;  // the warpgroup's rows of Q, where there are registers for them

    __device__ Consumer(const Params& p, const TensorMaps& maps, Shared& s, int warpgroup)
        : p(p),
          maps(maps),
          s(s),
          warpgroup(warpgroup),
          first_row(64 * warpgroup),
          warp_row(first_row + threadIdx.x / 32 % 4 * 16),
          dropout(p),
          turns{warpgroup},
          factor(Pairs(p, Head{}).factor()) {}

    __device__ Placement<> placement(int key) const { return {tile.head.q, tile.queries.begin, key, warp_row}; }
    __device__ int query(int h) const { return tile.queries.begin + warp_row + threadIdx.x % 32 / 4 + 8 * h; }
    __device__ Range queries() const {
        int begin = tile.queries.begin + first_row;
        return {begin, begin + 64};
    }

    // What is hidden from all rows of the warpgroup it only passes on.
    __device__ void pass(int tiles) {
        for (; tiles > 0; tiles--) {
            turns.wait();
            turns.pass();
            s.k.pass();
            s.v.pass();
            if (PAIR_ARRAYS) s.pairs.pass();
        }
    }

    // tO += w V + P tV of the tile before.
    __device__ void start_values() {
        if (WEIGHED) start_AB<KEYS>(o, weights, s.v_tile());
        if (TV) start_AB<KEYS>(o, probabilities, s.tv_tile());
    }
    __device__ void add_values() {
        s.v.wait_full();
        if constexpr (CLEARS) clear_values();
        start_values();
    }
    // Zeros in V of unseen keys, whatever the other warpgroups have done there: the product is this one's.
    __device__ void clear_values() {
        DeadRows<KEYS> dead([&](int key) { return unseen >> key / 32 & 1; });
        if (!dead.any()) return;
        if (WEIGHED) dead.clear_many<4>(s.v_tile(), threadIdx.x / 32 % 4);
        if (TV) dead.clear_many<4>(s.tv_tile(), threadIdx.x / 32 % 4);
        fence_async();
        sync_threads<128>(1 + warpgroup);
    }
    __device__ void values_added() {
        wgmma_wait<0>();
        changed(o);
        s.v.release();
        s.v.advance();
    }

    // Products become probabilities, hidden ones 0, those that dropout drops negative; and what their tangents are
    // multiplied by.
    __device__ void weigh(Scores& x, Scores& slopes, int step, bool tests) {
        int key = own.tile(step) * KEYS;
        Pairs pairs(p, tile.head, own.bits(step, tile.queries));
        Placement<> at = placement(key);
        if (PAIR_ARRAYS) s.pairs.wait_full();
        InTiles<false, Pairwise> arrays(s.pair_tiles(), warp_row, 0);
        Lines<1, false, InTiles<false, Pairwise>> lines(pairs, at, arrays);
        near = near && near_zero(x, pairs);
        as_near(near, [&](auto how) {
            constexpr bool NEAR = decltype(how)::value;
            x.each(
                [&](float& s, int r, int c, float& slope) {
                    slope = lines.template slope<NEAR>(s, r, c) * p.scale;
                    s = exp2_approx(lines.template exponent<NEAR>(s, r, c, factor, minus_lse[r / 8]));
                },
                slopes);
        });
        if (tests) {
            keep_branch();
            KeysSeen<KEYS> seen(pairs, key);
            if constexpr (CLEARS) {
                int lane = threadIdx.x % 32, keys = tile.head.keys(p) - key;
                unseen = 0;
#pragma unroll
                for (int n = 0; n < KEYS; n += 32) unseen |= unsigned(n + lane < keys && !seen[n + lane]) << n / 32;
            }
            hide(x, at, pairs, seen, arrays, 0);
        }
        if (PAIR_ARRAYS) {
            s.pairs.release();
            s.pairs.advance();
        }
        drop(x, at, tile.head.batch, dropout);
    }

    // c of rows whose first tile with weight this is, from w without it.
    __device__ void find_centre(const Scores& x, Scores& w) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float mass = 0;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) mass += fabs(x.x[0][n][2 * h]) + fabs(x.x[0][n][2 * h + 1]);
            float all = of_quad(mass), mean = of_quad(sum[h]);
            bool found = waiting >> h & 1 && all > NO_WEIGHT;
            float c = found ? mean / all : 0;
            if (found) centre[h] = c, waiting &= ~(1u << h);
            sum[h] = fma(-c, mass, sum[h]);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    float weight = x.x[0][n][e];
                    if (!DROPOUT || weight > 0) w.x[0][n][e] = fma(-c, fabs(weight), w.x[0][n][e]);
                }
        }
    }
    __device__ static float of_quad(float x) {
        x += __shfl_xor_sync(~0u, x, 1);
        return x + __shfl_xor_sync(~0u, x, 2);
    }

    // Q B^T, in the background.
    template <bool ADD>
    __device__ void start_with_q(Scores& sum, KTile b) const {
        if constexpr (HELD)
            start_ABt<DOT, ADD>(sum, held, b);
        else
            start_ABt<DOT, ADD>(sum, s.q_tile(), first_row, b);
    }

    // A key tile. LATER: another came before, which is still to be added.
    template <bool LATER>
    __device__ void visit(int step, bool tests) {
        constexpr int UNDER_WAY = AHEAD && LATER ? ADDED_PRODUCTS : 0;
        Scores x, tx, slopes;
        s.k.wait_full();
        turns.wait();
        start_with_q<false>(x, s.k_tile());
        if constexpr (TQ) start_ABt<DOT>(tx, s.tq_tile(), first_row, s.k_tile());
        if constexpr (TK) start_with_q<TQ>(tx, s.tk_tile());
        if (AHEAD && LATER) add_values();
        turns.pass();
        wgmma_wait<PRODUCTS + UNDER_WAY>();
        changed(x);
        weigh(x, slopes, step, tests);
        wgmma_wait<UNDER_WAY>();
        changed(tx);
        s.k.release();
        s.k.advance();
        if (own.after(step) == 0) {
            s.q.release();
            s.q.advance();
        }
        if constexpr (WEIGHED) {
            if (tests || SCORE) {  // hidden, or without weight, whatever its tangent and its slope are
                keep_branch();
                tx.each(
                    [](float& t, int, int, float& weight, float& slope) {
                        if (weight == 0) t = slope = 0;
                    },
                    x, slopes);
            }
            tx.each(
                [&](float& t, int r, int, float& weight, float& slope) {
                    float w = fabs(weight);
                    w *= fma(t, Pairs::settled(slope, weight), -centre[r / 8]);
                    sum[r / 8] += w;
                    t = DROPOUT && weight < 0 ? 0 : w;
                },
                x, slopes);
        }
        if (AHEAD && LATER) values_added();
        if (WEIGHED && __any_sync(~0u, waiting)) {
            keep_branch();
            find_centre(x, tx);
        }
        if (TV) probabilities.template take<0, KEYS, DROPOUT>(x);
        if (WEIGHED) weights.take(tx);
        if (!AHEAD) {
            add_values();
            values_added();
        }
    }

    // lse of the lane's rows; those that see nothing have no probabilities.
    __device__ void begin() {
        waiting = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float lse = query(h) < tile.head.queries(p) ? p.lse[tile.head.row_number(p, query(h))] : MINUS_INFINITY;
            minus_lse[h] = lse == MINUS_INFINITY ? MINUS_INFINITY : -lse * LOG2E;
            if (lse != MINUS_INFINITY) waiting |= 1u << h;
            centre[h] = sum[h] = 0;
        }
        near = true;
        o.clear();
        if constexpr (HELD) held.load(s.q_tile(), warp_row);
    }

    // tlse, and tO from what is summed and O.
    __device__ void finish() {
        Pairs pairs(p, tile.head);
        float by = 1 / kept(p);
        int queries = tile.head.queries(p);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = query(h);
            bool there = i < queries;
            long long n = tile.head.row_number(p, i);
            sum[h] = of_quad(sum[h]);
            if (SINKS && minus_lse[h] != MINUS_INFINITY)
                sum[h] -= exp2_approx(fma(pairs.sink(tile.head.q), LOG2E, minus_lse[h])) * centre[h];
            if (there && threadIdx.x % 4 == 0) p.tlse[n] = minus_lse[h] == MINUS_INFINITY ? 0 : sum[h] + centre[h];
            const Out* out = tile.head.query_row(p.out, p.out_strides, i);
            bool pairwise = (unsigned long long)out % 4 == 0 && p.dim_v % 2 == 0;
#pragma unroll
            for (int k = 0; k < DIM_V / 8; k++) {
                float (&x)[4] = o.x[0][k];
                int c = o.column(k, 0);
                float of[2] = {};
                if (there && sum[h] != 0 && c < p.dim_v) {  // (what nobody sees is 0 without a look)
                    if (pairwise) {
                        unsigned both = *(const unsigned*)(out + c);
                        of[0] = to_float(Out{(unsigned short)both}),
                        of[1] = to_float(Out{(unsigned short)(both >> 16)});
                    } else {
                        of[0] = to_float(out[c]);
                        if (c + 1 < p.dim_v) of[1] = to_float(out[c + 1]);
                    }
                }
#pragma unroll
                for (int e = 0; e < 2; e++) x[2 * h + e] = fma(-sum[h], of[e], x[2 * h + e] * by);
            }
        }
        store();
    }

    __device__ void store() {
        if constexpr (O_STAGED) return store_staged(p, maps, s, o, warpgroup, tile, p.tout, p.tout_strides);
        Out* to = tile.head.query_row(p.tout, p.tout_strides);
        bool vectors = aligned(to, p.tout_strides.row, p.dim_v);
        store_rows(o, vectors, p.dim_v, [&](int row) {
            int i = tile.queries.begin + warp_row + row;
            return i < tile.head.queries(p) ? to + i * p.tout_strides.row : nullptr;
        });
    }

    __device__ void run() {
        TileSchedule schedule(p);
        turns.start();
        while (true) {
            s.q.wait_full();
            if (!s.told(p, tile, schedule)) break;
            Range q{queries().begin, min(queries().end, tile.head.queries(p))};
            Range keys = Band{p, tile.head}.keys_of(q);
            TileWalk all = walk_of(p, tile);
            bool any = q.begin < q.end && keys.begin < keys.end;
            own = all.part(keys, any);
            if (walk::LISTED) any = any && own.count() > 0;
            begin();
            if (any) {
                pass(all.before(own));
                int step = own.start(), behind = all.behind(own);
                visit<false>(step, tests(step));
                step = own.next(step);
                if (walk::TESTS_FIRST || walk::TESTS_ANY || walk::TESTS_LAST || walk::LISTED)
                    for (; own.has(step); step = own.next(step)) visit<true>(step, tests(step));
                else
                    for (; own.has(step); step = own.next(step)) visit<true>(step, false);
                if (AHEAD) {
                    add_values();
                    values_added();
                }
                pass(behind);
            } else {
                pass(all.count());
                s.q.release();
                s.q.advance();
            }
            finish();
        }
        if (O_STAGED && threadIdx.x % 128 == 0) tma_wait_read();  // shared memory goes with the block
    }
    __device__ bool tests(int step) const { return own.tests(p, tile.head, queries(), step); }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_jvp(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared s(shared_address(memory));
    if (threadIdx.x == 0) {
        s.init();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
    }
    __syncthreads();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<PRODUCER_REGISTERS>();
        produce(p, maps, s);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer(p, maps, s, warpgroup).run();
    }
}
