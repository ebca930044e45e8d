// Consumers that share out the columns of dK and dV, where 64 keys are too many for one consumer's registers. Each
// computes S and dP of all queries of a tile and its part of the keys; P and dS go through shared memory, and from
// there every consumer takes both for its own columns: dV^T += dO^T P, dK^T += Q^T dS, dQ^T = K^T dS^T. SPLIT_KEYS: dQ
// is that of two blocks' keys, and half as much is added to memory. SPLIT_COLUMNS: S and dP are sums of what two blocks
// have of the columns, each of which has half of those of all results.
#pragma once
#include "sm90/backward_dead_rows.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_shares.cuh"

struct WideConsumer {
    enum { S, DP };  // what the blocks of a cluster send to each other where they share out columns
    // The adding thread says when a step's part may be added.
    static constexpr bool IN_TURN = DETERMINISTIC && CLUSTERED;
    static constexpr int PART_KEYS = KEYS / WARPGROUPS;
    static constexpr int BLOCKS = (BLOCK_DIM + 63) / 64, BLOCKS_V = (BLOCK_DIM_V + 63) / 64;  // of 64 columns
    // Of these a consumer's.
    static constexpr int PARTS = (BLOCKS + WARPGROUPS - 1) / WARPGROUPS,
                         PARTS_V = (BLOCKS_V + WARPGROUPS - 1) / WARPGROUPS;
    static constexpr int DQ_PARTS = SPLIT_COLUMNS ? PARTS : 1, DQ_BLOCKS = WARPGROUPS * DQ_PARTS * (SPLIT_KEYS ? 2 : 1);
    static_assert(!WIDE || ROWS == 64 && STAGES == 2 && PARTS <= 2 && PARTS_V <= 2);
    static_assert(!WIDE || BLOCKS <= DQ_BLOCKS);

    using Scores = Accumulator<1, PART_KEYS / 8>;
    using DQPart = Accumulator<1, PART_ROWS / 8>;
    using SeenKeys = KeysSeen<PART_KEYS>;

    const Params& p;
    const TensorMaps& maps;
    Shared& s;
    int warpgroup, first_key;  // of the consumer's keys in a tile
    float factor;
    Dropout dropout;
    Shared::DQRing dq_ring;
    KTile my_keys;
    // Which columns of dQ are the consumer's, and where a thread's numbers lie in a tile of sums.
    int dq_block, dq_place;
    // Two numbers tell the place in every ring: registers are scarce here.
    unsigned tiles = 0, steps = 0;

    Accumulator<1, KEYS / 8> dk[PARTS], dv[PARTS_V];  // transposed
    float minus_lse[2], minus_delta[2];               // of this thread's two rows
    // S of a query tile is computed one step ahead, beside dQ and dK of the one before: in every stretch of work of the
    // threads the tensor cores have something to do. After the last tile it is computed of whatever lies in the ring.
    Scores scores;
    int left;  // steps
    // CLUSTERED: dQ of a query tile is computed a step late, when the other block's dS has come (SPLIT_KEYS), or while
    // S and dP are on their way. At the first step it is computed of whatever lies there and does not leave: products
    // in a branch are put in series by ptxas.
    bool owing;
    int last, shift;  // the query tile whose dQ is owed; from query tiles to tiles of sums
    OutQ* owed_rows;  // PUTS_DQ: where its rows are, and how many
    int owed_count;

    __device__ WideConsumer(const Params& p, const TensorMaps& maps, Shared& s, int warpgroup)
        : p(p),
          maps(maps),
          s(s),
          warpgroup(warpgroup),
          first_key(PART_KEYS * warpgroup),
          factor(Pairs(p, Head{}).factor()),
          dropout(p),
          dq_ring(s.dq(warpgroup)),
          my_keys{s.k_tile().base + 128 * first_key},
          dq_block(SPLIT_COLUMNS ? warpgroup * PARTS : s.dq_block(warpgroup)),
          dq_place(place_in_sums(dq_block + s.column() / 64)) {}

    __device__ static int warp() { return threadIdx.x / 32 % 4; }
    __device__ static int first_row() { return 16 * warp(); }

