// A block mask as kernels read it (cupyflash/blockmask/tile_lists.py makes it): for each tile of one side the tiles of
// the other side that it visits, in order, and of those of which only some pairs are visible a bit for each pair.
#pragma once
#include "attention/tiles.cuh"

// Which pairs of a tile a block mask leaves: rows of words with a bit for each of 16 columns, the lowest first.
struct TileBits {
    const unsigned short* words = nullptr;  // null: all
    int pitch = 0;                          // words of a row
    int i = 0, j = 0;                       // first query and key

    __device__ bool partial() const { return words != nullptr; }
    __device__ const unsigned short* row(int r) const { return words + r * pitch; }
    // Where rows are queries.
    __device__ bool visible(int query, int key) const {
        int c = key - j;
        return !partial() || row(query - i)[c / 16] >> c % 16 & 1;
    }
};

// The visits of one tile, of `tiles` that its side has.
struct Visits {
    const int* list = nullptr;
    const int* visits = nullptr;  // (tile, where its bits are in the list, or -1)
    Range steps{0, 0};

    __device__ Visits() {}
    __device__ Visits(const Params& p, const Head& head, const int* list, int tiles, int tile) : list(list) {
        int count = p.lists * tiles, n = number(p, head) * tiles + tile;
        visits = list + 2 * count + 1;
        // None of the mask's: no steps, but who looks ahead may ask for the tile of one.
        if (RAGGED && tile >= tiles) return;
        steps = {list[n], list[n + 1]};
    }

    // The n-th tile of a head in the order of the number of visits, most first.
    __device__ static int nth(const Params& p, const Head& head, const int* list, int tiles, int n) {
        return list[p.lists * tiles + 1 + number(p, head) * tiles + n];
    }

    __device__ int tile(int step) const { return visits[2 * step]; }
    __device__ const unsigned short* words(int step) const {
        int at = visits[2 * step + 1];
        return at < 0 ? nullptr : (const unsigned short*)(list + at);
    }

    // The first step with this tile or one behind it.
    __device__ int find(int tile_wanted) const {
        int begin = steps.begin, end = steps.end;
        while (begin < end) {
            int middle = (begin + end) / 2;
            if (tile(middle) < tile_wanted)
                begin = middle + 1;
            else
                end = middle;
        }
        return begin;
    }
    // Steps with tiles of a range alone.
    __device__ Range within(Range tiles) const { return {find(tiles.begin), find(tiles.end)}; }

   private:
    // Which of the mask's patterns is the head's.
    __device__ static int number(const Params& p, const Head& head) {
        return head.batch * p.lists_batch + head.q * p.lists_head;
    }
};
