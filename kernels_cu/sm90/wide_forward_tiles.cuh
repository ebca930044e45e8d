// The tiles of the Hopper forward of wide heads in shared memory, what the two blocks of a cluster send to each other,
// and the warp that loads.
#pragma once
#include "attention/pairs.cuh"
#include "ptx/cluster.cuh"
#include "sm90/tile_schedule.cuh"
#include "tile/ring.cuh"
#include "tile/swizzled.cuh"

using namespace config;

static_assert(ROWS == 128 && KEYS == 128 && CLUSTER == 2 && sizeof(Product) == 2 && sizeof(Out) == 2);
static_assert(!(SHIFTS || walk::LISTED || MASK || BIAS || ADDS || BATCH_INVARIANT));

constexpr int WARPGROUPS = ROWS / 64, THREADS = 128 * (1 + WARPGROUPS);
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

constexpr int COLUMNS = DIM_V / CLUSTER;            // of O, those of a block
constexpr int K_PIECES = tiles_in(DIM, K_COLUMNS);  // of the block's own keys
constexpr int V_PIECES = OWN_KEYS / V_KEYS;         // of the block's own keys, and as many of the other's

static_assert(CLUSTER * OWN_KEYS == KEYS && OWN_KEYS % V_KEYS == 0);
static_assert(STAGES >= 2 * V_PIECES, "of a tile all pieces of V are held at once");

// Whether V may hold anything where key_mask hides keys.
constexpr bool CLEARS = KEY_MASK;

using TileSchedule = PackSchedule<ROWS, 1, CLUSTER>;
using TileWalk = KeyWalk<KEYS, ROWS>;

using QTile = SwizzledTile<ROWS, DIM>;
using KPiece = SwizzledTile<OWN_KEYS, K_COLUMNS>;
using VPiece = SwizzledTile<V_KEYS, COLUMNS>;
using Scores = Accumulator<1, OWN_KEYS / 8>;
using Probabilities = Operand<OWN_KEYS>;

struct TensorMaps {
    TensorMap q, k, v;
    int none;  // there is no map of a result
};

// The warp of the other block that has the same rows. What it sends lies as its threads hold it, who hold the same
// elements as this one's.
//
// Numbers of rows are exchanged in turn with P: who sends one of them has read the one that it was sent before. So P
// has one place, and nobody has to say that it is free; numbers have two, since at the end of a tile of queries two
// exchanges of them follow each other.
struct Partner {
    static constexpr int P_BYTES = 16 * OWN_KEYS * 2, NUMBERS_BYTES = 4 * 16, BARRIERS_BYTES = 8 * 3;
    static constexpr int VECTORS = 16 * 32;  // bytes that a warp's threads hold side by side

    unsigned p, numbers, barriers;  // addresses
    unsigned far;                   // from an address to the same place in the other block
    unsigned exchanges = 0, received = 0;

    __device__ void init() const {
        for (int i = 0; i < 3; i++) mbarrier_init(barriers + 8 * i, 1);
    }

    // One of each row.
    __device__ void send(const float (&x)[1][2]) const {
        unsigned lane = threadIdx.x % 32, to = numbers + exchanges % 2 * NUMBERS_BYTES + lane / 4 * 8 + lane % 4 * 4;
        float own = lane % 4 == 0 ? x[0][0] : x[0][1];
        if (lane % 4 < 2) store_far(to + far, __float_as_uint(own), barriers + exchanges % 2 * 8 + far);
    }
    __device__ void receive(float (&x)[1][2]) {
        wait(barriers + exchanges % 2 * 8, NUMBERS_BYTES, exchanges / 2 % 2);
        float2 two = load_shared_float2(numbers + exchanges % 2 * NUMBERS_BYTES + threadIdx.x % 32 / 4 * 8);
        x[0][0] = two.x, x[0][1] = two.y;
        exchanges++;
    }