    // Which 64 columns are the consumer's. One for whom none are left computes the last ones again, and nobody takes
    // them.
    __device__ int block(int part) const { return min(warpgroup * PARTS + part, BLOCKS - 1); }
    __device__ int block_v(int part) const { return min(warpgroup * PARTS_V + part, BLOCKS_V - 1); }

    __device__ void read_rows(unsigned values) {
        values += 4 * (first_row() + threadIdx.x % 32 / 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            minus_lse[h] = __uint_as_float(load_shared(values + 32 * h));
            minus_delta[h] = __uint_as_float(load_shared(values + 32 * h + 4 * ROWS));
        }
    }

    // dQ^T = K^T dS^T of the block's own keys, 64 columns; `moved`: see visit.
    __device__ void start_dq(DQPart& dq, unsigned moved, unsigned step, int part = 0) const {
        STile ds_tile{s.ds_tile(CLUSTERED ? step : 0).base + moved};
        start_AtB<KEYS>(dq, KTile{s.k_tile().base + moved}, min(dq_block + part, BLOCKS - 1), ds_tile);
    }
    // And of the other block's.
    __device__ void add_far_dq(DQPart& dq, unsigned moved) {
        s.far_ds.go_to(steps - 1);
        if (owing) s.far_ds.wait_full();
        fence_async();  // threads have stored it
        STile far_ds_tile{s.far_ds_tile() + moved};
        start_AtB<KEYS, ADD>(dq, FarKTile{s.far_k_tile().base + moved}, warpgroup, far_ds_tile);
    }
    // The other block may send dS of another step to the place of the last.
    __device__ void release_far_ds() {
        s.far_ds.go_to(steps - 1);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive_far(s.far(s.far_ds.empty()));
    }
    // Whether there are columns for the warp in a part of dQ.
    __device__ bool has_dq(int part) const {
        return BLOCK_DIM == 64 * DQ_BLOCKS || 64 * (dq_block + part) + first_row() < BLOCK_DIM;
    }
    // Half of a part of dQ to memory: all of it at once would hold up the loads.
    template <int HALF, int PART = 0>
    __device__ void leave_half(const DQPart& dq, int tile, unsigned step) {
        if constexpr (PUTS_DQ) {
            int column = s.column() + 64 * (dq_block + PART);
            if (has_dq(PART))
                put_turned<HALF * ROW8S / 2, ROW8S / 2>(dq, owed_rows + column, p.dq_strides.row, owed_count,
                                                        p.dim - column, p.scale);
            return;
        }
        if (IN_TURN) dq_ring.go_to(step);
        if (IN_TURN && HALF == 0 && PART == 0) dq_ring.wait_turn();
        float* sums = p.dq_sum + (long long)(tile + shift) * DQ_TILE + dq_place + PART * 64 * PART_ROWS;
        if (has_dq(PART)) add_part<HALF * ROW8S / 2, ROW8S / 2>(dq, sums);
        if (IN_TURN && HALF == 1 && PART == DQ_PARTS - 1) dq_ring.filled();
    }

