// Gradients of the arrays that scores read (attention/array_gradient.cuh), on the tensor cores of Ampere and every GPU
// after it: S = Q K^T and dP = dO V^T of one tile of pairs after the other, dS = P (dP - delta) added up in registers.
//
// Both products are taken in pieces of DEPTH columns, which come through a ring in shared memory, from one tile to the
// next without a break: any head dimension fits.
#include "attention/array_gradient.cuh"
#include "attention/dropped.cuh"
#include "attention/exact_delta.cuh"
#include "attention/mask.cuh"
#include "attention/operands.cuh"
#include "attention/score_gradient.cuh"
#include "tile/fragment.cuh"

using namespace config;

constexpr int WARPS = ROW_WARPS * COLUMN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = ROWS / ROW_WARPS, WARP_KEYS = KEYS / COLUMN_WARPS;
constexpr int M = WARP_ROWS / 16, N = WARP_KEYS / 8;
static_assert(WARP_ROWS % 16 == 0 && WARP_KEYS % 16 == 0);

using QueryPiece = OperandTile<ROWS, DEPTH>;  // of Q or dO
using KeyPiece = OperandTile<KEYS, DEPTH>;    // of K or V

// The bias of a block's own tile, for its gradient: along the axes that are summed it is the same.
struct BiasTile {
    using Number = Pointed<decltype(Params::bias)>;
    static constexpr int PITCH = KEYS + 8;
    static constexpr int BYTES = sizeof(Number) * ROWS * PITCH;

    unsigned base;

    __device__ void load(const Params& p, char* memory, const SummedTiles<OfBias, ROWS, KEYS>& tiles) const {
        const PairStrides& s = p.bias_strides;
        const Number* from = p.bias + tiles.batch * s.batch + tiles.head * s.head;
        for (int n = threadIdx.x; n < ROWS * KEYS; n += THREADS) {
            int row = n / KEYS, column = n % KEYS, i = tiles.tile_q * ROWS + row, j = tiles.tile_k * KEYS + column;
            if constexpr (BIAS_LINES) i = tiles.lines.begin + row;
            bool there = (i < (BIAS_LINES ? tiles.lines.end : Sequence::most_queries(p)) || s.query == 0) &&
                         (j < Sequence::most_keys(p) || s.key == 0);
            ((Number*)memory)[row * PITCH + column] = there ? from[i * s.query + j * s.key] : Number();
        }
    }

    // Of a row, from a column on that is even.
    __device__ void read(int row, int column, float (&x)[2]) const {
        unsigned at = base + sizeof(Number) * (row * PITCH + column);
        if constexpr (sizeof(Number) == 4) {
            float2 both = load_shared_float2(at);
            x[0] = both.x, x[1] = both.y;
        } else {
            unsigned both = load_shared(at);
            x[0] = to_float(Number{(unsigned short)both}), x[1] = to_float(Number{(unsigned short)(both >> 16)});
        }
    }
};

// Mask and bias as the lines of a warp's accumulator read them, where it stands at a row and a key of the tile.
template <bool BIAS_IN_TILE>
struct Arrays : InMemory<M, false> {
    BiasTile tile;
    int row, column;  // the lane's first

    __device__ Arrays(const Pairs& pairs, const Placement<>& at, BiasTile tile, int row, int key)
        : InMemory<M, false>(pairs, at),
          tile(tile),
          row(row + Accumulator<M, N>::row(0, 0)),
          column(key + Accumulator<M, N>::column(0, 0)) {}

    __device__ void bias(int line, int n, float (&x)[2]) const {
        if constexpr (BIAS_IN_TILE)
            tile.read(row + 8 * line, column + n, x);
        else
            InMemory<M, false>::bias(line, n, x);
    }
};

struct Shared {
    static constexpr int STAGE = QueryPiece::BYTES + KeyPiece::BYTES;
    static constexpr int RING = STAGES * STAGE;
    static constexpr int PITCH = KEYS + 1;  // floats of a row of sums, which take the ring's place in the end
    static constexpr int SUMS = 4 * (ROWS * PITCH + ROWS);
    static constexpr int BIAS_TILE = RING > SUMS ? RING : SUMS;
    static constexpr int END = BIAS_TILE + (D_BIAS ? BiasTile::BYTES : 0);
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    char* memory;
    unsigned base;

    __device__ Shared(char* memory) : memory(memory), base(shared_address(memory)) {}

    __device__ BiasTile bias() const { return {base + BIAS_TILE}; }
    __device__ QueryPiece queries(int stage) const { return {base + stage * STAGE}; }
    __device__ KeyPiece keys(int stage) const { return {queries(stage).base + QueryPiece::BYTES}; }
};

// Where the copies are: a piece of a tile of pairs; those of S come first, then those of dP.
template <class Of>
struct Cursor {
    using Tiles = SummedTiles<Of, ROWS, KEYS>;

