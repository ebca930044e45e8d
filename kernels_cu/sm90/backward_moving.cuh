// A consumer of the kernel that differentiates the backward: as those of backward_narrow.cuh it owns 64 keys, and what
// it computes of a tile of queries has tangents,
//
//     tdQ += tdX K + dX tK    tdK += tdX^T Q + dX^T tQ    tdV += tP^T dO + P^T tdO
//
// tdX and dX go through shared memory for tdQ, of which each consumer adds to memory what its own keys do: so it waits
// for no other one, and they take turns at the tensor cores.
#pragma once
#include "sm90/key_owner.cuh"
#include "sm90/moving_rows.cuh"
#include "sm90/turns.cuh"

struct MovingConsumer : KeyOwner {
    using Scores = Accumulator<1, ROWS / 8>;
    using OwnTile = SwizzledTile<ROWS, 64>;         // of tdX or dX
    static constexpr int BLOCKS = (DIM + 63) / 64;  // of columns

    Turns<WARPGROUPS, 5> turns;

    Accumulator<1, DIM / 8> tdk;
    Accumulator<1, DIM_V / 8> tdv;

    __device__ MovingConsumer(const Params& p, Shared& s, int warpgroup)
        : KeyOwner(p, s, warpgroup), turns{warpgroup} {}

    __device__ OwnTile own_tile(int number) const {
        return {s.ds_tile(number).base + warpgroup * OwnTile::BLOCK_BYTES};
    }

