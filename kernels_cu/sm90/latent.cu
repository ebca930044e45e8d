// The Hopper forward of latent attention: V is the first columns of K, so that a tile of keys stands in shared memory
// once, and O of 64 rows and 512 columns takes the registers of two warpgroups.
//
// Both have the same rows, those of heads that share K, and half of the columns of O each. Key tiles are dealt out in
// turn: warpgroup 0 computes S = Q K^T and its softmax of the first, third, ... tile of a walk, warpgroup 1 of the
// others, and both multiply every P with their half of V. What one computes it keeps in registers and hands to the
// other through shared memory, with the rows' maxima, which are common. So under the softmax of one the tensor cores
// have products of the other. A third warpgroup loads: halves of V are free as soon as their own warpgroup is done with
// them. (The order is that of DeepSeek's FlashMLA.)
#include "attention/dead_rows.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "ptx/barrier.cuh"
#include "sm90/latent_load.cuh"
#include "tile/rows.cuh"

static_assert(ROWS == 64 && KEYS == 64 && V_PARTS == 1 && !(PACKED_Q || BATCH_INVARIANT || DROPOUT || KEY_MASK));

constexpr int HALF = DIM_V / 2;    // columns of O of a warpgroup
constexpr int REST = DIM - DIM_V;  // columns of K that are none of V

// Barriers of threads: of each warpgroup alone, P that each hands over, and both.
enum { OWN = 1, HANDED = 3, BOTH = 5 };

using LatentK = SwizzledTile<KEYS, DIM>;
using LatentV = SwizzledTile<KEYS, HALF>;
using LatentP = SwizzledTile<ROWS, KEYS>;

// Shared memory: Q, two tiles of K, P as it changes hands with two numbers a row, barriers, and what is told of a tile
// of queries.
struct Shared {
    static constexpr int K_TILES = LatentQ::BYTES, P_TILE = K_TILES + 2 * LatentK::BYTES;
    static constexpr int NUMBERS = P_TILE + LatentP::BYTES, BARRIERS = NUMBERS + 2 * 4 * ROWS, NOTE = BARRIERS + 80;
    static_assert(NOTE + PieceNote::BYTES <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    unsigned base;

    __device__ LatentQ q() const { return {base}; }
    __device__ LatentK k(unsigned n) const { return {base + K_TILES + n % 2 * LatentK::BYTES}; }
    __device__ LatentV v(unsigned n, int half) const { return {k(n).base + half * (HALF / 64) * LatentK::BLOCK_BYTES}; }
    __device__ LatentP p() const { return {base + P_TILE}; }
    __device__ unsigned maximum(int row) const { return base + NUMBERS + 4 * row; }
    __device__ unsigned shrink(int row) const { return maximum(ROWS + row); }
    __device__ unsigned sum(int half, int row) const { return maximum(half * ROWS + row); }
    __device__ PieceNote note() const { return {base + NOTE}; }

    // Of the n-th tile of K since the start the half that warpgroup `half` multiplies; the first one with the rest.
    __device__ unsigned full(unsigned n, int half) const { return base + BARRIERS + 8 * (n % 2 * 2 + half); }
    __device__ unsigned empty(unsigned n, int half) const { return full(n, half) + 32; }
    __device__ unsigned q_full() const { return base + BARRIERS + 64; }
    __device__ unsigned q_empty() const { return q_full() + 8; }

    __device__ void init() const {
        for (unsigned n = 0; n < 2; n++)
            for (int half = 0; half < 2; half++) mbarrier_init(full(n, half), 1), mbarrier_init(empty(n, half), 4);
        mbarrier_init(q_full(), 1);
        mbarrier_init(q_empty(), 8);
    }
    __device__ void wait_full(unsigned n, int half) const { mbarrier_wait(full(n, half), n / 2 % 2); }
    __device__ void wait_empty(unsigned n, int half) const { mbarrier_wait(empty(n, half), n / 2 % 2 ^ 1); }
};

// As the producer loads K: the two halves of V of a tile, the first one with the rest.
struct Ring {
    Shared s;
    unsigned loaded = 0;  // tiles so far

    __device__ bool waits() const { return loaded >= 2; }
    __device__ void load(const KeyTile& tile, int) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned barrier = s.full(loaded, half);
            if (threadIdx.x == 0) {
                s.wait_empty(loaded, half);
                mbarrier_arrive_expect(barrier, half == 0 ? LatentK::BYTES - LatentV::BYTES : LatentV::BYTES);
            }
            tile.load(s.v(loaded, half), barrier, half * HALF);
            if (half == 0) tile.load(SwizzledTile<KEYS, REST>{s.v(loaded, 2).base}, barrier, DIM_V);
        }
        loaded++;
    }
};

// A warpgroup with half of the columns of O.
struct Consumer : PieceResults {
    using Scores = Accumulator<1, KEYS / 8>;

