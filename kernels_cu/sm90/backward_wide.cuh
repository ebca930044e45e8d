// Workers that share out the columns of dK and dV, where 64 keys are too many for one worker's registers. Each
// computes S and dP of all queries of a tile and its part of the keys; P and dS go through shared memory, and from
// there every worker takes both for its own columns: dV^T += dO^T P, dK^T += Q^T dS, dQ^T = K^T dS^T. PAIRED: dQ is that of
// two blocks' keys, and half as much is added to memory.
#pragma once
#include "sm90/backward_dq.cuh"

__device__ inline void work_wide(const Params& p, const TensorMaps& maps, Shared& s, int group) {
    constexpr bool IN_TURN = DETERMINISTIC && PAIRED;  // the adding thread says when this worker may add a step's part
    constexpr int PART_KEYS = KEYS / GROUPS;
    constexpr int BLOCKS = (DIM + 63) / 64, BLOCKS_V = (DIM_V + 63) / 64;  // of 64 columns
    constexpr int PARTS = (BLOCKS + GROUPS - 1) / GROUPS, PARTS_V = (BLOCKS_V + GROUPS - 1) / GROUPS;  // each worker's
    static_assert(!WIDE || ROWS == 64 && STAGES == 2 && PARTS <= 2 && PARTS_V <= 2 && BLOCKS <= GROUPS * CLUSTER);
    int first_key = PART_KEYS * group, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, first_row = 16 * warp;
    float factor = float(p.scale * 1.4426950408889634);
    Ring<1, 1, 4> dq_ring = s.dq(group);
    KTile my_keys{s.k_tile.base + 128 * first_key};
    // A worker for whom no columns are left computes the last ones again, and nobody takes them.
    auto block = [&](int part) { return min(group * PARTS + part, BLOCKS - 1); };
    auto block_v = [&](int part) { return min(group * PARTS_V + part, BLOCKS_V - 1); };
    int dq_block = s.dq_block(group), dq_place = place_in_sums(dq_block);
    bool has_dq = DIM % (64 * GROUPS * CLUSTER) == 0 || 4 * dq_block + warp < DIM / 16;
    // Two numbers tell the place in every ring: registers are scarce here.
    unsigned tiles = 0, steps = 0;
    while (true) {
        s.k.go_to(tiles);
        s.v.go_to(tiles);
        tiles++;
        s.k.wait_full();
        KeyTile t = s.this_tile();
        if (t.pair == -1) break;
        tma_wait_read();  // what left through shared memory: the next barrier tells the others
        int batch = t.pair / p.heads_k, key = s.first_key(t) + first_key;
        Mask mask(p, batch);
        unsigned kept[(PART_KEYS + 31) / 32];
#pragma unroll
        for (int n = 0; KEY_MASK && n < (PART_KEYS + 31) / 32; n++) kept[n] = mask.kept(key + 32 * n);
        Accumulator<1, KEYS / 8> dk[PARTS], dv[PARTS_V];
#pragma unroll
        for (int part = 0; part < PARTS; part++) dk[part].clear();
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) dv[part].clear();

        float minus_lse[2], minus_delta[2];  // of this thread's two rows
        auto read_rows = [&](unsigned values) {
            values += 4 * (first_row + lane / 4);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                minus_lse[h] = __uint_as_float(load_shared(values + 32 * h));
                minus_delta[h] = __uint_as_float(load_shared(values + 32 * h + 4 * ROWS));
            }
        };
        // S of a query tile is computed one step ahead, beside dQ and dK of the one before: in every stretch of work of the
        // threads the tensor cores have something to do. After the last tile it is computed of whatever lies in the ring.
        Accumulator<1, PART_KEYS / 8> scores;
        int left = p.heads_q / p.heads_k * (t.last - t.first);  // steps
        s.q.go_to(steps);
        if (left > 0) s.q.wait_full();
        if (PAIRED) read_rows(s.row_values());
        start_ABt<DIM>(scores, s.q_tile(), 0, my_keys);
        s.v.wait_full();
        wgmma_wait<0>();

        // PAIRED: dQ of a query tile is computed a step late, when the other block's dS has come. At the first step it is
        // computed of whatever lies there and does not leave: products in a branch are put in series by ptxas.
        bool owing = false;
        int last = 0;  // the query tile whose dQ is owed
        int shift = DQCounters(p).shift(p, t.pair);
        auto start_dq = [&](Accumulator<1, PART_ROWS / 8>& dq, unsigned moved, unsigned step) {
            STile ds_tile{s.ds_tiles + moved + (PAIRED ? step % 2 * STile::BYTES : 0)};
            start_AtB<KEYS>(dq, KTile{s.k_tile.base + moved}, min(dq_block, BLOCKS - 1), ds_tile);
        };
        auto add_far_dq = [&](Accumulator<1, PART_ROWS / 8>& dq, unsigned moved) {
            s.far_ds.go_to(steps - 1);
            if (owing) s.far_ds.wait_full();
            fence_async();  // threads have stored it
            STile far_ds_tile{s.far_ds_tiles + moved + s.far_ds.stage * STile::BYTES};
            add_AtB<KEYS>(dq, FarKTile{s.far_k_tile.base + moved}, group, far_ds_tile);
        };
        // Half of a part of dQ: all of it at once would hold up the loads.
        auto leave_half = [&](auto half, const Accumulator<1, PART_ROWS / 8>& dq, int tile, unsigned step) {
            if (IN_TURN) dq_ring.go_to(step);
            if (IN_TURN && half.value == 0) mbarrier_wait(dq_ring.empty(), dq_ring.parity);
            float* sums = p.dq_sum + (long long)(tile + shift) * DQ_TILE + dq_place;
            if (has_dq) add_part<half.value * ROW8S / 2, ROW8S / 2>(dq, sums);
            if (IN_TURN && half.value == 1) dq_ring.filled();
        };

        auto visit = [&](int head, int tile_q, int tile) {
            int i0 = tile_q * ROWS;
            s.q.go_to(steps);
            s.d.go_to(steps);
            // Through a shuffle, else ptxas keeps the descriptors of all tiles in registers.
            unsigned moved = __shfl_sync(~0u, s.k_tile.base, 0) - s.k_tile.base;
            KTile my_keys{s.k_tile.base + moved + 128 * first_key};
            VTile my_values{s.v_tile.base + moved + 128 * first_key};
            QTile q_tile{s.q_tile().base + moved};
            DOTile do_tile{s.do_tile().base + moved};
            STile p_tile{s.p_tile + moved}, ds_tile{s.ds_tiles + moved + (PAIRED ? steps % 2 * STile::BYTES : 0)};
            Accumulator<1, PART_KEYS / 8> ds;
            Accumulator<1, PART_ROWS / 8> dq;
            if (PAIRED) {
                start_dq(dq, moved, steps - 1);
                add_far_dq(dq, moved);
            }
            s.d.wait_full();
            start_ABt<DIM_V>(ds, do_tile, 0, my_values);
            // P = exp(S - lse), under dP = dO V^T
            if (!PAIRED) read_rows(s.row_values());
            changed(scores);
            scores.each([&](float& x, int i, int j) {
                x = exp2_approx(score(x, batch, head, i0 + first_row + i, key + j) * factor + minus_lse[i / 8 % 2]);
            });
            if (mask.tests({i0, i0 + ROWS}, {key, key + PART_KEYS})) {
                keep_branch();
                scores.each([&](float& x, int i, int j) {
                    bool seen = mask.in_band(i0 + first_row + i, key + j);
                    if (!seen || (KEY_MASK && !(kept[j / 32] >> j % 32 & 1))) x = 0;
                });
            }
            sync_threads<128 * GROUPS>(1);  // nobody reads P of the step before any more
            store_rounded<true>(scores, p_tile, first_key, first_row, lane);
            fence_async();
            sync_threads<128 * GROUPS>(2);
            // dS = P (dP - delta), under dV^T += dO^T P
#pragma unroll
            for (int part = 0; part < PARTS_V; part++) add_AtBt<ROWS>(dv[part], do_tile, block_v(part), p_tile, 0);
            wgmma_wait<PARTS_V>();
            changed(ds);
            if (PAIRED) changed(dq);
            ds.zip(scores, [&](float& x, float probability, int i, int j) {
                x = probability * (x + minus_delta[i / 8 % 2]) *
                    score_derivative(0.f, batch, head, i0 + first_row + i, key + j);
            });
            store_rounded<true>(ds, ds_tile, first_key, first_row, lane);
            fence_async();
            if (PAIRED) {
                s.far_ds.go_to(steps);
                if (lane == 0) mbarrier_arrive_expect(s.far_ds.full(), STile::BYTES / WORKERS);
            }
            sync_threads<128 * GROUPS>(6);
            if constexpr (PAIRED) {  // dS to the other block; half of dQ of the step before to memory
                s.far_ds.wait_empty();
                unsigned own = 16 * (threadIdx.x - 128), full = s.far(s.far_ds.full());
                unsigned far = s.far(s.far_ds_tiles + s.far_ds.stage * STile::BYTES + own);
                static_assert(STile::BYTES % (16 * 32 * WORKERS) == 0);
#pragma unroll
                for (int n = 0; n < STile::BYTES; n += 16 * 32 * WORKERS)
                    store_far_16(far + n, load_shared_16(ds_tile.base + own + n), full);
                if (owing) {
                    s.far_ds.go_to(steps - 1);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive_far(s.far(s.far_ds.empty()));
                    leave_half(Constant<0>(), dq, last, steps - 1);
                }
            } else {
                start_dq(dq, moved, steps);
            }
            // dK^T += Q^T dS, and S = Q K^T of the next query tile
            add_AtBt<ROWS>(dk[0], q_tile, block(0), ds_tile, 0);
            wgmma_wait<1>();
            s.d.release();
            if (!PAIRED) {
                changed(dq);
                dq_ring.go_to(steps);
                hand_over(dq, s.part(group), dq_ring);
            }
            if constexpr (PARTS == 2) add_AtBt<ROWS>(dk[1], q_tile, block(1), ds_tile, 0);
            auto next = s.q;
            next.go_to(steps + 1);
            if (--left > 0) next.wait_full();
            if (PAIRED) read_rows(s.rows + next.stage * 8 * ROWS);
            start_ABt<DIM>(scores, QTile{s.q_tiles + moved + next.stage * QTile::BYTES}, 0, my_keys);
            if (PAIRED && owing) leave_half(Constant<1>(), dq, last, steps - 1);
            wgmma_wait<0>();
            s.q.release();
            owing = true;
            last = tile;
            steps++;
        };
        query_tiles(p, t, visit);
        if (PAIRED && owing) {
            Accumulator<1, PART_ROWS / 8> dq;
            start_dq(dq, 0, steps - 1);
            add_far_dq(dq, 0);
            wgmma_wait<0>();
            __syncwarp();
            if (lane == 0) mbarrier_arrive_far(s.far(s.far_ds.empty()));
            changed(dq);
            leave_half(Constant<0>(), dq, last, steps - 1);
            leave_half(Constant<1>(), dq, last, steps - 1);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) changed(dk[part]);
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) changed(dv[part]);
        s.k.release();
        s.v.release();

        // Out through shared memory and the copy engine, 64 columns at a time. What is used here alone is reckoned here:
        // kept over the steps it would fill the registers.
        if (!IN_TURN) {
            dq_ring.go_to(PAIRED ? tiles - 1 : steps);
            dq_ring.wait_empty();
        }
        if (PAIRED) {
            if (!IN_TURN) dq_ring.filled();  // this worker has added all its parts
            sync_threads<128 * GROUPS>(1);  // nobody reads P and dS of the last step any more
        }
        SwizzledTile<KEYS, 64> tile{s.out_tile(group)};
        auto leave = [&](const Accumulator<1, KEYS / 8>& sum, const TensorMap& map, Element* to, const Strides& strides,
                         int column, int columns) {
            tma_wait_read();
            sync_threads<128>(3 + group);
            Operand<KEYS> rounded;
            rounded.take(sum);
            store_transposed(rounded, tile, 0, 16 * warp);
            fence_async();
            sync_threads<128>(3 + group);
            if (maps.map_out) {
                tma_store(map, tile.base, column, s.first_key(t), t.pair % p.heads_k, t.pair / p.heads_k,
                          threadIdx.x % 128 == 0);
                tma_commit();
            } else {
                to += t.pair / p.heads_k * strides.batch + t.pair % p.heads_k * strides.head;
                to += s.first_key(t) * strides.row + column;
                store_rows<KEYS / 4>(tile, warp * (KEYS / 4), to, strides.row, p.seq_k - s.first_key(t), columns - column);
            }
        };
        auto leave_dv = [&](int part) {
            int column = 64 * (group * PARTS_V + part);
            if (column < p.dim_v) leave(dv[part], maps.dv, p.dv, p.dv_strides, column, p.dim_v);
        };
        auto leave_dk = [&](int part) {
            int column = 64 * (group * PARTS + part);
            dk[part].each([&](float& x, int, int) { x *= p.scale_float; });
            if (column < p.dim) leave(dk[part], maps.dk, p.dk, p.dk_strides, column, p.dim);
        };
        leave_dv(0);
        if constexpr (PARTS_V == 2) leave_dv(1);
        leave_dk(0);
        if constexpr (PARTS == 2) leave_dk(1);
    }
    tma_wait_read();  // shared memory goes with the block
}
