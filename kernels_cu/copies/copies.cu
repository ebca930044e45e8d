// Pieces of arrays copied to pieces of others, or sums of several such pieces, all in one launch; arrays may lie in
// another GPU's memory. A piece is cut into tiles of TILE bytes, of which a block has one, and blocks are at PLACES of
// all tiles at once, so that all links are busy to the end. A thread has EACH words on their way before it stores them:
// the way to another GPU is long. Words are as wide as a piece's addresses, strides and lengths allow. Of SUMS each has
// several sources of In, which are added in their order and rounded once, to Out. Its Params are its own
// (cupyflash/gpu/copies.py).
#include "ptx/convert.cuh"

using Number = unsigned long long;

struct Axes {
    long long at[3];  // bytes; the last axis goes on fastest
};

struct Piece {
    Axes strides;  // of what is written
    Number run;    // bytes that lie side by side, as they are read
    unsigned length[3];
    unsigned first;  // of its tiles, among all
};

struct Params {
    char* to[MOST];
    const char* from[MOST];
    Piece pieces[MOST];
    Axes strides[MOST];               // of what is read
    unsigned short begins[MOST + 1];  // of a piece's sources, among all
    unsigned count, tiles;
};

struct alignas(16) Sixteen {
    Number at[2];
};

template <class T, int OF>
struct alignas(OF * sizeof(T)) Numbers {
    static constexpr int COUNT = OF;
    T at[OF];
};

constexpr int EACH = TILE / (sizeof(Sixteen) * THREADS);

struct Place {
    unsigned at[3];
    Number in_run;  // words
};

template <class Word, class Written = Word>
__device__ void copy_tile(const Params& p, unsigned number, unsigned tile) {
    constexpr Number OF_TILE = TILE / sizeof(Word);
    const Piece& piece = p.pieces[number];
    const unsigned source = SUMS ? p.begins[number] : number;
    Number run = piece.run / sizeof(Word), last = piece.length[2], middle = piece.length[1];
    Number first = tile * OF_TILE, end = run * last * middle * piece.length[0];
    if (end > first + OF_TILE) end = first + OF_TILE;
    for (Number begin = first + threadIdx.x; begin < end; begin += EACH * THREADS) {
        Place places[EACH];
        Word words[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Number n = begin + e * THREADS, row = n / run, rows = row / last;
            places[e] = {{unsigned(rows / middle), unsigned(rows % middle), unsigned(row % last)}, n % run};
        }
        long long at[EACH];
        auto find = [&](const Axes& strides, int size) {
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const Place& x = places[e];
                at[e] = x.at[0] * strides.at[0] + x.at[1] * strides.at[1] + x.at[2] * strides.at[2];
                at[e] += (long long)x.in_run * size;
            }
        };
        auto read = [&](unsigned source, Word(&words)[EACH]) {
            find(p.strides[source], sizeof(Word));
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (begin + e * THREADS < end) words[e] = *(const Word*)(p.from[source] + at[e]);
        };
        read(source, words);
        if constexpr (SUMS) {
            for (unsigned next = source + 1; next < p.begins[number + 1]; next++) {
                Word more[EACH];
                read(next, more);
#pragma unroll
                for (int e = 0; e < EACH; e++)
#pragma unroll
                    for (int c = 0; c < Word::COUNT; c++) words[e].at[c] += more[e].at[c];
            }
        }
        find(piece.strides, sizeof(Written));
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (begin + e * THREADS >= end) continue;
            Written written;
            if constexpr (SUMS) {
#pragma unroll
                for (int c = 0; c < Word::COUNT; c++) written.at[c] = from_float<Out>(words[e].at[c]);
            } else {
                written = words[e];
            }
            *(Written*)(p.to[number] + at[e]) = written;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, SUMS ? 2 : 4) copy_pieces(const __grid_constant__ Params p) {
    unsigned tile = blockIdx.x % PLACES * (gridDim.x / PLACES) + blockIdx.x / PLACES;
    if (tile >= p.tiles) return;
    unsigned n = 0, end = p.count;
    while (end - n > 1) {
        unsigned middle = (n + end) / 2;
        if (p.pieces[middle].first <= tile)
            n = middle;
        else
            end = middle;
    }
    const Piece& piece = p.pieces[n];
    tile -= piece.first;
    constexpr Number RATIO = sizeof(In) / sizeof(Out);  // what is written is aligned alike if this many times it is
    Number all = Number(p.to[n]) * RATIO | piece.run;
    for (int axis = 0; axis < 3; axis++) all |= piece.strides.at[axis] * RATIO;
    for (unsigned source = SUMS ? p.begins[n] : n; source < (SUMS ? p.begins[n + 1] : n + 1); source++) {
        all |= Number(p.from[source]);
        for (int axis = 0; axis < 3; axis++) all |= p.strides[source].at[axis];
    }
    if constexpr (SUMS) {
        constexpr int WIDE = sizeof(Sixteen) / sizeof(In);
        if (all % sizeof(Sixteen) == 0)
            copy_tile<Numbers<In, WIDE>, Numbers<Out, WIDE>>(p, n, tile);
        else
            copy_tile<Numbers<In, 1>, Numbers<Out, 1>>(p, n, tile);
    } else {
        if (all % 16 == 0)
            copy_tile<Sixteen>(p, n, tile);
        else if (all % 8 == 0)
            copy_tile<Number>(p, n, tile);
        else if (all % 4 == 0)
            copy_tile<unsigned>(p, n, tile);
        else if (all % 2 == 0)
            copy_tile<unsigned short>(p, n, tile);
        else
            copy_tile<unsigned char>(p, n, tile);
    }
}
