// Workers that each own 64 keys: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers as the A operands of
// dV += P^T dO and dK += dS^T Q. dS goes through shared memory as well, for dQ^T = K^T dS^T, of which each worker
// computes its part.
#pragma once
#include "sm90/backward_dq.cuh"

// At head dimension 64 the exponentials of a tile take as long as two of its five products. So they are taken in two halves,
// and dV and dK of the first half start before the second is there.
constexpr bool HALVES = SHARE_ROWS;
constexpr int FIRST = ROWS / 32 * 16, SECOND = ROWS - FIRST;  // queries
static_assert(!HALVES || FIRST == SECOND);

// A warpgroup with 64 keys of every tile.
__device__ inline void work_narrow(const Params& p, const TensorMaps& maps, Shared& s, int group) {
    Ring<1, 1, 4> dq_ring = s.dq(group);
    int first_key = 64 * group, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float factor = float(p.scale * 1.4426950408889634);
    static_assert(WIDE || KEYS == 64 * GROUPS && DIM <= 64 * GROUPS);
    unsigned steps = 0, own = column_offset();
    while (true) {
        s.k.wait_full();
        KeyTile t = s.this_tile();
        if (t.pair == -1) break;
        tma_wait_read();
        sync_threads<128 * GROUPS>(1);  // there is room for dS and parts of dQ
        int batch = t.pair / p.heads_k, head_k = t.pair % p.heads_k, key = t.number * KEYS + first_key;
        Mask mask(p, batch);
        bool kept[2];  // this thread's two keys
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int j = key + 16 * warp + lane / 4 + 8 * h;
            kept[h] = !KEY_MASK || (j < p.seq_k && mask.keys[j]);
        }
        Accumulator<1, DIM / 8> dk;
        Accumulator<1, DIM_V / 8> dv;
        dk.clear();
        dv.clear();

        bool owed = false;  // whether the thread that adds dQ is still to be told of a part
        auto tell = [&] {
            fence_async();
            dq_ring.filled();
        };
        auto visit = [&](int head, int tile_q, int) {
            int i0 = tile_q * ROWS, j0 = key + 16 * warp;
            // One number tells the place in every ring: registers are scarce here.
            s.q.go_to(steps);
            s.d.go_to(steps);
            dq_ring.go_to(steps);
            STile ds_tile{s.ds_tiles + steps % 2 * STile::BYTES};
            steps++;

            Accumulator<1, ROWS / 8> probabilities, ds;
            // P^T = exp(S^T - lse) of eight queries.
            auto exponentials = [&](int n, const float (&minus_lse)[2]) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& x = probabilities.x[0][n][e];
                    int i = i0 + 8 * n + lane % 4 * 2 + e % 2, j = j0 + lane / 4 + e / 2 * 8;
                    x = exp2_approx(score(x, batch, head, i, j) * factor + minus_lse[e % 2]);
                }
            };
            auto tested = [&] { return __any_sync(~0u, mask.tests({i0, i0 + ROWS}, {key, key + 64})); };
            bool tests = HALVES && tested();
            auto hide = [&](int begin, int end) {
                if (HALVES ? tests : tested()) {
                    keep_branch();
#pragma unroll
                    for (int n = begin; n < end; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            int i = i0 + 8 * n + lane % 4 * 2 + e % 2, j = j0 + lane / 4 + e / 2 * 8;
                            if (!mask.in_band(i, j) || !kept[e / 2]) probabilities.x[0][n][e] = 0;
                        }
                }
            };
            // dS^T = P^T (dP^T - delta)
            auto derive = [&](int n, const float (&minus_delta)[2]) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& x = ds.x[0][n][e];
                    int i = i0 + 8 * n + lane % 4 * 2 + e % 2, j = j0 + lane / 4 + e / 2 * 8;
                    if (HALVES) x += minus_delta[e % 2];
                    x *= probabilities.x[0][n][e] * score_derivative(0.f, batch, head, i, j);
                }
            };

            // S^T = K Q^T, dP^T = V dO^T, which starts at -delta where registers are filled faster than added to. Rows'
            // numbers are read before products keep shared memory busy.
            s.q.wait_full();
            ColumnVector<(HALVES ? FIRST : ROWS) / 8> minus_lse(s.row_values(), own);
            if constexpr (!HALVES) {
                ds.fill(ColumnVector<ROWS / 8>(s.row_values() + 4 * ROWS, own));
                changed(ds);
            }
            start_ABt<DIM>(probabilities, s.k_tile, first_key, s.q_tile());
            s.d.wait_full();
            if constexpr (HALVES) {
                start_ABt<DIM_V>(ds, s.v_tile, first_key, s.do_tile());
                if (owed) tell();
                owed = true;
            } else {
                add_ABt<DIM_V>(ds, s.v_tile, first_key, s.do_tile());
            }
            wgmma_wait<1>();
            changed(probabilities);
            Operand<ROWS> p_operand, ds_operand;
            if constexpr (HALVES) {
                ColumnVector<SECOND / 8> minus_lse_2(s.row_values() + 4 * FIRST, own);
#pragma unroll
                for (int n = 0; n < FIRST / 8; n++) exponentials(n, minus_lse.x[n]);
                hide(0, FIRST / 8);
                wgmma_wait<0>();
                changed(ds);
                p_operand.template take<0, FIRST>(probabilities);
                start_AB<FIRST>(dv, p_operand, s.do_tile());
                ColumnVector<ROWS / 8> minus_delta(s.row_values() + 4 * ROWS, own);
#pragma unroll
                for (int n = 0; n < FIRST / 8; n++) {
                    exponentials(FIRST / 8 + n, minus_lse_2.x[n]);
                    derive(n, minus_delta.x[n]);
                }
                ds_operand.template take<0, FIRST>(ds);
                store_transposed<0, FIRST>(ds_operand, ds_tile, 0, first_key + 16 * warp);
                hide(FIRST / 8, ROWS / 8);
#pragma unroll
                for (int n = FIRST / 8; n < ROWS / 8; n++) derive(n, minus_delta.x[n]);
                wgmma_wait<0>();  // nothing under way: ptxas wants operands in registers made so
                changed(dv);
                p_operand.template take<FIRST, SECOND>(probabilities);
                ds_operand.template take<FIRST, SECOND>(ds);
                store_transposed<FIRST, SECOND>(ds_operand, ds_tile, 0, first_key + 16 * warp);
                start_AB<SECOND, FIRST>(dv, p_operand, s.do_tile());
                start_AB<FIRST>(dk, ds_operand, s.q_tile());
                fence_async();
            } else {
#pragma unroll
                for (int n = 0; n < ROWS / 8; n++) exponentials(n, minus_lse.x[n]);
                hide(0, ROWS / 8);
                wgmma_wait<0>();
                changed(ds);
#pragma unroll
                for (int n = 0; n < ROWS / 8; n++) derive(n, minus_lse.x[n]);
                p_operand.take(probabilities);
                ds_operand.take(ds);
                store_transposed(ds_operand, ds_tile, 0, first_key + 16 * warp);
                fence_async();
                start_AB<ROWS>(dv, p_operand, s.do_tile());
            }
            sync_threads<128 * GROUPS>(2);
            // dQ^T = K^T dS^T, and dK += dS^T Q under its exit. Where registers allow, the fence that this asks for comes
            // under the next S: it waits for stores to shared memory, which products hold up.
            Accumulator<1, PART_ROWS / 8> dq;
            start_AtBt<KEYS>(dq, s.k_tile, SHARE_ROWS ? 0 : group, ds_tile, SHARE_ROWS ? group * PART_ROWS : 0);
            wgmma_wait<HALVES ? 2 : 1>();
            s.d.release();
            start_AB<HALVES ? SECOND : ROWS, HALVES ? FIRST : 0>(dk, ds_operand, s.q_tile());
            dq_ring.wait_empty();
            wgmma_wait<1>();
            changed(dq);
            put(dq, s.part(group));
            if (!HALVES) tell();
            wgmma_wait<0>();
            s.q.release();
        };
        s.v.wait_full();
        query_tiles(p, t, visit);
        if (owed) tell();
        changed(dk);
        changed(dv);
        s.k.release();
        s.k.advance();
        s.v.release();
        s.v.advance();

        // Out through shared memory and the copy engine, which goes on by itself.
        dq_ring.go_to(steps);
        dq_ring.wait_empty();
        sync_threads<128 * GROUPS>(1);  // nobody reads dS any more
        dk.each([&](float& x, int, int) { x *= p.scale_float; });
        SwizzledTile<64, DIM> dk_tile{s.out_tile(group)};
        SwizzledTile<64, DIM_V> dv_tile{dk_tile.base + dk_tile.BYTES};
        static_assert(WIDE || dk_tile.BYTES + dv_tile.BYTES <= 2 * STile::BYTES / GROUPS + PART_BYTES);
        store_rounded(dk, dk_tile, 16 * warp, 0);
        store_rounded(dv, dv_tile, 16 * warp, 0);
        fence_async();
        sync_threads<128>(3 + group);
        if (maps.map_out) {
            if (threadIdx.x % 128 == 0) {
                dk_tile.store(maps.dk, 0, key, head_k, batch);
                dv_tile.store(maps.dv, 0, key, head_k, batch);
                tma_commit();
            }
        } else {
            Element* dk_out = p.dk + batch * p.dk_strides.batch + head_k * p.dk_strides.head + key * p.dk_strides.row;
            Element* dv_out = p.dv + batch * p.dv_strides.batch + head_k * p.dv_strides.head + key * p.dv_strides.row;
            store_rows<16>(dk_tile, 16 * warp, dk_out, p.dk_strides.row, p.seq_k - key, p.dim);
            store_rows<16>(dv_tile, 16 * warp, dv_out, p.dv_strides.row, p.seq_k - key, p.dim_v);
        }
    }
    tma_wait_read();  // shared memory goes with the block
}
