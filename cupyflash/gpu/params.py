"""`struct Params`, what the host hands to every kernel by value: one list of fields makes its CUDA text and packs it.

The pointers stand in front, and at the end what the kernels know of a seed that is a number: a call packs these alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..passes import BY_ROWS
from ..problem import ARRAY_RULES, ARRAYS, AXES, FLOAT8, OPTIONS, ArrayRule, AttentionProblem, View
from ..score import ScoreArray
from .kernel_plan import KernelPlan
from .score import cuda_name

# dtype: what q, k, v and dO are; what the tensor cores multiply; what out and the gradients are; what sums are kept in
TYPES = {
    FLOAT8: ("float8_t", "float8_t", "float8_t", "float"),
    "float16": ("half_t", "half_t", "half_t", "float"),
    "bfloat16": ("bfloat16_t", "bfloat16_t", "bfloat16_t", "float"),
    "float32": ("float", "half_t", "float", "float"),
    "float64": ("double", "double", "double", "double"),
}


def types(plan: KernelPlan) -> tuple[str, str, str, str]:
    """TYPES of a plan, whose results may have another dtype than its inputs."""
    given, product, _, accum = TYPES[plan.dtype]
    return given, product, TYPES[plan.out_dtype or plan.dtype][2], accum


def dq_type(plan: KernelPlan) -> str:
    """What dq is."""
    return TYPES[plan.dq_dtype or plan.out_dtype or plan.dtype][2]


def kept_type(plan: KernelPlan) -> str:
    """What k and v are."""
    return EIGHT[plan.cache_dtype] if plan.cache_dtype else TYPES[plan.dtype][0]


EIGHT = {FLOAT8: "float8_t", "int8": "integer8_t"}  # of k and v beside q of 16 bits
OPTIONAL = {  # by the dtype of an optional array; one with that of q is const In
    "bool": "const unsigned char", "float32": "const float", "float64": "const double", "int64": "const long long",
    "uint64": "const unsigned long long", "int32": "const int", "uint32": "const unsigned",
}  # fmt: skip
LISTS = ("key_lists", "query_lists")  # of a block mask; null where not asked for
GRADIENTS = tuple(rule.name for rule in ARRAYS if rule.gradient)
ROUNDS = 7  # of dropout's generator, as attention/dropout.cuh has them
# Made of the seed: in 64 bits a word for each half of the generator.
KEYS = tuple(f"round_keys[{n}]" for n in range(ROUNDS))
WORKSPACE = {
    FLOAT8: "float8_t",
    "float16": "half_t",
    "uint32": "unsigned",
    "uint64": "unsigned long long",
    "float32": "float",
    "float64": "double",
}
LISTED = ("order",)  # workspaces that few programs have


def _cap_inverse(problem: AttentionProblem) -> float:
    """What a product of Q and K is multiplied by before tanh. Inside its type, so that times 0 it is not NaN."""
    if problem.softcap is None:
        return 0.0
    largest = 1e300 if problem.lse_dtype == "float64" else 1e30
    return min(abs(problem.scale) / problem.softcap, largest)


class NearZero(NamedTuple):
    """What stands for tanh(x) where |x| < bound: x (1 + tanh[0] x^2 + tanh[1] x^4). Its slope is 1 + slope[0] x^2 +
    slope[1] x^4.

    Of least absolute and least relative error.
    """

    bound: float
    tanh: tuple[float, float]
    slope: tuple[float, float]


# Off by 9e-5 and by a part in 40,000 (the special-function unit's tanh: a part in 2,000); by 9e-6 and by a part in
# 5,000.
NEAR_ZERO = {
    "bfloat16": NearZero(0.35, (-0.31975756, 0), (-0.9977361, 0.60618494)),  # pairs.cuh knows of the 0
    "float16": NearZero(0.5, (-0.33185084, 0.11544082), (-0.99126475, 0.55077579)),
}


def _near(n: int, slope: bool = False) -> Callable[[AttentionProblem], float]:
    """What s^(2n + 1) is multiplied by in an exponent of 2, of a product s that is near 0 beside the cap, or s^2n in
    the slope."""

    def coefficient(problem: AttentionProblem) -> float:
        if problem.softcap is None or not _near_bound(problem):
            return 0.0
        near, inverse = NEAR_ZERO[problem.dtype], _cap_inverse(problem)
        if slope:
            return near.slope[n - 1] * inverse ** (2 * n)
        return (1, *near.tanh)[n] * SCALARS["cap"][1](problem) * inverse ** (2 * n + 1)

    return coefficient


def _near_bound(problem: AttentionProblem) -> float:
    """The absolute value up to which products are near 0. The limits keep powers of them inside float32, and what a
    score is off by, of float16 1e-5 of the cap, under what rounds P."""
    inverse, largest = _cap_inverse(problem), 64 if problem.dtype == "float16" else 1e6
    if problem.softcap is None or problem.dtype not in NEAR_ZERO or not 1e-4 <= problem.softcap <= largest:
        return 0.0
    return NEAR_ZERO[problem.dtype].bound / inverse if 1e-9 <= inverse <= 1e4 else 0.0


def _factor(problem: AttentionProblem) -> float:
    """What turns scores to powers of two. Never 0: -inf * 0 is NaN."""
    return max(abs(problem.scale) * math.log2(math.e), 1e-300 if problem.lse_dtype == "float64" else 1e-30)


def _lists(problem: AttentionProblem, axis: str, length: int) -> int:
    return length if axis in (problem.block_mask or ()) else 1


def _live(side: int, end: str) -> Callable[[AttentionProblem], float]:
    """The first of the queries (0), or keys (1), that are no dead rows by position, or the end of them."""
    return lambda p: p.live[side].start if end == "first" else p.live[side].stop


def _or_0(option: str) -> Callable[[AttentionProblem], float]:
    return lambda problem: getattr(problem, option) or 0.0


def _bound(problem: AttentionProblem, n: int | None) -> int:
    """A window's as kernels have it: no more than may hide something."""
    farthest = max(problem.seq_q, problem.seq_k) + abs(problem.diagonal)
    return (n or 0) if problem.has("at") else min(n or 0, farthest)


