// The Hopper forward of wide heads: two thread blocks of a cluster share out what one has no room for.
//
// Both have the same 128 queries, two warpgroups with 64 rows each, and walk over the same tiles of 128 keys. Of a tile
// a block computes S = Q K^T and its softmax of 64 keys, over all columns, and of O += P V half of the columns, over
// all keys. So no product is computed twice. What travels is P, in 16 bits, and before it the largest score of each
// row, by which both blocks take exponentials and rescale O alike (Partner). Within a warpgroup O += P V of the tile
// before is under way while the softmax of S is done, as in forward.cu.
//
// K and V come in pieces of 16 KB, in the order in which they are multiplied, through one ring.
#include "attention/dead_rows.cuh"
#include "attention/dropped.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/launch.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/wide_forward_tiles.cuh"
#include "tile/rows.cuh"

// A warpgroup with 64 rows of every tile, and half of the columns of O.
struct Consumer {
    const Params& p;
    const Shared& s;
    int warpgroup, first_row, warp_row;  // rows: of the tile

    Tile tile{};
    TileWalk own;              // over the key tiles that the warpgroup's rows see
    OnlineSoftmax<1> softmax;  // the maxima are common, the sums of the block's own keys
    Dropout dropout;
    Partner partner;
    Shared::PieceRing ring, done;  // the next piece, and the first one that is not given back
    Shared::QRing q_ring;

    Accumulator<1, COLUMNS / 8> o;
    Probabilities probabilities;
    unsigned unseen = 0;  // CLEARS: of the tile's keys the lane's own (32 n + lane) that key_mask hides, in bits n

    __device__ Consumer(const Params& p, const Shared& s, int warpgroup)
        : p(p),
          s(s),
          warpgroup(warpgroup),
          first_row(64 * warpgroup),
          warp_row(first_row + threadIdx.x / 32 % 4 * 16),
          softmax(Pairs(p, {}).factor()),
          dropout(p),
          partner(s.partner(threadIdx.x / 32 - 4)),
          ring(s.pieces()),
          done(s.pieces()),
          q_ring(s.q_ring(warpgroup)) {}

    __device__ Placement<> placement(int key = 0) const { return {tile.head.q, tile.queries.begin, key, warp_row}; }
    __device__ Range queries() const { return {tile.queries.begin + first_row, tile.queries.begin + first_row + 64}; }

    __device__ void give_back(int pieces) {
        for (; pieces > 0; pieces--) {
            done.release();
            done.advance();
        }
    }
    // Of a tile that is hidden from all rows of the warpgroup.
    __device__ void pass(int pieces) {
        for (; pieces > 0; pieces--) {
            ring.wait_full();
            ring.advance();
            give_back(1);
        }
    }
    __device__ void release_q() {
        q_ring.release();
        q_ring.advance();
    }

    // S = Q K^T of the own keys, in the background. All pieces but the last are given back.
    __device__ void start_scores(Scores& scores) {
        for_constants<K_PIECES>([&](auto piece) {
            constexpr int N = piece.value, FIRST = N * K_COLUMNS;
            ring.wait_full();
            QTile q = s.q();
            KPiece k{s.piece(ring.stage)};
            mark_changed(q.base);  // else the addresses of all operands are kept from tile to tile
            constexpr int COUNT = DOT - FIRST < K_COLUMNS ? DOT - FIRST : K_COLUMNS;
            start_product<COUNT, N != 0, 0, 0>(
                scores, [&](int i) { return q.along_rows(first_row, FIRST / 16 + i); },
                [&](int i) { return k.along_rows(0, i); });
            ring.advance();
            if constexpr (N > 0) {
                wgmma_wait<1>();
                give_back(1);
            }
        });
    }

