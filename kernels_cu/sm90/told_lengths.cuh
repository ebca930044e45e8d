// The lengths of a sequence, from the thread that looks for it to all others of a thread block, through shared memory.
#pragma once
#include "attention/head.cuh"
#include "ptx/shared.cuh"

// What a tile is told with where lengths are data: those of its sequence, so that nobody else has to look for it.
template <bool DATA>
struct ToldLengths {
    static constexpr int BYTES = 0;

    __device__ void store(unsigned) const {}
    template <class F>
    __device__ static ToldLengths load(unsigned, F) {
        return {};
    }
    __device__ static ToldLengths of(const Params&, const Head&) { return {}; }
    // The sequence's head of K and V, by its number among all.
    __device__ Head head(const Params& p, int kv_head) const {
        return Head::of_k(p, kv_head / p.heads_k, kv_head % p.heads_k);
    }
};
template <>
struct ToldLengths<true> {
    static constexpr int BYTES = 32;

    int n;  // of the sequence
    Range rows_q, rows_k;

    __device__ void store(unsigned address) const {
        store_shared(address, n);
        store_shared(address + 16, rows_q.begin);
        store_shared(address + 20, rows_q.end);
        store_shared(address + 24, rows_k.begin);
        store_shared(address + 28, rows_k.end);
    }
    template <class F>
    __device__ static ToldLengths load(unsigned address, F settled) {
        uint4 rows = load_shared_16(address + 16);
        return {settled(load_shared(address)), {settled(rows.x), settled(rows.y)}, {settled(rows.z), settled(rows.w)}};
    }
    __device__ static ToldLengths of(const Params& p, const Head& head) {
        int q = head.first_query(), k = head.first_key();
        return {head.number(), {q, q + head.queries(p)}, {k, k + head.keys(p)}};
    }
    __device__ Head head(const Params& p, int kv_head) const {
        int k = kv_head % p.heads_k;
        return Head::told(p, n, k * group_of(p), k, rows_q, rows_k);
    }
};