    // f(n, e, numbers) for the elements of an accumulator; `numbers`: of the element's query.
    template <class F>
    __device__ void each(F f) const {
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float of[2][NUMBERS];
#pragma unroll
            for (int number = 0; number < NUMBERS; number++) {
                auto two = load_shared_pair<float>(s.row_values() + own + 4 * (ROWS * number + 8 * n));
                of[0][number] = two.x, of[1][number] = two.y;
            }
#pragma unroll
            for (int e = 0; e < 4; e++) f(n, e, of[e % 2]);
        }
    }

    // One tile of queries. `key`: the warpgroup's first one.
    __device__ void visit(const MovingPairs& pairs, const KeysSeen<16>& seen, int tile_q, int key) {
        Placement<true> at{pairs.head.q, tile_q * ROWS, key + 16 * warp()};
        s.q.go_to(steps);
        s.d.go_to(steps);
        dq_ring.go_to(steps);
        steps++;
        InMemory<1, true> arrays(pairs, at);
        Lines<1, true, InMemory<1, true>> lines(pairs, at, arrays);

        s.q.wait_full();
        s.d.wait_full();
        clear_queries(s.row_values(), warpgroup, ROWS, [] {}, s.q_tile(), s.do_tile());
        if constexpr (TQ) clear_queries(s.row_values(), warpgroup, ROWS, [] {}, s.tq_tile());
        if constexpr (TDOUT) clear_queries(s.row_values(), warpgroup, ROWS, [] {}, s.tdo_tile());
        Scores x, tx, dp, tdp;
        turns.wait();
        start_ABt<DOT>(x, s.k_tile(), first_key, s.q_tile());
        if constexpr (TQ) start_ABt<DOT>(tx, s.k_tile(), first_key, s.tq_tile());
        if constexpr (TK) start_ABt<DOT, TQ>(tx, s.tk_tile(), first_key, s.q_tile());
        if constexpr (MOVES) start_ABt<DOT_V>(dp, s.v_tile(), first_key, s.do_tile());
        if constexpr (TDOUT) start_ABt<DOT_V>(tdp, s.v_tile(), first_key, s.tdo_tile());
        if constexpr (TV) start_ABt<DOT_V, TDOUT>(tdp, s.tv_tile(), first_key, s.do_tile());
        turns.pass();
        wgmma_wait<TQ + TK + MOVES + TDOUT + TV>();
        changed(x);
        each([&](int n, int e, const float (&of)[NUMBERS]) {
            float& s = x.x[0][n][e];
            s = exp2_approx(lines.template exponent<false>(s, x.row(0, e), x.column(n, e), factor, of[LSE]));
        });
        Range queries{tile_q * ROWS, tile_q * ROWS + ROWS};
        bool tests = __any_sync(~0u, pairs.tests_backward(queries, {key, key + 64}));
        if (tests) {
            keep_branch();
            hide(x, at, pairs, seen, arrays, 0);
        }
        drop(x, at, pairs.head.batch, dropout);
        wgmma_wait<0>();
        changed(tx);
        changed(dp);
        changed(tdp);
        if (tests) {  // what is hidden, or without weight, whatever else is known of it
            keep_branch();
            each([&](int n, int e, const float (&)[NUMBERS]) {
                if (x.x[0][n][e] == 0) tx.x[0][n][e] = dp.x[0][n][e] = tdp.x[0][n][e] = 0;
            });
        }
        Scores tp;
        float slope = pairs.slope(0, {});  // a constant
        each([&](int n, int e, const float (&of)[NUMBERS]) {
            float weight = x.x[0][n][e], t = MOVES ? moved_probability(p, weight, slope, tx.x[0][n][e], of) : 0;
            move_pair(weight, t, dp.x[0][n][e], tdp.x[0][n][e], of);
            tp.x[0][n][e] = DROPOUT && weight < 0 ? 0 : t;
            if (NEGATIVE_SCALE) dp.x[0][n][e] *= slope, tdp.x[0][n][e] *= slope;
        });
        Operand<ROWS> tdx_operand, dx_operand, tp_operand, p_operand;
        tdx_operand.take(tdp);
        if constexpr (TQ || TK) dx_operand.take(dp);
        if constexpr (MOVES) tp_operand.take(tp);
        if constexpr (TDOUT) p_operand.template take<0, ROWS, DROPOUT>(x);
        store_transposed(tdx_operand, own_tile(0), 0, 16 * warp());
        if constexpr (TK) store_transposed(dx_operand, own_tile(1), 0, 16 * warp());
        fence_async();
        if constexpr (MOVES) start_AB<ROWS>(tdv, tp_operand, s.do_tile());
        if constexpr (TDOUT) start_AB<ROWS>(tdv, p_operand, s.tdo_tile());
        start_AB<ROWS>(tdk, tdx_operand, s.q_tile());
        if constexpr (TQ) start_AB<ROWS>(tdk, dx_operand, s.tq_tile());
        sync_threads<128>(3 + warpgroup);
        Accumulator<1, ROWS / 8> tdq[BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            start_AtBt<64>(tdq[b], s.k_tile().from(first_key), b, own_tile(0), 0);
            if constexpr (TK) start_AtBt<64, ADD>(tdq[b], s.tk_tile().from(first_key), b, own_tile(1), 0);
        }
        dq_ring.wait_empty();
        wgmma_wait<0>();
        changed(tdk);
        changed(tdv);
        s.q.release();
        s.d.release();
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            changed(tdq[b]);
            put(tdq[b], s.part(warpgroup) + b * (PART_BYTES / BLOCKS));
        }
        fence_async();
        dq_ring.filled();
    }

    __device__ void run() {
        turns.start();
        while (true) {
            s.k.wait_full();
            KeyTile t = s.this_tile();
            if (t.none()) break;
            Head keys = t.head(p);
            int key = t.number * KEYS + first_key;
            KeysSeen<16> seen(Pairs(p, keys), key + 16 * warp());
            tdk.clear();
            tdv.clear();
            s.v.wait_full();
            clear_keys(p, s, t);
            for_query_tiles(p, t, [&](const Head& head, int tile_q, int, TileBits bits) {
                visit(MovingPairs(p, head, bits), seen, tile_q, key);
            });
            s.k.release();
            s.k.advance();
            s.v.release();
            s.v.advance();
            tdk.each([&](float& x, int, int) { x *= p.scale; });
            int rows = keys.key_rows(p) - key, row = 16 * warp();
            store_result(tdk, keys.key_row(p.tdk, p.tdk_strides, key), p.tdk_strides, row, rows, p.dim);
            store_result(tdv, keys.key_row(p.tdv, p.tdv_strides, key), p.tdv_strides, row, rows, p.dim_v);
        }
    }
};
