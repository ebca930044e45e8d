// Workers that share out the columns of dK and dV, where 64 keys are too many for one worker's registers. Each
// computes S and dP of all queries of a tile and its part of the keys; P and dS go through shared memory, and from
// there every worker takes both for its own columns: dV^T += dO^T P, dK^T += Q^T dS, dQ^T = K^T dS^T.
#pragma once
#include "sm90/backward_tiles.cuh"

__device__ inline void work_wide(const Params& p, Shared& s, int group) {
    constexpr int PART_KEYS = KEYS / GROUPS;
    constexpr int BLOCKS = (DIM + 63) / 64, BLOCKS_V = (DIM_V + 63) / 64, PARTS_V = (BLOCKS_V + GROUPS - 1) / GROUPS;
    static_assert(!WIDE || ROWS == 64 && DS_STAGES == 1);
    int first_key = PART_KEYS * group, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, first_row = 16 * warp;
    float factor = float(p.scale * 1.4426950408889634);
    Ring<1, 1, 4> dq_ring = s.dq(group);
    KTile my_keys{s.k_tile.base + 128 * first_key};
    VTile my_values{s.v_tile.base + 128 * first_key};
    STile p_tile{s.p_tile}, ds_tile{s.ds_tiles};
    // A worker for whom no columns are left computes the last ones again, and nobody takes them.
    auto block = [&](int part) { return min(group * PARTS + part, BLOCKS - 1); };
    auto block_v = [&](int part) { return min(group * PARTS_V + part, BLOCKS_V - 1); };
    while (true) {
        s.k.wait_full();
        KeyTile t = s.this_tile();
        if (t.pair == -1) break;
        int batch = t.pair / p.heads_k, key = t.number * KEYS + first_key;
        Mask mask(p, batch);
        unsigned kept[(PART_KEYS + 31) / 32];
#pragma unroll
        for (int n = 0; KEY_MASK && n < (PART_KEYS + 31) / 32; n++) kept[n] = mask.kept(key + 32 * n);
        Accumulator<1, KEYS / 8> dk[PARTS], dv[PARTS_V];
#pragma unroll
        for (int part = 0; part < PARTS; part++) dk[part].clear();
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) dv[part].clear();

        auto visit = [&](int head, int tile_q, int) {
            int i0 = tile_q * ROWS;
            // S = Q K^T, and dP = dO V^T under P = exp(S - lse)
            Accumulator<1, PART_KEYS / 8> probabilities, ds;
            s.q.wait_full();
            start_ABt<DIM>(probabilities, s.q_tile(), 0, my_keys);
            float offset[2], delta[2];  // of this thread's two rows
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned row = s.row_values() + 4 * (first_row + lane / 4 + 8 * h);
                offset[h] = __uint_as_float(load_shared(row)), delta[h] = __uint_as_float(load_shared(row + 4 * ROWS));
            }
            s.d.wait_full();
            start_ABt<DIM_V>(ds, s.do_tile(), 0, my_values);
            wgmma_wait<1>();
            changed(probabilities);
            probabilities.each([&](float& x, int i, int j) {
                x = exp2_approx(score(x, batch, head, i0 + first_row + i, key + j) * factor + offset[i / 8 % 2]);
            });
            if (mask.tests({i0, i0 + ROWS}, {key, key + PART_KEYS})) {
                keep_branch();
                probabilities.each([&](float& x, int i, int j) {
                    bool seen = mask.in_band(i0 + first_row + i, key + j);
                    if (!seen || (KEY_MASK && !(kept[j / 32] >> j % 32 & 1))) x = 0;
                });
            }
            sync_threads<128 * GROUPS>(1);  // nobody reads P and dS of the step before any more
            store_rounded(probabilities, p_tile, first_row, first_key);
            // dS = P (dP - delta)
            wgmma_wait<0>();
            changed(ds);
            ds.zip(probabilities, [&](float& x, float probability, int i, int j) {
                x = probability * (x - delta[i / 8 % 2]) *
                    score_derivative(0.f, batch, head, i0 + first_row + i, key + j);
            });
            store_rounded(ds, ds_tile, first_row, first_key);
            fence_async();
            sync_threads<128 * GROUPS>(2);
#pragma unroll
            for (int part = 0; part < max(PARTS, PARTS_V); part++) {
                if (part < PARTS_V) start_AtB<ROWS>(dv[part], s.do_tile(), block_v(part), p_tile);
                if (part < PARTS) {
                    Accumulator<1, PART_ROWS / 8> dq;
                    start_AtBt<KEYS>(dq, s.k_tile, block(part), ds_tile, 0);
                    start_AtB<ROWS>(dk[part], s.q_tile(), block(part), ds_tile);
                    wgmma_wait<1>();
                    changed(dq);
                    hand_over(dq, s.part(group), dq_ring);
                }
                if (part == PARTS_V - 1) {
                    if (PARTS < PARTS_V) wgmma_wait<0>();
                    s.d.release();
                    s.d.advance();
                }
            }
            wgmma_wait<0>();
            s.q.release();
            s.q.advance();
        };
        if (t.first < t.last) s.v.wait_full();
        query_tiles(p, t, visit);
#pragma unroll
        for (int part = 0; part < PARTS; part++) changed(dk[part]);
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) changed(dv[part]);
        s.k.release();
        s.k.advance();
        if (t.first < t.last) {
            s.v.release();
            s.v.advance();
        }

        // Out through the shared memory that parts of dQ leave through, turned to rows.
        dq_ring.wait_empty();
        float scale = p.scale;
        SwizzledTile<KEYS, 64> tile{s.part(group)};
        auto leave = [&](const Accumulator<1, KEYS / 8>& sum, Element* to, const Strides& strides, int column,
                         int columns) {
            Operand<KEYS> rounded;
            rounded.take(sum);
            store_transposed(rounded, tile, 0, 16 * warp);
            sync_threads<128>(3 + group);
            int row = t.number * KEYS;
            to += batch * strides.batch + t.pair % p.heads_k * strides.head + row * strides.row + column;
            store_rows<KEYS / 4>(tile, warp * (KEYS / 4), to, strides.row, p.seq_k - row, columns - column);
            sync_threads<128>(3 + group);
        };
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) {
            int column = 64 * (group * PARTS_V + part);
            if (column < p.dim_v) leave(dv[part], p.dv, p.dv_strides, column, p.dim_v);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            int column = 64 * (group * PARTS + part);
            dk[part].each([&](float& x, int, int) { x *= scale; });
            if (column < p.dim) leave(dk[part], p.dk, p.dk_strides, column, p.dim);
        }
    }
}
