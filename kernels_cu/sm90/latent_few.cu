// Latent attention (latent.cu) for few rows of queries: these are the columns of S^T = K Q^T and of O^T = V^T P^T, so
// that products are as wide as there are rows, and not 64.
//
// O^T of 512 columns of V and up to 32 rows is small enough for one warpgroup. So each of two has every other key tile
// of a walk, with maxima and sums of its own, and both results are added when the walk is over: nothing is exchanged
// before. A tile of K comes and is given back in groups of 192 columns, as many of which are in flight as have room:
// what binds here is memory.
#include "attention/dead_rows.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "ptx/barrier.cuh"
#include "sm90/latent_load.cuh"
#include "tile/rows.cuh"

static_assert(ROWS <= 32 && KEYS == 64 && V_PARTS == 1 && !(PACKED_Q || BATCH_INVARIANT || DROPOUT || KEY_MASK));
static_assert(AHEAD == 0 && DIM == 576 && DIM_V == 512);

// Barriers of threads: of each warpgroup alone, and both.
enum { OWN = 1, BOTH = 3 };

using KGroup = SwizzledTile<KEYS, 192>;    // columns of a tile of K
using LatentP = SwizzledTile<ROWS, KEYS>;  // P^T, turned
constexpr int GROUPS = DIM / KGroup::COLUMNS, BLOCKS_V = DIM_V / 64;

// Shared memory: Q; two places for P of each warpgroup; places for groups of K, as many as fit; numbers of rows;
// barriers; what is told of a tile of queries.
struct Shared {
    static constexpr int P_TILES = LatentQ::BYTES, NUMBERS = P_TILES + 4 * LatentP::BYTES;
    static constexpr int MAXIMA = NUMBERS + 2 * 16 * ROWS, BARRIERS = MAXIMA + 2 * 4 * ROWS, NOTE = BARRIERS + 256;
    static constexpr int K_TILES = (NOTE + PieceNote::BYTES + 1023) / 1024 * 1024;
    static constexpr int PLACES = (SHARED_MEMORY - K_TILES) / KGroup::BYTES / 2;  // of a warpgroup
    static_assert(PLACES >= GROUPS && PLACES <= 7);

    unsigned base;

    __device__ LatentQ q() const { return {base}; }
    // The n-th group of a warpgroup since the start.
    __device__ KGroup group(int half, unsigned n) const {
        return {base + K_TILES + (half * PLACES + n % PLACES) * KGroup::BYTES};
    }
    __device__ LatentP p(int half, int n) const { return {base + P_TILES + (2 * half + n) * LatentP::BYTES}; }
    // Of a row: what a warp of a warpgroup has, and what all of that have.
    __device__ unsigned number(int half, int warp, int row) const {
        return base + NUMBERS + 4 * ((4 * half + warp) * ROWS + row);
    }
    __device__ unsigned maximum(int half, int row) const { return base + MAXIMA + 4 * (half * ROWS + row); }
    __device__ PieceNote note() const { return {base + NOTE}; }

    __device__ unsigned full(int half, unsigned n) const { return base + BARRIERS + 8 * (half * PLACES + n % PLACES); }
    __device__ unsigned empty(int half, unsigned n) const { return full(half, n) + 8 * 15; }
    __device__ unsigned q_full() const { return base + BARRIERS + 8 * 30; }
    __device__ unsigned q_empty() const { return q_full() + 8; }

    __device__ void init() const {
        for (unsigned n = 0; n < PLACES; n++)
            for (int half = 0; half < 2; half++) mbarrier_init(full(half, n), 1), mbarrier_init(empty(half, n), 4);
        mbarrier_init(q_full(), 1);
        mbarrier_init(q_empty(), 8);
    }
    __device__ void wait_full(int half, unsigned n) const { mbarrier_wait(full(half, n), n / PLACES % 2); }
    __device__ void wait_empty(int half, unsigned n) const { mbarrier_wait(empty(half, n), n / PLACES % 2 ^ 1); }
};

// As the producer loads K: tiles in turn to the places of one warpgroup and of the other, in groups.
struct Ring {
    Shared s;
    unsigned loaded[2] = {};  // groups so far

