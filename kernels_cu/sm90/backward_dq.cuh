// How dQ leaves: parts are added to float32 sums in memory; sums to which every key tile has added are turned to rows
// of dQ by warps that have nothing else to do. Only sums of heads under work lie in memory, so that the L2 cache holds
// them. They begin as zeros, or (FIRST_STORES: few key tiles add to each) as the part of the first to come by its
// ticket. Where a key tile has all keys (WHOLE_DQ) its part is all of dQ, and leaves as rows.
#pragma once
#include "ptx/global.cuh"
#include "ptx/reduce.cuh"
#include "sm90/dq_counters.cuh"

// dq_sum lies in memory as dQ^T lies in registers, four numbers of a lane side by side: fragments of 16 columns by 8
// queries, in twos that share the queries, PART_ROWS / 8 twos for each 32 columns. A consumer's part, of 64 columns,
// lies in one piece.
constexpr int ROW8S = PART_ROWS / 8;
constexpr int PARTS_OF_DQ = WARPGROUPS + (REST > 0);  // of each tile: what is left lies behind the consumers' own

__device__ inline constexpr int fragment_in_part(int column16, int row8) {
    return (column16 / 2 * ROW8S + row8) * 2 + column16 % 2;
}

__device__ inline float* dq_fragment(const Params& p, long long tile, int column16, int row8) {
    int fragment = row8 / ROW8S * (DQ_DIM / 16 * ROW8S) + fragment_in_part(column16, row8 % ROW8S);
    return p.dq_sum + tile * DQ_TILE + fragment * (FRAGMENT_BYTES / 4);
}

// Key tiles add to a query tile in the order of their tickets.
__device__ inline void wait_for_turn(const Params& p, const DQCounters& counters, const KeyTile& t, const Head& head,
                                     int tile_q, int n) {
    unsigned others = CLUSTER * adding_to(p, head, tile_q).rank(t.number);
    while (load_acquire(counters.added + n) < others) {  // (the cluster's other block may be done)
    }
}

// Where a consumer's part is all of dQ: rows of queries in shared memory, and on to the array.
using DQTile = SwizzledTile<PART_ROWS, 64>;

// (A template since other kernels have no map of dQ.)
template <class Maps>
__device__ void send_rows(const Params& p, const Maps& maps, const Shared& s, const Head& head, int tile_q,
                          int warpgroup) {
    if constexpr (WHOLE_BY_LENGTH) {
        int row = tile_q * ROWS + (SHARE_ROWS ? warpgroup * PART_ROWS : 0), column = SHARE_ROWS ? 0 : 64 * warpgroup;
        if (maps.map_out)
            DQTile{s.part(warpgroup)}.store(maps.dq, box_of_queries(p, head, head.to_query(row, column), row));
    }
}

