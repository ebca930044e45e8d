// The tangent of attention's forward from the O and lse that it left, on the tensor cores of Ampere and every GPU
// after:
//
//     tS = tQ K^T + Q tK^T    w = P (scale slope tS - c)    tO = w V + P tV - rowsum(w) O    tlse = rowsum(w) + c
//
// c is any number of a row's own. The mean over the first key tile that has weight (attention/shift.cuh) keeps w small
// where all keys share a tangent, which rounding w would show. P is known from lse, as in the backward: there is no
// maximum to look for.
//
// Thread blocks, warps and stages are those of the forward (forward.cu), with tQ, tK, tV beside Q, K, V. What is not
// given has no place in shared memory, and no products.
#include "attention/exact_lse.cuh"
#include "attention/shift.cuh"
#include "attention/tangents.cuh"
#include "sm80/query_block.cuh"
#include "sm80/tangents.cuh"

constexpr int LINES = 2 * M;  // rows of a lane
static_assert(COLUMN_WARPS <= 2 && !AGAIN);

constexpr bool WEIGHED = SCORES_MOVE;  // else tO = P tV
// P sums to 1 but for what rounds lse. Where that shows, tlse is divided by the sum. (tO is as exact as P is.)
constexpr bool DIVIDED = WEIGHED && sizeof(In) == 4;

using Scores = Accumulator<M, WARP_KEYS / 8>;

// One number for each row from each of the two warps that share it.
struct Exchange {
    unsigned base;
    int row, row_warp, column_warp;

    // The sums over both.
    __device__ void add(Accum (&x)[LINES]) const {
        sync_threads<64>(1 + row_warp);  // both are done with what was there
#pragma unroll
        for (int line = 0; line < LINES; line++)
            if (threadIdx.x % 4 == 0) store_shared_number(address(line) + SIZE * column_warp, x[line]);
        sync_threads<64>(1 + row_warp);
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            auto both = load_shared_pair<Accum>(address(line));
            x[line] = both.x + both.y;
        }
    }

   private:
    __device__ unsigned address(int line) const { return base + 2 * SIZE * (row + 8 * line + threadIdx.x % 32 / 4); }
};

// The sums over the lanes that have parts of a row.
__device__ inline void add_lanes(Accum (&x)[LINES]) {
#pragma unroll
    for (int line = 0; line < LINES; line++)
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) x[line] += __shfl_xor_sync(~0u, x[line], lanes);
}

// Where things lie in shared memory.
struct Shared {
    static constexpr int Q_TILES = (1 + TQ) * QTile::BYTES;
    static constexpr int RING = Q_TILES > OTile::BYTES || PARTS == 2 ? Q_TILES : OTile::BYTES;
    static constexpr int K_TILES = (1 + TK) * KTile::BYTES;
    static constexpr int STAGE = K_TILES + (WEIGHED + TV) * VTile::BYTES;
    static constexpr int P_TILE = RING + STAGES * STAGE;
    static constexpr int W_TILE = P_TILE + TV * PTile::BYTES;
    static constexpr int EXCHANGE = W_TILE + WEIGHED * PTile::BYTES;
    static constexpr int MAXIMA = EXCHANGE + 2 * SIZE * ROWS;  // of the warps
    static constexpr int END = SPLIT_K ? MAXIMA + (PARTS == 2 ? 4 * WARPS : 0) : P_TILE;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    unsigned base;

    __device__ QTile q_tile() const { return {base}; }
    __device__ QTile tq_tile() const { return {base + TQ * QTile::BYTES}; }
    __device__ OTile o_tile() const { return {base}; }
    __device__ KTile k_tile(int stage) const { return {base + RING + stage * STAGE}; }
    __device__ KTile tk_tile(int stage) const { return {k_tile(stage).base + TK * KTile::BYTES}; }
    __device__ VTile v_tile(int stage) const { return {k_tile(stage).base + K_TILES}; }
    __device__ VTile tv_tile(int stage) const { return {v_tile(stage).base + WEIGHED * VTile::BYTES}; }
    __device__ PTile p_tile() const { return {base + P_TILE}; }
    __device__ PTile w_tile() const { return {base + W_TILE}; }
};

struct Block : QueryBlock<Shared> {
    float tq_unit, p_times;  // what P is multiplied by where it is split; it is at most 1 / kept
    Dropout dropout;
    Accum factor;
    // Of the lane's rows: -lse; c; rowsum(w) and rowsum(P), of this lane's columns.
    Accum minus_lse[LINES], centre[LINES], sum[LINES], mass[LINES];
    unsigned waiting = 0;  // rows that have no c so far, as bits
    Output o;

