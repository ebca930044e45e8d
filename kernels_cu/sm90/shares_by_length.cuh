// Where each sequence is cut by its own length (attention/share_count.cuh), how many shares there are in all is known
// to nobody before lengths are read: the warp that loads counts along the sequences.
#pragma once
#include "attention/schedule.cuh"
#include "attention/share_count.cuh"

// Shares of tiles of ROWS queries are numbered by sequences, of which those that are cut come first, since their shares
// are longer; of one by shares. A warp finds a number, and later only larger ones.
template <int ROWS>
struct SharesByLength {
    const Params& p;
    int heads;       // of a sequence, that have tiles of their own
    int place = 0;   // all sequences, as those that are cut, and again, as those that are not
    int before = 0;  // numbers of the places in front
    int size = BY_LENGTH ? SHARE_TILES : 1;  // key tiles of a share, at most

    // What a number is: a tile of a sequence, and which share.
    struct Found {
        int sequence, tile, share;
    };

    // Whether there is such a number; if not, `before` is how many there are.
    __device__ bool find(int number, Found& found) {
        int lane = threadIdx.x % 32;
        for (; place < 2 * sequences(); place += 32) {
            Cut of = cut(place + lane);
            int own = of.tiles * of.shares, sum = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int lower = __shfl_sync(~0u, sum, max(0, lane - step));
                if (lane >= step) sum += lower;
            }
            unsigned behind = __ballot_sync(~0u, before + sum > number);
            if (behind != 0) {
                int first = __ffs(behind) - 1;
                place += first;
                before += __shfl_sync(~0u, sum - own, first);
                int tiles = __shfl_sync(~0u, of.tiles, first), n = number - before;
                found = {place % sequences(), n % tiles, n / tiles};
                return true;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
        return false;
    }

   private:
    // With what is left behind packed ones.
    __device__ int sequences() const { return p.batch + PACKED_Q; }
    struct Cut {
        int tiles, shares;
    };
    __device__ Cut cut(int place) const {
        if (place >= 2 * sequences()) return {0, 0};
        Head head = Head::of(p, place % sequences(), 0, 0);
        int shares = shares_of_keys(head.keys(p), size);
        return {heads * head.template query_tiles<ROWS>(p), (shares > 1) == (place < sequences()) ? shares : 0};
    }
};
