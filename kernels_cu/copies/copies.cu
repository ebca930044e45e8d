// Pieces of arrays copied to pieces of others, all in one launch; arrays may lie in another GPU's memory. A piece is
// cut into tiles of TILE bytes, of which a block has one, and blocks are at PLACES of all tiles at once, so that all
// links are busy to the end. A thread has EACH words on their way before it stores them: the way to another GPU is
// long. Words are as wide as a piece's addresses, strides and lengths allow. Its Params are its own
// (cupyflash/gpu/copies.py).
using Number = unsigned long long;

struct Piece {
    long long to_strides[3], from_strides[3];  // bytes; the last axis goes on fastest
    Number run;                                // bytes that lie side by side, on both sides
    unsigned length[3];
    unsigned first;  // of its tiles, among all
};

struct Params {
    char* to[MOST];
    const char* from[MOST];
    Piece pieces[MOST];
    unsigned count, tiles;
};

struct alignas(16) Sixteen {
    Number at[2];
};

constexpr int EACH = TILE / (sizeof(Sixteen) * THREADS);

template <class Word>
__device__ void copy_tile(const Piece& piece, char* to, const char* from, unsigned tile) {
    constexpr Number OF_TILE = TILE / sizeof(Word);
    Number run = piece.run / sizeof(Word), last = piece.length[2], middle = piece.length[1];
    Number first = tile * OF_TILE, end = run * last * middle * piece.length[0];
    if (end > first + OF_TILE) end = first + OF_TILE;
    for (Number begin = first + threadIdx.x; begin < end; begin += EACH * THREADS) {
        long long to_at[EACH], from_at[EACH];
        Word words[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            Number n = begin + e * THREADS, row = n / run, rows = row / last;
            long long i = rows / middle, j = rows % middle, k = row % last, in_row = n % run * sizeof(Word);
            to_at[e] = i * piece.to_strides[0] + j * piece.to_strides[1] + k * piece.to_strides[2] + in_row;
            from_at[e] = i * piece.from_strides[0] + j * piece.from_strides[1] + k * piece.from_strides[2] + in_row;
        }
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (begin + e * THREADS < end) words[e] = *(const Word*)(from + from_at[e]);
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (begin + e * THREADS < end) *(Word*)(to + to_at[e]) = words[e];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_pieces(const __grid_constant__ Params p) {
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
    char* to = p.to[n];
    const char* from = p.from[n];
    Number all = Number(to) | Number(from) | piece.run;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) all |= piece.to_strides[axis] | piece.from_strides[axis];
    tile -= piece.first;
    if (all % 16 == 0)
        copy_tile<Sixteen>(piece, to, from, tile);
    else if (all % 8 == 0)
        copy_tile<Number>(piece, to, from, tile);
    else if (all % 4 == 0)
        copy_tile<unsigned>(piece, to, from, tile);
    else if (all % 2 == 0)
        copy_tile<unsigned short>(piece, to, from, tile);
    else
        copy_tile<unsigned char>(piece, to, from, tile);
}
