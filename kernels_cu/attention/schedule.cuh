// Which tile of queries a persistent thread block works on next. Tiles are numbered in the order in which they should
// start; a block begins with the one of its own number.
#pragma once
#include "attention/mask.cuh"
#include "ptx/flag.cuh"

struct Tile {
    int batch, head, head_k;
    Range queries;
};

template <int ROWS>
struct Schedule {
    // Heads whose K and V together stay in the L2 cache.
    static constexpr long long CACHE = 32 << 20;

    const Params& p;
    int tiles;     // of a head
    int together;  // heads whose tiles are worked on together

    __device__ Schedule(const Params& p) : p(p), tiles((p.seq_q + ROWS - 1) / ROWS) {
        long long bytes = (long long)sizeof(Element) * p.seq_k * (p.dim + p.dim_v), fit = CACHE / bytes;
        together = int(fit < 1 ? 1 : fit < p.heads_k * p.batch ? fit : p.heads_k * p.batch) * (p.heads_q / p.heads_k);
    }

    __device__ int total() const { return tiles * p.heads_q * p.batch; }

    // With a causal mask later tiles see more keys: in a group of heads they come first. Else head by head.
    __device__ Tile tile(int number) const {
        int pair, row;
        if (config::RIGHT) {
            int first = number / (together * tiles) * together, place = number - first * tiles;
            int heads = min(together, p.heads_q * p.batch - first);
            pair = first + place % heads;
            row = (tiles - 1 - place / heads) * ROWS;
        } else {
            pair = number / tiles;
            row = number % tiles * ROWS;
        }
        int head = pair % p.heads_q;
        return {pair / p.heads_q, head, head / (p.heads_q / p.heads_k), {row, min(p.seq_q, row + ROWS)}};
    }
};

// Deals out the numbers 0, 1, ... to the thread blocks of a launch in the order of asking. N numbers are wanted; each block
// asks until it is told N or more, so that they ask N + blocks times in all, and `last` is that less one. The memory (3
// words) comes uninitialised, and nothing before this launch could set it: the first block that asks does, under a pair of
// marks that memory does not hold by chance; the last one that asks removes them, so that another launch on the same memory
// starts afresh.
struct Tickets {
    static constexpr unsigned long long SETTING = 0x9d3f6a1cc5e2704bull, READY = 0x71b8e40a2f96d35dull;

    unsigned* workspace;

    // `first`: the thread has not asked before.
    __device__ int take(bool first) const {
        if (first) set();
        return atomicAdd(workspace + 2, 1);
    }

    // With the last ticket a thread took.
    __device__ void settle(int ticket, int last) const {
        if (ticket == last) store_release(mark(), 0);
    }

   private:
    __device__ unsigned long long* mark() const { return (unsigned long long*)workspace; }

    __device__ void set() const {
        unsigned long long seen = load_acquire(mark());
        if (seen != READY && seen != SETTING && atomicCAS(mark(), seen, SETTING) == seen) {
            workspace[2] = 0;
            store_release(mark(), READY);
        }
        while (load_acquire(mark()) != READY) {
        }
    }
};
