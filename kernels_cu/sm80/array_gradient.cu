// Gradients of the arrays that scores read (attention/array_gradient.cuh), on the tensor cores of Ampere and every GPU after
// it: S = Q K^T and dP = dO V^T of one tile of pairs after the other, dS = P (dP - delta) added up in registers.
//
// Both products are taken in pieces of DEPTH columns, which come through a ring in shared memory, from one tile to the next
// without a break: any head dimension fits.
#include "attention/array_gradient.cuh"
#include "attention/mask.cuh"
#include "attention/prepare.cuh"
#include "tile/fragment.cuh"

using namespace config;

constexpr int WARPS = ROW_WARPS * COLUMN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = ROWS / ROW_WARPS, WARP_KEYS = KEYS / COLUMN_WARPS;
constexpr int M = WARP_ROWS / 16, N = WARP_KEYS / 8;
static_assert(WARP_ROWS % 16 == 0 && WARP_KEYS % 16 == 0);

using QueryPiece = SharedTile<ROWS, DEPTH>;  // of Q or dO
using KeyPiece = SharedTile<KEYS, DEPTH>;    // of K or V

struct Shared {
    static constexpr int STAGE = QueryPiece::BYTES + KeyPiece::BYTES;
    static constexpr int RING = STAGES * STAGE;
    static constexpr int PITCH = KEYS + 1;  // floats of a row of sums, which take the ring's place in the end
    static constexpr int SUMS = 4 * (ROWS * PITCH + ROWS);
    static constexpr int END = RING > SUMS ? RING : SUMS;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    char* memory;
    unsigned base;

    __device__ Shared(char* memory) : memory(memory), base(shared_address(memory)) {}

    __device__ QueryPiece queries(int stage) const { return {base + stage * STAGE}; }
    __device__ KeyPiece keys(int stage) const { return {queries(stage).base + QueryPiece::BYTES}; }
};

// Where the copies are: a piece of a tile of pairs; those of S come first, then those of dP.
template <class Of>
struct Cursor {
    const Share<Of, ROWS, KEYS>& share;
    int n, piece = 0;

    __device__ Cursor(const Share<Of, ROWS, KEYS>& share) : share(share), n(share.next(share.begin)) {}

    __device__ static int of_scores(const Params& p) { return tiles_in(p.dim, DEPTH); }
    __device__ static int of_values(const Params& p) { return tiles_in(p.dim_v, DEPTH); }

    // Start the copies of the next piece, as one group; behind the last there is nothing.
    __device__ void load(const Params& p, const Shared& s, int stage) {
        if (n < share.end) {
            PairsTile at = share.tile(n);
            bool scores = piece < of_scores(p);
            int column = (scores ? piece : piece - of_scores(p)) * DEPTH;
            const Strides &rows_q = scores ? p.q_strides : p.dout_strides, &rows_k = scores ? p.k_strides : p.v_strides;
            int columns = (scores ? p.dim : p.dim_v) - column;
            const In* q = at.head.query_row(scores ? p.q : p.dout, rows_q, at.i) + column;
            const In* k = at.head.key_row(scores ? p.k : p.v, rows_k, at.j) + column;
            AsyncCopy<THREADS, ROWS, DEPTH>(s.queries(stage), q, rows_q.row, at.head.queries(p) - at.i, columns).all();
            AsyncCopy<THREADS, KEYS, DEPTH>(s.keys(stage), k, rows_k.row, at.head.keys(p) - at.j, columns).all();
            if (++piece == of_scores(p) + of_values(p)) piece = 0, n = share.next(n + 1);
        }
        cp_async_commit();
    }
};

template <class Of>
struct Block {
    const Params& p;
    Shared s;
    Share<Of, ROWS, KEYS> share;
    Cursor<Of> ahead;
    int warp_row, warp_key, stage = 0;
    Accumulator<M, N> sums;

    __device__ Block(const Params& p, Shared s)
        : p(p),
          s(s),
          share(p, blockIdx.x),
          ahead(share),
          warp_row(threadIdx.x / 32 / COLUMN_WARPS * WARP_ROWS),
          warp_key(threadIdx.x / 32 % COLUMN_WARPS * WARP_KEYS) {
        sums.clear();
    }

