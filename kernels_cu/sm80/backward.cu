// FlashAttention-2 backward (Dao 2023, Algorithm 2) on the tensor cores of Ampere and every GPU after it.
//
// A thread block owns KEYS keys of one key/value head, holds their dK and dV in registers, and loops over the query
// tiles that see them, for every query head that shares them. Scores are computed transposed, S^T = K Q^T, so that
// P^T and dS^T stand in registers exactly as the A operands of dV += P^T dO and dK += dS^T Q; only dS goes through
// shared memory, for dQ += dS K, which many thread blocks add to in global memory (dq_sum).
//
// With COLUMN_WARPS of 2 or 4, that many warps share their keys: each computes the scores of its part of the queries,
// P and dS both go through shared memory, and each warp owns its part of the columns of dK and dV. The tiles of a warp
// are nearer to squares then, so that shared memory, which is what binds, is read less often.
//
// WIDE heads fill shared memory with one stage, and registers with dK and dV: dQ is added up half after half, dK comes
// before dV, and the next Q arrives under dV, the next dO under S (docs/notes/wide-heads.md).
#include "sm80/key_block.cuh"

constexpr bool ALONG = DIM > 64;  // exponentials are taken along the product for dP (of few steps: slower, measured)
static_assert(!WIDE || (SPLIT_QUERIES && STAGES == 1));

// Where things lie in shared memory.
struct Shared {
    static constexpr int NUMBERS = 2;  // of a query: -lse, and minus what is subtracted from dP
    static constexpr bool CLEARS_V = true;
    static constexpr int V_TILE = KTile::BYTES;
    static constexpr int DS_TILE = V_TILE + VTile::BYTES;
    static constexpr int P_TILE = DS_TILE + STile::BYTES;  // only where P is shared
    static constexpr int RING = SPLIT_QUERIES ? P_TILE + STile::BYTES : P_TILE;
    static constexpr int ROW_VALUES = QTile::BYTES + DOTile::BYTES;  // of a stage
    static constexpr int STAGE = ROW_VALUES + NUMBERS * ROWS * SIZE;
    static constexpr int MAXIMA = RING + STAGES * STAGE;  // of the warps, in two parts
    static constexpr int END = MAXIMA + (PARTS == 2 ? 4 * WARPS : 0);
    static_assert(END + 4 <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");  // 4: the ticket

    unsigned base;

    __device__ KTile k_tile() const { return {base}; }
    __device__ VTile v_tile() const { return {base + V_TILE}; }
    __device__ STile ds_tile() const { return {base + DS_TILE}; }
    __device__ STile p_tile() const { return {base + P_TILE}; }
    __device__ QTile q_tile(int stage) const { return {base + RING + stage * STAGE}; }
    __device__ DOTile do_tile(int stage) const { return {q_tile(stage).base + QTile::BYTES}; }
    __device__ unsigned row_values(int stage) const { return q_tile(stage).base + ROW_VALUES; }
    __device__ static const Accum* numbers(const Params& p, long long tile) { return prepared_rows<ROWS>(p, tile); }
};

struct Block : KeyBlock<Shared> {
    using KeyBlock::KeyBlock;

