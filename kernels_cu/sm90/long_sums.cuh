// O over many keys of 8 bits. Tensor cores align the products of a step to what they are added to and keep 13 bits of
// them: beside a sum over thousands of keys a product becomes 0. So the accumulator takes some SUM_TILES key tiles, and
// what is summed so far goes to shared memory, in bfloat16; what that rounds off stays behind. (In float32 there is not
// always room, and compilers spill.)
#pragma once
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"

struct LongSums {
    int tiles = 0;      // in the accumulator
    bool kept = false;  // whether there are some in memory

    // Of a thread block; O may leave from the same place.
    static constexpr int BYTES = config::SUM_TILES > 0 ? config::WARPGROUPS * ((config::DIM_V + 63) / 64) * 8192 : 0;

    // Another key tile comes, and `after` come after it: whether the accumulator is full with it. (Asked early: nothing
    // is to be waited for between two products.)
    __device__ bool full(int after) { return ++tiles >= config::SUM_TILES && after >= config::SUM_TILES / 2; }

    // To memory. Where nothing is kept yet, `free` waits until there is room.
    template <int N, class F>
    __device__ void put_away(unsigned base, int warpgroup, Accumulator<1, N>& o, F free) {
        if (kept)
            collect(base, warpgroup, o);
        else
            free();
        for_columns<N>(base, warpgroup, [&](unsigned at, int n) {
            float x[4];
            put(at, o.x[0][n], x);
#pragma unroll
            for (int i = 0; i < 4; i++) o.x[0][n][i] -= x[i];
        });
        tiles = 0, kept = true;
    }

    // What is in memory, multiplied, too; what that rounds off goes to the accumulator, which has been multiplied.
    template <int N>
    __device__ void scale_rows(unsigned base, int warpgroup, Accumulator<1, N>& o, const float (&by)[1][2]) const {
        if (!kept) return;
        for_columns<N>(base, warpgroup, [&](unsigned at, int n) {
            float x[4], stored[4];
            get(at, x);
            x[0] *= by[0][0], x[1] *= by[0][0], x[2] *= by[0][1], x[3] *= by[0][1];
            put(at, x, stored);
#pragma unroll
            for (int i = 0; i < 4; i++) o.x[0][n][i] += x[i] - stored[i];
        });
    }

    // All of O.
    template <int N>
    __device__ void collect(unsigned base, int warpgroup, Accumulator<1, N>& o) const {
        if (!kept) return;
        for_columns<N>(base, warpgroup, [&](unsigned at, int n) {
            float x[4];
            get(at, x);
#pragma unroll
            for (int e = 0; e < 4; e++) o.x[0][n][e] += x[e];
        });
    }

  private:
    // f(address, n) for each 8 columns, where a thread has a word, and another behind 512 bytes. Of 64 rows and columns
    // a warpgroup has 8 KiB side by side.
    template <int N, class F>
    __device__ static void for_columns(unsigned base, int warpgroup, F f) {
        unsigned own = base + warpgroup * 8192 + threadIdx.x % 128 * 4;
#pragma unroll
        for (int n = 0; n < N; n++) f(own + n / 8 * (config::WARPGROUPS * 8192) + n % 8 * 1024, n);
    }
    // `stored`: what is in memory of x now.
    __device__ static void put(unsigned at, const float (&x)[4], float (&stored)[4]) {
        unsigned words[2] = {pack2<bfloat16_t>(x[0], x[1]), pack2<bfloat16_t>(x[2], x[3])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            store_shared(at + 512 * i, words[i]);
            unpack(words[i], stored[2 * i], stored[2 * i + 1]);
        }
    }
    __device__ static void get(unsigned at, float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) unpack(load_shared(at + 512 * i), x[2 * i], x[2 * i + 1]);
    }
    __device__ static void unpack(unsigned word, float& low, float& high) {
        low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000);
    }
};
