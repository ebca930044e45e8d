// Consumers that each own 64 keys: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers as the A operands of
// dV += P^T dO and dK += dS^T Q. dS goes through shared memory as well, for dQ^T = K^T dS^T, of which each consumer
// computes its part.
#pragma once
#include "sm90/backward_shares.cuh"
#include "sm90/key_owner.cuh"

// At head dimension 64 the exponentials of a tile take as long as two of its five products. So a step is taken in two
// halves of its queries, and dV and dK of the first half start before the second is there.
constexpr bool HALF_STEPS = SHARE_ROWS;
constexpr int FIRST = ROWS / 32 * 16, SECOND = ROWS - FIRST;  // queries
static_assert(!HALF_STEPS || FIRST == SECOND);

// Whether the sums of dP start at -delta: registers are filled faster than added to. (What is dropped of dP is not
// delta.)
constexpr bool DELTA_FIRST = !HALF_STEPS && !DROPOUT;

struct NarrowConsumer : KeyOwner {
    const TensorMaps& maps;
    bool owed = false;   // whether the thread that adds dQ is still to be told of a part
    bool whole = false;  // WHOLE_BY_LENGTH: whether the keys at hand are all of their sequence
    bool near = true;    // whether soft caps with the keys at hand were near 0 so far: then it is asked again

    Accumulator<1, BLOCK_DIM / 8> dk;
    Accumulator<1, BLOCK_DIM_V / 8> dv;

    __device__ NarrowConsumer(const Params& p, const TensorMaps& maps, Shared& s, int warpgroup)
        : KeyOwner(p, s, warpgroup), maps(maps) {
        static_assert(WIDE || KEYS == 64 * WARPGROUPS && BLOCK_DIM <= 64 * WARPGROUPS + REST);
    }

    __device__ void tell() {
        fence_async();
        dq_ring.filled();
    }