    // One tile of queries; `tile`: its number among those of all heads.
    __device__ void visit(const Pairs& pairs, const SeenKeys& seen, int tile_q, int tile, int key) {
        Placement<> at{pairs.head.q, tile_q * ROWS + first_row(), key};
        s.q.go_to(steps);
        s.d.go_to(steps);
        s.pairs.go_to(steps);
        InTiles<false, Pairwise> arrays(s.pair_tiles(), first_row(), first_key);
        Lines<1, false, InTiles<false, Pairwise>> lines(pairs, at, arrays);
        // Through a shuffle, else ptxas keeps the descriptors of all tiles in registers.
        unsigned moved = __shfl_sync(~0u, s.k_tile().base, 0) - s.k_tile().base;
        KTile my_keys{s.k_tile().base + moved + 128 * first_key};
        VTile my_values{s.v_tile().base + moved + 128 * first_key};
        QTile q_tile{s.q_tile().base + moved};
        DOTile do_tile{s.do_tile().base + moved};
        STile p_tile{s.p_tile().base + moved}, ds_tile{s.ds_tile(CLUSTERED ? steps : 0).base + moved};
        Scores ds, slopes;
        DQPart dq;
        if (CLUSTERED) {
            start_dq(dq, moved, steps - 1);
            if constexpr (SPLIT_KEYS) add_far_dq(dq, moved);
        }
        s.d.wait_full();
        clear_queries(s.row_values(), warpgroup, ROWS, Nothing(), s.do_tile());
        start_ABt<DOT_V>(ds, do_tile, 0, my_values);
        // P = exp(S - lse), under dP = dO V^T
        if (!CLUSTERED) read_rows(s.row_values());
        changed(scores);
        if constexpr (SPLIT_COLUMNS) s.far_sums(warpgroup).add(scores, S, steps);
        if (PAIR_ARRAYS) s.pairs.wait_full();
        as_near(near_zero(scores, pairs), [&](auto how) {
            constexpr bool NEAR = decltype(how)::value;
            scores.each(
                [&](float& x, int r, int c, float& slope) {
                    slope = lines.template slope<NEAR>(x, r, c);
                    x = exp2_approx(lines.template exponent<NEAR>(x, r, c, factor, minus_lse[r / 8 % 2]));
                },
                slopes);
        });
        drop(scores, at, pairs.head.batch, dropout);
        if (pairs.tests_backward({tile_q * ROWS, tile_q * ROWS + ROWS}, {key, key + PART_KEYS})) {
            keep_branch();
            hide(scores, at, pairs, seen, arrays, 0);
        }
        if (PAIR_ARRAYS) s.pairs.release();
        sync_threads<128 * WARPGROUPS>(1);  // nobody reads P of the step before any more
        store_rounded<true, DROPOUT>(scores, p_tile, first_key, first_row());
        fence_async();
        sync_threads<128 * WARPGROUPS>(2);
        // dS = P (dP - delta) slope, under dV^T += dO^T P
#pragma unroll
        for (int part = 0; part < PARTS_V; part++) start_AtBt<ROWS, ADD>(dv[part], do_tile, block_v(part), p_tile, 0);
        wgmma_wait<PARTS_V>();
        changed(ds);
        if (CLUSTERED) changed(dq);
        if constexpr (SPLIT_COLUMNS) {
            s.far_sums(warpgroup).send(ds, DP);
            if (owing) leave_half<0>(dq, last, steps - 1);
            s.far_sums(warpgroup).add(ds, DP, steps);
            if (owing) leave_half<1>(dq, last, steps - 1);
            if constexpr (DQ_PARTS == 2) start_dq(dq, moved, steps - 1, 1);
            wgmma_wait<DQ_PARTS - 1>();
            s.d.release();
        }
        ds.each(
            [&](float& x, int r, int, float& probability, float& slope) {
                x = derivative(probability, x, minus_delta[r / 8 % 2]) * Pairs::settled(slope, probability);
            },
            scores, slopes);
        store_rounded<true>(ds, ds_tile, first_key, first_row());
        fence_async();
        if (SPLIT_KEYS) {
            s.far_ds.go_to(steps);
            if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(s.far_ds.full(), STile::BYTES / CONSUMER_WARPS);
        }
        sync_threads<128 * WARPGROUPS>(6);
        if constexpr (SPLIT_KEYS) {  // dS to the other block; half of dQ of the step before to memory
            s.far_ds.wait_empty();
            unsigned own = 16 * (threadIdx.x - 128), full = s.far(s.far_ds.full());
            unsigned far = s.far(s.far_ds_tile() + own);
            static_assert(STile::BYTES % (16 * 32 * CONSUMER_WARPS) == 0);
#pragma unroll
            for (int n = 0; n < STile::BYTES; n += 16 * 32 * CONSUMER_WARPS)
                store_far_16(far + n, load_shared_16(ds_tile.base + own + n), full);
            if (owing) {
                release_far_ds();
                leave_half<0>(dq, last, steps - 1);
            }
        } else if constexpr (!CLUSTERED) {
            start_dq(dq, moved, steps);
        }
        // dK^T += Q^T dS, and S = Q K^T of the next query tile
        start_AtBt<ROWS, ADD>(dk[0], q_tile, block(0), ds_tile, 0);
        if constexpr (!SPLIT_COLUMNS) {
            wgmma_wait<1>();
            s.d.release();
            if (!CLUSTERED) {
                changed(dq);
                dq_ring.go_to(steps);
                dq_ring.wait_empty();
                if constexpr (WHOLE_DQ)
                    put_rows(dq, s.part(warpgroup), p.scale);
                else
                    put(dq, s.part(warpgroup));
                fence_async();
                dq_ring.filled();
            }
            if constexpr (PARTS == 2) start_AtBt<ROWS, ADD>(dk[1], q_tile, block(1), ds_tile, 0);
        } else if constexpr (DQ_PARTS == 2) {
            wgmma_wait<1>();
            changed(dq);
            if (owing) leave_half<0, 1>(dq, last, steps - 1);
        }
        Shared next = s;
        next.q.go_to(steps + 1);
        if (--left > 0) {
            next.q.wait_full();
            clear_queries(next.row_values(), warpgroup, ROWS, Nothing(), next.q_tile());
        }
        if (CLUSTERED) read_rows(next.row_values());
        start_ABt<DOT>(scores, QTile{next.q_tile().base + moved}, 0, my_keys);
        if constexpr (SPLIT_COLUMNS) {  // S goes to the other block under the last product
            if constexpr (PARTS == 2) start_AtBt<ROWS, ADD>(dk[1], q_tile, block(1), ds_tile, 0);
            if (DQ_PARTS == 2 && owing) leave_half<1, 1>(dq, last, steps - 1);
            wgmma_wait<PARTS - 1>();
            send_scores();
        } else if (CLUSTERED && owing) {
            leave_half<1>(dq, last, steps - 1);
        }
        wgmma_wait<0>();
        s.q.release();
        owing = true;
        last = tile;
        if constexpr (PUTS_DQ) {
            owed_rows = pairs.head.query_row(p.dq, p.dq_strides, tile_q * ROWS);
            owed_count = pairs.head.queries(p) - tile_q * ROWS;
        }
        steps++;
    }