    __device__ void load(const KeyTile& tile, int n) {
        n % 2 ? load_groups(tile, 1, loaded[1]) : load_groups(tile, 0, loaded[0]);
    }

   private:
    __device__ void load_groups(const KeyTile& tile, int half, unsigned& loaded) const {
        for (int group = 0; group < GROUPS; group++, loaded++) {
            unsigned barrier = s.full(half, loaded);
            if (threadIdx.x == 0) {
                s.wait_empty(half, loaded);
                mbarrier_arrive_expect(barrier, KGroup::BYTES);
            }
            tile.load(s.group(half, loaded), barrier, group * KGroup::COLUMNS);
        }
    }
};

// A warpgroup with every other key tile.
struct Consumer : PieceResults {
    static constexpr int N = ROWS / 8;
    using Scores = Accumulator<1, N>;  // S^T
    using ByRow = Accumulator<N, 1>;   // the same numbers, a row of queries in a row, as the softmax takes them

    Shared s;
    int half, warp;

    TileWalk walk;
    OnlineSoftmax<N> softmax;  // of the warpgroup's own tiles; sums of a lane's keys
    Scores o[BLOCKS_V];
    unsigned first = 0;  // of the tile's groups of K, among all of the warpgroup so far

    __device__ Consumer(const Params& p, Shared s, int half)
        : PieceResults{p}, s(s), half(half), warp(threadIdx.x / 32 % 4), softmax(Pairs(p, {}).factor()) {}