    // A tile of queries.
    __device__ void visit(const Step& at, int stage) {
        Pairs pairs(p, at.head, walk.bits<true>(at.step, keys));
        int tile_q = walk.tile(at.step), i0 = tile_q * ROWS + warp_query, j0 = keys.begin + warp_key;
        Placement<true> placement{at.head.q, i0, j0};
        InMemory<M, true> arrays(pairs, placement);
        Lines<M, true, InMemory<M, true>> lines(pairs, placement, arrays);
        // What the tile's Q, dO and the keys have in memory, while it arrives.
        float q_unit = operand_unit<OfQ>(p, at.head, tile_q), do_unit = operand_unit<OfDO>(p, at.head, tile_q);
        KeysSeen<WARP_KEYS> seen(pairs, j0);
        cp_async_wait<WIDE ? 1 : 0>();
        __syncthreads();  // the tile has arrived (of WIDE, Q), and everybody is done with the one before
        clear_queries<true, !WIDE>(at.head, tile_q * ROWS, stage);

        // S^T = K Q^T. The copies of the next tile ride along from the second step on, where there are steps enough:
        // their addresses are not to be reckoned between the arrival of this tile and its first product.
        Scores probabilities, slopes, ds;
        ColumnVector<WARP_QUERIES / 8> minus_lse, minus_delta;
        unsigned lse_address = s.row_values(stage) + SIZE * warp_query, delta_address = lse_address + SIZE * ROWS;
        if (ALONG) {
            minus_lse.load(lse_address);
            minus_delta.load(delta_address);
        }
        probabilities.clear();
        FromShared<KTile> k_operand{s.k_tile(), warp_key};
        if constexpr (STAGES == 2) {
            load_queries(next(at), 1 - stage, [&](auto next_q, auto next_do) {
                constexpr int LATER = ALONG && DIM / 16 > next_q.PIECES && DIM / 16 > next_do.PIECES,
                              STEPS = DIM / 16 - LATER;
                mma_ABt<DIM, true>(probabilities, k_operand, s.q_tile(stage), warp_query, [&](int k) {
                    if (k < LATER) return;
                    next_q.template part<STEPS>(k - LATER);
                    next_do.template part<STEPS>(k - LATER);
                });
            });
            cp_async_commit();
        } else {
            mma_ABt<DIM, true>(probabilities, k_operand, s.q_tile(stage), warp_query);
        }
        if (PARTS == 2) scale_by_units(probabilities, k_unit, q_unit);

        // dP^T = V dO^T, P^T = exp(S^T - lse)
        auto exponential = [&](Accum& x, int r, int c, Accum& slope) {
            slope = lines.slope(x, r, c);
            x = probability(lines.score(x, r, c), factor, minus_lse[c]);
        };
        auto settle = [&] {
            drop(probabilities, placement, at.head.batch, dropout);
            if (pairs.tests_backward({i0, i0 + WARP_QUERIES}, {j0, j0 + WARP_KEYS})) {
                keep_branch();
                hide(probabilities, placement, pairs, seen, arrays, 0);
            }
            if constexpr (SPLIT_QUERIES) probabilities.store<DROPOUT>(s.p_tile(), warp_key, warp_query, p_times);
        };
        if (!ALONG) {
            minus_lse.load(lse_address);
            probabilities.each(exponential, slopes);
            settle();
        }
        if constexpr (WIDE) {
            cp_async_wait<0>();
            __syncthreads();  // dO has arrived
            clear_queries<false, true>(at.head, tile_q * ROWS, stage);
        }
        ds.clear();
        mma_ABt<DIM_V>(ds, FromShared<VTile>{s.v_tile(), warp_key}, s.do_tile(stage), warp_query, [&](int k) {
            if constexpr (ALONG) probabilities.template part<DIM_V / 16>(k, exponential, slopes);
        });
        if (ALONG) settle();

        // dS^T = P^T (dP^T - delta) slope
        if (PARTS == 2) scale_by_units(ds, v_unit, do_unit);
        if (!ALONG) minus_delta.load(delta_address);
        ds.each(
            [&](Accum& x, int, int c, Accum& probability, Accum& slope) {
                x = derivative(probability, x, minus_delta[c]) * Pairs::settled(slope, probability);
            },
            probabilities, slopes);
        PowerOfTwo ds_power(ds_size(ds));
        ds.store(s.ds_tile(), warp_key, warp_query, ds_power.times);
        if constexpr (!SPLIT_QUERIES)
            mma_AB<ROWS>(dv, FromRegisters<M, WARP_QUERIES / 8, DROPOUT>{probabilities, p_times}, s.do_tile(stage), 0,
                         Nothing(), do_unit / p_times);
        __syncthreads();

        // dQ += dS K. The additions in memory ride along the products that follow, dV += P^T dO and dK += dS^T Q: in
        // one burst they would hold up the loads of those.
        DqPart dq(warp);
        dq.multiply(s.ds_tile(), s.k_tile(), k_unit * ds_power.unit);
        long long number = QueryTiles<ROWS>::number(p, at.head, tile_q);
        if (DETERMINISTIC) wait_for_turn(p, at.head, tile_q, number, tile);
        Accum* dq_sum = dq.place(p, number);
        constexpr int OF_PRODUCT = ROWS / 16, STEPS = OF_PRODUCT * (1 + SPLIT_QUERIES);
        auto along = [&](int product) {
            return [&, product](int k) { dq.add<STEPS>(dq_sum, OF_PRODUCT * product + k); };
        };
        if constexpr (WIDE) {
            mma_AB<ROWS>(dk, FromShared<STile>{s.ds_tile(), warp_key}, s.q_tile(stage),
                         column_warp * (DIM / COLUMN_WARPS), [&](int k) { dq.add<OF_PRODUCT>(dq_sum, k); });
            __syncthreads();  // everybody is done with Q
            dq.next();
            dq_sum = dq.place(p, number);
            dq.multiply(s.ds_tile(), s.k_tile(), k_unit * ds_power.unit);
            load_queries(next(at), stage, [&](auto next_q, auto next_do) {
                mma_AB<ROWS>(dv, FromShared<STile>{s.p_tile(), warp_key}, s.do_tile(stage),
                             column_warp * (DIM_V / COLUMN_WARPS), [&](int k) {
                                 next_q.template part<OF_PRODUCT>(k);
                                 dq.add<OF_PRODUCT>(dq_sum, k);
                             });
                cp_async_commit();
                __syncthreads();  // everybody is done with dO
                next_do.all();
            });
            cp_async_commit();
        } else if constexpr (SPLIT_QUERIES) {
            mma_AB<ROWS>(dv, FromShared<STile>{s.p_tile(), warp_key}, s.do_tile(stage),
                         column_warp * (DIM_V / COLUMN_WARPS), along(0), do_unit / p_times);
            mma_AB<ROWS>(dk, FromShared<STile>{s.ds_tile(), warp_key}, s.q_tile(stage),
                         column_warp * (DIM / COLUMN_WARPS), along(1), q_unit * ds_power.unit);
        } else {
            mma_AB<ROWS>(dk, FromRegisters<M, WARP_QUERIES / 8>{ds, ds_power.times}, s.q_tile(stage), 0, along(0),
                         q_unit * ds_power.unit);
        }
        leave(at, number);
    }