    Shared s;
    int half, warp_row;

    TileWalk walk;
    OnlineSoftmax<1> softmax;  // the maxima are common, the sums of the warpgroup's own tiles
    Accumulator<1, HALF / 8> o;
    Operand<KEYS> probabilities;
    unsigned first = 0;  // of the tile's tiles of K, among all so far

    __device__ Consumer(const Params& p, Shared s, int half)
        : PieceResults{p}, s(s), half(half), warp_row(threadIdx.x / 32 % 4 * 16), softmax(Pairs(p, {}).factor()) {}

    __device__ TileRows placement(int key = 0) const { return {head().q, piece.tile.queries.begin, key, warp_row}; }
    __device__ void done_with(unsigned n) const { mbarrier_arrive_warp(s.empty(first + n, half)); }

    // S = Q K^T of the n-th tile, in the background. It begins with the half of K that comes first.
    __device__ void start_scores(Scores& scores, unsigned n) const {
        constexpr int STEPS = HALF / 16;  // of a half
        s.wait_full(first + n, 0);
        LatentQ q = s.q();
        LatentK k = s.k(first + n);
        mark_changed(q.base);  // else the addresses of all operands are kept from tile to tile
        mark_changed(k.base);
        auto place = [](int i) { return i < STEPS ? i : i + STEPS; };
        start_product<DOT - HALF, !ADD, 0, 0>(
            scores, [&](int i) { return q.along_rows(0, place(i)); }, [&](int i) { return k.along_rows(0, place(i)); });
        s.wait_full(first + n, 1);
        start_product<HALF, ADD, 0, 0>(
            scores, [&](int i) { return q.along_rows(0, STEPS + i); },
            [&](int i) { return k.along_rows(0, STEPS + i); });
    }

    // Products become probabilities; what O so far is to be multiplied by. Whether that is not 1.
    __device__ bool take(Scores& scores, int step, float (&shrink)[1][2]) {
        int key = walk.tile(step) * KEYS;
        TileRows at = placement(key);
        Pairs pairs(p, head());
        InMemory<1, false> arrays(pairs, at);
        score(scores, at, pairs, arrays);
        int begin = piece.tile.queries.begin;
        if (walk.tests(p, head(), {begin, begin + HEAD_ROWS}, step))
            hide(scores, at, pairs, KeysSeen<KEYS>(pairs, key), arrays, MINUS_INFINITY);
        float largest[1][2];
        softmax.row_maximum(scores, largest);
        bool grown = softmax.raise(largest, shrink);
        if (!grown) shrink[0][0] = shrink[0][1] = 1;
        softmax.exponentiate(scores);
        return grown;
    }

    // Zeros in V of keys that no query sees: of the n-th tile, for both warpgroups, by the one whose tile it is.
    __device__ void clear_keys(unsigned n, int step) const {
        if constexpr (!K_ENDS) return;
        Range live = head().live_keys(p);
        int key = walk.tile(step) * KEYS;
        if (live.end >= key + KEYS && (!walk::BOUND_FIRST || key >= live.begin)) return;
        DeadRows<KEYS> dead([&](int j) { return key + j >= live.end || (walk::BOUND_FIRST && key + j < live.begin); });
        dead.clear_many<4>(SwizzledTile<KEYS, DIM_V>{s.k(first + n).base}, threadIdx.x / 32 % 4);
        fence_async();
        sync_threads<128>(OWN + half);
    }

