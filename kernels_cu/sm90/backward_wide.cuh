// Workers that share out the columns of dK and dV, where 64 keys are too many for one worker's registers. Each
// computes S and dP of all queries of a tile and its part of the keys; P and dS go through shared memory, and from
// there every worker takes both for its own columns: dV^T += dO^T P, dK^T += Q^T dS, dQ^T = K^T dS^T.
#pragma once
#include "sm90/backward_dq.cuh"

// The same number, which the compiler cannot keep in a register, or reckon, for a later use: where registers are scarce.
__device__ inline unsigned opaque(unsigned x) {
    asm volatile("mov.u32 %0, %0;" : "+r"(x));
    return x;
}

__device__ inline void work_wide(const Params& p, const TensorMaps& maps, Shared& s, int group) {
    constexpr bool IN_TURN = DETERMINISTIC && !DQ_STAGED;  // the adding thread says when this worker may add a step's parts
    constexpr int PART_KEYS = KEYS / GROUPS;
    constexpr int BLOCKS = (DIM + 63) / 64, BLOCKS_V = (DIM_V + 63) / 64, PARTS_V = (BLOCKS_V + GROUPS - 1) / GROUPS;
    static_assert(!WIDE || ROWS == 64 && STAGES == 2 && PARTS <= 2 && PARTS_V <= 2);
    int first_key = PART_KEYS * group, warp = threadIdx.x / 32 % 4;
    float factor = float(p.scale * 1.4426950408889634);
    Ring<1, 1, 4> dq_ring = s.dq(group);
    KTile my_keys{s.k_tile.base + 128 * first_key};
    // A worker for whom no columns are left computes the last ones again, and nobody takes them.
    auto block = [&](int part) { return min(group * PARTS + part, BLOCKS - 1); };
    auto block_v = [&](int part) { return min(group * PARTS_V + part, BLOCKS_V - 1); };
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

        // S of a query tile is computed one step ahead, beside dQ and dK of the one before: in every stretch of work of the
        // threads the tensor cores have something to do. After the last tile it is computed of whatever lies in the ring.
        Accumulator<1, PART_KEYS / 8> scores;
        int left = p.heads_q / p.heads_k * (t.last - t.first);  // steps
        s.q.go_to(steps);
        if (left > 0) s.q.wait_full();
        start_ABt<DIM>(scores, s.q_tile(), 0, my_keys);
        s.v.wait_full();
        wgmma_wait<0>();

        int shift = DQCounters(p).shift(p, t.pair);
        bool owing = false;  // dK of the step before was under way, and its Q is not yet released
        auto release_last = [&] {
            Ring<STAGES, WORKERS> last = s.q;
            last.go_to(steps - 1);
            last.release();
        };

        auto visit = [&](int head, int tile_q, int tile) {
            int thread = opaque(threadIdx.x), lane = thread % 32, first_row = 16 * (thread / 32 % 4);  // not kept, computed again
            int i0 = tile_q * ROWS;
            s.q.go_to(steps);
            s.d.go_to(steps);
            // Addresses of tiles too: kept over the steps they would fill the registers.
            unsigned base = __shfl_sync(~0u, s.k_tile.base, 0), moved = base - s.k_tile.base;
            KTile k_tile{base}, my_keys{base + 128 * first_key};
            VTile my_values{s.v_tile.base + moved + 128 * first_key};
            QTile q_tile{s.q_tile().base + moved};
            DOTile do_tile{s.do_tile().base + moved};
            STile p_tile{s.p_tile + moved}, ds_tile{s.ds_tiles + moved};
            Accumulator<1, PART_KEYS / 8> ds;
            s.d.wait_full();
            start_ABt<DIM_V>(ds, do_tile, 0, my_values);
            // P = exp(S - lse), under dP = dO V^T
            float offset[2], minus_delta[2];  // of this thread's two rows
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned row = s.row_values() + 4 * (first_row + lane / 4 + 8 * h);
                offset[h] = __uint_as_float(load_shared(row));
                minus_delta[h] = __uint_as_float(load_shared(row + 4 * ROWS));
            }
            changed(scores);
            scores.each([&](float& x, int i, int j) {
                x = exp2_approx(score(x, batch, head, i0 + first_row + i, key + j) * factor + offset[i / 8 % 2]);
            });
            if (mask.tests({i0, i0 + ROWS}, {key, key + PART_KEYS})) {
                keep_branch();
                scores.each([&](float& x, int i, int j) {
                    bool seen = mask.in_band(i0 + first_row + i, key + j);
                    if (!seen || (KEY_MASK && !(kept[j / 32] >> j % 32 & 1))) x = 0;
                });
            }
            wgmma_wait<1>();
            if (owing) release_last();
            sync_threads<128 * GROUPS>(1);  // nobody reads P and dS of the step before any more
            store_rounded(scores, p_tile, first_row, first_key, lane);
            fence_async();
            sync_threads<128 * GROUPS>(2);
            // dS = P (dP - delta), under dV^T += dO^T P
#pragma unroll
            for (int part = 0; part < PARTS_V; part++) start_AtB<ROWS>(dv[part], do_tile, block_v(part), p_tile);
            wgmma_wait<PARTS_V>();
            changed(ds);
            ds.zip(scores, [&](float& x, float probability, int i, int j) {
                x = probability * (x + minus_delta[i / 8 % 2]) *
                    score_derivative(0.f, batch, head, i0 + first_row + i, key + j);
            });
            store_rounded(ds, ds_tile, first_row, first_key, lane);
            fence_async();
            sync_threads<128 * GROUPS>(6);
            // dQ^T = K^T dS^T leaves part by part, under dK^T += Q^T dS and the next S = Q K^T
            auto next = s.q;
            next.go_to(steps + 1);
            auto start_next = [&] {
                if (--left > 0) next.wait_full();
                start_ABt<DIM>(scores, QTile{s.q_tiles + moved + next.stage * QTile::BYTES}, 0, my_keys);
            };
            auto leave = [&](Accumulator<1, PART_ROWS / 8>& dq, int part) {
                changed(dq);
                if (DQ_STAGED) {
                    dq_ring.go_to(PARTS * steps + part);
                    hand_over(dq, s.part(group), dq_ring);
                } else {
                    if (IN_TURN) dq_ring.go_to(steps);
                    if (IN_TURN && part == 0) mbarrier_wait(dq_ring.empty(), dq_ring.parity);
                    add_part(p, dq, tile + shift, 4 * (group * PARTS + part));
                    if (IN_TURN && part == PARTS - 1) dq_ring.filled();
                }
            };
            Accumulator<1, PART_ROWS / 8> dq;
            start_AtBt<KEYS>(dq, k_tile, block(0), ds_tile, 0);
            start_AtB<ROWS>(dk[0], q_tile, block(0), ds_tile);
            wgmma_wait<1>();
            s.d.release();
            leave(dq, 0);
            if constexpr (PARTS == 2) start_AtBt<KEYS>(dq, k_tile, block(1), ds_tile, 0);
            start_next();
            if constexpr (PARTS == 2) {  // the last part of dK goes on beside the next step
                start_AtB<ROWS>(dk[1], q_tile, block(1), ds_tile);
                wgmma_wait<2>();
                leave(dq, 1);
                wgmma_wait<1>();
                owing = true;
            } else {
                wgmma_wait<0>();
                s.q.release();
            }
            steps++;
        };
        query_tiles(p, t, visit);
        wgmma_wait<0>();
        if (owing) release_last();
#pragma unroll
        for (int part = 0; part < PARTS; part++) changed(dk[part]);
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) changed(dv[part]);
        s.k.release();
        s.v.release();

        // Out through shared memory and the copy engine, 64 columns at a time. What is used here alone is reckoned here:
        // kept over the steps it would fill the registers.
        if (!IN_TURN) {
            dq_ring.go_to(DQ_STAGED ? PARTS * steps : tiles - 1);
            dq_ring.wait_empty();
        }
        if (!DQ_STAGED) {
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
                tma_store(map, tile.base, column, t.number * KEYS, t.pair % p.heads_k, t.pair / p.heads_k,
                          threadIdx.x % 128 == 0);
                tma_commit();
            } else {
                to += t.pair / p.heads_k * strides.batch + t.pair % p.heads_k * strides.head;
                to += t.number * KEYS * strides.row + column;
                store_rows<KEYS / 4>(tile, warp * (KEYS / 4), to, strides.row, p.seq_k - t.number * KEYS, columns - column);
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