    typename Tiles::Step step;
    int piece = 0;

    __device__ Cursor(const Tiles& tiles) : step(tiles.first()) {}

    __device__ static int of_scores(const Params& p) { return tiles_in(p.dim, DEPTH); }
    __device__ static int of_values(const Params& p) { return tiles_in(p.dim_v, DEPTH); }

    // Start the copies of the next piece, as one group; behind the last there is nothing.
    __device__ void load(const Params& p, const Tiles& tiles, Shared s, int stage) {
        if (tiles.has(step)) {
            int pieces = of_scores(p);
            if (piece < pieces)
                copy<OfQ, OfK>(p, s, stage, piece * DEPTH);
            else
                copy<OfDO, OfV>(p, s, stage, (piece - pieces) * DEPTH);
            if (++piece == pieces + of_values(p)) {
                piece = 0;
                tiles.advance(step);
            }
        }
        cp_async_commit();
    }

   private:
    template <class OfQueries, class OfKeys>
    __device__ void copy(const Params& p, Shared s, int stage, int column) {
        const PairsTile& at = step.tile;
        copy<OfQueries>(p, s.queries(stage), at.i, column);
        copy<OfKeys>(p, s.keys(stage), at.j, column);
    }
    template <class Array, class Piece>
    __device__ void copy(const Params& p, Piece piece, int row, int column) {
        auto from = operand_rows<Array>(p, step.tile.head, row);
        from.count = Array::rows(p, step.tile.head) - row;
        int columns = PARTS == 2 ? Array::COLUMNS : from.columns;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            Rows<const Product> own{from.from + part * columns + column, from.stride, from.count, columns - column};
            AsyncCopy<THREADS, Array::SIZE, DEPTH, Piece>(piece, own, part * DEPTH).all();
        }
    }
};

template <class Of>
struct Block {
    const Params& p;
    Shared s;
    SummedTiles<Of, ROWS, KEYS> tiles;
    Cursor<Of> ahead;
    int warp_row, warp_key, stage = 0;
    Dropout dropout;
    Accumulator<M, N> sums;

    __device__ Block(const Params& p, Shared s, int block)
        : p(p),
          s(s),
          tiles(p, block),
          ahead(tiles),
          warp_row(threadIdx.x / 32 / COLUMN_WARPS * WARP_ROWS),
          warp_key(threadIdx.x / 32 % COLUMN_WARPS * WARP_KEYS),
          dropout(p) {
        sums.clear();
    }

    // A product of `pieces` pieces: those of queries by those of keys, transposed.
    __device__ void multiply(Accumulator<M, N>& product, int pieces) {
        ProductSums<M, N> sums;
        product.clear();
        for (int n = 0; n < pieces; n++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // the piece has arrived, and everybody is done with the one before
            ahead.load(p, tiles, s, (stage + STAGES - 1) % STAGES);
            mma_ABt<DEPTH>(product, sums, FromShared<QueryPiece>{s.queries(stage), warp_row}, s.keys(stage), warp_key);
            stage = (stage + 1) % STAGES;
        }
        sums.add_to(product);
    }

    // Of this lane's rows.
    __device__ void read_rows(float (&x)[2 * M], const float* rows) const {
#pragma unroll
        for (int line = 0; line < 2 * M; line++)
            x[line] = rows[warp_row + Accumulator<M, N>::row(line / 2, line % 2 * 2)];
    }

    // P = exp(S - lse), hidden ones 0.
    __device__ void exponentiate(Accumulator<M, N>& scores, const Pairs& pairs, const Placement<>& place,
                                 const float (&minus_lse)[2 * M], const KeysSeen<WARP_KEYS>& seen) const {
        Arrays<Of::BIAS> arrays(pairs, place, s.bias(), warp_row, warp_key);
        float factor = exponent_factor(pairs);
        score(scores, place, pairs, arrays);
        scores.each([&](float& x, int r, int) { x = probability(x, factor, minus_lse[r / 8]); });
        drop(scores, place, pairs.head.batch, dropout);
        if (pairs.tests_backward({place.i, place.i + WARP_ROWS}, {place.j, place.j + WARP_KEYS})) {
            keep_branch();
            hide(scores, place, pairs, seen, arrays, 0);
        }
    }