    // One tile of queries. `key`: the warpgroup's first one.
    __device__ void visit(const Pairs& pairs, const KeysSeen<16>& seen, int tile_q, int key) {
        Placement<true> at{pairs.head.q, tile_q * ROWS, key + 16 * warp()};
        s.q.go_to(steps);
        s.d.go_to(steps);
        s.pairs.go_to(steps);
        InTiles<true, Pairwise> arrays(s.pair_tiles(), 0, first_key + 16 * warp());
        Lines<1, true, InTiles<true, Pairwise>> lines(pairs, at, arrays);
        dq_ring.go_to(steps);
        STile ds_tile = s.ds_tile(steps);
        steps++;

        Accumulator<1, ROWS / 8> probabilities, slopes, ds;
        // P^T = exp(S^T - lse)
        auto exponential = [&](auto how, float& x, int r, int c, float& slope, float minus_lse) {
            constexpr bool NEAR = decltype(how)::value;
            slope = lines.template slope<NEAR>(x, r, c);
            x = exp2_approx(lines.template exponent<NEAR>(x, r, c, factor, minus_lse));
        };
        auto tested = [&] {
            Range queries{tile_q * ROWS, tile_q * ROWS + ROWS};
            return __any_sync(~0u, pairs.tests_backward(queries, {key, key + 64}));
        };
        bool tests = HALF_STEPS && tested();
        auto mask = [&](auto begin, auto end) {  // of column groups
            if (HALF_STEPS ? tests : tested()) {
                keep_branch();
                hide<begin.value, end.value>(probabilities, at, pairs, seen, arrays, 0);
            }
        };
        // dS^T = P^T (dP^T - delta) slope. delta has been subtracted, or (DROPOUT) not yet.
        ColumnVector<ROWS / 8> minus_delta;
        auto derive = [&](float& x, int, int c, float& probability, float& slope) {
            if constexpr (DROPOUT)
                x = derivative(probability, x, minus_delta[c]) * Pairs::settled(slope, probability);
            else
                x *= probability * Pairs::settled(slope, probability);
        };

        // S^T = K Q^T, dP^T = V dO^T. Rows' numbers are read before products keep shared memory busy.
        s.q.wait_full();
        int rows = WINDOWS ? min(ROWS, pairs.head.queries(p) - tile_q * ROWS) : ROWS;
        clear_queries(s.row_values(), warpgroup, rows, [&] { s.d.wait_full(); }, s.q_tile(), s.do_tile());
        ColumnVector<(HALF_STEPS ? FIRST : ROWS) / 8> minus_lse(s.row_values(), own);
        if constexpr (DELTA_FIRST) {
            ds.fill(ColumnVector<ROWS / 8>(s.row_values() + 4 * ROWS, own));
            changed(ds);
        }
        start_ABt<DOT>(probabilities, s.k_tile(), first_key, s.q_tile());
        s.d.wait_full();
        start_ABt<DOT_V, DELTA_FIRST ? ADD : !ADD>(ds, s.v_tile(), first_key, s.do_tile());
        if constexpr (HALF_STEPS) {
            if (owed) tell();
            owed = true;
        }
        wgmma_wait<1>();
        changed(probabilities);
        if (PAIR_ARRAYS) s.pairs.wait_full();
        near = near && near_zero(probabilities, pairs);
        Operand<ROWS> p_operand, ds_operand;
        if constexpr (HALF_STEPS) {
            constexpr int HALF = FIRST / 8;
            ColumnVector<SECOND / 8> minus_lse_2(s.row_values() + 4 * FIRST, own);
            as_near(near, [&](auto how) {
                probabilities.template each<0, HALF>(
                    [&](float& x, int r, int c, float& slope) { exponential(how, x, r, c, slope, minus_lse[c]); },
                    slopes);
            });
            drop<0, HALF>(probabilities, at, pairs.head.batch, dropout);
            mask(Constant<0>(), Constant<HALF>());
            wgmma_wait<0>();
            changed(ds);
            p_operand.template take<0, FIRST, DROPOUT>(probabilities);
            start_AB<FIRST>(dv, p_operand, s.do_tile());
            minus_delta.load(s.row_values() + 4 * ROWS, own);
            auto subtract = [&](float& x, int, int c) {
                if (!DROPOUT) x += minus_delta[c];
            };
            auto both = [&](auto n, auto how) {  // exponentials of the second half, dS of the first
                probabilities.template each<HALF + n.value, HALF + n.value + 1>(
                    [&](float& x, int r, int c, float& slope) {
                        exponential(how, x, r, c, slope, minus_lse_2[c - FIRST]);
                    },
                    slopes);
                ds.template each<n.value, n.value + 1>(subtract);
                ds.template each<n.value, n.value + 1>(derive, probabilities, slopes);
            };
            as_near(near, [&](auto how) { for_constants<HALF>(both, how); });
            drop<HALF, ROWS / 8>(probabilities, at, pairs.head.batch, dropout);
            ds_operand.template take<0, FIRST>(ds);
            store_transposed<0, FIRST>(ds_operand, ds_tile, 0, first_key + 16 * warp());
            mask(Constant<HALF>(), Constant<ROWS / 8>());
            if (PAIR_ARRAYS) s.pairs.release();
            ds.template each<HALF, ROWS / 8>(subtract);
            ds.template each<HALF, ROWS / 8>(derive, probabilities, slopes);
            wgmma_wait<0>();  // nothing under way: ptxas wants operands in registers made so
            changed(dv);
            p_operand.template take<FIRST, SECOND, DROPOUT>(probabilities);
            ds_operand.template take<FIRST, SECOND>(ds);
            store_transposed<FIRST, SECOND>(ds_operand, ds_tile, 0, first_key + 16 * warp());
            start_AB<SECOND, FIRST>(dv, p_operand, s.do_tile());
            start_AB<FIRST>(dk, ds_operand, s.q_tile());
            fence_async();
        } else {
            as_near(near, [&](auto how) {
                probabilities.each(
                    [&](float& x, int r, int c, float& slope) { exponential(how, x, r, c, slope, minus_lse[c]); },
                    slopes);
            });
            drop(probabilities, at, pairs.head.batch, dropout);
            mask(Constant<0>(), Constant<ROWS / 8>());
            if (PAIR_ARRAYS) s.pairs.release();
            wgmma_wait<0>();
            changed(ds);
            if constexpr (!DELTA_FIRST) minus_delta.load(s.row_values() + 4 * ROWS, own);
            ds.each(derive, probabilities, slopes);
            p_operand.template take<0, ROWS, DROPOUT>(probabilities);
            ds_operand.take(ds);
            store_transposed(ds_operand, ds_tile, 0, first_key + 16 * warp());
            fence_async();
            start_AB<ROWS>(dv, p_operand, s.do_tile());  // dV += P^T dO
        }
        sync_threads<128 * WARPGROUPS>(2);
        // dQ^T = K^T dS^T, and dK += dS^T Q under its exit. Where registers allow, the fence that this asks for comes
        // under the next S: it waits for stores to shared memory, which products hold up.
        Accumulator<1, PART_ROWS / 8> dq;
        start_AtBt<KEYS>(dq, s.k_tile(), SHARE_ROWS ? 0 : warpgroup, ds_tile, SHARE_ROWS ? warpgroup * PART_ROWS : 0);
        wgmma_wait<HALF_STEPS ? 2 : 1>();
        s.d.release();
        start_AB<HALF_STEPS ? SECOND : ROWS, HALF_STEPS ? FIRST : 0>(dk, ds_operand, s.q_tile());
        dq_ring.wait_empty();
        wgmma_wait<1>();
        changed(dq);
        if (WHOLE_DQ || WHOLE_BY_LENGTH && whole) {
            put_rows(dq, s.part(warpgroup), p.scale);
            if constexpr (WHOLE_BY_LENGTH)
                if (!maps.map_out) store_own_rows(p, pairs.head, tile_q, warpgroup, s.part(warpgroup));
        } else
            put(dq, s.part(warpgroup));
        if constexpr (REST > 0) {  // of the columns beyond; registers do not hold all of it at once
            RestOfDQ rest;
            start_AtBt<KEYS>(rest, s.k_tile(), WARPGROUPS, ds_tile, warpgroup * REST_ROWS);
            wgmma_wait<0>();
            changed(rest);
            if (has_rest()) {
                if (WHOLE_DQ)
                    put_rows(rest, s.part(WARPGROUPS), p.scale, warpgroup * REST_ROWS / 8);
                else
                    put(rest, s.part(WARPGROUPS), warpgroup * REST_ROWS / 8);
            }
        }
        if (!HALF_STEPS) tell();
        wgmma_wait<0>();
        s.q.release();
    }

