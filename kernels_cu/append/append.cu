// New rows of K and V behind those that caches have, K turned by the angles of its positions; Q, turned, in an array of
// its own; and what lengths there are then. A thread has 2 WIDTH columns of a head's row, two halves of pairs where
// these are turned. In caches of 8 bits (EIGHT) numbers are divided by a scale and rounded; by a scale of the row's own
// (K_ROW_SCALES, V_ROW_SCALES) where each has one, which LANES neighbours find together and one of them writes.
// Bound by memory and by the way to it: all that a row is looked up by is on its way while what it holds is. Its Params
// are its own (cupyflash/gpu/append.py). Nothing that lengths, offsets, pages or slots hold leads outside of the
// caches.
#include "ptx/convert.cuh"
#include "ptx/launch.cuh"

using Number = unsigned long long;  // in which sums of nonsense wrap, and are looked at then
using Integer = long long;

template <class T>
struct alignas(WIDTH * sizeof(T) < 16 ? WIDTH * sizeof(T) : 16) Vector {
    T at[WIDTH];
};
using Some = Vector<In>;

constexpr bool ROW_SCALES = K_ROW_SCALES || V_ROW_SCALES;
constexpr float SMALLEST_SCALE = 1e-30f;  // of a row

struct Place {
    bool is = false;  // whether the row has one
    Integer entry, row;
};

// Of the sequence that a new row is of: the last one that begins at or before it.
__device__ int sequence_of(const Params& p, unsigned row) {
    int low = 0, high = p.sequences - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (p.cu_seqlens_q[(middle + 1) * p.offset_stride] > Integer(row))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// A new row's position in its sequence; below 0, as a number without sign beyond all others, where nobody has it.
__device__ Number position_of(const Params& p, unsigned sequence, unsigned row) {
    Integer filled = p.seqlens_k[sequence * p.length_stride], first = 0;
    bool own = filled >= 0;
    if constexpr (PACKED) {
        first = p.cu_seqlens_q[sequence * p.offset_stride];
        own = own && first <= Integer(row) && Integer(row) < p.cu_seqlens_q[(sequence + 1) * p.offset_stride];
    }
    return own ? Number(filled) + row - Number(first) : ~Number(0);
}

__device__ Place place_at(const Params& p, unsigned sequence, Number position) {
    if (position >= Number(p.most)) return {};
    if constexpr (PAGED) {
        Integer page = p.page_table[sequence * p.table_strides[0] + Integer(position / p.page) * p.table_strides[1]];
        return {page >= 0 && page < p.entries, page, Integer(position % p.page)};
    } else {
        return {true, sequence, Integer(position)};
    }
}

__device__ Place place_in_slot(const Params& p, unsigned sequence, unsigned row) {
    Integer slot = p.slots[sequence * p.slot_strides[0] + row * p.slot_strides[1]];
    return {slot >= 0 && slot / p.page < p.entries, slot / p.page, slot % p.page};
}

// What there is behind the call.
__device__ void write_length(const Params& p, int sequence) {
    Integer filled = p.seqlens_k[sequence * p.length_stride], rows = p.rows;
    if constexpr (PACKED) {
        Integer first = p.cu_seqlens_q[sequence * p.offset_stride],
                end = p.cu_seqlens_q[(sequence + 1) * p.offset_stride];
        Number own = end > first ? Number(end) - Number(first) : 0;
        rows = own < Number(rows) ? Integer(own) : rows;
    }
    Integer total = (filled < p.most ? filled : p.most) + rows;
    p.totals[sequence] = Length(filled < 0 ? 0 : total < p.most ? total : p.most);
}

// Of positions that tables have no angles for the nearest.
__device__ Integer table_row(const Params& p, Number position) {
    if (position < Number(p.positions)) return Integer(position);
    return Integer(position) < 0 ? 0 : p.positions - 1;
}

template <class T>
__device__ T* at_column(T* row, const Strides& stride, int column) {
    return row + column * (WIDTH > 1 ? 1 : stride.column);
}

template <class T>
__device__ void store(T* row, const Strides& stride, int first, int second, int columns, const Vector<T>& x,
                      const Vector<T>& y) {
    if (first < columns) *(Vector<T>*)at_column(row, stride, first) = x;
    if (second < columns) *(Vector<T>*)at_column(row, stride, second) = y;
}

// The size of a number as bits, of which those of NaN are above all others.
__device__ unsigned size_of(In x) { return __float_as_uint(to_float(x)) & 0x7fffffff; }

// The largest of LANES neighbours, a power of two, by whole warps; where they are more than one they are the block.
__device__ unsigned largest_of_lanes(unsigned x) {
#pragma unroll
    for (int step = (LANES < 32 ? LANES : 32) / 2; step > 0; step /= 2) {
        unsigned other = __shfl_xor_sync(~0u, x, step);
        x = other > x ? other : x;
    }
    if constexpr (LANES > 32) {
        __shared__ unsigned of_warp[(LANES + 31) / 32];
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < LANES / 32; n++) x = of_warp[n] > x ? of_warp[n] : x;
    }
    return x;
}

