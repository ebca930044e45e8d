// Gradients of the arrays that scores read (attention/array_gradient.cuh) on Hopper: dS = P (dP - delta) of one tile of
// pairs after the other is added up, with the engines of a multiprocessor working at once.
//
// One thread block stays on each multiprocessor and takes tile after tile of the gradient, ROWS queries by KEYS keys.
// Its first warpgroup loads: TMA brings the operands of S = Q K^T and dP = dO V^T in pieces of DEPTH
// columns, without a break from one tile to the next, so that any head dimension fits. The others own 64 queries each,
// multiply in the background (wgmma) and keep their sums in registers.
#include "attention/array_gradient.cuh"
#include "attention/dropped.cuh"
#include "attention/prepare.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/pair_tiles.cuh"
#include "tile/ring.cuh"
#include "tile/rows.cuh"
#include "tile/swizzled.cuh"

using namespace config;

constexpr int WARPGROUPS = ROWS / 64;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;
static_assert(WARPGROUPS == 2);  // the numbers of registers below

constexpr int DEPTH = 64;
constexpr int PIECES = tiles_in(DIM, DEPTH), PIECES_V = tiles_in(DIM_V, DEPTH);
// Pieces of a product that may be under way when threads turn to the numbers of S: of dP, that is.
constexpr int UNDER_WAY = PIECES_V < 2 ? 1 : 2;
static_assert(STAGES > UNDER_WAY);

using QueryPiece = SwizzledTile<ROWS, DEPTH>;  // of Q or dO
using KeyPiece = SwizzledTile<KEYS, DEPTH>;    // of K or V
using Sums = Accumulator<1, KEYS / 8>;

template <class Of>
using Tiles = SummedTiles<Of, ROWS, KEYS>;
using Pairwise = PairTiles<ROWS>;  // mask and bias
// The bias of a block's own tile of its gradient is the same along the axes that are summed; a mask need not be.
template <class Of>
constexpr bool PAIRS_PER_STEP = PAIR_ARRAYS && (MASK || !Of::BIAS);
template <class Of>
constexpr bool PAIRS_PER_SUM = PAIR_ARRAYS && !PAIRS_PER_STEP<Of>;

// Whether many queries read an element: their sum is added up at the end.
template <class Of>
__device__ bool over_queries(const Params& p) {
    return !Of::BY_KEY || (Of::strides(p).query == 0 && Sequence::most_queries(p) > 1);
}

struct TensorMaps : PairMaps {
    TensorMap q, k, v, dout;
};

// What the producer tells of a tile of pairs, with its first piece.
struct Note {
    static constexpr int BYTES = 32;
    // FIRST, LAST: of those that a block sums for a tile of the gradient. Where no query sees a key, the LAST is not
    // visited.
    static constexpr int VISIT = 1, FIRST = 2, LAST = 4, END = 8;

    Head head;
    int i, j, split, flags;

    __device__ void store(unsigned address) const {
        store_shared(address, head.batch);
        store_shared(address + 4, head.q);
        store_shared(address + 8, i);
        store_shared(address + 12, j);
        store_shared(address + 16, split);
        store_shared(address + 20, flags);
    }
    // For whole warps. (The shuffles tell the compiler that all lanes have the same.)
    __device__ static Note load(const Params& p, unsigned address) {
        uint4 x = load_shared_16(address);
        auto all = [](unsigned word) { return __shfl_sync(~0u, int(word), 0); };
        Head head = Head::of_q(p, all(x.x), all(x.y));
        return {head, all(x.z), all(x.w), all(load_shared(address + 16)), all(load_shared(address + 20))};
    }

    __device__ bool has(int flag) const { return flags & flag; }
};

// Shared memory, and one thread's place in its rings.
struct Shared {
    using PieceRing = Ring<STAGES, CONSUMER_WARPS>;
    using PairRing = Ring<PAIR_STAGES, CONSUMER_WARPS>;