    // What lies in shared memory of dK or dV, to memory. (A template since float32 does not go this way.)
    template <class Tile>
    __device__ void leave(Tile tile, const TensorMap& map, Out* to, const Strides& strides, const Head& head, int key,
                          int columns) {
        if (!maps.map_out)
            store_rows<16, true>(tile, 16 * warp(), head.key_row(to, strides, key), strides.row, head.key_rows(p) - key,
                                 columns);
        else if (threadIdx.x % 128 == 0)
            tile.store(map, box_of_keys(p, head, head.to_key(key), key));
    }

    // dK and dV of a tile, out through shared memory and TMA, which goes on by itself.
    static_assert(WIDE || SHARE_SUMS == 32 * (sizeof(dk) + sizeof(dv)), "the plan asks for another number of sums");
    __device__ void store(const KeyTile& t, const Head& head, int key) {
        dq_ring.go_to(steps);
        dq_ring.wait_empty();
        sync_threads<128 * WARPGROUPS>(1);  // nobody reads dS any more
        if (SHARES && !add_shares(p, s, t, warpgroup, dv, dk)) return;
        dk.each([&](float& x, int, int) { x *= p.scale; });
        if constexpr (FROM_REGISTERS<>) {
            int rows = head.key_rows(p) - key, row = 16 * warp();
            store_floats(dk, head.key_row(p.dk, p.dk_strides, key), p.dk_strides.row, row, 0, rows, p.dim);
            store_floats(dv, head.key_row(p.dv, p.dv_strides, key), p.dv_strides.row, row, 0, rows, p.dim_v);
        } else {
            using DKTile = SwizzledTile<64, BLOCK_DIM>;
            using DVTile = SwizzledTile<64, BLOCK_DIM_V>;
            constexpr int ROOM = (2 * STile::BYTES + REST_BYTES) / WARPGROUPS + PART_BYTES;
            constexpr bool TOGETHER = DKTile::BYTES + DVTile::BYTES <= ROOM;
            static_assert(WIDE || DKTile::BYTES <= ROOM && DVTile::BYTES <= ROOM);
            DKTile dk_tile{s.out_tile(warpgroup)};
            DVTile dv_tile{dk_tile.base + TOGETHER * DKTile::BYTES};
            auto meet = [&] { sync_threads<128>(3 + warpgroup); };
            store_rounded(dk, dk_tile, 16 * warp(), 0);
            if constexpr (!TOGETHER) {
                fence_async();
                meet();
                leave(dk_tile, maps.dk, p.dk, p.dk_strides, head, key, p.dim);
                tma_commit();
                tma_wait_read();
                meet();
            }
            store_rounded(dv, dv_tile, 16 * warp(), 0);
            fence_async();
            meet();
            if (TOGETHER) leave(dk_tile, maps.dk, p.dk, p.dk_strides, head, key, p.dim);
            leave(dv_tile, maps.dv, p.dv, p.dv_strides, head, key, p.dim_v);
            tma_commit();
        }
    }

    __device__ void run() {
        while (true) {
            s.k.wait_full();
            KeyTile t = s.this_tile();
            if (t.none()) break;
            tma_wait_read();
            sync_threads<128 * WARPGROUPS>(1);  // there is room for dS and parts of dQ
            Head keys = t.head(p);
            int key = t.number * KEYS + first_key;
            KeysSeen<16> seen(Pairs(p, keys), key + 16 * warp());
            dk.clear();
            dv.clear();
            owed = false;
            near = true;
            if (WHOLE_BY_LENGTH) whole = has_whole_dq(p, keys);
            s.v.wait_full();
            clear_keys(p, s, t);
            for_query_tiles(p, t, [&](const Head& head, int tile_q, int, TileBits bits) {
                visit(Pairs(p, head, bits), seen, tile_q, key);
            });
            if (owed) tell();
            changed(dk);
            changed(dv);
            s.k.release();
            s.k.advance();
            s.v.release();
            s.v.advance();
            store(t, keys, key);
        }
        tma_wait_read();  // shared memory goes with the block
    }
};
