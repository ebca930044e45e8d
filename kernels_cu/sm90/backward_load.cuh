// The thread that deals out the Hopper backward's tiles and loads them (the producer): copies come as far ahead as the
// rings reach.
#pragma once
#include "sm90/dq_counters.cuh"

// The number of the next key tile. Of a cluster, block 0 draws it and hands it on.
__device__ inline int next_number(const Params& p, Shared& s) {
    int number = 0;
    if (s.rank == 0) number = atomicAdd(p.counters, 1);
    if (!CLUSTERED) return number;
    if (s.rank == 0) {
        s.ticket.wait_empty();
        store_far(s.far(s.base + s.TICKET), number, s.far(s.ticket.full()));
    } else {
        mbarrier_arrive_expect(s.ticket.full(), 4);
        s.ticket.wait_full();
        number = load_shared(s.base + s.TICKET);
        if (number >= 0) mbarrier_arrive_far(s.far(s.ticket.empty()));  // it has been read
    }
    s.ticket.advance();
    return number;
}

// Those of a tile of queries, in memory.
template <class Given>
__device__ auto* row_numbers(const Given& p, int tile) {
    constexpr long long COUNT = NUMBERS_BYTES / 4;
    if constexpr (MOVED)
        return p.numbers + tile * COUNT;
    else
        return p.delta + tile * COUNT;
}

// The thread that deals out the tiles, and loads. Two numbers tell its place in every ring.
template <class Maps>
__device__ void load(const Params& p, const Maps& maps, Shared& s) {
    DQCounters counters(p);
    int number = next_number(p, s), of_head = key_tiles_of_head(p), total = of_head * Share::count(p);
    unsigned steps = 0, tiles = 0;
    auto wait_for_key_tile = [&](const KeyTile& t) {
        if (!has_whole_dq(p, t.head(p))) counters.wait_for_room(t.share);
        s.k.go_to(tiles);
        s.v.go_to(tiles);
        s.k.wait_empty();
        t.store(s.base + s.TILE);
        tiles++;
    };
    while (number < total) {
        KeyTile t = key_tile(p, number, of_head);
        if (PACKED_K && t.number < 0) {  // no tile has this place
            number = next_number(p, s);
            continue;
        }
        bool first = true;
        for_query_tiles(p, t, [&](const Head& head, int i, int n, TileBits) {
            s.q.go_to(steps);
            s.q.wait_empty();
            mbarrier_arrive_expect(s.q.full(), Q_BYTES + NUMBERS_BYTES);
            auto queries = [&](int column) {
                return box_of_queries(p, head, head.at_query(p, i * ROWS, column), i * ROWS);
            };
            s.q_tile().load(maps.q, s.q.full(), queries(s.column()));
            if constexpr (TQ) s.tq_tile().load(maps.tq, s.q.full(), head.at_query(p, i * ROWS));
            bulk_load(s.row_values(), row_numbers(p, n), NUMBERS_BYTES, s.q.full());
            s.d.go_to(steps);
            s.d.wait_empty();
            mbarrier_arrive_expect(s.d.full(), DO_BYTES);
            s.do_tile().load(maps.dout, s.d.full(), queries(s.column_v()));
            if constexpr (TDOUT) s.tdo_tile().load(maps.tdout, s.d.full(), head.at_query(p, i * ROWS));
            if constexpr (PAIR_ARRAYS) {
                s.pairs.go_to(steps);
                s.pairs.wait_empty();
                s.pair_tiles().load(p, maps, s.pairs.full(), head, i * ROWS, s.first_key(t));
            }
            steps++;
            if (first) {  // K and V after them: there is room for one, which the key tile before needs to its end
                first = false;
                wait_for_key_tile(t);
                int key = s.first_key(t);
                mbarrier_arrive_expect(s.k.full(), K_BYTES + SPLIT_KEYS * FarKTile::BYTES);
                InMap keys = head.at_key(p, 0);
                auto own = [&](int column) { return box_of_keys(p, head, keys.down(key, column), key); };
                s.k_tile().load(maps.k, s.k.full(), own(s.column()));
                if constexpr (TK) s.tk_tile().load(maps.tk, s.k.full(), keys.down(key));
                if (SPLIT_KEYS)
                    s.far_k_tile().load(maps.k, s.k.full(), keys.down(s.far_key(t), 64 * s.dq_block(0)));
                s.v.wait_empty();
                mbarrier_arrive_expect(s.v.full(), V_BYTES);
                s.v_tile().load(maps.v, s.v.full(), own(s.column_v()));
                if constexpr (TV) s.tv_tile().load(maps.tv, s.v.full(), keys.down(key));
            }
        });
        if (first) {  // nobody visits it
            wait_for_key_tile(t);
            mbarrier_arrive(s.k.full());
            s.v.wait_empty();
            mbarrier_arrive(s.v.full());
        }
        number = next_number(p, s);  // not before: blocks that had little to do so far ask first
    }
    s.k.go_to(tiles);
    s.k.wait_empty();
    KeyTile(-1, 0, Range{0, 0}).store(s.base + s.TILE);
    mbarrier_arrive(s.k.full());
}