SCALARS: dict[str, tuple[str, Callable[[AttentionProblem], float]]] = {
    "scale": ("Accum", lambda p: abs(p.scale)),  # the sign is a constant
    "factor": ("Accum", _factor),
    "cap": ("Accum", lambda p: (p.softcap or 0.0) * math.log2(math.e)),  # cap * tanh(cap_inverse * s): an exponent of 2
    "cap_inverse": ("Accum", _cap_inverse),
    "batch": ("int", lambda p: p.batch),
    "heads_q": ("int", lambda p: p.heads_q),
    "heads_k": ("int", lambda p: p.heads_k),
    "seq_q": ("int", lambda p: p.seq_q),
    "seq_k": ("int", lambda p: p.seq_k),
    "dim": ("int", lambda p: p.dim),
    "dim_v": ("int", lambda p: p.dim_v),
    "diagonal": ("int", lambda p: p.diagonal),  # query i stands on key i + diagonal
    # Keys that it sees before and after that one, where there is a bound; sums of positions fit.
    "left": ("int", lambda p: _bound(p, p.left)),
    "right": ("int", lambda p: _bound(p, p.right)),
    # Which of a block mask's patterns is that of a batch entry and head: batch * lists_batch + head * lists_head.
    "lists": ("int", lambda p: _lists(p, "batch", p.batch) * _lists(p, "head", p.heads_q)),
    "lists_batch": ("int", lambda p: _lists(p, "head", p.heads_q) if "batch" in (p.block_mask or ()) else 0),
    "lists_head": ("int", lambda p: 1 if "head" in (p.block_mask or ()) else 0),
    "kept": ("Accum", lambda p: p.kept),  # by dropout
    "log_kept": ("Accum", lambda p: math.log(p.kept)),
    "drop_below": ("unsigned", lambda p: p.dropped_below << 16),
    "out_scale": ("Accum", lambda p: p.out_scale),
    # The same without tanh, where s^2 < near_cap_squared: s (near_cap_0 + s^2 (near_cap_1 + s^2 near_cap_2)). And its
    # slope.
    "near_cap_squared": ("Accum", lambda p: _near_bound(p) ** 2),
    **{f"near_cap_{n}": ("Accum", _near(n)) for n in range(3)},
    **{f"near_slope_{n}": ("Accum", _near(n, slope=True)) for n in (1, 2)},
    # Of the others nobody sees a key, or nobody is seen, by position.
    **{f"{end}_{side}": ("int", _live(n, end)) for n, side in enumerate("qk") for end in ("first", "end")},
    **{rule.name: ("Accum", _or_0(rule.name)) for rule in OPTIONS if rule.adds},
}
STRIDES = {  # in elements; broadcast axes of an array over pairs have stride 0
    "Strides": ("batch", "row", "head"),
    "PairStrides": AXES,
    "ScoreShape": tuple(f"{what}{axis}" for what in ("stride", "length") for axis in range(4)),
    "ScoreStrides": tuple(f"stride{axis}" for axis in range(4)),  # of a tangent, as long as what it is the tangent of
}
_PACKED: dict[str, Any] = {
    "int": "<i4", "unsigned": "<u4", "float": "<f4", "double": "<f8",
    **{name: np.dtype([(axis, "<i8") for axis in axes], align=True) for name, axes in STRIDES.items()},
}  # fmt: skip


