// What is added to the product of Q and K: a list of terms. All families ask it, pair by pair (`onto`) or along the
// lines of a warp's accumulator (`Along`). A new one is a class here, its name in `Terms` below, and `adds` in its row
// of cupyflash/rules.py.
#pragma once
#include "attention/walk.cuh"
#include "ptx/convert.cuh"

// Query i and key j of a head of Q.
struct Pair {
    int head, i, j;

    // The one n further along a line of an accumulator.
    template <bool TRANSPOSED>
    __device__ Pair along(int n) const {
        return TRANSPOSED ? Pair{head, i + n, j} : Pair{head, i, j + n};
    }
};

constexpr Accum LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;

template <class T>
__device__ T* at_pair(T* array, const PairStrides& strides, int batch, Pair at) {
    return array + batch * strides.batch + at.head * strides.head + at.i * strides.query + at.j * strides.key;
}

// BY_LINE: of an array with a line for each packed query, and no axis of sequences.
template <bool BY_LINE, class T>
__device__ T* at_pair(T* array, const PairStrides& strides, const Head& head, Pair at) {
    if (BY_LINE) at.i = head.query_at(at.i);
    return at_pair(array, strides, head.batch, at);
}

// A tile of several heads may reach beyond the last.
__device__ inline int real_head(const Params& p, int head) { return min(head, p.heads_q - 1); }

// What a term adds to a score: a * b, in powers of two.
struct Added {
    Accum a, b;
};
// The same of a pair, which the term OF itself knows.
template <class Of>
struct AddedAt {
    const Params& p;
    const Head& head;
    Pair at;
};
struct NotGiven {};

// x and what a term adds. What a score function hides stays so, whatever that is.
__device__ inline Accum plus(Accum x, Added y) { return config::SCORE && x == MINUS_INFINITY ? x : fma(y.a, y.b, x); }
template <class Of>
__device__ Accum plus(Accum x, const AddedAt<Of>& y) {
    return Of::onto(x, y.p, y.head, y.at);
}
__device__ inline Accum plus(Accum x, NotGiven) { return x; }

// s * factor, and the number that goes into that.
__device__ inline Accum times(Accum s, Accum factor, NotGiven) { return s * factor; }
__device__ inline Accum times(Accum s, Accum factor, Accum x) { return fma(s, factor, x); }

// What lines say of the columns from n on, each when it is asked.
template <class Along>
struct FromColumn {
    const Along& along;
    int line, n;

    __device__ auto operator[](int column) const { return along.one(line, n + column); }
};
struct NoColumns {
    __device__ NotGiven operator[](int) const { return {}; }
};

// What all terms have that do not say more: their lines ask `onto` for each pair. Where a term MOVES, `tangent` is by
// how much what it adds changes, in natural units: a template, since few kernels' Params have tangents.
template <class Of>
struct Term {
    // Whether a row's scores may grow by it on the way from its last key to its first.
    static constexpr bool GROWS = true;
    // Whether its lines have a `number` instead, which goes into the product's multiplication.
    static constexpr bool IN_PRODUCT = false;
    static constexpr bool MOVES = false;  // whether what it adds has a tangent

    // Of the lines that a lane has of an accumulator of M row fragments, of such as Tile.
    template <int M, class Tile, bool TRANSPOSED>
    struct Along {
        const Params& p;
        Head head;
        Pair firsts[2 * M];

        template <class Placement>
        __device__ Along(const Params& p, const Head& head, const Placement& at) : p(p), head(head) {
#pragma unroll
            for (int line = 0; line < 2 * M; line++) {
                firsts[line] = at.template line<Tile>(line);
                firsts[line].head = real_head(p, firsts[line].head);
            }
        }
        // Of column n, of those that the lane holds: 8 * group + {0, 1}.
        __device__ AddedAt<Of> one(int line, int n) const {
            return {p, head, firsts[line].template along<TRANSPOSED>(n)};
        }
        template <int COUNT, class Arrays>
        __device__ FromColumn<Along> read(const Arrays&, int line, int n) const {
            return {*this, line, n};
        }
    };
};

// What is taken off for each key between the query's and the key (Press et al. 2022). Where nothing hides the keys
// behind the query, scores grow towards it.
struct Alibi : Term<Alibi> {
    static constexpr bool GIVEN = config::ALIBI_SLOPES, GROWS = !walk::BOUND_LAST, IN_PRODUCT = true;

    __device__ static Accum onto(Accum x, const Params& p, const Head& head, Pair at) {
        return plus(x, Added{-slope(p, head, at.head), Accum(abs(at.i + head.diagonal(p) - at.j))});
    }
    __device__ static Accum slope(const Params& p, const Head& head, int of_head) {
        return read(p, head, of_head, p.alibi_slopes, p.alibi_slopes_strides) * LOG2E;
    }
    static constexpr bool MOVES = config::TALIBI_SLOPES;
    template <class Given>
    __device__ static Accum tangent(const Given& p, const Head& head, Pair at) {
        Accum distance = abs(at.i + head.diagonal(p) - at.j);
        return -read(p, head, at.head, p.talibi_slopes, p.talibi_slopes_strides) * distance;
    }
    template <class T>
    __device__ static Accum read(const Params& p, const Head& head, int of_head, const T* slopes,
                                 const PairStrides& strides) {
        return to_float(slopes[head.batch * strides.batch + real_head(p, of_head) * strides.head]);
    }

    template <int M, class Tile, bool TRANSPOSED>
    struct Along {
        Accum steps[2 * M];  // what a key less of distance adds, and
        Accum from[2 * M];   // the distance of the line's first pair, or what it adds