    // What this block has of S of the next query tile, if there is one.
    __device__ void send_scores() {
        changed(scores);
        if (left > 0) s.far_sums(warpgroup).send(scores, S);
    }

    // dQ of the last step of a tile of keys.
    template <int PART = 0>
    __device__ void settle_dq() {
        DQPart dq;
        start_dq(dq, 0, steps - 1, PART);
        if constexpr (SPLIT_KEYS) add_far_dq(dq, 0);
        wgmma_wait<0>();
        if constexpr (SPLIT_KEYS) release_far_ds();
        changed(dq);
        leave_half<0, PART>(dq, last, steps - 1);
        leave_half<1, PART>(dq, last, steps - 1);
        if constexpr (PART + 1 < DQ_PARTS) settle_dq<PART + 1>();
    }

    static_assert(!WIDE || SHARE_SUMS == 32 * (sizeof(dk) + sizeof(dv)), "the plan asks for another number of sums");

    // 64 columns of dK or dV, through shared memory and TMA.
    __device__ void store(const Accumulator<1, KEYS / 8>& sum, const TensorMap& map, Out* to, const Strides& strides,
                          const KeyTile& t, int column, int columns) {
        if constexpr (FROM_REGISTERS<>) {
            Head head = t.head(p);
            int first = s.first_key(t);
            put_turned<0, KEYS / 8>(sum, head.key_row(to, strides, first) + column, strides.row,
                                    head.key_rows(p) - first, columns - column);
        } else {
            store_through(sum, map, to, strides, t, column, columns);
        }
    }
    // As registers hold them, COUNT times 8 columns of the sum, which are rows of the result.
    template <int FIRST, int COUNT, int ALL, class T>
    __device__ static void put_turned(const Accumulator<1, ALL>& sum, T* to, long long row_stride, int rows,
                                      int columns, float scale = 1) {
#pragma unroll
        for (int n = FIRST; n < FIRST + COUNT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int c = 16 * warp() + sum.row(0, e), row = sum.column(n, e);
                if (row < rows && c < columns) put_result(to + row * row_stride + c, scale * sum.x[0][n][e]);
            }
    }
    template <class T>
    __device__ void store_through(const Accumulator<1, KEYS / 8>& sum, const TensorMap& map, T* to,
                                  const Strides& strides, const KeyTile& t, int column, int columns) {
        SwizzledTile<KEYS, 64> tile{s.out_tile(warpgroup)};
        tma_wait_read();
        sync_threads<128>(3 + warpgroup);
        Operand<KEYS> rounded;
        rounded.take(sum);
        store_transposed(rounded, tile, 0, 16 * warp());
        fence_async();
        sync_threads<128>(3 + warpgroup);
        Head head = t.head(p);
        int first = s.first_key(t);
        if (maps.map_out && is_whole<KEYS>(p, head, first)) {
            tile.store(map, head.to_key(first, column), threadIdx.x % 128 == 0);
            tma_commit();
        } else {
            store_rows<KEYS / 4, !PACKED_K>(tile, warp() * (KEYS / 4), head.key_row(to, strides, first) + column,
                                            strides.row, head.key_rows(p) - first, columns - column);
        }
    }
    __device__ void store_dv(const KeyTile& t, int part) {
        int own = warpgroup * PARTS_V + part, column = s.column_v() + 64 * own;
        if (own < BLOCKS_V && column < p.dim_v) store(dv[part], maps.dv, p.dv, p.dv_strides, t, column, p.dim_v);
    }
    __device__ void store_dk(const KeyTile& t, int part) {
        int own = warpgroup * PARTS + part, column = s.column() + 64 * own;
        dk[part].each([&](float& x, int, int) { x *= p.scale; });
        if (own < BLOCKS && column < p.dim) store(dk[part], maps.dk, p.dk, p.dk_strides, t, column, p.dim);
    }

