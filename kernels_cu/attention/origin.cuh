// Where the arrays of a call stand that is on a part of a whole: its first batch entry, head, query and key there.
#pragma once

// Of what dropout and a score function ask, which go by the whole. All 0 where the call is on a whole. AT: it is data.
struct Origin {
    int batch, head, query, key;

    __device__ static Origin of(const Params& p) {
        if constexpr (config::AT) return {read(p, 0), read(p, 1), read(p, 2), read(p, 3)};
        return {p.at_batch, p.at_head, p.at_query, p.at_key};
    }
    // On which key query 0 of the part stands. (What is further makes no other difference to a mask: sums fit.)
    __device__ static int diagonal(const Params& p) {
        constexpr int FARTHEST = (1 << 30) - 1;
        return max(-FARTHEST, min(FARTHEST, read(p, 2) - read(p, 3)));
    }

   private:
    // Whatever memory holds.
    __device__ static int read(const Params& p, int axis) {
        auto n = __ldg(p.at + axis);  // nobody writes it meanwhile
        return n < 0 ? 0 : n > 0x7fffffff ? 0x7fffffff : int(n);
    }
};
