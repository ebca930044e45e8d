// A tile of 16-bit numbers in shared memory (of doubles: tile/doubles.cuh). Rows are 16 bytes longer than their
// elements, so that the eight rows that ldmatrix reads at once lie in different banks, and every address is a base plus
// a constant.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "tile/places.cuh"

// Elements of 16 bytes.
template <class T>
constexpr int VECTOR = 16 / sizeof(T);

template <int ROWS, int COLS, class T = Product>
struct SharedTile {
    static constexpr int COLUMNS = COLS;
    static constexpr int PITCH = COLS + 8;
    static constexpr int BYTES = 2 * ROWS * PITCH;

    unsigned base;  // 32-bit address in shared memory

    __device__ unsigned address(int row, int col) const { return base + 2 * (row * PITCH + col); }

    // Where column `col` is in rows from `row` on.
    struct Column {
        unsigned first;
        __device__ unsigned operator()(int rows) const { return first + 2 * rows * PITCH; }
    };
    __device__ Column column(int row, int col) const { return {address(row, col)}; }
};

// Numbers that the tensor cores multiply for each one of the problem, see halves.cuh.
constexpr int PARTS = sizeof(In) == 4 && sizeof(Product) == 2 ? 2 : 1;

// A tile of an operand: of two parts, COLS columns of the one and then those of the other.
template <int ROWS, int COLS>
using OperandTile = SharedTile<ROWS, PARTS * COLS>;

// A copy of rows x cols elements of global memory into a tile; what lies beyond them in the tile becomes zeros. It
// comes in PIECES, 16 bytes for each thread, so that it can ride along a product: in one burst they would fill the
// queue that the product's own loads wait in. Where cols is no multiple of 16 bytes, the memory must hold zeros up to
// the next (the host sees to it).
template <int THREADS, int ROWS, int COLS, class Tile = SharedTile<ROWS, COLS>, class T = Product>
struct AsyncCopy {
    static constexpr int EACH = VECTOR<T>;         // elements of a chunk
    static constexpr int CHUNKS = COLS / EACH;     // of 16 bytes in a row
    static constexpr int STEP = THREADS / CHUNKS;  // rows that the block copies at once
    static constexpr int PIECES = (ROWS + STEP - 1) / STEP;
    static constexpr bool EVEN = THREADS % CHUNKS == 0 && ROWS % STEP == 0;

    typename Tile::Column target;
    const T* source;
    long long stride;     // between pieces
    int rows, tile_rows;  // of the source and of the tile, from this thread's first on

    // Into a tile's columns from `column` on.
    __device__ AsyncCopy(Tile tile, const Rows<const T>& from, int column = 0) {
        int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
        target = tile.column(first, column + EACH * chunk);
        source = from.from + first * from.stride + EACH * chunk;
        stride = STEP * from.stride;
        rows = (EACH * chunk < from.columns ? from.count : 0) - first;
        tile_rows = first < STEP ? ROWS - first : 0;
    }

    __device__ void all() { part<1>(0); }

    // What belongs to step k of STEPS, in order.
    template <int STEPS>
    __device__ void part(int k) {
        constexpr int NOW = (PIECES + STEPS - 1) / STEPS;
#pragma unroll
        for (int i = k * NOW; i < (k + 1) * NOW && i < PIECES; i++) {
            if (EVEN || i * STEP < tile_rows) cp_async_16(target(i * STEP), source, i * STEP < rows);
            source += stride;
        }
    }
};

// The same of rows that lie wherever row(n) says; null: zeros. From `columns` columns of them.
template <int THREADS, int ROWS, int COLS, class Tile, class F, class T = Product>
struct RowsCopy : AsyncCopy<THREADS, ROWS, COLS, Tile, T> {
    using Whole = AsyncCopy<THREADS, ROWS, COLS, Tile, T>;
    F row;

    __device__ RowsCopy(Tile tile, const Rows<const T>& from, F row) : Whole(tile, from), row(row) {}

    __device__ void all() { part<1>(0); }

    template <int STEPS>
    __device__ void part(int k) {
        constexpr int STEP = Whole::STEP, NOW = (Whole::PIECES + STEPS - 1) / STEPS;
        int column = threadIdx.x % Whole::CHUNKS * Whole::EACH, first = threadIdx.x / Whole::CHUNKS;
#pragma unroll
        for (int i = k * NOW; i < (k + 1) * NOW && i < Whole::PIECES; i++) {
            if (!Whole::EVEN && i * STEP >= this->tile_rows) continue;
            const T* at = i * STEP < this->rows ? row(first + i * STEP) : nullptr;
            cp_async_16(this->target(i * STEP), at == nullptr ? this->source : at + column, at != nullptr);
        }
    }
};

// Whether rows of `cols` elements from `target` on can be written 16 bytes at once.
template <class T>
__device__ bool aligned(const T* target, long long row_stride, int cols) {
    return cols % VECTOR<T> == 0 && row_stride % VECTOR<T> == 0 && (unsigned long long)target % 16 == 0;
}

// An element from shared memory to global memory.
template <class T>
__device__ void copy_shared(T* to, unsigned from) {
    to->bits = load_shared_u16(from);
}
template <>
__device__ inline void copy_shared<double>(double* to, unsigned from) {
    *to = load_shared_double(from);
}

// Write the warp's rows [first, first + COUNT) of a tile to global memory, where they are rows of `cols` elements.
// RARE: the loop is not unrolled, for NVRTC's time.
template <int COUNT, bool RARE = false, class Tile, class T>
__device__ void store_rows(Tile tile, int first, T* target, long long row_stride, int rows, int cols) {
    int lane = threadIdx.x % 32;
    bool vectors = aligned(target, row_stride, cols);
    constexpr int EACH = VECTOR<T>, CHUNKS = Tile::COLUMNS / EACH;
    auto store = [&](int i) {
        int row = first + i / CHUNKS, col = i % CHUNKS * EACH;
        if (row >= rows || col >= cols) return;
        T* to = target + row * row_stride + col;
        if (vectors) {
            *(uint4*)to = load_shared_16(tile.address(row, col));
        } else {
#pragma unroll 1
            for (int c = 0; c < min(EACH, cols - col); c++) copy_shared(to + c, tile.address(row, col + c));
        }
    };
    if constexpr (RARE) {
#pragma unroll 1
        for (int i = lane; i < COUNT * CHUNKS; i += 32) store(i);
    } else {
        for (int i = lane; i < COUNT * CHUNKS; i += 32) store(i);
    }
}