    // Offsets.
    static constexpr int STAGE = QueryPiece::BYTES + KeyPiece::BYTES;
    static constexpr int PAIR_TILES = STAGES * STAGE;
    static constexpr int PIECE_RING = PAIR_TILES + PAIR_STAGES * Pairwise::BYTES;
    static constexpr int PAIR_RING = PIECE_RING + PieceRing::BYTES;
    static constexpr int NOTES = PAIR_RING + PairRing::BYTES;
    static constexpr int END = NOTES + STAGES * Note::BYTES;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    unsigned base;
    PieceRing pieces;
    PairRing pairs;

    __device__ Shared(unsigned base) : base(base), pieces(base + PIECE_RING), pairs(base + PAIR_RING) {}

    __device__ QueryPiece queries() const { return {base + pieces.stage * STAGE}; }
    __device__ KeyPiece keys() const { return {queries().base + QueryPiece::BYTES}; }
    __device__ Pairwise pair_tiles() const { return {base + PAIR_TILES + pairs.stage * Pairwise::BYTES}; }
    __device__ unsigned note() const { return base + NOTES + pieces.stage * Note::BYTES; }
};

// The producer.
template <class Of>
struct Producer {
    const Params& p;
    const TensorMaps& maps;
    Shared s;

    // A piece of both operands.
    __device__ void load(const PairsTile& at, const TensorMap& of_queries, const TensorMap& of_keys, int column) {
        mbarrier_arrive_expect(s.pieces.full(), Shared::STAGE);
        s.queries().load(of_queries, s.pieces.full(), at.head.at_query(p, at.i, column));
        s.keys().load(of_keys, s.pieces.full(), at.head.at_key(p, at.j, column));
        s.pieces.advance();
        s.pieces.wait_empty();
    }
    __device__ void visit(const Note& note) {
        PairsTile at{note.head, note.i, note.j};
        note.store(s.note());
#pragma unroll 1
        for (int n = 0; n < PIECES; n++) load(at, maps.q, maps.k, n * DEPTH);
        if (PAIRS_PER_STEP<Of> || (PAIRS_PER_SUM<Of> && note.has(Note::FIRST))) {
            s.pairs.wait_empty();
            s.pair_tiles().load(p, maps, s.pairs.full(), at.head, at.i, at.j);
            s.pairs.advance();
        }
#pragma unroll 1
        for (int n = 0; n < PIECES_V; n++) load(at, maps.dout, maps.v, n * DEPTH);
    }
    // No more than a note.
    __device__ void tell(const Note& note) {
        note.store(s.note());
        mbarrier_arrive(s.pieces.full());
        s.pieces.advance();
        s.pieces.wait_empty();
    }

    __device__ void run() {
        int count = Tiles<Of>::count(p);
        for (int n = blockIdx.x; n < count; n += gridDim.x) {
            Tiles<Of> tiles(p, n);
            auto step = tiles.first();
            PairsTile at = step.tile;
            if (!tiles.has(step)) tell({at.head, at.i, at.j, tiles.split, Note::LAST});
            for (int flags = Note::VISIT | Note::FIRST; tiles.has(step); flags = Note::VISIT) {
                at = step.tile;
                tiles.advance(step);
                visit({at.head, at.i, at.j, tiles.split, flags | (tiles.has(step) ? 0 : Note::LAST)});
            }
        }
        tell({{}, 0, 0, 0, Note::END});
    }
};

// A warpgroup that computes.
template <class Of>
struct Consumer {
    const Params& p;
    Shared s;
    Shared::PieceRing done;    // with pieces: their stages are freed later than they are asked for
    int warpgroup, first_row;  // of the warp in a tile
    Dropout dropout;
    Sums sums;

