// The seam: all that a kernel knows about what happens to a score between S = Q K^T and P V. Forward and backward, all
// families, ask one object, made for a head, about pairs of a query and a key. What is not asked compiles to nothing.
#pragma once
#include "attention/score_functions.cuh"
#include "attention/terms.cuh"
#include "ptx/math.cuh"

// What an array of Params holds.
namespace pointed {
template <class T>
T to(T*);
template <class T>
T to(const T*);
}
template <class Pointer>
using Pointed = decltype(pointed::to(Pointer()));

#include "user/score.cuh"  // of the plan, which has the user's score function

// Where a tile of scores stands: element (row, column) is the pair of query i + row and key j + column. TRANSPOSED:
// rows are keys. HEAD_ROWS: heads that share K and V share the tile, and each has so many rows of it; `row`: the first
// of these.
template <bool TRANSPOSED = false, int HEAD_ROWS = 0>
struct Placement {
    int head, i, j, row = 0;

    __device__ Pair operator()(int r, int c) const {
        if constexpr (TRANSPOSED) {
            return {head, i + c, j + r};
        } else if constexpr (HEAD_ROWS > 0) {
            return {head + (row + r) / HEAD_ROWS, i + (row + r) % HEAD_ROWS, j + c};
        } else {
            return {head, i + row + r, j + c};
        }
    }
    // The first of a line that a lane has of an accumulator.
    template <class Accumulator>
    __device__ Pair line(int n) const {
        return (*this)(Accumulator::row(n / 2, n % 2 * 2), Accumulator::column(0, 0));
    }
};

// Whether scores are more than the product of Q and K: they come in powers of two then.
constexpr bool SCORED = config::SOFTCAP || config::SCORE || Terms::GIVEN > 0;

// Whether soft caps of a tile whose products are all near 0 are reckoned without the special-function unit, which they
// keep busier than the exponentials do: a polynomial is as exact as 16 bits ask.
constexpr bool NEAR_CAPS =
    config::SOFTCAP && !config::SCORE && !Terms::IN_PRODUCT && sizeof(In) == 2 && !config::BATCH_INVARIANT;

// Whether that has a term with s^5. bfloat16 asks for none.
template <class T>
constexpr bool FIFTH_POWER = true;
template <>
constexpr bool FIFTH_POWER<bfloat16_t> = false;

// Whether a row's scores grow on the way from its last key to its first, as a rule. What is not known may.
constexpr bool GROWING_SCORES = config::SCORE || Terms::GROWS;

struct Pairs {
    const Params& p;
    Head head;
    const unsigned char* keys;  // this batch's row of key_mask
    TileBits bits;              // what a block mask leaves of the tile at hand

    __device__ Pairs(const Params& p, const Head& head, TileBits bits = {})
        : p(p),
          head(head),
          keys(p.key_mask + (config::KEY_MASK ? head.batch * p.key_mask_strides.batch : 0)),
          bits(bits) {}

    // What a score is multiplied by to be an exponent of 2: exp(scale * s) = 2^(factor * s). Never 0: -inf * 0 is NaN.
    __device__ Accum factor() const { return SCORED ? Accum(1) : p.factor; }

    // What it is multiplied by to be in natural units, those of lse.
    __device__ Accum unit() const { return SCORED ? LN2 : p.scale; }

    // The score of a pair from its product s of Q and K: scale, soft cap or score function, and what is added to that.
    // (Softmaxes take the largest score, so `unit` is not negative.) Asked beyond the last query, key and head too:
    // what is read from an array must be in bounds.
    __device__ Accum score(Accum s, Pair at) const { return Terms::onto(product(s, at, tabled(at)), p, head, at); }

    // The derivative of unit * score with respect to |scale| * s, which multiplies dS in the backward.
    __device__ Accum slope(Accum s, Pair at) const { return product_slope(s, at, tabled(at)); }

    // Where lies what is known of a pair's score function before: of the pair beside it, one further.
    __device__ const Accum* tabled(Pair at) const {
        return config::SCORE ? user::tabled(p, head.batch, real_head(p, at.head), at.i, at.j) : nullptr;
    }

    // Where a score function's slope may be infinite or NaN, that of a pair without weight does not count.
    __device__ static Accum settled(Accum slope, Accum probability) {
        return config::SCORE && !user::CONSTANT_SLOPE && probability == 0 ? 0 : slope;
    }

    // The scaled product: what score functions start from.
    __device__ Accum natural(Accum s) const { return (config::NEGATIVE_SCALE ? -s : s) * p.scale; }

