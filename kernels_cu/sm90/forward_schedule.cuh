// The tiles of a Hopper forward: which a thread block takes, with a share of whose keys, and where those keys lie.
// ROWS, of a tile of queries, is a constant of the plan or of the file that includes this.
#pragma once
#include "attention/pairs.cuh"
#include "sm90/shares_by_length.cuh"
#include "sm90/tile_order.cuh"
#include "sm90/tile_schedule.cuh"
#include "tile/swizzled.cuh"

using namespace config;

constexpr int HEAD_ROWS = ROWS / PACK;  // where queries are few, heads that share K and V share a tile: rows of each

// Whether rows behind the end of a tile may be those of another sequence, or stale: of arrays over queries, and of K
// and V, among which are also those that no query of their sequence sees. (Else none are there, and the tensor map, or
// what turned V, has zeros. So it has behind the end of packed Q, K and V: their maps are of windows.)
constexpr bool Q_ENDS = PACKED_Q, K_ENDS = PACKED_K || LENGTHS ||
                                           (SHIFTS && sizeof(In) > 1 && (walk::BOUND_FIRST || walk::BOUND_LAST));

static_assert(!BY_LENGTH || SHARES && (LENGTHS || PACKED_K) && !walk::LISTED);

// Threads that load: a warp where it looks up pages, or counts shares; then its first thread alone waits and asks.
// (Others that waited could come so late that a phase of the same parity is the next but one.)
constexpr int LOADERS = PAGED || BY_LENGTH ? 32 : 1;
__device__ inline bool leads() { return LOADERS == 1 || threadIdx.x == 0; }

// Where the keys of a tile lie, of K as of V. In pages they are so many boxes of which none has rows of two, and a lane
// looks up the page of one.
template <bool IN_PAGES>
struct KeyPlaces {
    __device__ void look_up(const Params&, const Head&, int) {}
    template <class Tile>
    __device__ void load(const Params& p, Tile tile, const TensorMap& map, unsigned barrier, int key, const Head& head,
                         int column = 0) const {
        if (!leads()) return;
        InMap at = head.at_key(p, key, column);
        if constexpr (PACKED_K)
            tile.load(map, barrier, at.in_window(head.live_keys(p).end - key));
        else
            tile.load(map, barrier, at);
    }
};
template <>
struct KeyPlaces<true> {
    static constexpr int BOXES = KEYS / KEY_BOX;
    static_assert(BOXES <= LOADERS && KEYS % KEY_BOX == 0);

    int row, page;

    template <class Given>
    __device__ void look_up(const Given& p, const Head& head, int key) {
        int lane = threadIdx.x % 32;
        InMap at = head.at_paged_key(p, key + min(lane, BOXES - 1) * KEY_BOX);
        row = at.row, page = at.batch;
    }
    template <class Tile>
    __device__ void load(const Params&, Tile tile, const TensorMap& map, unsigned barrier, int, const Head& head,
                         int column = 0) const {
        constexpr int TOGETHER = BOXES % 4 == 0 ? 4 : BOXES % 2 == 0 ? 2 : BOXES;
        __syncwarp();  // the first thread has waited for all
        for (int first = 0; first < BOXES; first += TOGETHER) {
            int rows[TOGETHER], pages[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; n++)
                rows[n] = __shfl_sync(~0u, row, first + n), pages[n] = __shfl_sync(~0u, page, first + n);
            if (elected()) {
#pragma unroll
                for (int n = 0; n < TOGETHER; n++) {
                    InMap at = head.in_page(rows[n], pages[n]).down(0, column);
                    tile.from((first + n) * KEY_BOX).load(map, barrier, at);
                }
            }
        }
    }
};
using KeyPlace = KeyPlaces<PAGED>;

using TileWalk = KeyWalk<KEYS, ROWS>;  // (what is listed is not packed)

static_assert(!ORDERED || PACKED_Q && !SHARES && !walk::LISTED);

// V_PARTS: wide rows of V and O come in parts of DIM_V columns, each of a thread block that computes S by itself. Where
// it begins:
__device__ inline int first_column(const Tile& tile) { return V_PARTS > 1 ? tile.part * DIM_V : 0; }

// Each tile so many times, with a part of the columns of V; SHARES: with a share of its keys.
struct TileSchedule : PackSchedule<HEAD_ROWS, PACK, 1, walk::GROWING || ORDERED> {
    using Whole = PackSchedule<HEAD_ROWS, PACK, 1, walk::GROWING || ORDERED>;

    __device__ TileSchedule(const Params& p) : Whole(p) {
        if constexpr (ORDERED) {
            AllTiles all = AllTiles::of(p);
            tiles = all.count;
            // Those with most keys are worked on at once; and each worker has time for LAST of them in the last round.
            together = heads_in(CACHE, Sequence::bytes_of_kv(p, all.most));
            rounds = max(0, heads - tiles_in(LAST * gridDim.x, max(1, all.full))) / together;
        }
    }
    __device__ int total() const { return Whole::total() * V_PARTS * (SHARES ? p.shares : 1); }  // (not BY_LENGTH)
    template <bool BY_WARP = false>
    __device__ Tile tile(int number) const {
        if constexpr (!SHARES && V_PARTS == 1) return of_head<BY_WARP>(number);
        int of_part = number / V_PARTS, shares = SHARES ? p.shares : 1;
        Tile tile = of_head(of_part / shares);
        tile.part = number % V_PARTS;
        if (SHARES) tile.share = of_part % shares;
        return tile;
    }

   private:
    template <bool BY_WARP = false>
    __device__ Tile of_head(int number) const {
        if constexpr (ORDERED) {
            TileIndex at = this->index(number);
            Heads heads = this->heads_of(at.head);
            auto tile = ListedTile::at(p, 1 + at.tile, heads.q, heads.k);
            return {tile.head, tile.head.template query_tile<HEAD_ROWS>(p, tile.number)};
        } else {
            return Whole::template tile<BY_WARP>(number);
        }
    }
};

// BY_LENGTH: the same by numbers that only grow, of which there are so many as lengths say.
struct SharesInTurn {
    const TileSchedule& schedule;
    SharesByLength<HEAD_ROWS> shares;
    SharesByLength<HEAD_ROWS>::Found found;

    __device__ SharesInTurn(const Params& p, const TileSchedule& schedule)
        : schedule(schedule), shares{p, schedule.heads} {}
    __device__ bool has(int number) { return shares.find(number, found); }
    // Of the number that has() has found.
    __device__ Tile tile() const {
        auto [q, k] = schedule.heads_of(found.tile % schedule.heads);
        Head head = Head::of(schedule.p, found.sequence, q, k);
        return {head, head.template query_tile<HEAD_ROWS>(schedule.p, found.tile / schedule.heads), found.share};
    }
    // Where has() has said no.
    __device__ int total() const { return shares.before; }
};

// Over the key tiles of a tile, or of its share.
__device__ inline TileWalk walk_of(const Params& p, const Tile& tile) {
    TileWalk walk(p, tile.head, tile.queries);
    return SHARES ? walk.share(tile.share, shares_of(p, tile.head)) : walk;
}