    __device__ Consumer(const Params& p, const Shared& s, int warpgroup)
        : p(p),
          s(s),
          done(s.pieces),
          warpgroup(warpgroup),
          first_row(64 * warpgroup + 16 * (threadIdx.x / 32 % 4)),
          dropout(p) {}

    __device__ void release() {
        done.release();
        done.advance();
    }

    // Start the next piece of a product, NUMBER in its tile of pairs; one that came earlier is done.
    template <int NUMBER, int COLUMNS, bool ADD>
    __device__ void start(Sums& product) {
        if (NUMBER > 0) s.pieces.wait_full();
        start_ABt<COLUMNS, ADD>(product, s.queries(), 64 * warpgroup, s.keys());
        s.pieces.advance();
        if constexpr (NUMBER >= UNDER_WAY) {
            wgmma_wait<UNDER_WAY>();
            release();
        }
    }
    template <int BEFORE, int COLUMNS>
    __device__ void start(Sums& product) {
        for_constants<tiles_in(COLUMNS, DEPTH)>([&](auto n) {
            constexpr int REST = COLUMNS - n.value * DEPTH;
            start<BEFORE + n.value, (REST < DEPTH ? REST : DEPTH), (n.value > 0)>(product);
        });
    }

    // A tile of pairs.
    __device__ void visit(const Note& note) {
        Pairs pairs(p, note.head);
        Placement<> at{note.head.q, note.i + first_row, note.j};
        const float* rows = prepared_rows<ROWS>(p, note.head, note.i / ROWS) + first_row;
        float minus_lse[2], minus_delta[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = Sums::row(0, 2 * h);
            minus_lse[h] = rows[row];
            minus_delta[h] = rows[row + ROWS];
        }
        Sums probabilities, ds;
        start<0, DIM>(probabilities);
        start<PIECES, DIM_V>(ds);  // no more of S is under way then
        changed(probabilities);
        // P = exp(S - lse), under dP = dO V^T
        float factor = pairs.factor();
        if (PAIRS_PER_STEP<Of> || (PAIRS_PER_SUM<Of> && note.has(Note::FIRST))) s.pairs.wait_full();
        InTiles<false, Pairwise> arrays(s.pair_tiles(), first_row, 0);
        score(probabilities, at, pairs, arrays);
        probabilities.each([&](float& x, int r, int) { x = exp2_approx(fmaf(x, factor, minus_lse[r / 8])); });
        drop(probabilities, at, note.head.batch, dropout);
        if (pairs.tests_backward({at.i, at.i + 16}, {at.j, at.j + KEYS})) {
            keep_branch();
            KeysSeen<KEYS> seen(pairs, at.j);
            hide(probabilities, at, pairs, seen, arrays, 0);
        }
        if (PAIRS_PER_STEP<Of> || (PAIRS_PER_SUM<Of> && note.has(Note::LAST))) {
            s.pairs.release();
            s.pairs.advance();
        }
        wgmma_wait<0>();
        changed(ds);
        for (int n = 0; n < UNDER_WAY; n++) release();
        sums.each(
            [&](float& sum, int r, int c, float& probability, float& x) {
                float change = Of::change(pairs, at(r, c), 0);
                if (KEY_MASK && probability == 0) return;  // what is hidden may be anything
                if (config::DROPOUT)
                    sum = fmaf(derivative(probability, x, minus_delta[r / 8]), change, sum);
                else
                    sum = fmaf(Of::BIAS ? probability : probability * change, x + minus_delta[r / 8], sum);
            },
            probabilities, ds);
    }

