// Consumers of the kernel that differentiates the backward where 64 keys' sums are too many for one's registers: two
// share out the columns of tdK, tdV and tdQ. The first computes P and tP of all pairs, the second dX and tdX; from
// shared memory both take all of them for their own columns.
#pragma once
#include "sm90/backward_dead_rows.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/moving_rows.cuh"

template <bool OF_SCORES>
struct MovingWideConsumer {
    using Scores = Accumulator<1, ROWS / 8>;
    static constexpr int COLUMNS = DIM / 2, BLOCKS = COLUMNS / 64;      // of a consumer
    static constexpr int PROBABILITIES = 2, DERIVATIVES = 5, READ = 6;  // barriers
    static_assert(!WIDE || !MOVED || DIM == 256 && DIM_V == 256 && WARPGROUPS == 2 && !TDOUT);

    const Params& p;
    Shared& s;
    static constexpr int warpgroup = !OF_SCORES;
    float factor;
    Dropout dropout;
    unsigned steps = 0, tiles = 0, own;

    Accumulator<1, COLUMNS / 8> tdk, tdv;

    __device__ MovingWideConsumer(const Params& p, Shared& s)
        : p(p), s(s), factor(Pairs(p, Head{}).factor()), dropout(p), own(column_offset()) {}

    __device__ static int warp() { return threadIdx.x / 32 % 4; }
    // Tiles of products' operands, queries by keys.
    __device__ STile tdx_tile() const { return s.ds_tile(0); }
    __device__ STile dx_tile() const { return s.ds_tile(1); }
    __device__ STile tp_tile() const { return s.p_tile(); }
    // P and tP as threads hold them, of a fragment.
    __device__ unsigned exchanged(int array, int n) const { return s.part(array) + 2048 * n + threadIdx.x % 128 * 16; }
    // The consumer's columns of a tile of rows.
    template <class Tile>
    __device__ static SwizzledTile<ROWS, COLUMNS> columns_of(Tile tile) {
        return {tile.base + warpgroup * BLOCKS * Tile::BLOCK_BYTES};
    }

    __device__ void numbers_at(int n, int number, float (&x)[2]) const {
        auto two = load_shared_pair<float>(s.row_values() + own + 4 * (ROWS * number + 8 * n));
        x[0] = two.x, x[1] = two.y;
    }