    __device__ void run() {
        while (true) {
            s.k.go_to(tiles);
            s.v.go_to(tiles);
            tiles++;
            s.k.wait_full();
            KeyTile t = s.this_tile();
            if (t.none()) break;
            tma_wait_read();  // what left through shared memory: the next barrier tells the others
            int key = s.first_key(t) + first_key;
            SeenKeys seen(Pairs(p, t.head(p)), key);
#pragma unroll
            for (int part = 0; part < PARTS; part++) dk[part].clear();
#pragma unroll
            for (int part = 0; part < PARTS_V; part++) dv[part].clear();
            left = t.visits(p);
            s.q.go_to(steps);
            if (CLEARS) {
                s.v.wait_full();
                clear_keys(p, s, t);
            }
            if (left > 0) {
                s.q.wait_full();
                clear_queries(s.row_values(), warpgroup, ROWS, Nothing(), s.q_tile());
            }
            if (CLUSTERED) read_rows(s.row_values());
            start_ABt<DOT>(scores, s.q_tile(), 0, my_keys);
            s.v.wait_full();
            wgmma_wait<0>();
            if constexpr (SPLIT_COLUMNS) send_scores();

            owing = false;
            last = 0;
            shift = DQCounters(p).shift(p, t.share);
            for_query_tiles(p, t, [&](const Head& head, int tile_q, int tile, TileBits bits) {
                visit(Pairs(p, head, bits), seen, tile_q, tile, key);
            });
            if (CLUSTERED && owing) settle_dq();
#pragma unroll
            for (int part = 0; part < PARTS; part++) changed(dk[part]);
#pragma unroll
            for (int part = 0; part < PARTS_V; part++) changed(dv[part]);
            s.k.release();
            s.v.release();

            // What is used here alone is reckoned here: kept over the steps it would fill the registers.
            if (!IN_TURN && !PUTS_DQ) {
                dq_ring.go_to(CLUSTERED ? tiles - 1 : steps);
                dq_ring.wait_empty();
            }
            if (CLUSTERED) {
                if (!IN_TURN && !PUTS_DQ) dq_ring.filled();  // this consumer has added all its parts
                sync_threads<128 * WARPGROUPS>(1);  // nobody reads P and dS of the last step any more
            }
            if (SHARES && !add_shares(p, s, t, warpgroup, dv, dk)) continue;
            store_dv(t, 0);
            if constexpr (PARTS_V == 2) store_dv(t, 1);
            store_dk(t, 0);
            if constexpr (PARTS == 2) store_dk(t, 1);
        }
        tma_wait_read();  // shared memory goes with the block
    }
};
