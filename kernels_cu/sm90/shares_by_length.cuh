// Where each sequence is cut by its own length (attention/share_count.cuh), how many shares there are in all is known
// to nobody before lengths are read: the warp that loads counts along the sequences.
#pragma once
#include "attention/schedule.cuh"
#include "attention/share_count.cuh"

// Shares of tiles are numbered by sequences, of which those that are cut come first, since their shares are longer; of
// one by shares. A warp finds a number, and later only larger ones.
struct SharesByLength {
    const Params& p;
    int wide;        // tiles of queries of all heads of a sequence
    int place = 0;   // all sequences, as those that are cut, and again, as those that are not
    int before = 0;  // numbers of the places in front
    int size = BY_LENGTH ? SHARE_TILES : 1;  // key tiles of a share, at most

    // What a number is: a tile of a sequence, and which share.
    struct Found {
        int batch, tile, share;
    };

    // Whether there is such a number; if not, `before` is how many there are.
    __device__ bool find(int number, Found& found) {
        int lane = threadIdx.x % 32;
        for (; place < 2 * p.batch; place += 32) {
            int own = wide * shares_at(place + lane), sum = own;
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
                found = {place % p.batch, (number - before) % wide, (number - before) / wide};
                return true;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
        return false;
    }

   private:
    __device__ int shares_at(int place) const {
        if (place >= 2 * p.batch) return 0;
        int shares = shares_of_keys(Head::of(p, place % p.batch, 0, 0).keys(p), size);
        return (shares > 1) == (place < p.batch) ? shares : 0;
    }
};