    __device__ void send(const Probabilities& x) const {
        unsigned to = p + threadIdx.x % 32 * 16 + far;
#pragma unroll
        for (int k = 0; k < OWN_KEYS / 16; k++)
            store_far_16(to + k * VECTORS, make_uint4(x.x[k][0], x.x[k][1], x.x[k][2], x.x[k][3]), barriers + 16 + far);
    }
    __device__ void receive(Probabilities& x) {
        wait(barriers + 16, P_BYTES, received++ % 2);
#pragma unroll
        for (int k = 0; k < OWN_KEYS / 16; k++) {
            uint4 words = load_shared_16(p + threadIdx.x % 32 * 16 + k * VECTORS);
            x.x[k][0] = words.x, x.x[k][1] = words.y, x.x[k][2] = words.z, x.x[k][3] = words.w;
        }
    }

   private:
    __device__ static void wait(unsigned barrier, int bytes, unsigned parity) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(barrier, bytes);
        mbarrier_wait(barrier, parity);
    }
};

// Shared memory, and one thread's place in its rings.
struct Shared {
    using QRing = Ring<1, 4>;
    using PieceRing = Ring<STAGES, 4 * WARPGROUPS>;
    using TicketRing = Ring<1, 1>;

    static constexpr int PIECE = KPiece::BYTES;
    static_assert(VPiece::BYTES <= PIECE);
    static constexpr int PIECES = QTile::BYTES, P = PIECES + STAGES * PIECE;
    static constexpr int NUMBERS = P + 4 * WARPGROUPS * Partner::P_BYTES;
    static constexpr int PARTNERS = NUMBERS + 4 * WARPGROUPS * 2 * Partner::NUMBERS_BYTES;
    static constexpr int PIECE_RING = PARTNERS + 4 * WARPGROUPS * Partner::BARRIERS_BYTES;
    static constexpr int Q_RINGS = PIECE_RING + PieceRing::BYTES, TICKET_RING = Q_RINGS + WARPGROUPS * QRing::BYTES;
    static constexpr int NOTES = TICKET_RING + TicketRing::BYTES, TICKET = NOTES + 4 * WARPGROUPS, END = TICKET + 4;
    static_assert(END <= SHARED_MEMORY, "the plan asks for less than the kernel lays out");

    unsigned base;
    int rank;  // of the block in its cluster

    __device__ Shared(unsigned base) : base(base), rank(blockIdx.x % CLUSTER) {}

    __device__ QTile q() const { return {base}; }
    __device__ unsigned piece(int stage) const { return base + PIECES + stage * PIECE; }
    __device__ Strip strip(int warp) const { return {base + P + warp * Partner::P_BYTES}; }
    __device__ unsigned far(unsigned address) const { return far_address(address, 1 - rank); }
    __device__ Partner partner(int warp) const {
        return {base + P + warp * Partner::P_BYTES, base + NUMBERS + warp * 2 * Partner::NUMBERS_BYTES,
                base + PARTNERS + warp * Partner::BARRIERS_BYTES, far(base) - base};
    }
    __device__ PieceRing pieces() const { return {base + PIECE_RING}; }
    // Each warpgroup gives its rows of Q back by itself, and is told of the next tile with those of that.
    __device__ QRing q_ring(int warpgroup) const { return {base + Q_RINGS + warpgroup * QRing::BYTES}; }
    __device__ unsigned note(int warpgroup) const { return base + NOTES + 4 * warpgroup; }
    __device__ TicketRing tickets() const { return {base + TICKET_RING}; }

    __device__ void init() const {
        for (int warp = 0; warp < 4 * WARPGROUPS; warp++) partner(warp).init();
        for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) q_ring(warpgroup).init();
        pieces().init();
        tickets().init();
    }

    // The first key of its own, or of the other block's, of a tile.
    __device__ int own_key(int tile_k) const { return tile_k * KEYS + rank * OWN_KEYS; }
    __device__ int other_key(int tile_k) const { return tile_k * KEYS + (1 - rank) * OWN_KEYS; }
    __device__ int column() const { return rank * COLUMNS; }
};

// Numbers of tiles of queries, as clusters take them: block 0 draws them and hands them on. For the warp that loads.
struct TileNumbers {
    const Params& p;
    const Shared& s;
    Shared::TicketRing ring;
    int total, clusters = gridDim.x / CLUSTER, number = blockIdx.x / CLUSTER;
    bool asked = false;