    // The sums to the gradient, or to their part of it.
    __device__ void write(const Note& note) {
        const PairStrides& strides = Of::strides(p);
        Pair at{note.head.q, note.i + first_row, note.j};
        int queries = note.head.queries(p) - at.i, keys = note.head.keys(p) - at.j;
        if (over_queries<Of>(p)) {
            float* part = Of::parts(p) + (note.split * CONSUMER_WARPS + first_row / 16) * Tiles<Of>::elements(p);
            add_up(at_pair(part, strides, note.head.batch, {at.head, 0, at.j}), keys);
            return;
        }
        bool vectors = note.head.keys(p) % 8 == 0;  // the result is contiguous
        auto store = [&](auto* array) {
            auto* first = at_pair(array, strides, note.head.batch, at);
            auto row = [&](int n) { return n < queries ? first + n * strides.query : nullptr; };
            if constexpr (sizeof(*first) == 4)
                store_float_rows(sums, vectors, keys, row);
            else
                store_rows(sums, vectors, keys, row);
        };
        if (Of::splits(p) == 1)
            store(Of::target(p));
        else
            store(Of::parts(p) + note.split * Tiles<Of>::elements(p));
    }

    // Where the array is broadcast along queries: a warp's sums to a part of their own; along keys too where it has
    // none.
    __device__ void add_up(float* to, int keys) {
        int lane = threadIdx.x % 32;
        auto over_lanes = [](float x, int from) {
            for (int lanes = 16; lanes >= from; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
            return x;
        };
        float all = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = sums.x[0][n][e] + sums.x[0][n][e + 2];
                int column = sums.column(n, e);
                if (Of::BY_KEY) {
                    x = over_lanes(x, 4);
                    if (lane < 4 && column < keys) to[column] = x;
                } else {
                    all += x;
                }
            }
        if (!Of::BY_KEY) {
            all = over_lanes(all, 1);
            if (lane == 0) *to = all;
        }
    }

    __device__ void run() {
        sums.clear();
        while (true) {
            s.pieces.wait_full();
            Note note = Note::load(p, s.note());
            if (note.has(Note::END)) break;
            if (note.has(Note::VISIT)) {
                visit(note);
            } else {
                s.pieces.advance();
                release();
            }
            if (note.has(Note::LAST)) {
                write(note);
                sums.clear();
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    HeadTile at = numbered_heads_first<QueryTiles<ROWS>>(p, blockIdx.x);
    prepare_rows<ROWS>(p, at.head, at.number);
}

// Kernels of arrays whose gradients nobody asks for are empty.
template <bool WANTED, class Of>
__device__ void gather(const Params& p, const TensorMaps& maps) {
    extern __shared__ __align__(1024) char memory[];
    if constexpr (WANTED) {
        Shared s(shared_address(memory));
        if (threadIdx.x == 0) {
            s.pieces.init();
            s.pairs.init();
            mbarrier_init_fence();
            tma_prefetch(maps.q);
            tma_prefetch(maps.k);
            tma_prefetch(maps.v);
            tma_prefetch(maps.dout);
        }
        __syncthreads();
        int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
        if (warpgroup == -1) {
            shrink_registers<40>();
            if (threadIdx.x == 0) Producer<Of>{p, maps, s}.run();
        } else {
            grow_registers<232>();
            Consumer<Of>(p, s, warpgroup).run();
        }
    }
}
template <bool WANTED, class Of>
__device__ void add_parts(const Params& p) {
    if constexpr (WANTED) Tiles<Of>(p, 0).template add_parts<128>(over_queries<Of>(p) ? CONSUMER_WARPS : 1);
}

#define KERNELS(ARRAY, WANTED, OF)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        attention_backward_##ARRAY(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {        \
        gather<WANTED, OF>(p, maps);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        attention_backward_##ARRAY##_add(const __grid_constant__ Params p) {                                           \
        add_parts<WANTED, OF>(p);                                                                                      \
    }
ARRAYS_OVER_PAIRS(KERNELS)

extern "C" __global__ void __launch_bounds__(256) attention_backward_sinks(const __grid_constant__ Params p) {
    gather_sink<D_SINKS, 256>(p, blockIdx.x, [&](const Head& head, int i) {
        return prepared_rows<ROWS>(p, head, i / ROWS)[ROWS + i % ROWS] / kept(p);
    });
}