# Where lengths are data: rows of all sequences together (of a cache, of each), and of a page, and how many of these.
RAGGED: dict[str, Callable[[AttentionProblem], int]] = {
    "rows_q": lambda p: p.rows_q or 0,
    "rows_k": lambda p: p.rows_k or p.cache or p.seq_k,
    "page": lambda p: p.page or 0,
    "pages": lambda p: p.pages,
}


# Of a part of a whole, for what asks where it stands.
AT = tuple(f"at_{axis}" for axis in AXES)

# Of heads that run in portions: which are those of a launch.
PORTION = ("first_head", "portion_heads")


class Field(NamedTuple):
    name: str
    type: str  # in CUDA
    value: Any = 0


def pointers(plan: KernelPlan) -> dict[str, str]:
    """The pointers of a plan's Params, in its order, with the type that they point to."""
    arrays = {rule.name: _optional(plan, rule.name, rule.dtypes[0]) for rule in _rules(plan)}
    rows = [x for x in plan.of.rows if not (plan.wrt and x.result)]
    given, of_arrays = {x.name: x.type if x.result else f"const {x.type}" for x in rows}, {}
    if plan.wrt:
        of_arrays = {f"{_d(plan)}{name}": arrays[name].removeprefix("const ") for name in GRADIENTS}
    read = {x.key: "const In" if x.dtype == plan.dtype else OPTIONAL[x.dtype] for x in _score_arrays(plan)}
    of_read = {f"{_d(plan)}{name}": type.removeprefix("const ") for name, type in read.items() if name in plan.wrt}
    tangents = {f"t{x.name}": (arrays | read)[x.name] for x in plan.tangents if x.name in arrays | read}
    return {
        **given,
        **arrays,
        **of_arrays,
        **read,
        **of_read,
        **tangents,
        **dict.fromkeys(LISTS, "const int"),
        **{space.name: WORKSPACE[space.dtype] for space in plan.workspace},
    }


def ragged(plan: KernelPlan) -> bool:
    """Whether lengths are data. Other programs' Params have no room for what is said of these."""
    return any(ARRAY_RULES[x.name].ragged for x in plan.given)


