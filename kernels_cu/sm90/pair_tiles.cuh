// Tiles of the arrays over pairs, mask and bias, in shared memory: TMA brings them as it brings K and V, and
// lanes read what is at the elements that they hold.
#pragma once
#include "attention/mask.cuh"
#include "ptx/tma.cuh"
#include "tile/places.cuh"
#include "tile/ring.cuh"

// QUERIES by KEYS elements; not BY_QUERY: the same row for all queries. Blocks of 128 bytes a row, as SwizzledTile.
template <class T, int QUERIES, int KEYS, bool BY_QUERY>
struct PairTile {
    static constexpr int SIZE = sizeof(T);
    static constexpr int COLUMNS = 128 / SIZE, BLOCKS = (KEYS + COLUMNS - 1) / COLUMNS;
    static constexpr int BLOCK_BYTES = BY_QUERY ? 128 * QUERIES : 1024;
    static constexpr int BYTES = BLOCKS * BLOCK_BYTES;
    static constexpr int ARRIVING = BLOCKS * 128 * (BY_QUERY ? QUERIES : 1);
    static_assert(QUERIES % 8 == 0 && KEYS % 16 == 0);

    unsigned base;

    __device__ void load(const TensorMap& map, unsigned barrier, InMap at) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            tma_load(base + b * BLOCK_BYTES, map, barrier, at.column + b * COLUMNS, BY_QUERY ? at.row : 0, at.head,
                     at.batch);
    }

    // Zeros in rows [begin, end), by a warp.
    __device__ void clear(int begin, int end) const {
        constexpr float ZEROS[4] = {};
        if (!BY_QUERY) return;
        for (int b = 0; b < BLOCKS; b++)
            for (int n = 8 * begin + threadIdx.x % 32; n < 8 * end; n += 32)
                store_shared_16(base + b * BLOCK_BYTES + 16 * n, ZEROS);
    }

    // Where the elements of a fragment's lane begin. A lane's further ones are a constant away, but for the swizzle:
    // rows by 8, or keys by 8, or by 1 where queries run along its lines.
    template <bool TRANSPOSED>
    __device__ unsigned place(int query, int key) const {
        int lane = threadIdx.x % 32, apart = lane / 4, along = lane % 4 * 2;
        int q = BY_QUERY ? query + (TRANSPOSED ? along : apart) : 0, k = key + (TRANSPOSED ? apart : along);
        return base + k / COLUMNS * BLOCK_BYTES + 128 * q + (k % COLUMNS * SIZE ^ q % 8 * 16);
    }

    // The element at line h and column n of those that the lane holds, n = 8 group + {0, 1}.
    template <bool TRANSPOSED>
    __device__ static unsigned address(unsigned place, int h, int n) {
        if (TRANSPOSED) {
            unsigned at = place ^ 8 * SIZE * h;
            return BY_QUERY ? (at ^ n % 2 * 16) + 128 * n : at;
        }
        return (place ^ 8 * (n / 8) % COLUMNS * SIZE) + 8 * (n / 8) / COLUMNS * BLOCK_BYTES + n % 2 * SIZE +
               (BY_QUERY ? 1024 * h : 0);
    }
};

constexpr bool PAIR_ARRAYS = config::MASK || config::BIAS;  // whether there is any

// What a launch says of them.
template <bool GIVEN>
struct MaskMap {
    TensorMap mask;
};
template <bool GIVEN>
struct BiasMap {
    TensorMap bias;
};
template <>
struct MaskMap<false> {};
template <>
struct BiasMap<false> {};
struct PairMaps : MaskMap<config::MASK>, BiasMap<config::BIAS> {};

// Both of a tile of QUERIES and one of config::KEYS.
template <int QUERIES>
struct PairTiles {
    using MaskType = Pointed<decltype(Params::mask)>;
    using BiasType = Pointed<decltype(Params::bias)>;
    using Mask = PairTile<MaskType, QUERIES, config::KEYS, config::MASK_BY_QUERY>;
    using Bias = PairTile<BiasType, QUERIES, config::KEYS, config::BIAS_BY_QUERY>;
    static constexpr int MASK_BYTES = config::MASK ? Mask::BYTES : 0;
    static constexpr int BYTES = MASK_BYTES + (config::BIAS ? Bias::BYTES : 0);
    static constexpr int ARRIVING = (config::MASK ? Mask::ARRIVING : 0) + (config::BIAS ? Bias::ARRIVING : 0);

    unsigned base;

    __device__ Mask mask() const { return {base}; }
    __device__ Bias bias() const { return {base + MASK_BYTES}; }
    __device__ void clear(int begin, int end) const {
        if constexpr (config::MASK) mask().clear(begin, end);
        if constexpr (config::BIAS) bias().clear(begin, end);
    }

    // The producer: from a query and a key on. Of an axis that it is broadcast along, an array has one entry.
    template <class Maps>
    __device__ void load(const Params& p, const Maps& maps, unsigned barrier, const Head& head, int query,
                         int key) const {
        mbarrier_arrive_expect(barrier, ARRIVING);
        if constexpr (config::MASK)
            mask().load(maps.mask, barrier, head.at_pair<config::MASK_LINES>(p.mask_strides, query, key));
        if constexpr (config::BIAS)
            bias().load(maps.bias, barrier, head.at_pair<config::BIAS_LINES>(p.bias_strides, query, key));
    }
};

// As the lines of an accumulator read them (see InMemory), which stands at a query and a key of the tile.
template <bool TRANSPOSED, class Tiles>
struct InTiles {
    using Mask = typename Tiles::Mask;
    using Bias = typename Tiles::Bias;
    using Number = typename Tiles::BiasType;

    unsigned masks, biases;

    __device__ InTiles(Tiles tiles, int query, int key) {
        if constexpr (config::MASK) masks = tiles.mask().template place<TRANSPOSED>(query, key);
        if constexpr (config::BIAS) biases = tiles.bias().template place<TRANSPOSED>(query, key);
    }

    __device__ bool visible(int line, int n) const {
        return load_shared_u8(Mask::template address<TRANSPOSED>(masks, line, n));
    }
    __device__ float bias(int line, int n) const {
        unsigned at = Bias::template address<TRANSPOSED>(biases, line, n);
        if constexpr (sizeof(Number) == 4)
            return __uint_as_float(load_shared(at));
        else
            return to_float(Number{load_shared_u16(at)});
    }

    // Of columns n and n + 1, which lie side by side where keys run along the lines.
    __device__ void visible(int line, int n, bool (&x)[2]) const {
        if constexpr (TRANSPOSED) {
            x[0] = visible(line, n), x[1] = visible(line, n + 1);
        } else {
            unsigned both = load_shared_u16(Mask::template address<TRANSPOSED>(masks, line, n));
            x[0] = both & 0xff, x[1] = both >> 8;
        }
    }
    __device__ void bias(int line, int n, float (&x)[2]) const {
        unsigned at = Bias::template address<TRANSPOSED>(biases, line, n);
        if constexpr (TRANSPOSED) {
            x[0] = bias(line, n), x[1] = bias(line, n + 1);
        } else if constexpr (sizeof(Number) == 4) {
            float2 both = load_shared_float2(at);
            x[0] = both.x, x[1] = both.y;
        } else {
            unsigned both = load_shared(at);
            x[0] = to_float(Number{(unsigned short)both}), x[1] = to_float(Number{(unsigned short)(both >> 16)});
        }
    }
};