    // Start O += P V of V_PIECES pieces, a group each, whose first key is number `key` of the tile.
    __device__ void add_values(const Probabilities& x, int key, unsigned unseen_of_v) {
#pragma unroll
        for (int n = 0; n < V_PIECES; n++) {
            ring.wait_full();
            VPiece v{s.piece(ring.stage)};
            if constexpr (CLEARS) clear_values(v, unseen_of_v >> (key / 32 + n));
            v = v.without_rank();
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < V_KEYS / 16; k++) wgmma(o.x[0], x.x[V_KEYS / 16 * n + k], v.down_columns(k), Product());
            wgmma_commit();
            ring.advance();
        }
    }
    // Zeros in V of unseen keys, whatever the other warpgroup has done there.
    __device__ void clear_values(VPiece v, unsigned unseen_of_v) const {
        static_assert(V_KEYS == 32);
        DeadRows<V_KEYS> dead([&](int) { return unseen_of_v & 1; });
        if (!dead.any()) return;
        dead.clear_many<4>(v, threadIdx.x / 32 % 4);
        fence_async();
        sync_threads<128>(1 + warpgroup);
    }
    __device__ int own_part() const { return s.rank * OWN_KEYS; }
    __device__ int other_part() const { return (1 - s.rank) * OWN_KEYS; }

    // Products become scores, hidden ones -inf.
    __device__ void mask(Scores& scores, int step) {
        Pairs pairs(p, tile.head);
        int key = s.own_key(own.tile(step));
        Placement<> at = placement(key);
        InMemory<1, false> arrays(pairs, at);
        score(scores, at, pairs, arrays);
        if constexpr (CLEARS) {
            int first = own.tile(step) * KEYS + threadIdx.x % 32;
            unseen = 0;
#pragma unroll
            for (int n = 0; n < KEYS; n += 32)
                unseen |= unsigned(first + n < tile.head.keys(p) && !pairs.key_seen(first + n)) << n / 32;
        }
        if (own.tests(p, tile.head, queries(), step))
            hide(scores, at, pairs, KeysSeen<OWN_KEYS>(pairs, key), arrays, MINUS_INFINITY);
    }

    // A key tile: S, its softmax and, but of the first one, O += P V of the tile before. (Or V of that is passed.)
    template <bool FIRST>
    __device__ void visit(int step, bool passes = false) {
        Scores scores;
        Probabilities others;
        unsigned unseen_before = unseen;
        start_scores(scores);
        if constexpr (FIRST) {
            wgmma_wait<0>();
        } else {
            add_values(probabilities, own_part(), unseen_before);
            partner.receive(others);
            wgmma_wait<V_PIECES>();
        }
        changed(scores);
        give_back(1);
        if (own.after(step) == 0) release_q();
        if (FIRST && passes) pass(2 * V_PIECES);
        float largest[1][2], far_largest[1][2], shrink[1][2];
        mask(scores, step);
        softmax.row_maximum(scores, largest);
        partner.send(largest);
        if constexpr (!FIRST) add_values(others, other_part(), unseen_before);
        partner.receive(far_largest);
#pragma unroll
        for (int h = 0; h < 2; h++) largest[0][h] = larger(largest[0][h], far_largest[0][h]);
        bool grown = softmax.raise(largest, shrink);
        softmax.exponentiate(scores);
        drop(scores, placement(s.own_key(own.tile(step))), tile.head.batch, dropout);
        if constexpr (!FIRST) {
            // (Never true; but exponentials are not moved behind the next wait, which would then be in vain.)
            if (__any_sync(~0u, softmax.sum[0][0] + softmax.sum[0][1] < 0)) ring.wait_full();
            wgmma_wait<V_PIECES>();
            was_read(probabilities);
            changed(scores);
            give_back(V_PIECES);
        }
        probabilities.template take<0, OWN_KEYS, DROPOUT>(scores);
        partner.send(probabilities);
        if constexpr (!FIRST) {
            added(V_PIECES);
            was_read(others);
            if (__builtin_expect(grown, false)) softmax.scale_rows(o, shrink);
        }
    }
    __device__ void added(int pieces) {
        wgmma_wait<0>();
        changed(o);
        give_back(pieces);
    }

    // O += P V of the last tile.
    __device__ void finish() {
        Probabilities others;
        add_values(probabilities, own_part(), unseen);
        partner.receive(others);
        add_values(others, other_part(), unseen);
        added(2 * V_PIECES);
        was_read(probabilities);
        was_read(others);
    }

    // All key tiles. Pieces come in this order: K of a tile, and V of the one before.
    __device__ void visit_all(const TileWalk& all) {
        constexpr int K = K_PIECES, V = 2 * V_PIECES;
        int before = all.before(own), behind = all.behind(own), step = own.start();
        if (before > 0) pass(K + (before - 1) * (K + V));
        visit<true>(step, before > 0);
        for (step = own.next(step); own.has(step); step = own.next(step)) visit<false>(step);
        if (behind > 0) pass(K);
        finish();
        if (behind > 0) pass((behind - 1) * K + behind * V);
    }

    // The sums of rows over all keys; then lse, and what O is to be multiplied by.
    __device__ void close() {
        float far_sum[1][2];
        softmax.add_lanes();
        partner.send(softmax.sum);
        partner.receive(far_sum);
        softmax.add(far_sum);
        Pairs pairs(p, tile.head);
        softmax.close(pairs.unit(), kept(p), [&](int) -> float { return pairs.sink(tile.head.q); });
        if (p.lse == nullptr || s.rank > 0 || threadIdx.x % 4 > 0) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = placement()(Scores::row(0, 2 * h), 0).i;
            if (i < tile.head.queries(p)) p.lse[tile.head.row_number(p, i)] = softmax.maximum[0][h];
        }
    }

    // O leaves through the place of P: the partner writes there when it has the next tile's first numbers.
    __device__ void store() {
        softmax.scale_rows(o, softmax.sum);
        const Strides& to = p.out_strides;
        int column = s.column(), first = tile.queries.begin + warp_row, queries = tile.head.queries(p);
        Out* out = tile.head.query_row(p.out, to) + column;
        store_rows_through(s.strip(threadIdx.x / 32 - 4), o, aligned(out, to.row, p.dim_v - column), p.dim_v - column,
                           [&](int row) { return first + row < queries ? out + (first + row) * to.row : nullptr; });
    }

    __device__ void run() {
        TileSchedule schedule(p);
        while (true) {
            q_ring.wait_full();
            int number = __shfl_sync(~0u, int(load_shared(s.note(warpgroup))), 0);
            if (number < 0) return;
            tile = schedule.tile(number);
            Range q{queries().begin, min(queries().end, tile.head.queries(p))}, keys = Band{p, tile.head}.keys_of(q);
            TileWalk all(p, tile.head, tile.queries);
            bool any = q.begin < q.end && keys.begin < keys.end;
            own = all.part(keys, any);
            softmax = OnlineSoftmax<1>(Pairs(p, tile.head).factor());
            o.clear();
            if (any) {
                visit_all(all);
            } else {
                pass(all.count() * (K_PIECES + 2 * V_PIECES));
                release_q();
            }
            close();
            store();
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    Shared s(shared_address(memory));
    if (threadIdx.x == 0) {
        s.init();
        mbarrier_init_fence();
        tma_prefetch(maps.q);
        tma_prefetch(maps.k);
        tma_prefetch(maps.v);
    }
    sync_cluster();
    let_next_kernel_start();
    wait_for_kernel_before();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) load(p, maps, s);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer(p, s, warpgroup).run();
    }
    sync_cluster();  // shared memory goes with the block
}