def _absent(plan: KernelPlan) -> list[str]:
    """What kernels may name though Params have it not."""
    rows = [row for row in ARRAYS if (row.ragged or row.placed) and row not in _rules(plan)]
    lines = [f"static constexpr const int* {row.name} = nullptr;" for row in rows]
    lines += [f"static constexpr PairStrides {row.name}_strides = {{}};" for row in rows if row.ragged]
    lines += [f"static constexpr unsigned* {name} = nullptr;" for name in LISTED if name not in pointers(plan)]
    numbers = [*(() if ragged(plan) else RAGGED), *(() if _placed(plan) else AT), *(() if plan.portions else PORTION)]
    return lines + [f"static constexpr int {name} = 0;" for name in numbers]


def _placed(plan: KernelPlan) -> bool:
    """Whether it is numbers that `kernel_plan.placed` is about."""
    constants = dict(plan.constants)
    return bool(constants["PLACED"] and not constants["AT"])


def _d(plan: KernelPlan) -> str:
    """What stands before the name of an array in that of what is computed with respect to it."""
    return "td" if plan.of.moved else "d"


def _rules(plan: KernelPlan) -> list[ArrayRule]:
    given = [x.name for x in plan.given]  # programs of wholes, and dense ones, have no room for places, and lengths
    return [
        rule
        for rule in ARRAYS
        if (not rule.of_float8 or plan.dtype == FLOAT8 or plan.cache_dtype)
        and (not (rule.ragged or rule.placed) or rule.name in given)
    ]


def _score_arrays(plan: KernelPlan) -> tuple[ScoreArray, ...]:
    return plan.score.arrays if plan.score else ()


def _in_cuda(plan: KernelPlan) -> dict[str, str]:
    """The names of pointers that are not called in CUDA as they are here. (The tangent of a gradient is written as
    that.)"""
    names = {x.key: cuda_name(n) for n, x in enumerate(_score_arrays(plan))}
    of_arrays = {
        f"{_d(plan)}{name}": f"d{names.get(name, name)}" for name in plan.wrt + (GRADIENTS if plan.wrt else ())
    }
    return names | of_arrays | {f"t{x.name}": f"t{names[x.name]}" for x in plan.tangents if x.name in names}


def score_shape(view: View) -> tuple[int, ...]:
    """What a ScoreShape holds of an array that a score function reads."""
    rest = 4 - len(view.shape)
    return (*view.strides, *(0,) * rest, *view.shape, *(1,) * rest)


def _optional(plan: KernelPlan, name: str, usual: str) -> str:
    dtype = next((x.dtype for x in plan.given if x.name == name), usual)
    return "const In" if dtype in ("q", plan.dtype) else OPTIONAL[dtype]


def _values(
    plan: KernelPlan, problem: AttentionProblem | None = None, strides: Mapping[str, Sequence[int]] | None = None
) -> list[Field]:
    """The fields behind the pointers; without a problem, not their values."""
    strides = strides or {}
    named = pointers(plan)
    shaped = [rule.name for rule in _rules(plan) if rule.axes and not rule.placed]
    of_shaped = [f"{d}{name}" for d in (_d(plan), "t") for name in GRADIENTS]
    over_pairs = [name for name in (*shaped, *of_shaped) if name in named]
    read = [x.key for x in _score_arrays(plan)]
    in_cuda = _in_cuda(plan)
    return [
        *(
            Field(f"{name}_strides", "Strides", tuple(strides.get(name, (0, 0, 0))))
            for name in named
            if name in BY_ROWS
        ),
        *(
            Field(f"{in_cuda.get(name, name)}_strides", "PairStrides", tuple(strides.get(name, (0, 0, 0, 0))))
            for name in over_pairs
        ),
        *(Field(f"{in_cuda[name]}_shape", "ScoreShape", tuple(strides.get(name, (0,) * 8))) for name in read),
        *(
            Field(f"{in_cuda[name]}_strides", "ScoreStrides", tuple(strides.get(name, (0,) * 8)[:4]))
            for name in (f"t{key}" for key in read)
            if name in named
        ),
        *(Field(name, type, value(problem) if problem else 0) for name, (type, value) in SCALARS.items()),
        *(Field(name, "int", value(problem) if problem else 0) for name, value in RAGGED.items() if ragged(plan)),
        *(Field(name, "int", n) for name, n in zip(AT, (problem and problem.at) or (0,) * 4) if _placed(plan)),
        *(Field(name, "int", value) for name, value in plan.scalars),
    ]


