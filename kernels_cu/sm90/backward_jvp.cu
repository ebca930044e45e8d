// The tangent of attention's backward along tangents of Q, K, V and dO, for Hopper, from what the forward and its
// tangent left (attention/tangents.cuh has the formulas of a pair):
//
//     tdQ = scale (tdX K + dX tK)    tdK = scale (tdX^T Q + dX^T tQ)    tdV = tP^T dO + P^T tdO
//
// In two kernels that each own what they sum: nothing is added up in memory, every run gives the same bits, and no
// workspace grows with the lengths' product. One owns 64 queries of a head for each warpgroup and visits tiles of keys,
// the other 64 keys, which all heads that share them visit. Either side of the scores has a first array (Q, K) and a
// second one (dO, V): what is owned, and what visits, is the same code.
#include "attention/dead_rows.cuh"
#include "attention/dropped.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/backward_jvp_tiles.cuh"
#include "sm90/turns.cuh"

// The second result, which keys alone have.
template <bool GIVEN>
struct SecondSum {
    Accumulator<1, DIM_V / 8> x;
};
template <>
struct SecondSum<false> {};

// A warpgroup with 64 rows of what the block owns.
template <bool OWNS_KEYS>
struct Consumer {
    using Of = Sides<OWNS_KEYS>;
    static constexpr int VISITED = Of::VISITED, N = VISITED / 8;
    static constexpr bool OWN_FIRST_MOVES = Of::Own::FIRST_MOVES, OWN_SECOND_MOVES = Of::Own::SECOND_MOVES;
    static constexpr bool FIRST_MOVES = Of::Visitor::FIRST_MOVES, SECOND_MOVES = Of::Visitor::SECOND_MOVES;
    static constexpr int AFTER_SCORES =
        OWN_FIRST_MOVES + FIRST_MOVES + MOVES + OWN_SECOND_MOVES + SECOND_MOVES;  // products
    using Scores = Accumulator<1, N>;
    using Place = Placement<OWNS_KEYS>;

    const Params& p;
    Of& s;
    OwnTile<OWNS_KEYS> tile;
    int warpgroup, first, warp_row;  // the warpgroup's first row in the head; the warp's in the tile
    float factor;
    Dropout dropout;
    Turns<TURNS ? WARPGROUPS : 1, 1 + WARPGROUPS> turns;
    float numbers[OWNS_KEYS ? 1 : 2][NUMBERS];  // of the lane's queries

    // The warpgroup's rows of the own arrays, where there are registers for them.
    static constexpr int HELD = OWNS_KEYS ? KEYS_HELD : QUERIES_HELD;
    Operand<HELD >= 1 ? DOT : 16> first_held;
    Operand<HELD >= 2 ? DOT_V : 16> second_held;
    Operand<HELD == 3 && OWN_FIRST_MOVES ? DOT : 16> first_tangent_held;
    Operand<HELD == 3 && OWN_SECOND_MOVES ? DOT_V : 16> second_tangent_held;

    Accumulator<1, DIM / 8> sum;
    SecondSum<OWNS_KEYS> second;
    // What a visitor adds to them is added under the scores of the next one, where registers allow it.
    static constexpr bool LAGS = AHEAD && !OWNS_KEYS;
    static_assert(Of::STAGES > LAGS, "what is owed keeps a stage while the next visitor has another");
    static constexpr int ADDED = 1 + FIRST_MOVES + (OWNS_KEYS ? MOVES + TDOUT : 0);  // products
    Operand<VISITED> tdx_operand, dx_operand, tp_operand, p_operand;
    bool owed = false;              // whether that is still to be done
    unsigned owed_tile, owed_slot;  // where it lies, and its barrier

