// Dropout (Srivastava et al. 2014) of probabilities. Whether one is kept is a function of the seed, the batch entry,
// the head, the query and the key alone: the same in every kernel, in the forward, the backward and on a CPU, and
// nothing is stored.
#pragma once
#include "attention/origin.cuh"
#include "attention/pairs.cuh"

// Philox4x32 (Salmon et al. 2011): a counter of four words becomes four random words. 7 rounds are the fewest that pass
// BigCrush there. The counter is (key, batch entry, query, head), so that the first two rounds know either of the query
// or of the key; a lane that has one of these for many of the other takes them once.
struct Philox {
    static constexpr int ROUNDS = 7;

    const Params& p;
    unsigned key[2] = {};  // where the seed is in memory

    __device__ Philox(const Params& p) : p(p) {
        if constexpr (config::SEED) {
            unsigned long long seed = *p.seed;
            key[0] = unsigned(seed), key[1] = unsigned(seed >> 32);
        }
    }

    // What the first two rounds make of one side.
    struct Side {
        unsigned x, y, z;
    };
    __device__ Side of_query(unsigned i, unsigned batch) const {
        unsigned long long first = product<1>(i), second = product<0>(high(first) ^ batch ^ round_key<0>(0));
        return {low(first) ^ round_key<0>(1), high(second) ^ round_key<1>(1), low(second)};
    }
    __device__ Side of_key(unsigned j, unsigned head) const {
        unsigned long long first = product<0>(j), second = product<1>(high(first) ^ head ^ round_key<1>(0));
        return {high(second), low(first), low(second)};
    }

    __device__ void words(const Side& query, const Side& of_key, unsigned (&x)[4]) const {
        x[0] = query.x ^ of_key.x, x[1] = of_key.z, x[2] = query.y ^ of_key.y, x[3] = query.z;
#pragma unroll
        for (int round = 2; round < ROUNDS; round++) {
            unsigned long long first = product<0>(x[0]), second = product<1>(x[2]);
            x[0] = high(second) ^ x[1] ^ round_key<0>(round), x[1] = low(second);
            x[2] = high(first) ^ x[3] ^ round_key<1>(round), x[3] = low(first);
        }
    }

   private:
    template <int WHICH>
    __device__ static unsigned long long product(unsigned x) {
        return (unsigned long long)x * (WHICH == 0 ? 0xD2511F53u : 0xCD9E8D57u);
    }
    template <int WHICH>
    __device__ unsigned round_key(unsigned round) const {
        if (!config::SEED) return p.round_keys[2 * round + WHICH];  // an operand of what follows
        return key[WHICH] + round * (WHICH == 0 ? 0x9E3779B9u : 0xBB67AE85u);
    }
    __device__ static unsigned low(unsigned long long x) { return unsigned(x); }
    __device__ static unsigned high(unsigned long long x) { return unsigned(x >> 32); }
};

// Four words are 16 bits for each of eight pairs, a group: two queries that differ in bit 3, by four keys that differ
// in bits 3 and 0. That is what a lane holds of an accumulator (tile/fragment.cuh). Word 2 (bit 3 of the key) + (bit 3
// of the query), its half by bit 0 of the key.
struct Dropout {
    Philox philox;

    __device__ Dropout(const Params& p) : philox(p) {}

    // Of a part queries and keys begin at multiples of 16: with whole groups.
    __device__ Origin origin() const { return Origin::of(philox.p); }

    // A query, or key, without the bits in which those of a group differ.
    __device__ static unsigned group_of_query(unsigned i) { return i / 16 * 8 + i % 8; }
    __device__ static unsigned group_of_key(unsigned j) { return j / 16 * 4 + j / 2 % 4; }

    __device__ Philox::Side of_query(unsigned group, int batch) const {
        return philox.of_query(group + group_of_query(origin().query), batch + origin().batch);
    }
    __device__ Philox::Side of_key(unsigned group, int head) const {
        return philox.of_key(group + group_of_key(origin().key), head + origin().head);
    }

    // What is dropped has a number below this one, where that is the upper half of a word.
    __device__ unsigned below() const { return philox.p.drop_below; }

    // One pair by itself.
    __device__ bool keeps(int batch, Pair at) const {
        if (!config::DROPOUT) return true;
        unsigned x[4];
        philox.words(of_query(group_of_query(at.i), batch), of_key(group_of_key(at.j), at.head), x);
        unsigned word = at.j & 8 ? (at.i & 8 ? x[3] : x[2]) : (at.i & 8 ? x[1] : x[0]);
        return (at.j & 1 ? word : word << 16) >= below();
    }
};

// What sums of kept probabilities are divided by, and its natural logarithm. The backward has P / kept in the place of
// P: as exp(S - lse - log kept), so that with kept delta dS = P / kept (dP - kept delta) costs no further product.
__device__ inline Accum kept(const Params& p) { return config::DROPOUT ? p.kept : Accum(1); }
__device__ inline Accum lse_of_kept(const Params& p, Accum lse) { return config::DROPOUT ? lse + p.log_kept : lse; }