    __device__ TileNumbers(const Params& p, const Shared& s, int total) : p(p), s(s), ring(s.tickets()), total(total) {}

    // Ask for the next one: late, since clusters that had little to do so far should ask first, but before it is
    // needed.
    __device__ void ask() {
        if (p.counters == nullptr || s.rank > 0 || asked) return;
        asked = true;
        if (threadIdx.x == 0) {
            Tickets tickets{p.counters};
            int ticket = tickets.take(number < clusters);
            tickets.settle(ticket, total - 1);
            store_shared(s.base + Shared::TICKET, clusters + ticket);
            ring.wait_empty();
            store_far(s.far(s.base + Shared::TICKET), clusters + ticket, s.far(ring.full()));
        }
        __syncwarp();
        ring.advance();
    }
    __device__ void turn() {
        if (p.counters == nullptr) {
            number += clusters;
            return;
        }
        ask();
        if (s.rank > 0) {
            if (threadIdx.x == 0) mbarrier_arrive_expect(ring.full(), 4);
            ring.wait_full();
        }
        number = __shfl_sync(~0u, int(load_shared(s.base + Shared::TICKET)), 0);
        if (s.rank > 0) {
            if (threadIdx.x == 0) mbarrier_arrive_far(s.far(ring.empty()));
            ring.advance();
        }
        asked = false;
    }
};

// The producer, a warp. K is a tile ahead of V.
__device__ inline void load(const Params& p, const TensorMaps& maps, const Shared& s) {
    TileSchedule schedule(p);
    TileNumbers numbers(p, s, schedule.total());
    Shared::PieceRing ring = s.pieces();
    unsigned tiles = 0;  // so far
    auto load_piece = [&](auto piece, const TensorMap& map, InMap at) {
        ring.wait_empty();
        piece.base = s.piece(ring.stage);
        __syncwarp();  // all have waited
        if (elected()) {
            mbarrier_arrive_expect(ring.full(), piece.BYTES);
            piece.load(map, ring.full(), at);
        }
        ring.advance();
    };
    auto load_k = [&](const Head& head, int tile_k) {
        InMap at = head.at_key(p, s.own_key(tile_k));
#pragma unroll 1
        for (int n = 0; n < K_PIECES; n++) load_piece(KPiece{}, maps.k, at.down(0, n * K_COLUMNS));
    };
    auto load_v = [&](const Head& head, int tile_k) {
        InMap own = head.at_key(p, s.own_key(tile_k), s.column()), other = own.down(s.other_key(0) - s.own_key(0), 0);
#pragma unroll 1
        for (int n = 0; n < 2 * V_PIECES; n++)
            load_piece(VPiece{}, maps.v, (n < V_PIECES ? own : other).down(n % V_PIECES * V_KEYS, 0));
    };
    // The warpgroups are told of a tile; what comes with that.
    auto tell = [&](int number, auto fill) {
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
            unsigned full = s.q_ring(warpgroup).full();
            mbarrier_wait(s.q_ring(warpgroup).empty(), tiles % 2 ^ 1);
            __syncwarp();
            if (elected()) {
                store_shared(s.note(warpgroup), number);
                fill(warpgroup, full);
            }
        }
        tiles++;
    };
    while (numbers.number < numbers.total) {
        Tile tile = schedule.tile(numbers.number);
        TileWalk walk(p, tile.head, tile.queries);
        int step = walk.start();
        bool any = walk.has(step);
        if (any) load_k(tile.head, walk.tile(step));
        tell(numbers.number, [&](int warpgroup, unsigned full) {
            mbarrier_arrive_expect(full, QTile::BYTES / WARPGROUPS);
            int first = 64 * warpgroup;
            s.q().from(first).load(maps.q, full, tile.head.at_query(p, tile.queries.begin + first));
        });
        for (; walk.after(step) > 0; step = walk.next(step)) {
            load_k(tile.head, walk.tile(walk.next(step)));
            if (walk.after(step) <= 2) numbers.ask();
            load_v(tile.head, walk.tile(step));
        }
        if (any) load_v(tile.head, walk.tile(step));
        numbers.turn();
    }
    tell(-1, [](int, unsigned full) { mbarrier_arrive(full); });
}