    // A tile of pairs.
    __device__ void visit(const PairsTile& at) {
        Pairs pairs(p, at.head, at.bits);
        Placement<> place{at.head.q, at.i + warp_row, at.j + warp_key};
        int tile_q = at.i / ROWS, tile_k = at.j / KEYS;
        // What its rows and keys have in memory, while the first pieces arrive.
        const float* rows = prepared_rows<ROWS>(p, at.head, tile_q);
        float minus_lse[2 * M], minus_delta[2 * M];
        read_rows(minus_lse, rows);
        read_rows(minus_delta, rows + ROWS);
        float q_unit = operand_unit<OfQ>(p, at.head, tile_q), k_unit = operand_unit<OfK>(p, at.head, tile_k);
        float do_unit = operand_unit<OfDO>(p, at.head, tile_q), v_unit = operand_unit<OfV>(p, at.head, tile_k);
        KeysSeen<WARP_KEYS> seen(pairs, place.j);

        Accumulator<M, N> probabilities, ds;
        multiply(probabilities, Cursor<Of>::of_scores(p));
        if (PARTS == 2) scale_by_units(probabilities, q_unit, k_unit);
        Accumulator<M, N> products;
        if constexpr (Of::WEIGHTED) products = probabilities;
        exponentiate(probabilities, pairs, place, minus_lse, seen);
        multiply(ds, Cursor<Of>::of_values(p));
        if (PARTS == 2) scale_by_units(ds, do_unit, v_unit);
        sums.each(
            [&](float& sum, int r, int c, float& probability, float& x, float& product) {
                Pair pair{at.head.q, place.i + r, place.j + c};
                float ds = derivative(probability, x, minus_delta[r / 8]) * Of::change(pairs, pair, product);
                sum += probability == 0 ? 0 : ds;  // by a mask or not: nothing is added then, whatever dP is
            },
            probabilities, ds, Of::WEIGHTED ? products : ds);
    }

    __device__ void run() {
        if constexpr (Of::BIAS) {
            s.bias().load(p, s.memory + Shared::BIAS_TILE, tiles);
            __syncthreads();  // (with head dimension 0 no barrier of a product comes before it is read)
        }
        for (int n = 0; n < STAGES - 1; n++) ahead.load(p, tiles, s, n);
        for (auto step = tiles.first(); tiles.has(step); tiles.advance(step)) visit(step.tile);
        cp_async_wait<0>();
        __syncthreads();  // everybody is done with the ring
        float* out = (float*)s.memory;
        sums.each([&](float& x, int r, int c) { out[(warp_row + r) * Shared::PITCH + warp_key + c] = x; });
        __syncthreads();
        write_sums<THREADS>(
            tiles, [&](int r, int c) { return out[r * Shared::PITCH + c]; }, out + ROWS * Shared::PITCH);
    }
};

// Launched where there are two parts.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) attention_split(const __grid_constant__ Params p) {
    if constexpr (PARTS == 2) split_operands<OfQ, OfK, OfV, OfDO>(p, blockIdx.x);
}

// What each query brings: see attention/exact_delta.cuh.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    HeadTile at = numbered_heads_first<QueryTiles<ROWS>>(p, blockIdx.x);
    if (config::PACKED_Q && at.none()) return;
    prepare_queries<ROWS>(p, at.head, at.number);
}

// Kernels of arrays whose gradients nobody asks for are empty.
template <bool WANTED, class Of>
__device__ void gather(const Params& p) {
    extern __shared__ __align__(16) char shared[];
    if constexpr (WANTED) Block<Of>(p, Shared(shared), blockIdx.x).run();
}
template <bool LARGEST>
__device__ void gather_reads(const Params& p) {
    extern __shared__ __align__(16) char shared[];
    for_read<LARGEST>(p, blockIdx.x, [&](auto of, int block) { Block<decltype(of)>(p, Shared(shared), block).run(); });
}
template <bool WANTED, class Of>
__device__ void add_parts(const Params& p) {
    if constexpr (WANTED) SummedTiles<Of, ROWS, KEYS>(p, 0).template add_parts<128>();
}

#define KERNELS(ARRAY, WANTED, OF)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                     \
        attention_backward_##ARRAY(const __grid_constant__ Params p) {                           \
        gather<WANTED, OF>(p);                                                                   \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                            \
        attention_backward_##ARRAY##_add(const __grid_constant__ Params p) {                     \
        add_parts<WANTED, OF>(p);                                                                \
    }
ARRAYS_OVER_PAIRS(KERNELS)

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_score(const __grid_constant__ Params p) {
    if constexpr (D_SCORE) gather_reads<false>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_score_largest(const __grid_constant__ Params p) {
    if constexpr (D_SCORE && DETERMINISTIC) gather_reads<true>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_score_clear(const __grid_constant__ Params p) {
    if constexpr (D_SCORE) clear_sum<128>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_score_finish(const __grid_constant__ Params p) {
    if constexpr (D_SCORE) finish_sum<128>(p);
}
extern "C" __global__ void __launch_bounds__(256) attention_backward_sinks(const __grid_constant__ Params p) {
    gather_sink<D_SINKS, 256>(p, blockIdx.x, [&](const Head& head, int i) {
        return prepared_rows<ROWS>(p, head, i / ROWS)[ROWS + i % ROWS] / kept(p);
    });
}