        template <class Placement>
        __device__ Along(const Params& p, const Head& head, const Placement& at) {
#pragma unroll
            for (int line = 0; line < 2 * M; line++) {
                Pair first = at.template line<Tile>(line);
                steps[line] = -slope(p, head, first.head);
                from[line] = first.i + head.diagonal(p) - first.j;
                if (config::ALIBI_BEHIND) from[line] *= steps[line];
            }
        }
        // Where every key that is seen is behind its query, a multiplication and an addition.
        __device__ Accum number(int line, int n) const {
            Accum step = TRANSPOSED ? n : -n;
            return config::ALIBI_BEHIND ? fma(steps[line], step, from[line]) : steps[line] * fabs(from[line] + step);
        }
        template <int COUNT, class Arrays>
        __device__ NoColumns read(const Arrays&, int, int) const {
            return {};
        }
    };
};

// A number for each pair. Its lines are read where the kernel has it, in memory (mask.cuh) or in shared memory
// (sm90/pair_tiles.cuh).
struct Bias : Term<Bias> {
    static constexpr bool GIVEN = config::BIAS;

    __device__ static Accum onto(Accum x, const Params& p, const Head& head, Pair at) {
        if (at.i < head.queries(p) && at.j < head.keys(p))
            x = plus(x, Added{to_float(*at_pair<config::BIAS_LINES>(p.bias, p.bias_strides, head, at)), LOG2E});
        return x;
    }
    static constexpr bool MOVES = config::TBIAS;
    template <class Given>
    __device__ static Accum tangent(const Given& p, const Head& head, Pair at) {
        if (at.i >= head.queries(p) || at.j >= head.keys(p)) return 0;
        return to_float(*at_pair<config::BIAS_LINES>(p.tbias, p.tbias_strides, head, at));
    }

    template <int M, class Tile, bool TRANSPOSED>
    struct Along {
        template <class Placement>
        __device__ Along(const Params&, const Head&, const Placement&) {}

        // COUNT columns at once: 1, or an even one and the next.
        template <int COUNT>
        struct Read {
            Accum x[COUNT];

            template <class Arrays>
            __device__ Read(const Arrays& arrays, int line, int n) {
                if constexpr (COUNT == 1)
                    x[0] = arrays.bias(line, n);
                else
                    arrays.bias(line, n, x);
            }
            __device__ Added operator[](int column) const { return {x[column], LOG2E}; }
        };
        template <int COUNT, class Arrays>
        __device__ Read<COUNT> read(const Arrays& arrays, int line, int n) const {
            return {arrays, line, n};
        }
    };
};

template <class Of, bool GIVEN, int M, class Tile, bool TRANSPOSED>
struct AlongIfGiven : Of::template Along<M, Tile, TRANSPOSED> {
    using Lines = typename Of::template Along<M, Tile, TRANSPOSED>;
    using Lines::Lines;
};
template <class Of, int M, class Tile, bool TRANSPOSED>
struct AlongIfGiven<Of, false, M, Tile, TRANSPOSED> {
    template <class Placement>
    __device__ AlongIfGiven(const Params&, const Head&, const Placement&) {}
    template <int COUNT, class Arrays>
    __device__ NoColumns read(const Arrays&, int, int) const {
        return {};
    }
};

template <class... All>
struct TermList {
    static constexpr int GIVEN = (0 + ... + All::GIVEN);
    static constexpr bool GROWS = (false || ... || (All::GIVEN && All::GROWS));
    static constexpr int IN_PRODUCT = (0 + ... + (All::GIVEN && All::IN_PRODUCT));
    static_assert(IN_PRODUCT <= 1, "a multiplication takes one number along");

    // x and what is added at a pair.
    __device__ static Accum onto(Accum x, const Params& p, const Head& head, Pair at) {
        ((x = All::GIVEN ? All::onto(x, p, head, at) : x), ...);
        return x;
    }

    // What these change by, in natural units.
    static constexpr int MOVING = (0 + ... + All::MOVES);
    template <class Given>
    __device__ static Accum tangent(const Given& p, const Head& head, Pair at) {
        return (Accum(0) + ... + tangent_of<All>(p, head, at));
    }
    template <class Of, class Given>
    __device__ static Accum tangent_of(const Given& p, const Head& head, Pair at) {
        if constexpr (Of::MOVES) return Of::tangent(p, head, at);
        return 0;
    }

    // The same for the lines that a lane has of an accumulator of M row fragments.
    template <int M, class Tile, bool TRANSPOSED>
    struct Along : AlongIfGiven<All, All::GIVEN, M, Tile, TRANSPOSED>... {
        template <class Placement>
        __device__ Along(const Params& p, const Head& head, const Placement& at)
            : AlongIfGiven<All, All::GIVEN, M, Tile, TRANSPOSED>(p, head, at)... {}

        // The number of the term that goes into the product, if any, and f(what the others add, from column n on).
        __device__ auto number(int line, int n) const { return number_of<All...>(line, n); }
        template <int COUNT, class Arrays, class F>
        __device__ auto read(const Arrays& arrays, int line, int n, F f) const {
            return f(AlongIfGiven<All, All::GIVEN, M, Tile, TRANSPOSED>::template read<COUNT>(arrays, line, n)...);
        }

       private:
        template <class First, class... Rest>
        __device__ auto number_of(int line, int n) const {
            if constexpr (First::GIVEN && First::IN_PRODUCT)
                return AlongIfGiven<First, true, M, Tile, TRANSPOSED>::number(line, n);
            else if constexpr (sizeof...(Rest) > 0)
                return number_of<Rest...>(line, n);
            else
                return NotGiven();
        }
    };
};

using Terms = TermList<Alibi, Bias>;
static_assert(Terms::GIVEN == config::ADDED, "an array or option that `adds` to scores has no term");
static_assert(Terms::MOVING == config::ADDED_MOVES, "the term of an array that `adds` to scores has no tangent");