    // A product of `pieces` pieces: those of queries by those of keys, transposed.
    __device__ void multiply(Accumulator<M, N>& product, int pieces) {
        product.clear();
        for (int n = 0; n < pieces; n++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // the piece has arrived, and everybody is done with the one before
            ahead.load(p, s, (stage + STAGES - 1) % STAGES);
            mma_ABt<DEPTH>(product, FromShared<QueryPiece>{s.queries(stage), warp_row}, s.keys(stage), warp_key);
            stage = (stage + 1) % STAGES;
        }
    }

    // P = exp(S - lse), hidden ones 0.
    __device__ void exponentiate(Accumulator<M, N>& scores, const Pairs& pairs, const PairsTile& at, const float* rows) const {
        Placement<> place{at.head.q, at.i + warp_row, at.j + warp_key};
        InMemory<M, false> arrays(pairs, place);
        Lines<M, false, InMemory<M, false>> lines(pairs, place, arrays);
        float factor = pairs.factor();
        scores.each([&](float& x, int r, int c) { x = exp2_approx(fmaf(lines.score(x, r, c), factor, rows[warp_row + r])); });
        if (pairs.tests_backward({place.i, place.i + WARP_ROWS}, {place.j, place.j + WARP_KEYS})) {
            keep_branch();
            KeysSeen<WARP_KEYS> seen(pairs, place.j);
            hide(scores, place, pairs, seen, arrays, 0);
        }
    }

    // A tile of pairs.
    __device__ void visit(const PairsTile& at) {
        Pairs pairs(p, at.head);
        const float* rows = prepared_rows<ROWS>(p, query_tile_number<ROWS>(p, at.head, at.i / ROWS));
        Accumulator<M, N> probabilities, ds;
        multiply(probabilities, Cursor<Of>::of_scores(p));
        exponentiate(probabilities, pairs, at, rows);
        multiply(ds, Cursor<Of>::of_values(p));
        sums.each(
            [&](float& sum, int r, int c, float& probability, float& x) {
                Pair pair{at.head.q, at.i + warp_row + r, at.j + warp_key + c};
                // Where P is 0, by a mask or not, nothing is added, whatever dP is.
                if (probability != 0) sum = fmaf(probability * (x + rows[ROWS + warp_row + r]), Of::change(pairs, pair), sum);
            },
            probabilities, ds);
    }

    __device__ void run() {
        for (int n = 0; n < STAGES - 1; n++) ahead.load(p, s, n);
        for (int n = share.next(share.begin); n < share.end; n = share.next(n + 1)) visit(share.tile(n));
        cp_async_wait<0>();
        __syncthreads();  // everybody is done with the ring
        float* out = (float*)s.memory;
        sums.each([&](float& x, int r, int c) { out[(warp_row + r) * Shared::PITCH + warp_key + c] = x; });
        __syncthreads();
        share.template write<THREADS>([&](int r, int c) { return out[r * Shared::PITCH + c]; }, out + ROWS * Shared::PITCH);
    }
};

// What each query brings: see attention/prepare.cuh.
extern "C" __global__ void __launch_bounds__(128) attention_backward_prepare(const __grid_constant__ Params p) {
    Place at = place_heads_first(blockIdx.x, query_tiles<ROWS>(p), p.heads_q);
    prepare_rows<ROWS>(p, Head::of_q(p, at.batch, at.head), at.tile);
}

// Kernels of arrays whose gradients nobody asks for are empty.
template <bool WANTED, class Of>
__device__ void gather(const Params& p) {
    extern __shared__ __align__(16) char shared[];
    if constexpr (WANTED) Block<Of>(p, Shared(shared)).run();
}
template <bool WANTED, class Of>
__device__ void add_parts(const Params& p) {
    if constexpr (WANTED) Share<Of, ROWS, KEYS>(p, 0).template add_parts<128>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_bias(const __grid_constant__ Params p) {
    gather<D_BIAS, OfBias>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_bias_add(const __grid_constant__ Params p) {
    add_parts<D_BIAS, OfBias>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_alibi_slopes(const __grid_constant__ Params p) {
    gather<D_ALIBI_SLOPES, OfSlopes>(p);
}
extern "C" __global__ void __launch_bounds__(128) attention_backward_alibi_slopes_add(const __grid_constant__ Params p) {
    add_parts<D_ALIBI_SLOPES, OfSlopes>(p);
}
extern "C" __global__ void __launch_bounds__(256) attention_backward_sinks(const __grid_constant__ Params p) {
    gather_sink<D_SINKS, 256>(p, blockIdx.x, [&](const Head& head, int i) {
        return prepared_rows<ROWS>(p, query_tile_number<ROWS>(p, head, i / ROWS))[ROWS + i % ROWS];
    });
}