    __device__ Block(const Params& p, Shared s, Head head, int tile)
        : QueryBlock<Shared>(p, s, head, tile),
          tq_unit(operand_unit<OfTQ>(p, head, tile)),
          p_times(PowerOfTwo(1 / kept(p)).times),
          dropout(p),
          factor(exponent_factor(Pairs(p, head))) {
        o.clear();
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            int i = query(line);
            Accum lse = i < head.queries(p) ? p.lse[head.row_number(p, i)] : MINUS_INFINITY;
            bool any = lse != MINUS_INFINITY;
            minus_lse[line] = any ? -lse_of_kept(p, lse) * (EXACT_LSE ? 1 : LOG2_E) : MINUS_INFINITY;
            centre[line] = sum[line] = mass[line] = 0;
            if (WEIGHED && any) waiting |= 1u << line;
        }
    }

    __device__ int query(int line) const { return queries.begin + warp_row + Scores::row(line / 2, line % 2 * 2); }

    // The copies of a step's tiles of keys; behind the end of the walk there is nothing to read, nor behind the last
    // live key.
    template <class Of, class Tile>
    __device__ auto copy_keys(Tile tile, int step) const {
        int row = walk.tile(step) * KEYS;
        auto from = operand_rows<Of>(p, head, row);
        from.count = walk.has(step) ? head.live_keys(p).end - row : 0;
        return AsyncCopy<THREADS, KEYS, Tile::COLUMNS>(tile, from);
    }
    // along(copies of K and tK), along(copies of V and tV): so many of each as there are.
    template <class F>
    __device__ void copy_scores(int step, int stage, F along) const {
        auto k = copy_keys<OfK>(s.k_tile(stage), step);
        if constexpr (TK)
            along(k, copy_keys<OfTK>(s.tk_tile(stage), step));
        else
            along(k);
    }
    template <class F>
    __device__ void copy_values(int step, int stage, F along) const {
        if constexpr (WEIGHED && TV)
            along(copy_keys<OfV>(s.v_tile(stage), step), copy_keys<OfTV>(s.tv_tile(stage), step));
        else if constexpr (WEIGHED)
            along(copy_keys<OfV>(s.v_tile(stage), step));
        else if constexpr (TV)
            along(copy_keys<OfTV>(s.tv_tile(stage), step));
        else
            along();
    }

    template <class Of>
    __device__ void copy_queries(QTile tile) const {
        int rows = head.queries(p) - queries.begin;
        AsyncCopy<THREADS, ROWS, QTile::COLUMNS>(tile, operand_rows<Of>(p, head, queries.begin, rows)).all();
    }

    // Q, and the first K and V.
    __device__ void load_first() const {
        auto all = [](auto... copies) { (copies.all(), ...); };
        copy_queries<OfQ>(s.q_tile());
        if constexpr (TQ) copy_queries<OfTQ>(s.tq_tile());
        copy_scores(walk.start(), 0, all);
        if (STAGES == 2) copy_values(walk.start(), 0, all);
        cp_async_commit();
    }

    __device__ void clear_values(int tile, int stage) const {
        clear_dead_keys(tile, [&](const DeadRows<KEYS>& dead) {
            if (WEIGHED) dead.clear<WARPS>(s.v_tile(stage), threadIdx.x / 32);
            if (TV) dead.clear<WARPS>(s.tv_tile(stage), threadIdx.x / 32);
        });
    }

    // Products become probabilities, hidden ones 0, and their tangents those of the scores.
    __device__ void exponentiate(Scores& x, Scores& tx, int step, const KeysSeen<WARP_KEYS>& seen) const {
        MovingPairs pairs(p, head, walk.bits(step, queries));
        int row = queries.begin + warp_row, key = walk.tile(step) * KEYS + warp_key;
        Placement<> at{head.q, row, key};
        bool tests = pairs.tests({row, row + WARP_ROWS}, {key, key + WARP_KEYS});
        InMemory<M, false> arrays(pairs, at);
        Lines<M, false, InMemory<M, false>> lines(pairs, at, arrays);
        x.each(
            [&](Accum& s, int r, int c, Accum& ts) {
                if (WEIGHED) ts = pairs.tangent(s, ts, at(r, c));
                s = probability(lines.score(s, r, c), factor, minus_lse[r / 8]);
            },
            tx);
        if (tests) {
            keep_branch();
            hide(x, at, pairs, seen, arrays, 0);
        }
    }

    // c of rows whose first tile with weight this is: the mean of the scores' tangents.
    __device__ void find_centres(const Scores& x, const Scores& tx, const Exchange& exchange) {
        Accum mass[LINES] = {}, mean[LINES] = {};
#pragma unroll
        for (int line = 0; line < LINES; line++)
#pragma unroll
            for (int n = 0; n < WARP_KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    Accum weight = x.x[line / 2][n][line % 2 * 2 + e], tangent = tx.x[line / 2][n][line % 2 * 2 + e];
                    mass[line] += weight;
                    mean[line] = weight == 0 ? mean[line] : fma(weight, tangent, mean[line]);
                }
        add_lanes(mass);
        add_lanes(mean);
        if (SPLIT_K) {
            exchange.add(mass);
            exchange.add(mean);
        }
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            if (!(waiting >> line & 1) || !(mass[line] > NO_WEIGHT)) continue;
            waiting &= ~(1u << line);
            centre[line] = mean[line] * reciprocal_approx(mass[line]);
        }
    }

    // P and what the tangents of its scores make of it, as operands of tO: dropped ones 0.
    __device__ void weigh(Scores& x, Scores& tx, int tile, const Exchange& exchange) {
        if constexpr (WEIGHED) {
            if (__any_sync(~0u, waiting)) {
                keep_branch();
                find_centres(x, tx, exchange);
            }
            tx.each(
                [&](Accum& w, int r, int, Accum& probability) {
                    // By a mask or not: what has no weight adds nothing, whatever its tangent is.
                    w = probability == 0 ? 0 : probability * (w - centre[r / 8]);
                    sum[r / 8] += w;
                    if (DIVIDED) mass[r / 8] += probability;
                },
                x);
        }
        if constexpr (DROPOUT) {
            drop(x, Placement<>{head.q, queries.begin + warp_row, tile * KEYS + warp_key}, head.batch, dropout);
            tx.each([](Accum& w, int, int, Accum& probability) { w = probability < 0 ? 0 : w; }, x);
        }
    }

    // A tile of keys, under whose products the next K and V are on their way.
    __device__ void visit(int step, int stage) {
        Exchange exchange{s.base + Shared::EXCHANGE, warp_row, row_warp, column_warp};
        int next = walk.next(step), tile = walk.tile(step);
        // What the tile's K, V and keys have in memory, while it arrives.
        float k_unit = operand_unit<OfK>(p, head, tile), v_unit = operand_unit<OfV>(p, head, tile);
        float tk_unit = operand_unit<OfTK>(p, head, tile), tv_unit = operand_unit<OfTV>(p, head, tile);
        KeysSeen<WARP_KEYS> seen(Pairs(p, head), tile * KEYS + warp_key);
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and everybody is done with the one before
        if (STAGES == 2) clear_values(tile, stage);

        // S = Q K^T and its tangent
        Scores scores, tangents;
        using Operand = FromShared<QTile>;
        auto q = moved<TQ>(Operand{s.q_tile(), warp_row}, Operand{s.tq_tile(), warp_row}, q_unit, tq_unit);
        auto k = moved<TK>(s.k_tile(stage), s.tk_tile(stage), k_unit, tk_unit);
        auto multiply = [&](auto... copies) {
            constexpr int STEPS = STAGES == 1 ? (DIM + 31) / 32 : DIM / 16;
            multiply_moved<DIM, false>(scores, tangents, q, k, warp_key,
                                       [&](int k) { (copies.template part<STEPS>(k), ...); });
        };
        if constexpr (STAGES == 1)
            copy_values(step, 0, multiply);
        else
            copy_scores(next, 1 - stage, [&](auto... of_scores) {
                copy_values(next, 1 - stage, [&](auto... of_values) { multiply(of_scores..., of_values...); });
            });
        cp_async_commit();

        exponentiate(scores, tangents, step, seen);
        weigh(scores, tangents, tile, exchange);

        if (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();  // V has arrived, and everybody is done with K
            clear_values(tile, stage);
        }

        // tO += w V + P tV
        float w_unit = v_unit, p_unit = tv_unit / p_times;
        PowerOfTwo power(1);
        if constexpr (WEIGHED && PARTS == 2) {
            power = PowerOfTwo(largest(tangents));
            w_unit *= power.unit;
        }
        auto add = [&](const auto& probabilities, const auto& weights, auto... copies) {
            auto along = [&](int k) { (copies.template part<KEYS / 16>(k), ...); };
            int column = column_warp * WARP_COLUMNS;
            if constexpr (WEIGHED) mma_AB<KEYS>(o, weights, s.v_tile(stage), column, along, w_unit);
            if constexpr (TV && WEIGHED) mma_AB<KEYS>(o, probabilities, s.tv_tile(stage), column, Nothing(), p_unit);
            if constexpr (TV && !WEIGHED) mma_AB<KEYS>(o, probabilities, s.tv_tile(stage), column, along, p_unit);
            if constexpr (!TV && !WEIGHED) for_constants<KEYS / 16>([&](auto k) { along(k.value); });
        };
        auto add_along = [&](auto... copies) {
            if constexpr (SPLIT_K) {
                if (TV) scores.store<DROPOUT>(s.p_tile(), warp_row, warp_key, p_times);
                if (WEIGHED) tangents.store(s.w_tile(), warp_row, warp_key, power.times);
                sync_row_warps();
                add(FromShared<PTile>{s.p_tile(), warp_row}, FromShared<PTile>{s.w_tile(), warp_row}, copies...);
            } else {
                add(FromRegisters<M, WARP_KEYS / 8, DROPOUT>{scores, p_times},
                    FromRegisters<M, WARP_KEYS / 8>{tangents, power.times}, copies...);
            }
        };
        if constexpr (STAGES == 1)
            copy_scores(next, 0, add_along);
        else
            add_along();
        cp_async_commit();
    }

    // The largest of the weights of a warp, or of all that share them, for the power of two with which they are split.
    __device__ float largest(Scores& weights) const {
        float found = 0;
        weights.each([&](Accum& w, int, int) { found = fmaxf(found, finite_size(w)); });
        if constexpr (SPLIT_K) return largest_of_block<WARPS>(found, s.base + Shared::MAXIMA);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, lanes));
        return found;
    }

    // What all keys have in common is taken off; tlse.
    __device__ void finish() {
        Exchange exchange{s.base + Shared::EXCHANGE, warp_row, row_warp, column_warp};
        cp_async_wait<0>();
        add_lanes(sum);
        if (DIVIDED) add_lanes(mass);
        if (SPLIT_K) exchange.add(sum);
        if (SPLIT_K && DIVIDED) exchange.add(mass);
        Pairs pairs(p, head);
        const Out* out = head.query_row(p.out, p.out_strides, queries.begin);
        int rows = head.queries(p) - queries.begin;
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            int i = query(line), row = i - queries.begin;
            if (row >= rows) continue;
            long long number = head.row_number(p, i);
            Accum total = sum[line] * kept(p), whole = mass[line] * kept(p);
            if constexpr (SINKS) {
                Accum weight = exp2_approx((pairs.sink(head.q) - p.lse[number]) * LOG2_E);
                if (weight > 0) total = fma(weight, sink_tangent(p, head) - centre[line], total);
                whole += weight;
            }
            if (threadIdx.x % 4 == 0 && column_warp == 0)
                p.tlse[number] = centre[line] + (DIVIDED && total != 0 ? total / whole : total);
            if (total == 0) continue;  // a row that sees nothing is 0, whatever stands in O
            const Out* from = out + row * p.out_strides.row + column_warp * WARP_COLUMNS;
#pragma unroll
            for (int n = 0; n < WARP_COLUMNS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int column = Scores::column(n, e);
                    if (column_warp * WARP_COLUMNS + column >= p.dim_v) continue;
                    Accum& x = o.x[line / 2][n][line % 2 * 2 + e];
                    x = fma(-total, Accum(to_float(from[column])), x);
                }
        }
        store_result(rows);
    }

    __device__ void store_result(int rows) {
        Out* to = head.query_row(p.tout, p.tout_strides, queries.begin);
        if constexpr (PARTS == 2) {
            store_floats(o, to, p.tout_strides.row, warp_row, column_warp * WARP_COLUMNS, rows, p.dim_v);
        } else {
            // Through shared memory, where Q was, for whole rows.
            __syncthreads();
            o.store(s.o_tile(), warp_row, column_warp * WARP_COLUMNS);
            if (COLUMN_WARPS > 1) sync_row_warps();
            __syncwarp();
            constexpr int OUT_ROWS = WARP_ROWS / COLUMN_WARPS;
            store_rows<OUT_ROWS>(s.o_tile(), warp_row + column_warp * OUT_ROWS, to, p.tout_strides.row, rows, p.dim_v);
        }
    }
};

// Launched where there are two parts.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) attention_split(const __grid_constant__ Params p) {
    if constexpr (PARTS == 2) split_operands<OfQ, OfK, OfV, OfTQ, OfTK, OfTV>(p, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_jvp(const __grid_constant__ Params p) {
    visit_keys<Block>(p, QuerySchedule(p).tile(blockIdx.x));
}