// The thread that adds parts of dQ to memory, and tells what has been added.
__device__ inline void add_dq(const Params& p, const TensorMaps& maps, Shared& s) {
    Shared::DQRing dq = s.dq(0);  // all consumers are at the same place in theirs
    DQCounters counters(p);
    while (true) {
        KeyTile t = s.next_tile();
        if (t.none()) break;
        bool whole = WHOLE_BY_LENGTH && has_whole_dq(p, t.head(p));  // rows, which nobody adds to
        if constexpr (!CONSUMERS_ADD) {
            // Tiles: owed, added to but not told; begun, as was seen.
            int shift = counters.shift(p, t.share), owed = -1, begun = -1;
            auto tell = [&](int n) {
                if (n != -1) add_release(counters.added + n, 1);
            };
            for_query_tiles(p, t, [&](const Head& head, int i, int n, TileBits) {
                if (DETERMINISTIC && !whole) wait_for_turn(p, counters, t, head, i, n);
                bool first = FIRST_STORES && adding_to(p, head, i).rank(t.number) == 0;
                if (FIRST_STORES && !first) {
                    if (n != begun && load_acquire(counters.added + n) == 0) {
                        tma_wait<0>();  // what is owed first: else key tiles would wait for each other in a chain
                        tell(owed);
                        owed = -1;
                        while (load_acquire(counters.added + n) == 0) {
                        }
                    }
                    fence_async_global();
                }
#pragma unroll
                for (int warpgroup = 0; warpgroup < PARTS_OF_DQ; warpgroup++) {
                    int column16 = SHARE_ROWS || MOVED ? 0 : 4 * warpgroup;
                    int bytes = 4 * PART_ROWS * (MOVED ? DIM : min(DQ_DIM - 16 * column16, 64));
                    if (warpgroup < WARPGROUPS) {
                        dq.barriers = s.dq(warpgroup).barriers;
                        dq.wait_full();
                    }
                    float* sums = dq_fragment(p, n + shift, column16, SHARE_ROWS ? warpgroup * ROW8S : 0);
                    if (whole)
                        send_rows(p, maps, s, head, i, warpgroup);
                    else if (bytes > 0 && first)
                        bulk_store(sums, s.part(warpgroup), bytes);
                    else if (bytes > 0)
                        bulk_add(sums, s.part(warpgroup), bytes);
                }
                tma_commit();
                // A look ahead while that leaves. (Behind the last tile there is one more counter.)
                if (FIRST_STORES) begun = load_acquire(counters.added + n + 1) != 0 ? n + 1 : -1;
                tma_wait_read();
#pragma unroll
                for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
                    dq.barriers = s.dq(warpgroup).barriers;
                    mbarrier_arrive(dq.empty());
                }
                dq.advance();
                if (whole) return;
                if (DETERMINISTIC || first) {  // others wait for it
                    tma_wait<0>();
                    tell(owed);
                    tell(n);
                    owed = -1;
                } else {
                    tma_wait<1>();  // what was added at the step before has arrived
                    tell(owed);
                    owed = n;
                }
            });
            tma_wait<0>();
            tell(owed);
        } else if constexpr (DETERMINISTIC) {  // the consumers add when this thread says that it is their turn
            for_query_tiles(p, t, [&](const Head& head, int i, int n, TileBits) {
                wait_for_turn(p, counters, t, head, i, n);
#pragma unroll
                for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) mbarrier_arrive(s.dq(warpgroup).empty());
#pragma unroll
                for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
                    dq.barriers = s.dq(warpgroup).barriers;
                    dq.wait_full();
                }
                dq.advance();
                add_release(counters.added + n, 1);
            });
        } else {  // the consumers have added, and say so once a key tile
#pragma unroll
            for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
                dq.barriers = s.dq(warpgroup).barriers;
                dq.wait_full();
                mbarrier_arrive(dq.empty());
            }
            dq.advance();
            __threadfence();  // to tell by add_release would be a fence each time
            for_query_tiles(p, t, [&](const Head&, int, int n, TileBits) { atomicAdd(counters.added + n, 1); });
        }
    }
}

// Where dQ's rows are; of the kernel that differentiates the backward, those of its tangent.
template <class Given>
__device__ auto* dq_rows(const Given& p) {
    if constexpr (MOVED)
        return p.tdq;
    else
        return p.dq;
}
template <class Given>
__device__ const Strides& dq_strides(const Given& p) {
    if constexpr (MOVED)
        return p.tdq_strides;
    else
        return p.dq_strides;
}

// A consumer's part of dQ^T, or what it has of one from rows `first` * 8 on, to shared memory.
template <int COUNT>
__device__ void put(const Accumulator<1, COUNT>& dq, unsigned part, int first = 0) {
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        store_shared_16(
            part + fragment_in_part(threadIdx.x / 32 % 4, first + n) * FRAGMENT_BYTES + threadIdx.x % 32 * 16,
            dq.x[0][n]);
}

// Of the columns that are left, some rows of each warpgroup, by the warps that have some.
using RestOfDQ = Accumulator<1, REST_ROWS / 8>;
__device__ inline bool has_rest() { return 16 * (threadIdx.x / 32 % 4) < REST; }

