// Workers that each own 64 keys: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers as the A operands of
// dV += P^T dO and dK += dS^T Q. dS goes through shared memory as well, for dQ^T = K^T dS^T, of which each worker
// computes its part.
#pragma once
#include "sm90/backward_dq.cuh"

// A warpgroup with 64 keys of every tile.
__device__ inline void work_narrow(const Params& p, Shared& s, int group) {
    Ring<1, 1, 4> dq_ring = s.dq(group);
    int first_key = 64 * group, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float factor = float(p.scale * 1.4426950408889634);
    static_assert(WIDE || KEYS == 64 * GROUPS && DIM <= 64 * GROUPS);
    unsigned steps = 0, own = column_offset();
    while (true) {
        s.k.wait_full();
        KeyTile t = s.this_tile();
        if (t.pair == -1) break;
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

        auto visit = [&](int head, int tile_q, int) {
            int i0 = tile_q * ROWS, j0 = key + 16 * warp;
            // One number tells the place in every ring: registers are scarce here.
            s.q.go_to(steps);
            s.d.go_to(steps);
            dq_ring.go_to(steps);
            STile ds_tile{s.ds_tiles + steps % DS_STAGES * STile::BYTES};
            steps++;
            // S^T = K Q^T, and dP^T - delta = V dO^T - delta under P^T = exp(S^T - lse)
            Accumulator<1, ROWS / 8> probabilities, ds;
            s.q.wait_full();
            ds.fill(ColumnVector<ROWS / 8>(s.row_values() + 4 * ROWS, own));
            changed(ds);
            start_ABt<DIM>(probabilities, s.k_tile, first_key, s.q_tile());
            s.d.wait_full();
            add_ABt<DIM_V>(ds, s.v_tile, first_key, s.do_tile());
            wgmma_wait<1>();
            changed(probabilities);
            ColumnVector<ROWS / 8> offset(s.row_values(), own);
            probabilities.each([&](float& x, int j, int i) {
                x = exp2_approx(score(x, batch, head, i0 + i, j0 + j) * factor + offset[i]);
            });
            if (__any_sync(~0u, mask.tests({i0, i0 + ROWS}, {key, key + 64}))) {
                keep_branch();
                probabilities.each([&](float& x, int j, int i) {
                    if (!mask.in_band(i0 + i, j0 + j) || !kept[j / 8 % 2]) x = 0;
                });
            }
            // dS^T = P^T (dP^T - delta)
            Operand<ROWS> p_operand, ds_operand;
            wgmma_wait<0>();
            changed(ds);
            ds.zip(probabilities, [&](float& x, float probability, int j, int i) {
                x *= probability * score_derivative(0.f, batch, head, i0 + i, j0 + j);
            });
            p_operand.take(probabilities);
            ds_operand.take(ds);
            if (DS_STAGES == 1) sync_threads<128 * GROUPS>(1);  // nobody reads dS of the step before any more
            store_transposed(ds_operand, ds_tile, 0, first_key + 16 * warp);
            fence_async();
            start_AB<ROWS>(dv, p_operand, s.do_tile());
            sync_threads<128 * GROUPS>(2);
            // dQ^T = K^T dS^T, and dK += dS^T Q under its exit
            Accumulator<1, PART_ROWS / 8> dq;
            start_AtBt<KEYS>(dq, s.k_tile, SHARE_ROWS ? 0 : group, ds_tile, SHARE_ROWS ? group * PART_ROWS : 0);
            wgmma_wait<1>();
            s.d.release();
            start_AB<ROWS>(dk, ds_operand, s.q_tile());
            wgmma_wait<1>();
            changed(dq);
            hand_over(dq, s.part(group), dq_ring);
            wgmma_wait<0>();
            s.q.release();
        };
        if (t.first < t.last) s.v.wait_full();
        query_tiles(p, t, visit);
        changed(dk);
        changed(dv);
        s.k.release();
        s.k.advance();
        if (t.first < t.last) {
            s.v.release();
            s.v.advance();
        }

        float scale = p.scale;
        dk.each([&](float& x, int, int) { x *= scale; });
        int j0 = key + 16 * warp;
        Element* dk_out = p.dk + batch * p.dk_strides.batch + head_k * p.dk_strides.head + j0 * p.dk_strides.row;
        Element* dv_out = p.dv + batch * p.dv_strides.batch + head_k * p.dv_strides.head + j0 * p.dv_strides.row;
        store_rows(dv, dv_out, p.dv_strides.row, p.seq_k - j0, p.dim_v);
        store_rows(dk, dk_out, p.dk_strides.row, p.seq_k - j0, p.dim);
    }
}
