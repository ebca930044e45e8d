// Where key tiles are too few for all multiprocessors, some take much longer than others, or the queries of a head of K
// and V are too many for the L2 cache, its query tiles (those of all heads that share it) are dealt out in shares, each
// as if it had a head of K and V by itself: of all heads, or of the last ones, so that the last multiprocessors at work
// have little to do. Thread blocks leave their sums of dK and dV in memory, in float32, and who
// is done last with a key tile adds up those of all shares, in their order: so dK and dV are the same bits in every
// run.
#pragma once
#include "sm90/dq_counters.cuh"

// f(x, n) for each fragment of a consumer's sums, x[4]; n counts from `first` on. Returns how far.
template <int N, class F>
__device__ int for_fragments(Accumulator<1, N>& sum, int first, F f) {
#pragma unroll
    for (int n = 0; n < N; n++) f(sum.x[0][n], first + n);
    return first + N;
}
template <int COUNT, int N, class F>
__device__ int for_fragments(Accumulator<1, N> (&sums)[COUNT], int first, F f) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) first = for_fragments(sums[i], first, f);
    return first;
}

// A consumer's sums of a key tile are done. True for who has to store them: then they are those of all shares. By its
// 128 threads, each of which finds what its like in other blocks have left.
template <class DV, class DK>
__device__ bool add_shares(const Params& p, const Shared& s, const KeyTile& t, int warpgroup, DV& dv, DK& dk) {
    if (t.share < p.whole_heads) return true;
    Share share(p, t.share);
    int thread = threadIdx.x % 128;
    int number = (share.kv_head - p.whole_heads) * KeyTiles<CLUSTER_KEYS>::of_head(p) + t.number;
    number = (number * CLUSTER + s.rank) * WARPGROUPS + warpgroup;
    float* sums = p.share_sums + (long long)number * p.shares * SHARE_SUMS + 4 * thread;
    auto each = [&](auto f) { for_fragments(dk, for_fragments(dv, 0, f), f); };
    float* own = sums + share.number * SHARE_SUMS;
    each([&](float (&x)[4], int n) { *(float4*)(own + 512 * n) = make_float4(x[0], x[1], x[2], x[3]); });
    sync_threads<128>(3 + warpgroup);
    bool last = true;
    if (thread == 0) {
        __threadfence();
        last = atomicAdd(DQCounters(p).left + number, 1u) == p.shares - 1;
        __threadfence();
    }
    if (!all_threads<128>(3 + warpgroup, last)) return false;
    each([&](float (&x)[4], int) { x[0] = x[1] = x[2] = x[3] = 0; });
#pragma unroll 1
    for (int i = 0; i < p.shares; i++, sums += SHARE_SUMS)
        each([&](float (&x)[4], int n) {
            float4 more = *(const float4*)(sums + 512 * n);
            x[0] += more.x, x[1] += more.y, x[2] += more.z, x[3] += more.w;
        });
    return true;
}
