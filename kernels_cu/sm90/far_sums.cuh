// Products whose sums run along columns that two blocks of a cluster share out: each has a part of every sum, and sends
// it to the other. In turn, of two products: who sends of one has read what it was sent of the other, so nobody has to
// say that a place is free.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"

// Of a warpgroup, with 64 rows of COLUMNS sums of each product; in memory as threads hold them.
template <int COLUMNS>
struct ColumnSums {
    using Sums = Accumulator<1, COLUMNS / 8>;
    static constexpr int PRODUCTS = 2, PRODUCT = 4 * 64 * COLUMNS;
    static constexpr int BYTES = PRODUCTS * PRODUCT, BARRIERS = 8 * PRODUCTS;
    static constexpr int VECTORS = 16 * 128;  // bytes that the threads hold side by side

    unsigned places, barriers;  // of both products
    unsigned other;             // rank of the other block

    __device__ void init() const {
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) mbarrier_init(barriers + 8 * i, 4);
    }

    __device__ void send(const Sums& x, int product) const {
        unsigned full = far_address(barriers + 8 * product, other);
        unsigned place = far_address(own_place(product), other);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            auto word = [&](int e) { return __float_as_uint(x.x[0][n][e]); };
            store_far_16(place + n * VECTORS, make_uint4(word(0), word(1), word(2), word(3)), full);
        }
    }

    // What the other block has sent at its `step`-th step. Both add the same two numbers: they have the same sums.
    __device__ void add(Sums& x, int product, unsigned step) const {
        unsigned full = barriers + 8 * product, place = own_place(product);
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(full, PRODUCT / 4);
        mbarrier_wait(full, step % 2);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            uint4 more = load_shared_16(place + n * VECTORS);
            float* own = x.x[0][n];
            own[0] += __uint_as_float(more.x), own[1] += __uint_as_float(more.y);
            own[2] += __uint_as_float(more.z), own[3] += __uint_as_float(more.w);
        }
    }

   private:
    __device__ unsigned own_place(int product) const { return places + product * PRODUCT + threadIdx.x % 128 * 16; }
};