    // P and tP of a tile of queries, to the other consumer.
    __device__ void probabilities(const MovingPairs& pairs, const KeysSeen<16>& seen, int tile_q, int key) {
        Placement<true> at{pairs.head.q, tile_q * ROWS, key + 16 * warp()};
        InMemory<1, true> arrays(pairs, at);
        Lines<1, true, InMemory<1, true>> lines(pairs, at, arrays);
        Scores x, tx;
        start_ABt<DOT>(x, s.k_tile(), 0, s.q_tile());
        if constexpr (TQ) start_ABt<DOT>(tx, s.k_tile(), 0, s.tq_tile());
        if constexpr (TK) start_ABt<DOT, TQ>(tx, s.tk_tile(), 0, s.q_tile());
        wgmma_wait<TQ + TK>();
        changed(x);
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float lse[2];
            numbers_at(n, LSE, lse);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& s = x.x[0][n][e];
                s = exp2_approx(lines.template exponent<false>(s, x.row(0, e), x.column(n, e), factor, lse[e % 2]));
            }
        }
        Range queries{tile_q * ROWS, tile_q * ROWS + ROWS};
        if (__any_sync(~0u, pairs.tests_backward(queries, {key, key + KEYS}))) {
            keep_branch();
            hide(x, at, pairs, seen, arrays, 0);
        }
        drop(x, at, pairs.head.batch, dropout);
        wgmma_wait<0>();
        changed(tx);
        float slope = pairs.slope(0, {});  // a constant
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float of[2][NUMBERS];
            float tlse[2];
            numbers_at(n, TLSE, tlse);
            of[0][TLSE] = tlse[0], of[1][TLSE] = tlse[1];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float weight = x.x[0][n][e], &t = tx.x[0][n][e];
                // Without a probability it is 0, whatever stands elsewhere.
                t = MOVES && weight != 0 ? moved_probability(p, weight, slope, t, of[e % 2]) : 0;
            }
        }
        sync_threads<256>(READ);  // nobody reads those of the step before any more
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            store_shared_16(exchanged(0, n), x.x[0][n]);
            store_shared_16(exchanged(1, n), tx.x[0][n]);
        }
        if constexpr (MOVES) {
            if (DROPOUT) tx.each([](float& t, int, int, float& weight) { t = weight < 0 ? 0 : t; }, x);
            Operand<ROWS> operand;
            operand.take(tx);
            store_transposed(operand, tp_tile(), 0, 16 * warp());
            fence_async();
        }
        sync_threads<256>(PROBABILITIES);
    }

    // dP, where it is asked for, and tdP, under way.
    __device__ void start_derivatives(Scores& dp, Scores& tdp) const {
        if constexpr (MOVES) start_ABt<DOT_V>(dp, s.v_tile(), 0, s.do_tile());
        if constexpr (TV) start_ABt<DOT_V>(tdp, s.tv_tile(), 0, s.do_tile());
    }
    // dX and tdX, for both consumers.
    __device__ void derivatives(const MovingPairs& pairs, Scores& dp, Scores& tdp) const {
        float slope = pairs.slope(0, {});
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float of[2][NUMBERS], delta[2], tdelta[2];
            numbers_at(n, DELTA, delta);
            numbers_at(n, TDELTA, tdelta);
            uint4 weights = load_shared_16(exchanged(0, n)), ts = load_shared_16(exchanged(1, n));
            float weight[4] = {__uint_as_float(weights.x), __uint_as_float(weights.y), __uint_as_float(weights.z),
                               __uint_as_float(weights.w)};
            float t[4] = {__uint_as_float(ts.x), __uint_as_float(ts.y), __uint_as_float(ts.z), __uint_as_float(ts.w)};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                of[e % 2][DELTA] = delta[e % 2], of[e % 2][TDELTA] = tdelta[e % 2];
                float &dx = dp.x[0][n][e], &tdx = tdp.x[0][n][e];
                if (weight[e] == 0) dx = tdx = 0;
                move_pair(weight[e], t[e], dx, tdx, of[e % 2]);
                if (NEGATIVE_SCALE) dx *= slope, tdx *= slope;
            }
        }
        Operand<ROWS> operand;
        operand.take(tdp);
        store_transposed(operand, tdx_tile(), 0, 16 * warp());
        if constexpr (TQ || TK) {
            operand.take(dp);
            store_transposed(operand, dx_tile(), 0, 16 * warp());
        }
        fence_async();
    }

    __device__ void start_dv() {
        if constexpr (MOVES) start_AtB<ROWS, ADD>(tdv, tp_tile(), 0, columns_of(s.do_tile()));
    }

    __device__ void visit(const MovingPairs& pairs, const KeysSeen<16>& seen, int tile_q, long long sums, int key) {
        s.q.go_to(steps);
        s.d.go_to(steps);
        steps++;
        s.q.wait_full();
        if constexpr (OF_SCORES) {
            clear_queries(s.row_values(), warpgroup, ROWS, [&] { s.d.wait_full(); }, s.q_tile(), s.do_tile());
            if constexpr (TQ) clear_queries(s.row_values(), warpgroup, ROWS, [] {}, s.tq_tile());
            probabilities(pairs, seen, tile_q, key);
            s.d.wait_full();
            start_dv();
        } else {
            s.d.wait_full();
            clear_queries(s.row_values(), warpgroup, ROWS, [] {}, s.q_tile(), s.do_tile());
            if constexpr (TQ) clear_queries(s.row_values(), warpgroup, ROWS, [] {}, s.tq_tile());
            Scores dp, tdp;
            start_derivatives(dp, tdp);
            arrive_threads<256>(READ);
            wgmma_wait<0>();
            changed(dp);
            changed(tdp);
            sync_threads<256>(PROBABILITIES);
            start_dv();
            derivatives(pairs, dp, tdp);
        }
        sync_threads<256>(DERIVATIVES);
        start_AtB<ROWS, ADD>(tdk, tdx_tile(), 0, columns_of(s.q_tile()));
        if constexpr (TQ) start_AtB<ROWS, ADD>(tdk, dx_tile(), 0, columns_of(s.tq_tile()));
        Accumulator<1, ROWS / 8> tdq[BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            start_AtBt<KEYS>(tdq[b], s.k_tile(), warpgroup * BLOCKS + b, tdx_tile(), 0);
            if constexpr (TK) start_AtBt<KEYS, ADD>(tdq[b], s.tk_tile(), warpgroup * BLOCKS + b, dx_tile(), 0);
        }
        wgmma_wait<BLOCKS * (1 + TK) + 1 + TQ>();
        s.d.release();
        wgmma_wait<BLOCKS * (1 + TK)>();
        s.q.release();
        wgmma_wait<0>();
        changed(tdv);
        changed(tdk);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            changed(tdq[b]);
            add_part<0, ROW8S>(tdq[b], p.dq_sum + sums + place_in_sums(warpgroup * BLOCKS + b));
        }
    }

    __device__ void run() {
        Shared::DQRing dq_ring = s.dq(warpgroup);
        while (true) {
            s.k.wait_full();
            KeyTile t = s.this_tile();
            if (t.none()) break;
            Head keys = t.head(p);
            int key = t.number * KEYS;
            KeysSeen<16> seen(Pairs(p, keys), key + 16 * warp());
            tdk.clear();
            tdv.clear();
            s.v.wait_full();
            clear_keys(p, s, t);
            int shift = DQCounters(p).shift(p, t.share);
            for_query_tiles(p, t, [&](const Head& head, int tile_q, int tile, TileBits bits) {
                visit(MovingPairs(p, head, bits), seen, tile_q, (long long)(tile + shift) * DQ_TILE, key);
            });
            s.k.release();
            s.k.advance();
            s.v.release();
            s.v.advance();
            dq_ring.go_to(tiles++);
            dq_ring.wait_empty();
            dq_ring.filled();  // this consumer has added all its parts
            tdk.each([&](float& x, int, int) { x *= p.scale; });
            constexpr int FIRST_COLUMN = warpgroup * COLUMNS;
            int rows = keys.key_rows(p) - key, row = 16 * warp();
            store_result<FIRST_COLUMN>(tdk, keys.key_row(p.tdk, p.tdk_strides, key), p.tdk_strides, row, rows, p.dim);
            store_result<FIRST_COLUMN>(tdv, keys.key_row(p.tdv, p.tdv_strides, key), p.tdv_strides, row, rows, p.dim_v);
        }
    }
};