// Where a thread adds its numbers of 64 columns of dQ^T, in a tile of sums; `block`: which 64.
__device__ inline int place_in_sums(int block) {
    return fragment_in_part(4 * block + threadIdx.x / 32 % 4, 0) * (FRAGMENT_BYTES / 4) + threadIdx.x % 32 * 4;
}

// A consumer's part of dQ^T, or COUNT times 8 of its queries, to memory, four additions of a lane at once.
template <int FIRST, int COUNT>
__device__ void add_part(const Accumulator<1, PART_ROWS / 8>& dq, float* to) {
#pragma unroll
    for (int n = FIRST; n < FIRST + COUNT; n++) red_add_4(to + n * (FRAGMENT_BYTES / 2), dq.x[0][n]);
}

// Where that is all of dQ: the same, rounded.
template <int COUNT>
__device__ void put_rows(Accumulator<1, COUNT>& dq, unsigned part, float scale, int first = 0) {
    dq.each([&](float& x, int, int) { x *= scale; });
    store_rounded<true>(dq, DQTile{part}, 8 * first, threadIdx.x / 32 % 4 * 16);
}

// WHOLE_BY_LENGTH: on to memory, by all of the consumer's threads, where rows lie as no map can tell. (A template since
// rows of other kernels may be wider.)
template <class Given>
__device__ void store_own_rows(const Given& p, const Head& head, int tile_q, int warpgroup, unsigned part) {
    sync_threads<128>(3 + warpgroup);
    int row = tile_q * ROWS + (SHARE_ROWS ? warpgroup * PART_ROWS : 0), column = SHARE_ROWS ? 0 : 64 * warpgroup;
    store_rows<PART_ROWS / 4, true>(DQTile{part}, threadIdx.x / 32 % 4 * (PART_ROWS / 4),
                                    head.query_row(dq_rows(p), dq_strides(p), row) + column, dq_strides(p).row,
                                    head.queries(p) - row, p.dim - column);
}

// WHOLE_DQ: the warp that sends it on. (A template since other kernels have no map of dQ.)
template <class Maps>
__device__ void send_dq(const Params& p, const Maps& maps, Shared& s) {
    Shared::DQRing dq = s.dq(0);  // all consumers are at the same place in theirs
    bool first = threadIdx.x % 32 == 0;
    while (true) {
        s.k.wait_full();
        KeyTile t = s.this_tile();
        s.k.release();
        s.k.advance();
        if (t.none()) break;
        for_query_tiles(p, t, [&](const Head& head, int tile_q, int, TileBits) {
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < PARTS_OF_DQ; warpgroup++) {
                DQTile tile{s.part(warpgroup)};
                int row = tile_q * ROWS + (SHARE_ROWS ? warpgroup * PART_ROWS : 0),
                    column = SHARE_ROWS ? 0 : 64 * warpgroup;
                if (warpgroup < WARPGROUPS) {
                    dq.barriers = s.dq(warpgroup).barriers;
                    dq.wait_full();
                }
                if constexpr (SENDS_DQ) {
                    if (!maps.map_out)
                        store_rows<PART_ROWS, true>(tile, 0, head.query_row(dq_rows(p), dq_strides(p), row) + column,
                                                    dq_strides(p).row, head.queries(p) - row, p.dim - column);
                    else
                        tile.store(maps.dq, head.to_query(row, column), first);
                }
            }
            tma_commit();
            tma_wait_read();
#pragma unroll
            for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
                dq.barriers = s.dq(warpgroup).barriers;
                dq.release();
            }
            dq.advance();
        });
    }
}

// Whether key tiles add to the n-th tile of queries of all heads.
__device__ inline bool has_sums(const Params& p, int n) {
    if constexpr (!WHOLE_BY_LENGTH) return true;
    HeadTile at = numbered_queries(p, n);
    return !at.none() && !has_whole_dq(p, at.head);
}