def text(plan: KernelPlan) -> str:
    """Strides, PairStrides and Params as CUDA."""
    lines = [f"struct {name} {{ long long {', '.join(axes)}; }};" for name, axes in STRIDES.items()]
    names = _in_cuda(plan)
    lines += ["struct Params {", *(f"    {type}* {names.get(name, name)};" for name, type in pointers(plan).items())]
    lines += [f"    {field.type} {field.name};" for field in _values(plan)]
    keys = f"unsigned round_keys[{2 * ROUNDS}]"
    # Not asked for, they take no room in a launch.
    lines.append(f"    alignas(8) {keys};" if _keys(plan) else f"    static constexpr {keys} = {{}};")
    lines += [f"    {line}" for line in _absent(plan)]
    return "\n".join([*lines, "};"]) + "\n"


def layout(plan: KernelPlan) -> np.dtype[np.void]:
    """The fields as a NumPy record, laid out as a C compiler does."""
    return _layout(plan, tuple(pointers(plan)), _values(plan))


def _layout(plan: KernelPlan, front: tuple[str, ...], values: list[Field]) -> np.dtype[np.void]:
    accum = TYPES[plan.dtype][3]
    return _record(front, tuple([(x.name, accum if x.type == "Accum" else x.type) for x in values]), len(_keys(plan)))


@functools.lru_cache(256)  # a new shape of a known kind has the same: to make one takes NumPy a tenth of a millisecond
def _record(pointers: tuple[str, ...], values: tuple[tuple[str, str], ...], keys: int) -> np.dtype[np.void]:
    fields = [(name, "<u8") for name in pointers]
    fields += [(name, _PACKED[type]) for name, type in values]
    fields += [("round_keys", f"<{keys}u8")] if keys else []
    return np.dtype(fields, align=True)


def _keys(plan: KernelPlan) -> tuple[str, ...]:
    return KEYS if dict(plan.constants)["DROPOUT"] else ()


@functools.lru_cache(256)
def round_keys(seed: int) -> tuple[int, ...]:
    """What stands under `KEYS` for a seed: Philox adds a constant to each of the key's two words in every round."""
    low, high = seed % 2**32, seed // 2**32
    return tuple((low + n * 0x9E3779B9) % 2**32 | (high + n * 0xBB67AE85) % 2**32 << 32 for n in range(ROUNDS))


class Packer:
    """Packs the Params of a plan and a problem.

    `strides` has, by the name of an array, its (batch, row, head), or (batch, head, query, key) of an optional one; of
    one that a score function reads, its `score_shape`.
    """

    def __init__(self, plan: KernelPlan, problem: AttentionProblem, strides: Mapping[str, Sequence[int]]) -> None:
        front, back = tuple(pointers(plan)), _keys(plan)
        self.slots = {name: index for index, name in enumerate(front + back)}
        values = _values(plan, problem, strides)
        keys = ((0,) * len(back),) if back else ()
        record = np.array((*(0,) * len(front), *[x.value for x in values], *keys), _layout(plan, front, values))
        self._front, self._back = (struct.Struct(f"<{len(x)}Q") for x in (front, back))
        self._record, self._behind = record.tobytes(), record.nbytes - self._back.size
        self._pointers = len(front)

    def memory(self) -> ctypes.Array[ctypes.c_char]:
        """Params but for what `fill` puts there."""
        return (ctypes.c_char * len(self._record)).from_buffer_copy(self._record)

    def fill(self, memory: ctypes.Array[ctypes.c_char], addresses: Sequence[int]) -> None:
        """Pointers, and round keys, in the order of `slots`."""
        n = self._pointers
        self._front.pack_into(memory, 0, *addresses[:n])
        if len(addresses) > n:
            self._back.pack_into(memory, self._behind, *addresses[n:])
