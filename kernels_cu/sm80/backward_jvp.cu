// What the backward's dQ, dK and dV change by along tangents of Q, K, V and dO, on the tensor cores of Ampere and every
// GPU after it; lse, delta and what these change by are known of each query. With z the scores and x the scaled
// products:
//
//     dz = P (dP - delta)    tP = P (tz - tlse)    tdz = tP (dP - delta) + P (tdP - tdelta)
//     dx = slope dz    tdx = slope tdz + bend dz    bend: what the slope changes by
//     tdQ = scale (tdx K + dx tK)    tdK = scale (tdx^T Q + dx^T tQ)    tdV = tP^T dO + P^T tdO
//
// Thread blocks, warps and stages are those of the backward (backward.cu), with the tangents that are given beside Q,
// K, V and dO. What is not given has no place in shared memory, and no products.
#include "attention/tangents.cuh"
#include "sm80/key_block.cuh"
#include "sm80/tangents.cuh"

// Where some warps would compute the same scores, they compute S and dP apart in double precision.
constexpr bool APART = SIZE == 8 && QUERY_WARPS < COLUMN_WARPS;

// Which of these go through shared memory: tdx, for tdQ; dx; tP and P, where warps share keys.
constexpr bool DX_STORED = TK || (SPLIT_QUERIES && TQ) || APART, TP_STORED = SPLIT_QUERIES && MOVES,
               P_STORED = SPLIT_QUERIES && TDOUT;

// Where things lie in shared memory.
struct Shared {
    static constexpr int NUMBERS = 4;  // of a query: -lse and -delta as the backward has them, tlse and tdelta
    static constexpr bool CLEARS_V = false;
    static constexpr int V_TILES = (1 + TK) * KTile::BYTES;
    static constexpr int S_TILES = V_TILES + (1 + TV) * VTile::BYTES;
    static constexpr int RING = S_TILES + (1 + DX_STORED + TP_STORED + P_STORED) * STile::BYTES;
    static constexpr int DO_TILES = (1 + TQ) * QTile::BYTES;  // of a stage
    static constexpr int ROW_VALUES = DO_TILES + (1 + TDOUT) * DOTile::BYTES;
    static constexpr int STAGE = ROW_VALUES + NUMBERS * ROWS * SIZE;
    static constexpr int MAXIMA = RING + STAGES * STAGE;  // of the warps, in two parts
    static constexpr int END = MAXIMA + (PARTS == 2 ? 3 * 4 * WARPS : 0);
    static_assert(END + 4 <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");  // 4: the ticket

    unsigned base;

    __device__ KTile k_tile() const { return {base}; }
    __device__ KTile tk_tile() const { return {base + TK * KTile::BYTES}; }
    __device__ VTile v_tile() const { return {base + V_TILES}; }
    __device__ VTile tv_tile() const { return {base + V_TILES + TV * VTile::BYTES}; }
    __device__ STile tdx_tile() const { return {base + S_TILES}; }
    __device__ STile dx_tile() const { return {tdx_tile().base + STile::BYTES}; }
    __device__ STile tp_tile() const { return {dx_tile().base + DX_STORED * STile::BYTES}; }
    __device__ STile p_tile() const { return {tp_tile().base + TP_STORED * STile::BYTES}; }
    __device__ QTile q_tile(int stage) const { return {base + RING + stage * STAGE}; }
    __device__ QTile tq_tile(int stage) const { return {q_tile(stage).base + TQ * QTile::BYTES}; }
    __device__ DOTile do_tile(int stage) const { return {q_tile(stage).base + DO_TILES}; }
    __device__ DOTile tdo_tile(int stage) const { return {do_tile(stage).base + TDOUT * DOTile::BYTES}; }
    __device__ unsigned row_values(int stage) const { return q_tile(stage).base + ROW_VALUES; }
    __device__ static Accum* numbers(const Params& p, long long tile) { return p.delta + tile * (NUMBERS * ROWS); }
};

// The powers of two with which these are split.
struct Powers {
    PowerOfTwo tdx{1}, dx{1}, tp{1};
};

struct Block : KeyBlock<Shared> {
    using KeyBlock::KeyBlock;