    // P and the rows' numbers, to the other warpgroup.
    __device__ void hand_over(const Scores& scores, const float (&shrink)[1][2]) const {
        store_rounded(scores, s.p(), warp_row, 0);
        if (threadIdx.x % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = warp_row + Scores::row(0, 2 * h);
                store_shared_number(s.maximum(row), softmax.maximum[0][h]);
                store_shared_number(s.shrink(row), shrink[0][h]);
            }
        }
        fence_async();
        arrive_threads<256>(HANDED + half);
    }
    // From it: P is there, and O so far, of which no product is under way, shrinks as it says.
    __device__ void receive() {
        float shrink[1][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = warp_row + Scores::row(0, 2 * h);
            softmax.maximum[0][h] = load_shared_number(s.maximum(row), Accum());
            shrink[0][h] = load_shared_number(s.shrink(row), Accum());
        }
        if (__any_sync(~0u, shrink[0][0] != 1 || shrink[0][1] != 1)) {
            softmax.sum[0][0] *= shrink[0][0], softmax.sum[0][1] *= shrink[0][1];
            softmax.scale_rows(o, shrink);
        }
    }
    __device__ void wait_for_other() const { sync_threads<256>(HANDED + (half ^ 1)); }

    // O += P V of the n-th tile, with P of the other warpgroup, or with the own one.
    __device__ void add_others(unsigned n) {
        s.wait_full(first + n, half);
        LatentP a = s.p();
        LatentV b = s.v(first + n, half);
        start_product<KEYS, ADD, 0, 1>(
            o, [&](int k) { return a.along_rows(0, k); }, [&](int k) { return b.down_columns(k); });
    }
    __device__ void add_own(unsigned n) { start_AB<KEYS>(o, probabilities, s.v(first + n, half)); }

    __device__ void added() {
        wgmma_wait<0>();
        changed(o);
    }

    // Of a walk of `count` tiles the first warpgroup computes every other one from the first on, and takes those
    // between. (No product is under way where ways part or meet: the compiler would wait for it. And each tile is given
    // back before anything is waited for, so that the next one is on its way.)
    __device__ void visit_even(int count) {
        int step = walk.start();
        for (unsigned n = 0; n < count; n += 2, step = walk.next(walk.next(step))) {
            Scores scores;
            start_scores(scores, n);
            wgmma_wait<0>();
            changed(scores);
            float shrink[1][2];
            if (take(scores, step, shrink)) softmax.scale_rows(o, shrink);
            clear_keys(n, step);
            hand_over(scores, shrink);
            probabilities.template take<0, KEYS>(scores);
            add_own(n);
            added();
            done_with(n);
            if (n + 1 == count) return;
            wait_for_other();
            receive();
            add_others(n + 1);
            added();
            done_with(n + 1);
        }
    }

    // The second one the others. (Its tile comes to the place of the one before, whose product is to be over.)
    __device__ void visit_odd(int count) {
        int step = walk.next(walk.start());
        unsigned n = 0;
        for (; n + 1 < count; n += 2, step = walk.next(walk.next(step))) {
            Scores scores;
            start_scores(scores, n + 1);
            wait_for_other();
            receive();
            add_others(n);
            wgmma_wait<1>();
            changed(scores);
            float shrink[1][2];
            bool grown = take(scores, step, shrink);
            added();
            done_with(n);
            if (grown) softmax.scale_rows(o, shrink);
            clear_keys(n + 1, step);
            hand_over(scores, shrink);
            probabilities.template take<0, KEYS>(scores);
            add_own(n + 1);
            added();
            done_with(n + 1);
        }
        if (n == count) return;
        wait_for_other();
        receive();
        add_others(n);
        added();
        done_with(n);
    }

    // Sums of rows over all tiles; then lse, and what O is to be multiplied by.
    __device__ void close() {
        softmax.add_lanes();
        sync_threads<256>(BOTH);  // maxima were read
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (threadIdx.x % 4 == 0)
                store_shared_number(s.sum(half, warp_row + Scores::row(0, 2 * h)), softmax.sum[0][h]);
        sync_threads<256>(BOTH);
#pragma unroll
        for (int h = 0; h < 2; h++)
            softmax.sum[0][h] += load_shared_number(s.sum(half ^ 1, warp_row + Scores::row(0, 2 * h)), Accum());
        sync_threads<256>(BOTH);  // before these places are a tile's maxima again
        Pairs pairs(p, head());
        TileRows at = placement();
        softmax.close(pairs.unit(), 1, [&](int r) -> float { return sink(pairs, at(r, 0)); });
        if (takes_lse() && half == 0 && threadIdx.x % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = Scores::row(0, 2 * h);
                store_lse(warp_row + row, at(row, 0), softmax.maximum[0][h]);
            }
        }
    }

    __device__ void store() {
        softmax.scale_rows(o, softmax.sum);
        TileRows at = placement();
        int column = half * HALF;
        if (cut()) {
            store_float_rows(o, true, HALF, [&](int row) -> float* {
                Pair x = at(row, 0);
                return real(x) ? p.share_out + left(warp_row + row, x) * DIM_V + column : nullptr;
            });
        } else {
            const Strides& to = p.out_strides;
            Out* out = head().query_row(p.out, to) + column;
            store_rows(o, to.head % 8 == 0 && aligned(out, to.row, HALF), HALF, [&](int row) -> Out* {
                Pair x = at(row, 0);
                return real(x) ? out + (x.head - head().q) * to.head + x.i * to.row : nullptr;
            });
        }
    }

    __device__ void run() {
        for (unsigned tiles = 0;; tiles++) {
            mbarrier_wait(s.q_full(), tiles % 2);
            if (!s.note().told(p, piece)) return;
            walk = TileWalk(piece.keys);
            int count = walk.count();
            softmax = OnlineSoftmax<1>(Pairs(p, head()).factor());
            o.clear();
            if (half == 0)
                visit_even(count);
            else
                visit_odd(count);
            first += count;
            mbarrier_arrive_warp(s.q_empty());
            close();
            store();
        }
    }
};

extern "C" __global__ void __launch_bounds__(LATENT_THREADS, 1)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ LatentMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    run_block<Ring, Consumer>(p, maps, Shared{shared_address(memory)});
}