// A piece of a row of K or V in 8 bits.
__device__ void store_eight(const Params& p, int which, Kept* row, const Place& place, unsigned head, int first,
                            int second, int columns, const Some& x, const Some& y) {
    const Strides& stride = p.scale_strides[which];
    float* scales = p.scales[which];
    float scale = p.numbers[which];
    if (which == 0 ? K_ROW_SCALES : V_ROW_SCALES) {
        unsigned largest = 0;
#pragma unroll
        for (int n = 0; n < WIDTH; n++) {
            unsigned one = size_of(x.at[n]), other = size_of(y.at[n]);
            largest = one > largest ? one : largest;
            largest = other > largest ? other : largest;
        }
        scale = __uint_as_float(largest_of_lanes(largest)) / LARGEST;
        scale = scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
        scales += place.entry * stride.entry + place.row * stride.row;
        if (first == 0 && head < p.heads[which]) scales[head * stride.head] = scale;
    } else if (scales) {
        scale = scales[head * stride.head];
    }
    Vector<Kept> a, b;
#pragma unroll
    for (int n = 0; n < WIDTH; n++) {
        a.at[n] = from_float<Kept>(to_float(x.at[n]) / scale);
        b.at[n] = from_float<Kept>(to_float(y.at[n]) / scale);
    }
    store(row, p.to_strides[which], first, second, columns, a, b);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_append(const __grid_constant__ Params p) {
    let_next_kernel_start();
    if (blockIdx.x >= p.blocks) {  // of rows
        Integer sequence = Integer(blockIdx.x - p.blocks) * THREADS + threadIdx.x;
        if (sequence < p.sequences) write_length(p, sequence);
        return;
    }
    unsigned row = blockIdx.x / p.blocks_of_row, sequence = row / p.rows;
    unsigned piece = blockIdx.x % p.blocks_of_row * THREADS + threadIdx.x;
    row -= sequence * p.rows;
    int which = 0;  // K, V, Q
    while (which < 3 && piece >= p.pieces[which]) piece -= p.pieces[which++];
    if (which == 3) return;
    unsigned head = piece / p.pieces_of_head[which];
    int pair = piece % p.pieces_of_head[which] * WIDTH, turned = which == 1 ? 0 : p.half;  // pairs of this head's row
    bool turns = pair < turned;
    int first = turns && !INTERLEAVED ? pair : 2 * pair, second = first + (turns && !INTERLEAVED ? turned : WIDTH);
    const Strides& stride = p.from_strides[which];
    const In* from = p.from[which] + sequence * stride.entry + row * stride.row + head * stride.head;
    // None of a head that is none, as which whole warps have some.
    int columns = !ROW_SCALES || head < p.heads[which] ? p.columns[which] : 0;
    Some x{}, y{};
    if (!ROW_SCALES || first < columns) x = *(const Some*)at_column(from, stride, first);
    if (second < columns) y = *(const Some*)at_column(from, stride, second);

    Place place{true, sequence, row};
    Number position = 0;
    if constexpr (SLOTS) {
        place = place_in_slot(p, sequence, row);
    } else {
        unsigned of = PACKED ? sequence_of(p, row) : sequence;
        position = position_of(p, of, row);
        if (which < 2) place = place_at(p, of, position);
    }
    if (!place.is) return;

    if (ROTARY && turns) {
        Integer at = table_row(p, position);
        auto cosines = *(const Vector<Table>*)(p.cos + at * p.cos_strides[0] + pair * p.cos_strides[1]);
        auto sines = *(const Vector<Table>*)(p.sin + at * p.sin_strides[0] + pair * p.sin_strides[1]);
        In both[2 * WIDTH];
#pragma unroll
        for (int n = 0; n < 2 * WIDTH; n++) both[n] = n < WIDTH ? x.at[n] : y.at[n - WIDTH];
#pragma unroll
        for (int n = 0; n < WIDTH; n++) {
            int one = INTERLEAVED ? 2 * n : n, other = INTERLEAVED ? one + 1 : n + WIDTH;
            Accum a = to_float(both[one]), b = to_float(both[other]);
            Accum c = to_float(cosines.at[n]), s = to_float(sines.at[n]);
            both[one] = from_float<In>(a * c - b * s);
            both[other] = from_float<In>(a * s + b * c);
        }
#pragma unroll
        for (int n = 0; n < WIDTH; n++) x.at[n] = both[n], y.at[n] = both[n + WIDTH];
    }
    const Strides& target = p.to_strides[which];
    Integer to = place.entry * target.entry + place.row * target.row + head * target.head;
    if (EIGHT && which < 2)
        store_eight(p, which, (Kept*)p.to[which] + to, place, head, first, second, columns, x, y);
    else
        store((In*)p.to[which] + to, target, first, second, columns, x, y);
}
