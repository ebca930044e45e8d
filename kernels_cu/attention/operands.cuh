// Q, K, V and dO as the tensor cores take them: from where they are, or, of float32, as two float16 a number
// (tile/halves.cuh) that `attention_split` has put into the plan's own memory before. A row of these is all its high
// parts, then all its low ones; every tile has a power of two of its own, so that the whole range of float32 has room.
#pragma once
#include "attention/pairs.cuh"
#include "attention/tiles.cuh"
#include "tile/fragment.cuh"

// Arrays with rows for queries, which come in tiles of ROWS, and for keys, in tiles of KEYS.
struct OfQueries : QueryTiles<config::ROWS> {
    static constexpr bool IN_PAGES = false;
    __device__ static int rows(const Params& p, const Head& head) { return head.queries(p); }
    __device__ static const In* row(const Head& head, const In* array, const Strides& s, int i) {
        return head.query_row(array, s, i);
    }
    static constexpr bool ALL_LIVE = !config::KEY_MASK && !config::LEFT && !config::RIGHT;
    __device__ static bool live(const Params& p, const Head& head, int i) { return Pairs(p, head).sees(i); }
    // Among the rows that are split at once.
    __device__ static long long row_number(const Params& p, const Head& head, int i) {
        return head.row_number(p, i) - Sequence::first_query_number(p, first_head(p));
    }
};
struct OfKeys : KeyTiles<config::KEYS> {
    static constexpr bool IN_PAGES = config::PAGED;
    __device__ static int rows(const Params& p, const Head& head) { return head.keys(p); }
    template <class T>
    __device__ static const T* row(const Head& head, const T* array, const Strides& s, int j) {
        return head.key_row(array, s, j);
    }
    static constexpr bool ALL_LIVE = OfQueries::ALL_LIVE;
    __device__ static bool live(const Params& p, const Head& head, int j) { return Pairs(p, head).is_seen(j); }
    __device__ static long long row_number(const Params& p, const Head& head, int j) {
        return head.key_row_number(p, j) - Sequence::first_key_number(p, first_head(p));
    }
};

// What Params knows of an array: where it is, and where its halves and the units of its tiles are.
template <class T>
struct Given {
    T* array;
    const Strides& strides;
    int columns;
};
template <class T>
Given(T*, const Strides&, int) -> Given<T>;
struct Halves {
    Product* rows;
    float* units;
};

