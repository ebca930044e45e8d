// Where the arrays of a call stand that is on a part of a whole: its first batch entry, head, query and key there.
#pragma once

// Of what dropout and a score function ask, which go by the whole. All 0 where the call is on a whole.
struct Origin {
    int batch, head, query, key;

    __device__ static Origin of(const Params& p) { return {p.at_batch, p.at_head, p.at_query, p.at_key}; }
};