    // A tile of queries.
    __device__ void visit(const Step& at, int stage) {
        MovingPairs pairs(p, at.head, walk.bits<true>(at.step, keys));
        int tile_q = walk.tile(at.step), i0 = tile_q * ROWS + warp_query, j0 = keys.begin + warp_key;
        Placement<true> placement{at.head.q, i0, j0};
        InMemory<M, true> arrays(pairs, placement);
        Lines<M, true, InMemory<M, true>> lines(pairs, placement, arrays);
        // What the tile's Q, dO and the keys have in memory, while it arrives.
        KeysSeen<WARP_KEYS> seen(pairs, j0);
        float q_unit = operand_unit<OfQ>(p, at.head, tile_q), tq_unit = operand_unit<OfTQ>(p, at.head, tile_q);
        float do_unit = operand_unit<OfDO>(p, at.head, tile_q), tdo_unit = operand_unit<OfTDO>(p, at.head, tile_q);
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before
        clear_queries(at.head, tile_q * ROWS, stage);

        // S^T = K Q^T and its tangent. The copies of the next tile ride along.
        Scores products, tx, x;
        unsigned values = s.row_values(stage) + SIZE * warp_query;
        auto score = [&] {
            using Operand = FromShared<KTile>;
            auto k = moved<TK>(Operand{s.k_tile(), warp_key}, Operand{s.tk_tile(), warp_key}, k_unit, tk_unit);
            auto q = moved<TQ>(s.q_tile(stage), s.tq_tile(stage), q_unit, tq_unit);
            if constexpr (STAGES == 2 && !APART) {
                load_queries(next(at), 1 - stage, [&](auto... copies) {
                    multiply_moved<DIM, true>(products, tx, k, q, warp_query,
                                              [&](int k) { (copies.template part<DIM / 16>(k), ...); });
                });
                cp_async_commit();
            } else {
                multiply_moved<DIM, true>(products, tx, k, q, warp_query, Nothing());
            }
        };

        // P^T = exp(S^T - lse), hidden ones 0, those that dropout drops negative
        auto exponentiate = [&] {
            x = products;
            ColumnVector<WARP_QUERIES / 8> minus_lse;
            minus_lse.load(values);
            x.each([&](Accum& s, int r, int c) { s = probability(lines.score(s, r, c), factor, minus_lse[c]); });
            drop(x, placement, at.head.batch, dropout);
            if (pairs.tests_backward({i0, i0 + WARP_QUERIES}, {j0, j0 + WARP_KEYS})) {
                keep_branch();
                hide(x, placement, pairs, seen, arrays, 0);
            }
            if constexpr (P_STORED) x.template store<DROPOUT>(s.p_tile(), warp_key, warp_query, p_times);
        };

        // dP^T = V dO^T and its tangent
        Scores dx, tdx;
        auto differentiate = [&] {
            using Operand = FromShared<VTile>;
            auto v = moved<TV>(Operand{s.v_tile(), warp_key}, Operand{s.tv_tile(), warp_key}, v_unit, tv_unit);
            auto d = moved<TDOUT>(s.do_tile(stage), s.tdo_tile(stage), do_unit, tdo_unit);
            multiply_moved<DIM_V, false>(dx, tdx, v, d, warp_query, Nothing());
        };

        // In the place of dP, tdP and what products change by: dx, tdx, tP.
        auto combine = [&] {
            ColumnVector<WARP_QUERIES / 8> minus_delta, tlse, tdelta;
            minus_delta.load(values + SIZE * ROWS);
            tlse.load(values + 2 * SIZE * ROWS);
            tdelta.load(values + 3 * SIZE * ROWS);
            dx.each(
                [&](Accum& dp, int r, int c, Accum& tdp, Accum& ts, Accum& probability, Accum& s) {
                    bool dropped = DROPOUT && probability < 0;
                    MovingRow row{0, -minus_delta[c], tlse[c], tdelta[c]};
                    MovedPair pair(DROPOUT ? fabs(probability) : probability, s, ts, dropped ? 0 : dp,
                                   dropped ? 0 : tdp, row, pairs, placement(r, c));
                    dp = pair.dx, tdp = pair.tdx, ts = dropped ? 0 : pair.tp;
                },
                tdx, tx, x, products);
        };

        Powers powers;
        auto keep = [&](const Scores& x, STile tile, float times) { x.store(tile, warp_key, warp_query, times); };
        auto store = [&] {
            keep(tdx, s.tdx_tile(), powers.tdx.times);
            if (DX_STORED) keep(dx, s.dx_tile(), powers.dx.times);
            if (TP_STORED) keep(tx, s.tp_tile(), powers.tp.times);
        };
        if constexpr (APART) {
            if (STAGES == 2) load_queries(next(at), 1 - stage);
            int part = column_warp / QUERY_WARPS;
            if (part == 0) {
                score();
                exponentiate();
            } else if (part == 1) {
                differentiate();
                keep(tdx, s.tdx_tile(), 1);  // where tdx and dx will be
                keep(dx, s.dx_tile(), 1);
            }
            __syncthreads();
            if (part == 0) {
                fetch(tdx, s.tdx_tile());
                fetch(dx, s.dx_tile());
                combine();
                store();
            }
        } else {
            score();
            exponentiate();
            differentiate();
            combine();
            powers = powers_of(tdx, dx, tx);
            store();
        }
        float tp_unit = do_unit * powers.tp.unit, p_unit = tdo_unit / p_times;
        if constexpr (!SPLIT_QUERIES) {
            FromRegisters<M, WARP_QUERIES / 8> of_tp{tx, powers.tp.times};
            FromRegisters<M, WARP_QUERIES / 8, DROPOUT> of_p{x, p_times};
            if constexpr (MOVES) mma_AB<ROWS>(dv, of_tp, s.do_tile(stage), 0, Nothing(), tp_unit);
            if constexpr (TDOUT) mma_AB<ROWS>(dv, of_p, s.tdo_tile(stage), 0, Nothing(), p_unit);
        }
        __syncthreads();

        // tdQ += tdx K + dx tK. The additions in memory ride along the products that follow: in one burst they would
        // hold up the loads of those.
        DqPart dq(warp);
        dq.multiply(s.tdx_tile(), s.k_tile(), k_unit * powers.tdx.unit);
        if constexpr (TK) dq.multiply(s.dx_tile(), s.tk_tile(), tk_unit * powers.dx.unit);
        long long number = QueryTiles<ROWS>::number(p, at.head, tile_q);
        if (DETERMINISTIC) wait_for_turn(p, at.head, tile_q, number, tile);
        Accum* dq_sum = dq.place(p, number);
        constexpr int BEFORE = TP_STORED + P_STORED, STEPS = ROWS / 16 * (BEFORE + 1 + TQ);
        auto along = [&](int product) {
            return [&, product](int k) { dq.add<STEPS>(dq_sum, ROWS / 16 * product + k); };
        };
        float tdx_unit = q_unit * powers.tdx.unit, dx_unit = tq_unit * powers.dx.unit;
        if constexpr (SPLIT_QUERIES) {
            using Operand = FromShared<STile>;
            Operand of_tp{s.tp_tile(), warp_key}, of_p{s.p_tile(), warp_key};
            int column = column_warp * (DIM_V / COLUMN_WARPS);
            if constexpr (MOVES) mma_AB<ROWS>(dv, of_tp, s.do_tile(stage), column, along(0), tp_unit);
            if constexpr (TDOUT) mma_AB<ROWS>(dv, of_p, s.tdo_tile(stage), column, along(TP_STORED), p_unit);
            Operand of_tdx{s.tdx_tile(), warp_key}, of_dx{s.dx_tile(), warp_key};
            column = column_warp * (DIM / COLUMN_WARPS);
            mma_AB<ROWS>(dk, of_tdx, s.q_tile(stage), column, along(BEFORE), tdx_unit);
            if constexpr (TQ) mma_AB<ROWS>(dk, of_dx, s.tq_tile(stage), column, along(BEFORE + 1), dx_unit);
        } else {
            FromRegisters<M, WARP_QUERIES / 8> of_tdx{tdx, powers.tdx.times}, of_dx{dx, powers.dx.times};
            mma_AB<ROWS>(dk, of_tdx, s.q_tile(stage), 0, along(0), tdx_unit);
            if constexpr (TQ) mma_AB<ROWS>(dk, of_dx, s.tq_tile(stage), 0, along(1), dx_unit);
        }
        leave(at, number);
    }