    // Which row of the tile of queries a column of the lane is, and where that stands.
    __device__ static int row(int n, int e) { return Scores::column(n, e); }
    __device__ Pair pair(int row) const { return TileRows{head().q, piece.tile.queries.begin, 0}(row, 0); }
    template <class F>
    __device__ static void each_row(F f) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) f(n, e);
    }

    // S^T = K Q^T of the tile whose first group is c, in the background.
    __device__ void start_scores(Scores& scores, unsigned c) const {
        for_constants<GROUPS>([&](auto g) {
            constexpr int G = decltype(g)::value, BEFORE = G * KGroup::COLUMNS;
            constexpr int COUNT = DOT - BEFORE < KGroup::COLUMNS ? DOT - BEFORE : KGroup::COLUMNS;
            s.wait_full(half, c + G);
            KGroup k = s.group(half, c + G);
            LatentQ q = s.q();
            mark_changed(k.base);
            mark_changed(q.base);
            start_product<COUNT, (G > 0), 0, 0>(
                scores, [&](int i) { return k.along_rows(0, i); },
                [&](int i) { return q.along_rows(0, BEFORE / 16 + i); });
        });
    }

    // What is hidden becomes -inf.
    __device__ void hide_pairs(Scores& scores, int key) const {
        Band band{p, head()};
        each_row([&](int n, int e) {
            Range seen = band.keys_of(pair(row(n, e)).i);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int j = key + 16 * warp + Scores::row(0, 2 * h);
                if (j < seen.begin || j >= seen.end) scores.x[0][n][2 * h + e] = MINUS_INFINITY;
            }
        });
    }

    // Products become probabilities, which are stored. Maxima are those of before as long as all fit beside them.
    __device__ void take(Scores& scores, unsigned c, int step, LatentP to) {
        int key = walk.tile(step) * KEYS;
        Pairs pairs(p, head());
        Placement<true> at{head().q, piece.tile.queries.begin, key + 16 * warp};
        InMemory<1, true> arrays(pairs, at);
        score(scores, at, pairs, arrays);
        int begin = piece.tile.queries.begin;
        if (walk.tests(p, head(), {begin, begin + HEAD_ROWS}, step)) hide_pairs(scores, key);
        clear_keys(c, key);
        ByRow by_row;
        to_rows(scores, by_row);
        ByRow kept = by_row;
        auto store = [&] {
            from_rows(by_row, scores);
            store_rounded<true>(scores, to, 0, 16 * warp);
            fence_async();
        };
        Accum added[N][2];
        bool fits = softmax.template exponentiate_blindly<1>(
            by_row, added, [](Accum s, Accum factor, Accum x) { return fma(s, factor, x); }, [](auto) {});
        store();
        if (all_threads<128>(OWN + half, fits)) {
            softmax.add(added);
            return;
        }
        Accum largest[N][2], shrink[N][2];
        each_row([&](int n, int e) {
            Accum x = larger(kept.x[n][0][2 * e], kept.x[n][0][2 * e + 1]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
            if (threadIdx.x % 32 < 4) store_shared_number(s.number(half, warp, row(n, e)), x);
        });
        sync_threads<128>(OWN + half);
        each_row([&](int n, int e) {
            Accum x = softmax.maximum[n][e];
#pragma unroll
            for (int w = 0; w < 4; w++) x = larger(x, load_shared_number(s.number(half, w, row(n, e)), Accum()));
            largest[n][e] = x;
        });
        if (softmax.raise(largest, shrink)) scale(shrink);
        by_row = kept;
        softmax.exponentiate(by_row);
        store();
        sync_threads<128>(OWN + half);
    }
    __device__ static void to_rows(const Scores& s, ByRow& to) {
        each_row([&](int n, int e) { to.x[n][0][2 * e] = s.x[0][n][e], to.x[n][0][2 * e + 1] = s.x[0][n][2 + e]; });
    }
    __device__ static void from_rows(const ByRow& p, Scores& to) {
        each_row([&](int n, int e) { to.x[0][n][e] = p.x[n][0][2 * e], to.x[0][n][2 + e] = p.x[n][0][2 * e + 1]; });
    }
    __device__ void scale(const Accum (&times)[N][2]) {
#pragma unroll
        for (int t = 0; t < BLOCKS_V; t++)
            each_row([&](int n, int e) { o[t].x[0][n][e] *= times[n][e], o[t].x[0][n][2 + e] *= times[n][e]; });
    }

    // Zeros in V of keys that no query sees. (All are told to wait behind this.)
    __device__ void clear_keys(unsigned c, int key) const {
        if constexpr (!K_ENDS) return;
        Range live = head().live_keys(p);
        if (live.end >= key + KEYS && (!walk::BOUND_FIRST || key >= live.begin)) return;
        DeadRows<KEYS> dead([&](int j) { return key + j >= live.end || (walk::BOUND_FIRST && key + j < live.begin); });
        for (int g = 0; g < GROUPS; g++) dead.clear_many<4>(s.group(half, c + g), warp);
    }

    // O^T += V^T P^T. Each group is given back when its products are done.
    __device__ void add(unsigned c, LatentP probabilities) {
        for_constants<BLOCKS_V>([&](auto t) {
            constexpr int T = decltype(t)::value;
            KGroup v = s.group(half, c + T / 3);
            mark_changed(v.base);
            start_AtBt<KEYS, ADD>(o[T], v, T % 3, probabilities, 0);
        });
        wgmma_wait<BLOCKS_V - 3>();
        mbarrier_arrive_warp(s.empty(half, c));
        wgmma_wait<BLOCKS_V - 6>();
        mbarrier_arrive_warp(s.empty(half, c + 1));
        wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < BLOCKS_V; t++) changed(o[t]);
        mbarrier_arrive_warp(s.empty(half, c + 2));
    }

    // The n-th tile of a walk.
    __device__ void visit(unsigned n, int step) {
        unsigned c = first + GROUPS * (n / 2);
        Scores scores;
        start_scores(scores, c);
        wgmma_wait<0>();
        changed(scores);
        LatentP probabilities = s.p(half, n / 2 % 2);
        take(scores, c, step, probabilities);
        mark_changed(probabilities.base);
        add(c, probabilities);
    }

    // Sums of rows over both; then lse, and what the own O is to be multiplied by.
    __device__ void close() {
        each_row([&](int n, int e) {
            Accum x = softmax.sum[n][e];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
            if (threadIdx.x % 32 < 4) {
                store_shared_number(s.number(half, warp, row(n, e)), x);
                if (warp == 0) store_shared_number(s.maximum(half, row(n, e)), softmax.maximum[n][e]);
            }
        });
        sync_threads<256>(BOTH);
        Accum own[N][2];
        each_row([&](int n, int e) {
            Accum maxima[2], sums[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                maxima[k] = load_shared_number(s.maximum(k, row(n, e)), Accum()), sums[k] = 0;
#pragma unroll
                for (int w = 0; w < 4; w++) sums[k] += load_shared_number(s.number(k, w, row(n, e)), Accum());
            }
            Accum top = softmax.maximum[n][e] = larger(maxima[0], maxima[1]), sum = 0;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                Accum times =
                    maxima[k] == MINUS_INFINITY ? 0 : exp2_approx((maxima[k] - top) * softmax.row_factor(n, e));
                sum = fma(sums[k], times, sum);
                if (k == half) own[n][e] = times;
            }
            softmax.sum[n][e] = sum;
        });
        Pairs pairs(p, head());
        softmax.close(pairs.unit(), 1, [&](int r) -> float {  // (row r of an accumulator is one of a lane's columns)
            return sink(pairs, pair(row(r / 16, r / 8 % 2)));
        });
        each_row([&](int n, int e) { own[n][e] *= softmax.sum[n][e]; });
        scale(own);
        if (takes_lse() && half == 0 && warp == 0 && threadIdx.x % 32 < 4)
            each_row([&](int n, int e) { store_lse(row(n, e), pair(row(n, e)), softmax.maximum[n][e]); });
    }

    // Each warpgroup stores a half of the columns of O, and the other hands it its own by the place of Q: those of four
    // blocks of columns of V.
    template <int FIRST>
    __device__ void hand_over() const {
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int n = 0; n < N; n++)
                store_shared_16(s.base + 16 * (128 * (N * t + n) + threadIdx.x % 128), o[FIRST + t].x[0][n]);
    }
    template <int FIRST>
    __device__ void add_handed() {
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                uint4 x = load_shared_16(s.base + 16 * (128 * (N * t + n) + threadIdx.x % 128));
                float(&to)[4] = o[FIRST + t].x[0][n];
                to[0] += __uint_as_float(x.x), to[1] += __uint_as_float(x.y);
                to[2] += __uint_as_float(x.z), to[3] += __uint_as_float(x.w);
            }
    }
    template <int FIRST>
    __device__ void store() const {
        const Strides& strides = p.out_strides;
        Out* out = head().query_row(p.out, strides);
        each_row([&](int n, int e) {
            Pair x = pair(row(n, e));
            if (!real(x)) return;
            int column = 64 * FIRST + 16 * warp + Scores::row(0, 0);
            if (cut()) {
                float* to = p.share_out + left(row(n, e), x) * DIM_V + column;
#pragma unroll
                for (int t = 0; t < 4; t++)
#pragma unroll
                    for (int h = 0; h < 2; h++) to[64 * t + 8 * h] = o[FIRST + t].x[0][n][2 * h + e];
            } else {
                Out* to = out + (x.head - head().q) * strides.head + x.i * strides.row + column;
#pragma unroll
                for (int t = 0; t < 4; t++)
#pragma unroll
                    for (int h = 0; h < 2; h++) to[64 * t + 8 * h] = from_float<Out>(o[FIRST + t].x[0][n][2 * h + e]);
            }
        });
    }

    __device__ void run() {
        for (unsigned tiles = 0;; tiles++) {
            mbarrier_wait(s.q_full(), tiles % 2);
            if (!s.note().told(p, piece)) return;
            walk = TileWalk(piece.keys);
            int count = walk.count(), step = walk.start();
            softmax = OnlineSoftmax<N>(Pairs(p, head()).factor());
#pragma unroll
            for (int t = 0; t < BLOCKS_V; t++) o[t].clear();
            if (half == 1) step = walk.next(step);
            for (int n = half; n < count; n += 2, step = walk.next(walk.next(step))) visit(n, step);
            first += GROUPS * ((count + 1 - half) / 2);
            close();
            if (half == 1) hand_over<0>();
            sync_threads<256>(BOTH);
            if (half == 0) add_handed<0>();
            sync_threads<256>(BOTH);
            if (half == 0) hand_over<4>();
            sync_threads<256>(BOTH);
            if (half == 1) add_handed<4>();
            fence_async();
            mbarrier_arrive_warp(s.q_empty());
            if (half == 0)
                store<0>();
            else
                store<4>();
        }
    }
};

extern "C" __global__ void __launch_bounds__(LATENT_THREADS, 1)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ LatentMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    run_block<Ring, Consumer>(p, maps, Shared{shared_address(memory)});
}