    // Of the score what depends on the product, and x more, where a term goes into that. NEAR: s is near 0.
    template <bool NEAR = false, class Number = NotGiven>
    __device__ Accum product(Accum s, Pair at, const Accum* tabled, Number x = {}) const {
        if (config::SCORE) return times(function(s, at, tabled), LOG2E, x);
        if constexpr (NEAR) return times(s, near_cap(s), x);
        return SCORED ? times(capped(s), weight(), x) : capped(s);
    }
    // The exponent of 2 that becomes of a score with x more, where that is a soft cap of the product and nothing else.
    template <bool NEAR, bool ALONE = NEAR_CAPS && Terms::GIVEN == 0>
    __device__ Accum capped_and(Accum s, Accum x) const {
        static_assert(ALONE, "a score has more parts");
        return product<NEAR>(s, {}, nullptr, x);
    }
    template <bool NEAR = false>
    __device__ Accum product_slope(Accum s, Pair at, const Accum* tabled) const {
        Accum sign = config::NEGATIVE_SCALE ? -1 : 1;
        if constexpr (NEAR) {
            Accum x = s * s;
            return sign * fma(x, fma(x, p.near_slope_2, p.near_slope_1), Accum(1));
        }
        if (config::SCORE) return sign * user::slope(p, natural(s), head.batch, at.head, at.i, at.j, tabled);
        if (!config::SOFTCAP) return sign;
        Accum t = capped(s);
        return sign * fma(-t, t, Accum(1));
    }

    // The logit that a row's denominator has beside those of its keys (Xiao et al. 2023), in natural units. Rows behind
    // packed sequences have none.
    __device__ Accum sink(int of_head) const {
        if (head.behind_all(p)) return MINUS_INFINITY;
        return to_float(p.sinks[real_head(p, of_head) * p.sinks_strides.head]);
    }

    // Whether the query may see the key.
    __device__ bool visible(Pair at) const {
        return Band{p, head}.contains(at.i, at.j) && key_seen(at.j) &&
               (!config::MASK || *at_pair<config::MASK_LINES>(p.mask, p.mask_strides, head, at)) &&
               (!config::BLOCK_MASK || bits.visible(at.i, at.j));
    }

    // What is said of a key for all queries. (A sequence that arrays are too short for may be asked about, too.)
    __device__ bool key_seen(int j) const {
        return !config::KEY_MASK || ((!RAGGED || j < Sequence::most_keys(p)) && keys[j]);
    }

    // The keys among which those are that a query may see, and the queries among which those are that may see a key.
    __device__ Range keys_of(int i) const { return Band{p, head}.keys_of(i); }
    __device__ Range queries_of(int j, bool key_seen) const {
        return key_seen ? Band{p, head}.queries_of(j) : Range{0, 0};
    }

    // Whether the query sees any key, and the key is seen by any, whatever mask and block mask say.
    __device__ bool sees(int i) const {
        Range of = keys_of(i);
        if (!config::KEY_MASK) return of.begin < of.end;
        // From both ends: of padding one side is seen.
        for (int first = of.begin, last = of.end - 1; first <= last; first++, last--)
            if (keys[first] || keys[last]) return true;
        return false;
    }
    __device__ bool is_seen(int j) const {
        Range by = queries_of(j, key_seen(j));
        return by.begin < by.end;
    }

    // Whether positions hide some pair of these tiles, and whether anything may.
    __device__ bool edges(Range queries, Range of_keys) const {
        return Band{p, head}.edges(queries, of_keys) || queries.end > head.queries(p);
    }
    __device__ bool tests(Range queries, Range of_keys) const {
        return (config::BLOCK_MASK && bits.partial()) || Band{p, head}.tests(queries, of_keys);
    }
    __device__ bool tests_backward(Range queries, Range of_keys) const {
        return (config::BLOCK_MASK && bits.partial()) || Band{p, head}.tests_backward(queries, of_keys);
    }

   protected:
    __device__ Accum function(Accum s, Pair at, const Accum* tabled) const {
        return user::score(p, natural(s), head.batch, at.head, at.i, at.j, tabled);
    }

    // A product with its sign, between -1 and 1 where it is capped, and what makes an exponent of 2 of that.
    __device__ Accum capped(Accum s) const {
        if (config::NEGATIVE_SCALE) s = -s;
        return config::SOFTCAP ? hyperbolic_tangent<In>(s * p.cap_inverse) : s;
    }
    // Of a product that is near 0: what makes a soft cap's exponent of 2 of it.
    __device__ Accum near_cap(Accum s) const {
        Accum x = s * s, y = fma(x, FIFTH_POWER<In> ? fma(x, p.near_cap_2, p.near_cap_1) : p.near_cap_1, p.near_cap_0);
        return config::NEGATIVE_SCALE ? -y : y;
    }
    __device__ Accum weight() const { return config::SOFTCAP ? p.cap : p.factor; }
};

// key_seen of COUNT keys from `first` on, fetched at once by a whole warp.
template <int COUNT>
struct KeysSeen {
    unsigned bits[config::KEY_MASK ? (COUNT + 31) / 32 : 1];

    __device__ KeysSeen(const Pairs& pairs, int first) {
        if constexpr (config::KEY_MASK) {
#pragma unroll
            for (int n = 0; n < (COUNT + 31) / 32; n++) {
                int j = first + 32 * n + threadIdx.x % 32;
                bits[n] = __ballot_sync(~0u, j < pairs.head.keys(pairs.p) && pairs.key_seen(j));
            }
        }
    }

    __device__ bool operator[](int n) const { return !config::KEY_MASK || (bits[n / 32] >> n % 32 & 1); }
    // Of n + shift, where they are in one word.
    __device__ bool shifted(int n, int shift) const {
        return !config::KEY_MASK || (bits[n / 32] >> shift >> n % 32 & 1);
    }
};

// At the start of a branch that a whole warp takes or not: keeps the compiler from computing both sides always.
__device__ inline void keep_branch() { __syncwarp(); }