    // What another warp has stored for the same scores.
    __device__ void fetch(Scores& x, STile tile) const {
#pragma unroll
        for (int line = 0; line < 2 * M; line++)
#pragma unroll
            for (int n = 0; n < WARP_QUERIES / 8; n++) {
                int row = Scores::row(line / 2, line % 2 * 2), column = Scores::column(n, 0);
                auto pair = load_shared_pair<Accum>(tile.address(warp_key + row, warp_query + column));
                x.x[line / 2][n][line % 2 * 2] = pair.x, x.x[line / 2][n][line % 2 * 2 + 1] = pair.y;
            }
    }

    // Of the largest numbers in all warps.
    __device__ Powers powers_of(Scores& tdx, Scores& dx, Scores& tp) const {
        float largest[3] = {1, 1, 1};
        if constexpr (PARTS == 2) {
            auto size = [](Scores& x) {
                float found = 0;
                x.each([&](Accum& y, int, int) { found = fmaxf(found, finite_size(y)); });
                return found;
            };
            largest[0] = size(tdx), largest[1] = size(dx), largest[2] = size(tp);
            largest_of_block<WARPS>(largest, s.base + Shared::MAXIMA);
        }
        return {largest[0], largest[1], largest[2]};
    }

    __device__ void finish() { KeyBlock::finish(p.tdk, p.tdk_strides, p.tdv, p.tdv_strides); }
};

// Launched where there are two parts.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) attention_split(const __grid_constant__ Params p) {
    if constexpr (PARTS == 2) split_operands<OfQ, OfK, OfV, OfDO, OfTQ, OfTK, OfTV, OfTDO>(p, blockIdx.x);
}