    __device__ Consumer(const Params& p, Of& s, const OwnTile<OWNS_KEYS>& tile, int warpgroup)
        : p(p),
          s(s),
          tile(tile),
          warpgroup(warpgroup),
          first(tile.first + 64 * warpgroup),
          warp_row(64 * warpgroup + threadIdx.x / 32 % 4 * 16),
          factor(Pairs(p, tile.head).factor()),
          dropout(p),
          turns{warpgroup} {
        sum.clear();
        if constexpr (OWNS_KEYS) second.x.clear();
        if constexpr (!OWNS_KEYS) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int i = tile.first + warp_row + threadIdx.x % 32 / 4 + 8 * h;
                const float* from = numbers_of(p, tile.head, i / ROWS);
#pragma unroll
                for (int n = 0; n < NUMBERS; n++)
                    numbers[h][n] = i < tile.head.queries(p) ? from[place_of(n, i % ROWS)]
                                    : n == LSE               ? MINUS_INFINITY
                                                             : 0;
            }
        }
    }

    __device__ Place placement(const Head& head, int n) const {
        if constexpr (OWNS_KEYS)
            return {head.q, n * VISITED, tile.first + warp_row};
        else
            return {head.q, tile.first + warp_row, n * VISITED};
    }

    // Whether any pair of the warpgroup's rows and a visitor's is visible by position.
    __device__ bool sees(const Head& head, int n) const {
        Range own{first, first + 64}, of = OWNS_KEYS
                                               ? Band{p, head}.queries_of({own.begin, min(own.end, head.keys(p))})
                                               : Band{p, head}.keys_of({own.begin, min(own.end, head.queries(p))});
        bool any = own.begin < (OWNS_KEYS ? head.keys(p) : head.queries(p));
        return any && of.begin < (n + 1) * VISITED && of.end > n * VISITED;
    }

    // f(n, e, numbers) for the elements of an accumulator; `numbers`: of the element's query.
    template <class F>
    __device__ void each(F f) const {
#pragma unroll
        for (int n = 0; n < N; n++) {
            if constexpr (OWNS_KEYS) {
                float of[2][NUMBERS];
#pragma unroll
                for (int number = 0; number < NUMBERS; number += 2) {
                    uint4 words = load_shared_16(s.numbers() + 4 * place_of(number, 8 * n + threadIdx.x % 4 * 2));
                    of[0][number] = __uint_as_float(words.x), of[1][number] = __uint_as_float(words.y);
                    of[0][number + 1] = __uint_as_float(words.z), of[1][number + 1] = __uint_as_float(words.w);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) f(n, e, of[e % 2]);
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) f(n, e, numbers[e / 2]);
            }
        }
    }

    // Rows may hold anything where key_mask hides a key, or leaves a query none. (What is dead by position no map knows
    // of.)
    __device__ void clear_dead(const Head& head, int n) {
        if constexpr (KEY_MASK) {
            DeadRows<VISITED> dead([&](int i) {
                if constexpr (OWNS_KEYS)
                    return __uint_as_float(load_shared(s.numbers() + 4 * place_of(LSE, i))) == MINUS_INFINITY;
                return n * VISITED + i < head.keys(p) && !Pairs(p, head).key_seen(n * VISITED + i);
            });
            if (!dead.any()) return;
            s.visitor().clear(dead);
            fence_async();
            sync_threads<128>(1 + warpgroup);
        }
    }

    // Products of the own arrays and a visitor's, in the background.
    template <bool ADD = false, class Tile>
    __device__ void start_first(Scores& sum, Tile b) const {
        if constexpr (HELD >= 1)
            start_ABt<DOT, ADD>(sum, first_held, b);
        else
            start_ABt<DOT, ADD>(sum, s.own().first(), 64 * warpgroup, b);
    }
    template <bool ADD = false, class Tile>
    __device__ void start_second(Scores& sum, Tile b) const {
        if constexpr (HELD >= 2)
            start_ABt<DOT_V, ADD>(sum, second_held, b);
        else
            start_ABt<DOT_V, ADD>(sum, s.own().second(), 64 * warpgroup, b);
    }

    template <class Tile>
    __device__ void start_first_tangent(Scores& sum, Tile b) const {
        if constexpr (HELD == 3)
            start_ABt<DOT>(sum, first_tangent_held, b);
        else
            start_ABt<DOT>(sum, s.own().first_tangent(), 64 * warpgroup, b);
    }
    template <class Tile>
    __device__ void start_second_tangent(Scores& sum, Tile b) const {
        if constexpr (HELD == 3)
            start_ABt<DOT_V>(sum, second_tangent_held, b);
        else
            start_ABt<DOT_V>(sum, s.own().second_tangent(), 64 * warpgroup, b);
    }

    __device__ void pass() {
        settle();
        turns.wait();
        turns.pass();
        s.ring.pass();
    }

    // LATER: another visitor came before, which is owed.
    template <bool LATER>
    __device__ void visit(const Head& head, int n, TileBits bits) {
        s.ring.wait_full();
        clear_dead(head, n);
        typename Of::Visitor other = s.visitor();
        Scores x, tx, dp, tdp;
        turns.wait();
        start_first(x, other.first());
        if constexpr (OWN_FIRST_MOVES) start_first_tangent(tx, other.first());
        if constexpr (FIRST_MOVES) start_first<OWN_FIRST_MOVES>(tx, other.first_tangent());
        if constexpr (MOVES) start_second(dp, other.second());
        if constexpr (OWN_SECOND_MOVES) start_second_tangent(tdp, other.second());
        if constexpr (SECOND_MOVES) start_second<OWN_SECOND_MOVES>(tdp, other.second_tangent());
        turns.pass();

        // P, hidden ones 0, and what is known of a pair's slope by its score alone.
        MovingPairs pairs(p, head, bits);
        Place at = placement(head, n);
        InMemory<1, OWNS_KEYS> arrays(pairs, at);
        Lines<1, OWNS_KEYS, InMemory<1, OWNS_KEYS>> lines(pairs, at, arrays);
        Scores slopes, bends;
        if (LATER) add();
        wgmma_wait<AFTER_SCORES + (LATER ? ADDED : 0)>();
        changed(x);
        each([&](int n, int e, const float (&of)[NUMBERS]) {
            int r = x.row(0, e), c = x.column(n, e);
            float& s = x.x[0][n][e];
            slopes.x[0][n][e] = lines.slope(s, r, c);
            if (MovingPairs::BENDS) bends.x[0][n][e] = pairs.bend(s, 1, at(r, c));
            s = exp2_approx(lines.template exponent<false>(s, r, c, factor, of[LSE]));
        });
        Range mine{first, first + 64}, others{n * VISITED, n * VISITED + VISITED};
        bool tests = OWNS_KEYS ? pairs.tests_backward(others, mine) : pairs.tests(mine, others);
        if (tests) {
            keep_branch();
            KeysSeen<OWNS_KEYS ? 16 : VISITED> seen(pairs, OWNS_KEYS ? tile.first + warp_row : n * VISITED);
            hide(x, at, pairs, seen, arrays, 0);
        }
        drop(x, at, head.batch, dropout);
        wgmma_wait<LATER ? ADDED : 0>();
        changed(tx);
        changed(dp);
        changed(tdp);
        if (tests || SCORE) {  // what is hidden, or without weight, whatever else is known of it
            keep_branch();
            each([&](int n, int e, const float (&)[NUMBERS]) {
                if (x.x[0][n][e] != 0) return;
                tx.x[0][n][e] = dp.x[0][n][e] = tdp.x[0][n][e] = slopes.x[0][n][e] = bends.x[0][n][e] = 0;
            });
        }

        // tP, dX, tdX.
        Scores tp;
        each([&](int n, int e, const float (&of)[NUMBERS]) {
            float weight = x.x[0][n][e], slope = slopes.x[0][n][e], ts = PRODUCTS_MOVE ? tx.x[0][n][e] : 0;
            float& dz = dp.x[0][n][e];
            float& tdz = tdp.x[0][n][e];
            float t = MOVES ? moved_probability(p, weight, slope, ts, of) : 0;
            move_pair(weight, t, dz, tdz, of);
            tp.x[0][n][e] = DROPOUT && weight < 0 ? 0 : t;
            tx.x[0][n][e] = slope * dz;
            tdz = MovingPairs::BENDS ? fma(bends.x[0][n][e] * ts, dz, slope * tdz) : slope * tdz;
        });

        if (LATER) added();
        tdx_operand.take(tdp);
        if constexpr (FIRST_MOVES) dx_operand.take(tx);
        if constexpr (OWNS_KEYS && MOVES) tp_operand.take(tp);
        if constexpr (OWNS_KEYS && TDOUT) p_operand.template take<0, VISITED, DROPOUT>(x);
        owed_tile = other.base, owed_slot = s.ring.empty();
        owed = true;
        if (!LAGS) settle();
        s.ring.advance();
    }

    // What the visitor before adds, in the background.
    __device__ void add() {
        typename Of::Visitor from{owed_tile};
        start_AB<VISITED>(sum, tdx_operand, from.first());
        if constexpr (FIRST_MOVES) start_AB<VISITED>(sum, dx_operand, from.first_tangent());
        if constexpr (OWNS_KEYS && MOVES) start_AB<VISITED>(second.x, tp_operand, from.second());
        if constexpr (OWNS_KEYS && TDOUT) start_AB<VISITED>(second.x, p_operand, from.second_tangent());
    }
    __device__ void added() {
        wgmma_wait<0>();
        changed(sum);
        if constexpr (OWNS_KEYS) changed(second.x);
        mbarrier_arrive_warp(owed_slot);
        owed = false;
    }
    __device__ void settle() {
        if (!owed) return;
        add();
        added();
    }

    __device__ void run() {
        mbarrier_wait(s.own_barrier(), 0);
        if constexpr (HELD >= 1) first_held.load(s.own().first(), warp_row);
        if constexpr (HELD >= 2) second_held.load(s.own().second(), warp_row);
        if constexpr (HELD == 3 && OWN_FIRST_MOVES) first_tangent_held.load(s.own().first_tangent(), warp_row);
        if constexpr (HELD == 3 && OWN_SECOND_MOVES) second_tangent_held.load(s.own().second_tangent(), warp_row);
        turns.start();
        tile.for_visitors(p, [&](const Head& head, int n, TileBits bits) {
            if (!walk::LISTED && !sees(head, n))
                pass();
            else if (LAGS && owed)
                visit<LAGS>(head, n, bits);
            else
                visit<false>(head, n, bits);
        });
        settle();
        sum.each([&](float& x, int, int) { x *= p.scale; });
        const Head& head = tile.head;
        int row = tile.first + warp_row;
        if constexpr (OWNS_KEYS) {
            int keys = head.keys(p);
            store_result(sum, head.key_row(p.tdk, p.tdk_strides), p.tdk_strides, row, keys, p.dim);
            store_result(second.x, head.key_row(p.tdv, p.tdv_strides), p.tdv_strides, row, keys, p.dim_v);
        } else {
            store_result(sum, head.query_row(p.tdq, p.tdq_strides), p.tdq_strides, row, head.queries(p), p.dim);
        }
    }
};

template <bool OWNS_KEYS>
__device__ void work(const Params& p, const TensorMaps& maps, unsigned memory) {
    Sides<OWNS_KEYS> s(memory);
    if (threadIdx.x == 0) {
        s.ring.init();
        mbarrier_init(s.own_barrier(), 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    OwnTile<OWNS_KEYS> tile(p, blockIdx.x);
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup == -1) {
        shrink_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) load(p, maps, s, tile);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer<OWNS_KEYS>(p, s, tile, warpgroup).run();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_jvp_dq(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    work<false>(p, maps, shared_address(memory));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_jvp_dk_dv(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    work<true>(p, maps, shared_address(memory));
}

// The numbers of a tile of ROWS queries.
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_jvp_prepare(const __grid_constant__ Params p, const __grid_constant__ TensorMaps) {
    auto [head, tile] = numbered<QueryTiles<ROWS>>(p, blockIdx.x);
    float* to = numbers_of(p, head, tile);
    for_numbers<ROWS>(p, head, tile, [&](int number, int r, float x) { to[place_of(number, r)] = x; });
}