    // The largest of the block's dS, for the power of two with which they are split.
    template <int N>
    __device__ float ds_size(Accumulator<M, N>& ds) const {
        if constexpr (PARTS == 2) {
            float largest = 0;
            ds.each([&](float& x, int, int) { largest = fmaxf(largest, finite_size(x)); });
            return largest_of_block<WARPS>(largest, s.base + Shared::MAXIMA);
        }
        return 1;
    }

    __device__ void finish() { KeyBlock::finish(p.dk, p.dk_strides, p.dv, p.dv_strides); }
};

// Launched where there are two parts.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) attention_split(const __grid_constant__ Params p) {
    if constexpr (PARTS == 2) split_operands<OfQ, OfK, OfV, OfDO>(p, blockIdx.x);
}

// What each query brings (attention/exact_delta.cuh); zeros where the dQ of this tile will be summed.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    HeadTile at = numbered<QueryTiles<ROWS>>(p, blockIdx.x);
    clear_dq(p, blockIdx.x);
    if (config::PACKED_Q && at.none()) return;
    prepare_queries<ROWS>(p, at.head, at.number);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward(const __grid_constant__ Params p) {
    visit_queries<Block>(p);
}

extern "C" __global__ void __launch_bounds__(128) attention_backward_finish(const __grid_constant__ Params p) {
    finish_dq(p, p.dq, p.dq_strides);
}