// A warp turns sums to rows, dQ = scale * dq_sum, of one tile of queries after the other, or of one of
// FINISH_PARTS parts of a tile (some columns of it, or of half of its rows): FINISH_FRAGMENTS at a time, with
// FINISH_STAGES times as many under way. Zeros are left where the sums of other heads will be, if those do not store
// first. A warp by itself waits for nearly every instruction: there must be few of them for a byte.
__device__ inline void finish_dq(const Params& p, Shared::FinishRing ring, unsigned first_slot) {
    constexpr int TWOS = FINISH_FRAGMENTS / 2;  // of fragments: 8 queries by 32 columns
    constexpr int FETCHES = DQ_TILE * 4 / FINISH_BYTES / FINISH_PARTS, DOWN = ROW8S / TWOS, ACROSS = DQ_DIM / 32;
    static_assert(ROW8S % TWOS == 0 && FINISH_FRAGMENTS % 2 == 0 && (FINISH_PARTS == 1 || FETCHES % DOWN == 0));
    int lane = threadIdx.x % 32, shares = Share::count(p);
    const Strides& strides = dq_strides(p);
    bool vectors = aligned(dq_rows(p), strides.row, p.dim) && strides.head % 8 == 0 && strides.batch % 8 == 0;
    // A thread takes 8 columns of a query.
    unsigned own = lane % 4 / 2 * FRAGMENT_BYTES + lane / 8 * 16 + lane % 2 * 8 + lane / 4 % 2 * 4;
    // Lane 0 fetches: there it is where the slots begin, as `sums` below.
    unsigned slots = first_slot + own;
    unsigned fetched = 0;
    auto fetch = [&](const float4* from, unsigned n) {
        ring.go_to(n);
        mbarrier_arrive_expect(ring.full(), FINISH_BYTES);
        bulk_load(slots + ring.stage * FINISH_BYTES, from, FINISH_BYTES, ring.full());
    };
    while (true) {
        DQCounters counters(p);
        int n = __shfl_sync(~0u, lane == 0 ? atomicAdd(counters.ticket, 1) : 0, 0);
        int part = n % FINISH_PARTS;
        n /= FINISH_PARTS;
        int next = n / counters.tiles;  // the share whose sums will lie here; before those of the first: none
        float4* sums = (float4*)(p.dq_sum + (long long)(n % (p.resident * counters.tiles)) * DQ_TILE) + lane;
        sums += part * (DQ_TILE / 4 / FINISH_PARTS);
        auto cleared = [&] {
            fence_async_global();
            __syncwarp();
            if (lane == 0) add_release(counters.clear + next, 1);
        };
        auto clear = [&] {
            for (int i = 0; i < DQ_TILE / 128 / FINISH_PARTS; i++) sums[32 * i] = make_float4(0, 0, 0, 0);
        };
        if (next < p.resident) {
            if (!FIRST_STORES && has_sums(p, n)) clear();
            cleared();
            continue;
        }
        n -= p.resident * counters.tiles;
        if (next - p.resident >= shares) break;
        bool again = next < shares;
        if (SHARES) {
            Share share(p, next - p.resident);
            int nth = n % counters.tiles;
            if (nth >= share.tiles.end - share.tiles.begin) {  // it has fewer than others
                if (again) cleared();
                continue;
            }
            n = share.first(p) + nth;
        }
        auto [head, tile] = numbered_queries(p, n);
        if (PACKED_Q && tile < 0 || WHOLE_BY_LENGTH && has_whole_dq(p, head)) {  // nobody adds here
            if (again) cleared();
            continue;
        }
        bool none = false;
        if (lane == 0) {
            unsigned adding = CLUSTER * adding_to(p, head, tile).count();
            while (load_acquire(counters.added + n) != adding) __nanosleep(32);
            // Where no key is seen the sums are zeros, once what lay here before is finished.
            none = adding == 0;
            if (none) counters.wait_for_room(next - p.resident);
            fence_async_global();
        }
        if (FIRST_STORES && __any_sync(~0u, none)) {
            __syncwarp();
            clear();
            fence_async_global();
            __syncwarp();
        }
        if (lane == 0) {
#pragma unroll 1
            for (int c = 0; c < min(FINISH_STAGES, FETCHES); c++) fetch(sums + c * (FINISH_BYTES / 16), fetched + c);
        }
        int before = part * (FETCHES / DOWN);  // columns by 32
        int row = tile * ROWS + (SHARE_ROWS ? before / ACROSS * PART_ROWS : 0) + lane / 4;
        int column = (SHARE_ROWS ? before % ACROSS : before) * 32 + lane % 4 * 8;
        OutQ* to = head.query_row(dq_rows(p), strides, row) + column;
        int rows = head.queries(p) - row, columns = p.dim - column;  // from there on
#pragma unroll 1
        for (int c = 1; c <= FETCHES; c++, fetched++, sums += FINISH_BYTES / 16) {
            ring.go_to(fetched);
            ring.wait_full();
            unsigned slot = slots + ring.stage * FINISH_BYTES;
            auto value = [&](int i, int e) {
                return __uint_as_float(load_shared(slot + 2 * i * FRAGMENT_BYTES + 64 * e)) * p.scale;
            };
            if (vectors) {
                int seen = columns > 0 ? rows : 0;
#pragma unroll
                for (int i = 0; i < TWOS; i++, to += 8 * strides.row) {
                    if constexpr (FROM_REGISTERS<OutQ>) {
                        constexpr int EACH = VECTOR<OutQ>;
#pragma unroll
                        for (int e = 0; e < 8; e += EACH)
                            if (8 * i < seen && e < columns)
                                put_results(to + e, [&](int c) { return value(i, e + c); });
                    } else {
                        auto two = [&](int e) { return pack2<In>(value(i, e), value(i, e + 1)); };
                        uint4 w = make_uint4(two(0), two(2), two(4), two(6));
                        if (8 * i < seen) store_global_16(to, w);
                    }
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < TWOS; i++, to += 8 * strides.row)
#pragma unroll 1
                    for (int e = 0; 8 * i < rows && e < min(columns, 8); e++) put_result(to + e, value(i, e));
            }
            rows -= 8 * TWOS;
            if (c % DOWN == 0) {  // on to the next columns
                to += 32 - PART_ROWS * strides.row, rows += PART_ROWS, columns -= 32;
                if (SHARE_ROWS && c % (DOWN * ACROSS) == 0)
                    to += PART_ROWS * strides.row - DQ_DIM, rows -= PART_ROWS, columns += DQ_DIM;
            }
            if (again && !FIRST_STORES) {
#pragma unroll
                for (int i = 0; i < FINISH_BYTES / 512; i++) sums[32 * i] = make_float4(0, 0, 0, 0);
            }
            __syncwarp();  // the stage has been read
            if (lane == 0 && c + FINISH_STAGES <= FETCHES)
                fetch(sums + FINISH_STAGES * (FINISH_BYTES / 16), fetched + FINISH_STAGES);
        }
        if (again) cleared();
    }
}

// A warp that does nothing else; and one of a consumer that has no key tile any more, nor has any other of its block:
// at the end there is much to turn at once, and where heads are few, some thread blocks have no keys at all.
__device__ inline void finish_dq(const Params& p, const Shared& s, int number) {
    finish_dq(p, s.finish_ring(number), s.finish_slots(number));
}
__device__ inline void help_to_finish(const Params& p, const Shared& s) {
    int number = threadIdx.x / 32 - 4;
    if (number >= Shared::HELPERS) return;
    Shared::FinishRing ring = s.helper_ring(number);
    if (threadIdx.x % 32 == 0) {
        ring.init();  // where TMA wrote
        mbarrier_init_fence();
        fence_async();
    }
    __syncwarp();
    finish_dq(p, ring, s.helper_slots(number));
}
