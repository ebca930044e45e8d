// Where lengths are data: what each thread block of latent attention has to do. The key tiles of all sequences stand in
// one line, and each block has a stretch of it, as long as all others. A sequence is cut where a stretch ends in it.
#pragma once
#include "sm90/forward_schedule.cuh"

// (Else tiles of queries are dealt out one by one.)
constexpr bool STRETCHES = LEAST_TILES > 0;
static_assert(!STRETCHES || SHARES && LENGTHS && !walk::BOUND_FIRST && !walk::LISTED);
static_assert(!STRETCHES || LEAST_TILES >= 2 * BEGIN_TILES, "two edges may come to one begin of a sequence");

// A tile of queries with some of the key tiles that it visits, or all.
struct Piece {
    static constexpr int WHOLE = -1;

    Tile tile;
    Range keys;  // tiles
    int place;   // of its results among those of shares; WHOLE: they are the rows'
};

// A place for results of shares: those of a piece that begins within its sequence come to the first one of its block,
// those of one that ends there to the second. What stands there is noted, for those who put rows together.
struct PlaceNote {
    int batch, head;  // the first head of its tile
    int part, parts;  // which one it is of how many; 0: nothing is there

    __device__ static PlaceNote read(const Params& p, int place) {
        uint4 x = *((const uint4*)p.share_notes + place);
        return {int(x.x), int(x.y), int(x.z), int(x.w)};
    }
    __device__ void write(const Params& p, int place) const {
        *((uint4*)p.share_notes + place) = make_uint4(batch, head, part, parts);
    }
    // The place of part 0 less one; that of part n > 0 lies 2 * n * columns behind it.
    __device__ int origin(const Params& p, int place) const { return place / 2 * 2 - 2 * part * p.columns; }
};

// The stretch of a thread block, found by a warp. `columns` blocks with different tiles of queries have the same, so
// that they read the same keys at the same time; the tiles that one of them has of a sequence follow each other.
struct Stretch {
    const Params& p;
    int in_turn;         // tiles of queries that a block has of a sequence
    int each;            // how long stretches are
    bool apart = false;  // whether sequences begin where stretches do
    int at, end;         // what is left of this one
    int place = 0;       // the first sequence that may lie there
    int before = 0;      // where it begins

    __device__ Stretch(const Params& p, int wide) : p(p), in_turn(wide / p.columns) {
        int sum = 0, longest = 0;
        each_sequence([&](int tiles) { sum += tiles + BEGIN_TILES, longest = max(longest, tiles); });
        int stretches = gridDim.x / p.columns;
        each = tiles_in(over_lanes(sum, add) * in_turn, stretches);
        each = max(each, min(LEAST_TILES, over_lanes(longest, larger_int) + BEGIN_TILES));
        // Where stretches an eighth longer leave each sequence its own, a block begins once, and fewer shares are left.
        int most = each + each / 8, parts = 0, part = 1;
        each_sequence([&](int tiles) {
            int own = max(1, tiles_in(tiles, most));
            parts += own, part = max(part, tiles_in(tiles, own));
        });
        apart = over_lanes(parts, add) * in_turn <= stretches;
        if (apart) each = over_lanes(part, larger_int);
        at = int(blockIdx.x) / p.columns * each, end = at + each;
        if (threadIdx.x % 32 < 2) PlaceNote{0, 0, 0, 0}.write(p, 2 * blockIdx.x + threadIdx.x % 32);
        __syncwarp();
    }

    // The next piece, or false.
    __device__ bool next(const TileSchedule& schedule, Piece& piece) {
        int lane = threadIdx.x % 32;
        while (at < end && place < p.batch) {
            int tiles = place + lane < p.batch ? this->tiles(place + lane) : 0;
            int own = place + lane < p.batch ? in_turn * length(tiles) : 0, sum = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int lower = __shfl_sync(~0u, sum, max(0, lane - step));
                if (lane >= step) sum += lower;
            }
            unsigned behind = __ballot_sync(~0u, before + sum > at);
            if (behind == 0) {
                place += 32, before += __shfl_sync(~0u, sum, 31);
                continue;
            }
            int first = __ffs(behind) - 1;
            place += first, before += __shfl_sync(~0u, sum - own, first), tiles = __shfl_sync(~0u, tiles, first);
            int number = (at - before) / length(tiles), begin = before + number * length(tiles), from = at;
            at = begin + length(tiles);
            piece.keys = {cut(from - begin, tiles), cut(end - begin, tiles)};
            if (tiles == 0 ? from > begin : piece.keys.begin == piece.keys.end) continue;
            number = place * schedule.heads + number * p.columns + int(blockIdx.x) % p.columns;
            piece.tile = schedule.Whole::tile(TileIndex{number, 0});
            piece.place = Piece::WHOLE;
            if (piece.keys.end - piece.keys.begin < tiles) note(piece, begin, tiles);
            return true;
        }
        return false;
    }

   private:
    static __device__ int add(int x, int y) { return x + y; }
    static __device__ int larger_int(int x, int y) { return max(x, y); }
    template <class F>
    static __device__ int over_lanes(int x, F f) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) x = f(x, __shfl_xor_sync(~0u, x, step));
        return x;
    }

    // Key tiles that the queries of sequence n visit.
    __device__ int tiles(int n) const {
        Head head = Head::of(p, n, 0, 0);
        return TileWalk(p, head, head.query_tile<HEAD_ROWS>(p, 0)).count();
    }
    template <class F>
    __device__ void each_sequence(F f) const {
#pragma unroll 4
        for (int n = threadIdx.x % 32; n < p.batch; n += 32) f(tiles(n));
    }

    // What a tile of queries has of the line: a key tile after the other, behind what it takes to begin.
    __device__ int length(int tiles) const {
        return apart ? max(1, tiles_in(tiles, each)) * each : tiles + BEGIN_TILES;
    }
    // Where an edge at a place of this length cuts its key tiles. What is shorter than a begin is not cut off.
    __device__ int cut(int place, int tiles) const {
        if (place <= 0) return 0;
        if (place >= length(tiles)) return tiles;
        int tile = apart ? place : place - BEGIN_TILES;
        return tiles - tile < BEGIN_TILES ? tiles : tile < BEGIN_TILES ? 0 : tile;
    }

    // A piece of a sequence whose length begins there is a part of it.
    __device__ void note(Piece& piece, int begin, int tiles) const {
        int first = begin / each, last = (begin + length(tiles) - 1) / each;
        if (cut((first + 1) * each - begin, tiles) == 0) first++;
        if (cut(last * each - begin, tiles) == tiles) last--;
        piece.place = 2 * blockIdx.x + (piece.keys.begin == 0);
        PlaceNote note{piece.tile.head.batch, piece.tile.head.q, int(blockIdx.x) / p.columns - first, last - first + 1};
        if (threadIdx.x % 32 == 0) note.write(p, piece.place);
    }
};