// What each query brings (attention/exact_delta.cuh); zeros where the tdQ of this tile will be summed.
extern "C" __global__ void __launch_bounds__(128) attention_backward_jvp_prepare(const __grid_constant__ Params p) {
    clear_dq(p, blockIdx.x);
    HeadTile at = numbered<QueryTiles<ROWS>>(p, blockIdx.x);
    if (config::PACKED_Q && at.none()) return;
    const Head& head = at.head;
    Accum* numbers = Shared::numbers(p, blockIdx.x);
    int first = at.number * ROWS;
    for_exact_row_sums<ROWS, OfDO>(p, head, at.number, p.out, p.out_strides,
                                   [&](int i, Accum sum) { write_prepared<ROWS>(p, head, numbers, first, i, sum); });
    // The same lanes have the same rows.
    for_exact_row_sums<ROWS, OfDO>(p, head, at.number, p.tout, p.tout_strides, [&](int i, Accum sum) {
        bool there = i < head.queries(p) && p.lse[head.row_number(p, i)] != MINUS_INFINITY;
        numbers[i - first + 2 * ROWS] = there ? p.tlse[head.row_number(p, i)] : 0;
        Accum tdlse = there && p.tdlse != nullptr ? p.tdlse[head.row_number(p, i)] : 0;
        numbers[i - first + 3 * ROWS] = there ? (sum - tdlse) * kept(p) : 0;
    });
    if constexpr (TDOUT)
        for_exact_row_sums<ROWS, OfTDO>(p, head, at.number, p.out, p.out_strides, [&](int i, Accum sum) {
            bool there = i < head.queries(p) && p.lse[head.row_number(p, i)] != MINUS_INFINITY;
            if (there) numbers[i - first + 3 * ROWS] += sum * kept(p);
        });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_backward_jvp(const __grid_constant__ Params p) {
    visit_queries<Block>(p);
}

extern "C" __global__ void __launch_bounds__(128) attention_backward_jvp_finish(const __grid_constant__ Params p) {
    finish_dq(p, p.tdq, p.tdq_strides);
}
