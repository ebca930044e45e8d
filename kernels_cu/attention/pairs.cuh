// The seam: all that a kernel knows about what happens to a score between S = Q K^T and P V. Forward and backward, all
// families, ask one object, made for a head, about pairs of a query and a key. What is not asked compiles to nothing.
#pragma once
#include "attention/walk.cuh"

// Query i and key j of a head of Q.
struct Pair {
    int head, i, j;
};

// Where a tile of scores stands: element (row, column) is the pair of query i + row and key j + column. TRANSPOSED: rows are
// keys. HEAD_ROWS: heads that share K and V share the tile, and each has so many rows of it; `row`: the first of these.
template <bool TRANSPOSED = false, int HEAD_ROWS = 0>
struct Placement {
    int head, i, j, row = 0;

    __device__ Pair operator()(int r, int c) const {
        if constexpr (TRANSPOSED) {
            return {head, i + c, j + r};
        } else if constexpr (HEAD_ROWS > 0) {
            return {head + (row + r) / HEAD_ROWS, i + (row + r) % HEAD_ROWS, j + c};
        } else {
            return {head, i + row + r, j + c};
        }
    }
};

struct Pairs {
    const Params& p;
    Head head;
    const unsigned char* keys;  // this batch's row of key_mask

    __device__ Pairs(const Params& p, const Head& head)
        : p(p), head(head), keys(p.key_mask + (config::KEY_MASK ? head.batch * p.key_mask_strides.batch : 0)) {}

    // What a score is multiplied by to be an exponent of 2: exp(scale * s) = 2^(factor * s). Never 0: -inf * 0 is NaN.
    __device__ Accum factor() const { return p.factor; }

    // What it is multiplied by to be in natural units, those of lse.
    __device__ Accum unit() const { return p.scale; }

    // The score of a pair from its product s of Q and K. (Softmaxes take the largest score, so `unit` is not negative.) Asked
    // beyond the last query, key and head too: what is read from an array for it must be in bounds.
    template <class T>
    __device__ T score(T s, Pair) const {
        return config::NEGATIVE_SCALE ? -s : s;
    }

    // The derivative of unit * score with respect to |scale| * s, which multiplies dS in the backward.
    template <class T>
    __device__ T slope(T /*s*/, Pair) const {
        return config::NEGATIVE_SCALE ? T(-1) : T(1);
    }

    // Whether the query may see the key.
    __device__ bool visible(Pair at) const { return Band{p, head}.contains(at.i, at.j) && key_seen(at.j); }

    // What is said of a key for all queries.
    __device__ bool key_seen(int j) const { return !config::KEY_MASK || keys[j]; }

    // The keys among which those are that a query may see, and the queries among which those are that may see a key.
    __device__ Range keys_of(int i) const { return Band{p, head}.keys_of(i); }
    __device__ Range queries_of(int j, bool key_seen) const { return key_seen ? Band{p, head}.queries_of(j) : Range{0, 0}; }

    // Whether some pair of these tiles may be hidden.
    __device__ bool tests(Range queries, Range of_keys) const { return Band{p, head}.tests(queries, of_keys); }
    __device__ bool tests_backward(Range queries, Range of_keys) const {
        return Band{p, head}.tests_backward(queries, of_keys);
    }
};

// key_seen of COUNT keys from `first` on, fetched at once by a whole warp.
template <int COUNT>
struct KeysSeen {
    unsigned bits[config::KEY_MASK ? (COUNT + 31) / 32 : 1];

    __device__ KeysSeen(const Pairs& pairs, int first) {
        if constexpr (config::KEY_MASK) {
#pragma unroll
            for (int n = 0; n < (COUNT + 31) / 32; n++) {
                int j = first + 32 * n + threadIdx.x % 32;
                bits[n] = __ballot_sync(~0u, j < pairs.head.keys(pairs.p) && pairs.key_seen(j));
            }
        }
    }

    __device__ bool operator[](int n) const { return !config::KEY_MASK || (bits[n / 32] >> n % 32 & 1); }
    // Of n + shift, where they are in one word.
    __device__ bool shifted(int n, int shift) const { return !config::KEY_MASK || (bits[n / 32] >> shift >> n % 32 & 1); }
};

// At the start of a branch that a whole warp takes or not: keeps the compiler from computing both sides always.
__device__ inline void keep_branch() { __syncwarp(); }
