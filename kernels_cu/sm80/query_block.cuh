// What the forward of this family (forward.cu) and its tangent (jvp.cu) have in common: thread blocks that own ROWS
// queries of one head, and walk over the key tiles that these see. Which warps have which rows is told in forward.cu.
#pragma once
#include "attention/dead_rows.cuh"
#include "attention/dropped.cuh"
#include "attention/mask.cuh"
#include "attention/operands.cuh"
#include "attention/schedule.cuh"
#include "ptx/barrier.cuh"
#include "tile/rows.cuh"

using namespace config;

constexpr int THREADS = 32 * WARPS;
constexpr int ROW_WARPS = WARPS / COLUMN_WARPS;
constexpr int WARP_ROWS = ROWS / ROW_WARPS;
// Warps that have the same rows share out the keys of S, or each computes all of it.
constexpr bool SPLIT_K = COLUMN_WARPS > 1 && KEYS >= 16 * COLUMN_WARPS;
constexpr bool AGAIN = COLUMN_WARPS > 1 && !SPLIT_K;
constexpr int WARP_KEYS = SPLIT_K ? KEYS / COLUMN_WARPS : KEYS, WARP_COLUMNS = DIM_V / COLUMN_WARPS;
constexpr int SIZE = sizeof(Accum);  // of what these warps tell each other of a row
constexpr int M = WARP_ROWS / 16;    // row fragments of a warp
static_assert(ROWS % (16 * ROW_WARPS) == 0 && WARP_KEYS % 16 == 0 && DIM % 16 == 0 && WARP_COLUMNS % 16 == 0 &&
              (STAGES == 1 || STAGES == 2) && COLUMN_WARPS <= 4);

using QTile = OperandTile<ROWS, DIM>;
using OTile = SharedTile<ROWS, DIM_V>;  // takes Q's place at the end
using KTile = OperandTile<KEYS, DIM>;
using VTile = OperandTile<KEYS, DIM_V>;
using PTile = OperandTile<ROWS, KEYS>;  // only where SPLIT_K

using Output = Accumulator<M, WARP_COLUMNS / 8>;

// A thread block with the queries of one tile. `Shared` says where things lie in shared memory.
template <class Shared>
struct QueryBlock {
    const Params& p;
    Shared s;
    Head head;
    Range queries;
    KeyWalk<KEYS, ROWS> walk;
    int row_warp, column_warp, warp_row, warp_key;  // the warp's first row and key in a tile
    float q_unit;

    __device__ QueryBlock(const Params& p, Shared s, Head head, int tile)
        : p(p),
          s(s),
          head(head),
          queries(head.query_tile<ROWS>(p, tile)),
          walk(p, head, queries),
          row_warp(threadIdx.x / 32 % ROW_WARPS),
          column_warp(threadIdx.x / 32 / ROW_WARPS),
          warp_row(row_warp * WARP_ROWS),
          warp_key(AGAIN ? 0 : column_warp * WARP_KEYS),
          q_unit(operand_unit<OfQ>(p, head, tile)) {}

    // Values of a tile have arrived: clear(its dead rows). (Of float32 these are 0. Scores of dead keys are hidden,
    // whatever K is.)
    template <class F>
    __device__ void clear_dead_keys(int tile, F clear) const {
        if constexpr (PARTS == 1 && (KEY_MASK || DEAD_KEYS)) {
            if (!KEY_MASK && tile * KEYS >= head.live_keys(p).begin) return;
            DeadRows<KEYS> dead = unseen_keys<KEYS>(Pairs(p, head), tile * KEYS);
            if (!dead.any()) return;
            clear(dead);
            __syncthreads();
        }
    }

    // The warps that have the same rows wait for each other.
    __device__ void sync_row_warps() const { sync_threads<32 * COLUMN_WARPS>(1 + row_warp); }
};

// The tiles of a head start one after the other, so that they share its K and V in the cache; where later ones see more
// keys, those first.
using QuerySchedule = Schedule<QueryTiles<ROWS>, QUERY_ORDER, config::PORTIONS>;

// The kernel: a block visits the steps of its tile of queries.
template <class Block, class... Share>
__device__ void visit_keys(const Params& p, HeadTile at, Share... share) {
    extern __shared__ __align__(16) char shared[];
    if (config::PACKED_Q && at.none()) return;
    Block block(p, {shared_address(shared)}, at.head, at.number, share...);
    block.load_first();
    int stage = 0;
    for (int step = block.walk.start(); block.walk.has(step); step = block.walk.next(step)) {
        block.visit(step, stage);
        if (STAGES == 2) stage = 1 - stage;
    }
    block.finish();
}