// Arrays by name: their rows, their columns in a tile and in memory, and whether they are given. (Templates, because
// not every plan's Params has all of it.)
#define OPERAND(NAME, ROWED, OF_TILE, ARRAY, IN_MEMORY, IS_GIVEN)                                                      \
    struct NAME : ROWED {                                                                                              \
        static constexpr bool GIVEN = IS_GIVEN;                                                                        \
        static constexpr int COLUMNS = OF_TILE;                                                                        \
                                                                                                                       \
        template <class P>                                                                                             \
        __device__ static auto given(const P& p) { return Given{p.ARRAY, p.ARRAY##_strides, p.IN_MEMORY}; }            \
        template <class P>                                                                                             \
        __device__ static Halves halves(const P& p) { return {p.ARRAY##_halves, p.ARRAY##_units}; }                    \
    };

OPERAND(OfQ, OfQueries, config::DIM, q, dim, true)
OPERAND(OfK, OfKeys, config::DIM, k, dim, true)
OPERAND(OfV, OfKeys, config::DIM_V, v, dim_v, true)
OPERAND(OfDO, OfQueries, config::DIM_V, dout, dim_v, true)
OPERAND(OfTQ, OfQueries, config::DIM, tq, dim, config::TQ)
OPERAND(OfTK, OfKeys, config::DIM, tk, dim, config::TK)
OPERAND(OfTV, OfKeys, config::DIM_V, tv, dim_v, config::TV)
OPERAND(OfTDO, OfQueries, config::DIM_V, tdout, dim_v, config::TDOUT)

// Rows of an operand, from one on: so many, or as many as the caller says then.
template <class Of, class P>
__device__ auto operand_rows(const P& p, const Head& head, int i, int count = 0) {
    if constexpr (!Of::GIVEN) {
        return Rows<const Product>{};
    } else if constexpr (PARTS == 2) {
        constexpr int WIDTH = 2 * Of::COLUMNS;
        return Rows<const Product>{Of::halves(p).rows + Of::row_number(p, head, i) * WIDTH, WIDTH, count, WIDTH};
    } else {
        auto given = Of::given(p);
        return Rows{Of::row(head, given.array, given.strides, i), given.strides.row, count, given.columns};
    }
}

// Where row i of an operand in pages lies; null: in none.
template <class Of, class P>
__device__ auto paged_operand_row(const P& p, const Head& head, int i) {
    auto given = Of::given(p);
    return head.paged_row(p, given.array, given.strides, i);
}

// What a tile's operand is to be multiplied by.
template <class Of, class P>
__device__ float operand_unit(const P& p, const Head& head, int tile) {
    if constexpr (PARTS == 2 && Of::GIVEN) return Of::halves(p).units[Of::number(p, head, tile)];
    return 1;
}

// Multiply a product by the units of its operands: in one step, where theirs is a normal number.
template <int M, int N>
__device__ void scale_by_units(Accumulator<M, N>& product, float a, float b) {
    float both = a * b;
    bool normal = both >= 0x1p-126f && both <= 0x1p126f;
    float first = normal ? both : a;
    product.each([&](Accum& x, int, int) { x *= first; });
    if (!normal) product.each([&](Accum& x, int, int) { x *= b; });
}

// The largest of the block's x, which are not negative; by all of its threads, WARPS floats of shared memory at
// `address`.
template <int WARPS>
__device__ float largest_of_block(float x, unsigned address) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    if (threadIdx.x % 32 == 0) store_shared(address + threadIdx.x / 32 * 4, __float_as_uint(x));
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) x = fmaxf(x, __uint_as_float(load_shared(address + 4 * warp)));
    return x;
}

// Infinities and NaN do not count for a tile's unit.
__device__ inline float finite_size(float x) { return fabsf(x) < __int_as_float(0x7f800000) ? fabsf(x) : 0; }

// A power of two that brings what is at most `largest` to less than 2^15, and its inverse; both are normal numbers.
struct PowerOfTwo {
    float times, unit;

    __device__ PowerOfTwo(float largest) {
        unsigned exponent = max(__float_as_uint(largest) >> 23, 15u);
        times = __uint_as_float(268 - exponent << 23), unit = __uint_as_float(exponent - 14 << 23);
    }
};

constexpr int SPLIT_THREADS = 256;

// Four numbers of a row, of which `count` are there.
template <class T>
__device__ float4 load_4(const T* from, int count, bool vectors) {
    if (count >= 4 && vectors) return *(const float4*)from;
    return {count > 0 ? from[0] : 0, count > 1 ? from[1] : 0, count > 2 ? from[2] : 0, count > 3 ? from[3] : 0};
}

// What is infinite or NaN stands among the low parts: there it meets the other operand's high part alone, whose sign
// counts.
template <int N>
__device__ void split_pair(unsigned& high, unsigned& low, float x, float y, float times) {
    unsigned pairs[N];
    pack_parts(pairs, finite_size(x) == 0 ? 0 : x, finite_size(y) == 0 ? 0 : y, times);
    // Once more: what lies in the middle of two high parts goes to the same one whenever it is split.
    pack_parts(pairs, fmaf(low_half(pairs[N - 1]), LOW_UNIT, low_half(pairs[0])),
               fmaf(high_half(pairs[N - 1]), LOW_UNIT, high_half(pairs[0])), 1);
    high = pairs[0], low = pairs[N - 1];
    if (!(fabsf(x) < __int_as_float(0x7f800000))) low = low & 0xffff0000 | pack2<half_t>(x, 0);
    if (!(fabsf(y) < __int_as_float(0x7f800000))) low = low & 0xffff | pack2<half_t>(0, y);
}

// Split a tile of one of these arrays, by a block. What dead rows hold shall not decide its unit.
template <class Of, class P>
__device__ void split_tile(const P& p, int n) {
    __shared__ float maxima[SPLIT_THREADS / 32];
    __shared__ bool live[Of::ALL_LIVE ? 1 : Of::SIZE];
    constexpr int CHUNKS = Of::COLUMNS / 4;
    auto [head, tile] = numbered<Of>(p, n);
    if (Of::PACKED && tile < 0) return;
    const Head& its = head;  // a structured binding cannot be captured
    auto given = Of::given(p);
    Halves halves = Of::halves(p);
    int first = tile * Of::SIZE, rows = min(Of::SIZE, Of::rows(p, head) - first);
    const In* from = Of::IN_PAGES ? given.array : Of::row(head, given.array, given.strides, first);
    bool vectors = (unsigned long long)from % 16 == 0 && given.strides.row % 4 == 0;
    auto numbers = [&](int i) {
        int row = i / CHUNKS, column = i % CHUNKS * 4;
        if (!Of::ALL_LIVE && !live[row]) return float4{};
        if constexpr (Of::IN_PAGES) {
            const In* at = paged_operand_row<Of>(p, its, first + row);
            if (at == nullptr) return float4{};
            return load_4(at + column, given.columns - column, (unsigned long long)at % 16 == 0);
        }
        return load_4(from + row * given.strides.row + column, given.columns - column, vectors);
    };

    if constexpr (!Of::ALL_LIVE) {
        for (int i = threadIdx.x; i < rows; i += SPLIT_THREADS) live[i] = Of::live(p, head, first + i);
        __syncthreads();
    }

    float largest = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * CHUNKS; i += SPLIT_THREADS) {
        float4 x = numbers(i);
        largest =
            fmaxf(fmaxf(fmaxf(largest, finite_size(x.x)), finite_size(x.y)), fmaxf(finite_size(x.z), finite_size(x.w)));
    }
    PowerOfTwo power(largest_of_block<SPLIT_THREADS / 32>(largest, shared_address(maxima)));
    if (threadIdx.x == 0) halves.units[n] = power.unit;
    Product* to = halves.rows + Of::row_number(p, head, first) * (2 * Of::COLUMNS);
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * CHUNKS; i += SPLIT_THREADS) {
        float4 x = numbers(i);
        uint2 high, low;
        split_pair<PARTS>(high.x, low.x, x.x, x.y, power.times);
        split_pair<PARTS>(high.y, low.y, x.z, x.w, power.times);
        Product* row = to + i / CHUNKS * (2LL * Of::COLUMNS) + i % CHUNKS * 4;
        *(uint2*)row = high, *(uint2*)(row + Of::COLUMNS) = low;
    }
}

// The tiles of all these arrays that are given, one after the other.
template <class Of, class... Others, class P>
__device__ void split_operands(const P& p, int n) {
    int tiles = Of::GIVEN ? int(Of::count(p)) : 0;
    if (n < tiles) {
        if constexpr (Of::GIVEN) split_tile<Of>(p, n);
    } else if constexpr (sizeof...(Others) > 0) {
        split_operands<Others...>(p, n - tiles);
    }
}
