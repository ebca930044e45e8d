"""What is asked: the attention problem as plain data, and every rule (and message) about shapes, dtypes and options.

Nothing here touches an array: callers describe their arrays as `View`s, and get back a frozen, hashable
`AttentionProblem` or a `TypeError` / `ValueError` that names the argument, what it is and what it must be.

`OPTIONS` and `ARRAYS` are the tables of what a call may be given beside q, k and v. The public functions, their backends,
PyTorch, JAX, `explain`, `tune`, `precompile` and the command line go over them.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

from .other_names import unexpected
from .passes import BACKWARD, FORWARD, Pass
from .score import Score, trace
from .score.graph import kind_of, name_of

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT8 = "float8_e4m3fn"
INPUTS = (*FLOATS, FLOAT8)
OF_FLOAT8 = ("bfloat16", "float16", FLOAT8)  # what results of it may be, the first unless asked for
INTEGERS = ("int64", "uint64", "int32", "uint32")
ITEMSIZE = {
    "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4,
}  # fmt: skip
SHORT = {"fp8": FLOAT8, "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
LAYOUTS = ("bshd", "bhsd")
CAUSALS = {False: None, True: "bottom_right", "bottom_right": "bottom_right", "top_left": "top_left"}
AXES = ("batch", "head", "query", "key")  # of arrays over pairs
# Axes of other arrays, and in whose place they stand: heads of keys, and blocks of rows that share a scale.
PLACES = {"key_head": "head", "query_block": "query", "key_block": "key"}
BLOCK = 128  # rows of these
SCORE_ARRAYS = 32  # a score function reads no more: older drivers have 4 KB for the parameters of a kernel
DROPOUT_STEPS = 1 << 16  # a pair is dropped by a random number of 16 bits


class View(NamedTuple):
    """An array as the corridor sees it. Strides count elements; `device` is "cpu" or "cuda:N"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    kind: str  # the array library: "numpy", "cupy", "torch", "jax"
    ptr: int = 0


class MaskKind(NamedTuple):
    """What a call must know of a block mask, and all that a kernel does before it runs: not the pattern."""

    shape: tuple[int, int, int, int]  # (batch, heads, queries, keys); 1 along an axis that it is shared along
    device: str

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of batch and head along which it has more than one pattern."""
        return tuple(axis for axis, n in zip(AXES[:2], self.shape) if n > 1)


class Given(NamedTuple):
    """An optional array of a problem: a row of ARRAYS, and the axes along which it has more than one entry."""

    name: str
    dtype: str
    axes: tuple[str, ...]


class _OfQKV(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_OfQKV):
    """What `attention_backward` returns, each shaped and typed like its input: (dq, dk, dv), and more by name.

    One for each row of ARRAYS that has a gradient; None where `wrt` did not ask for it.
    """

    of_arrays: dict[str, Any]  # of those that `wrt` asks for, by their names among the arrays of the call

    def __new__(cls, dq: Any, dk: Any, dv: Any, of_arrays: dict[str, Any] | None = None) -> Self:
        grads = super().__new__(cls, dq, dk, dv)
        grads.of_arrays = of_arrays or {}
        return grads

    @property
    def dbias(self) -> Any:
        return self.of_arrays.get("bias")

    @property
    def dalibi_slopes(self) -> Any:
        return self.of_arrays.get("alibi_slopes")

    @property
    def dsinks(self) -> Any:
        return self.of_arrays.get("sinks")

    @property
    def dscore_arrays(self) -> dict[str, Any]:
        """Those of the arrays that a score function reads, by their names."""
        named = ((name_of(key), x) for key, x in self.of_arrays.items())
        return {name: x for name, x in named if name is not None}

    def of_call(self, name: str) -> Any:
        """That of any array of the call, q, k and v too; None for one that has none."""
        return getattr(self, f"d{name}") if name in ("q", "k", "v") else self.of_arrays.get(name)


def float_name(dtype: Any) -> str | None:
    """What a short name, or a dtype of NumPy, PyTorch or JAX, is called here; text for what is unknown, None for None."""
    if dtype is None or isinstance(dtype, str):
        return SHORT.get(dtype, dtype) if dtype else dtype
    name = getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    return name if name in INPUTS else repr(dtype)


# ---- the tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionRule:
    """A scalar option of a call: a row of OPTIONS. What `check` returns is the problem's field of the same name, if any."""

    name: str
    default: Any
    help: str
    check: Callable[[Any], Any]  # the value as the problem has it; TypeError or ValueError
    backward: bool = False  # changes nothing but the gradients
    adds: bool = False  # a number that makes a term of scores (kernels_cu/attention/terms.cuh)
    number: bool = False  # may be an array of no dimensions
    written: bool = True  # whether a command line can say it
    text: bool = False  # on a command line it is taken as it is written


@dataclass(frozen=True)
class ArrayRule:
    """An optional input array of a call: a row of ARRAYS. Its shape is what NumPy broadcasts to that of the problem.

    Where q has no batch axis, or no heads, it has none here either.
    """

    name: str
    axes: tuple[str, ...]  # of AXES, in its order; none: one number
    dtypes: tuple[str, ...]  # "q" is the dtype of q
    label: str  # in a sentence
    entry: str  # what one element says
    adds: bool = False  # a term of scores: added to the product of q and k (kernels_cu/attention/terms.cuh)
    gradient: bool = False  # whether attention_backward gives one
    rows: bool = False  # the kernels read it along the last axis, which must have stride 1
    of_float8: bool = False  # for inputs of 8 bits alone

    def taken(self, dtype: str) -> list[str]:
        """The dtypes that it may have where q has this one, the usual one first."""
        named = (dtype if x == "q" else x for x in self.dtypes)
        return [x for x in dict.fromkeys(named) if x != FLOAT8]

    def has(self, rank: int) -> tuple[str, ...]:
        """Its axes where q has `rank` dimensions."""
        return tuple(axis for axis in self.axes if PLACES.get(axis, axis) not in AXES[: 4 - rank])

    def shape(self, problem: AttentionProblem, rank: int = 4) -> tuple[int, ...]:
        """Its shape in full where q has `rank` dimensions."""
        return tuple(problem.extent(axis) for axis in self.has(rank))

    def lengths(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Lengths of an array given for it along (batch, head, query, key); 1 along an axis that it has not."""
        own = {PLACES.get(axis, axis): n for axis, n in zip(reversed(self.axes), reversed(shape))}
        return tuple(own.get(axis, 1) for axis in AXES)  # type: ignore[return-value]

    def strides(self, view: View, problem: AttentionProblem, rank: int = 4) -> tuple[int, int, int, int]:
        """Element strides of (batch, head, query, key) of an array given for it; 0 along an axis that it has not."""
        own = zip(reversed(self.has(rank)), reversed(view.shape), reversed(view.strides))
        strides = {
            PLACES.get(axis, axis): stride for axis, length, stride in own if length != 1 or problem.extent(axis) == 1
        }
        return tuple(strides.get(axis, 0) for axis in AXES)  # type: ignore[return-value]

    def spread(self, view: View, rank: int = 4) -> tuple[str, ...]:
        """The axes along which an array given for it has more than one entry in memory."""
        own = zip(reversed(self.has(rank)), reversed(view.shape), reversed(view.strides))
        return tuple(axis for axis, length, stride in own if length > 1 and stride)[::-1]

    def to_copy(self, view: View, problem: AttentionProblem, rank: int = 4) -> View | None:
        """Its last axis in full, where that has another stride than 1 and kernels read rows of it; else None."""
        if not self.rows:
            return None
        axis = self.axes[-1]
        length, stride = problem.extent(axis), self.strides(view, problem, rank)[AXES.index(axis)]
        if axis not in self.has(rank) or length <= 1 or stride == 1:
            return None
        return view._replace(shape=(*view.shape[:-1], length), strides=(*view.strides[:-1], stride))


def _check_causal(causal: Any) -> str | None:
    try:
        return CAUSALS[causal]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"causal is {causal!r}; it must be False, True, 'bottom_right' or 'top_left'") from None


def _check_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"window is {window!r}; it must be None or a pair (left, right) of key counts, None = unbounded"
        )
    bounds: list[int | None] = []
    for side, n in zip(("left", "right"), window):
        if n is not None:
            try:
                if isinstance(n, bool):
                    raise TypeError
                n = operator.index(n)
            except TypeError:
                raise TypeError(f"window's {side} bound is {n!r}; it must be an integer or None") from None
            if n < 0:
                raise ValueError(f"window's {side} bound is {n}; it must be 0 or more keys, or None for unbounded")
        bounds.append(n)
    return bounds[0], bounds[1]


def check_scale(scale: Any) -> float | None:
    return _number("scale", scale)


def _check_softcap(softcap: Any) -> float | None:
    value = _number("softcap", softcap)
    if value is not None and value < 0:
        raise ValueError(f"softcap is {value}; it must be more than 0, or None (or 0) for none")
    return value or None


def _check_dropout(dropout: Any) -> float:
    value = _number("dropout", dropout) or 0.0
    if not 0 <= value < 1:
        raise ValueError(f"dropout is {value}; it must be a share of the probabilities, 0 or more and less than 1")
    return value


def seed_of(seed: Any, dropout: Any) -> tuple[Any, int | None]:
    """A seed as the array that it is, or as a number of 64 bits; neither where there is none and dropout asks for none."""
    if seed is None:
        if not (type(dropout) is float and dropout == 0) and _check_dropout(dropout):
            raise ValueError(
                f"dropout is {dropout}, but seed is not given; it must be an integer, or an array that holds one"
            )
        return None, None
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        number = int(seed)
        if not -(2**63) <= number < 2**64:
            raise ValueError(f"seed is {number}; it must have 64 bits, from -2**63 to 2**64 - 1")
        return None, number % 2**64
    if isinstance(seed, (bool, numbers.Number)) or not _may_be_array(seed):
        raise TypeError(f"seed is {seed!r}; it must be an integer, or an array that holds one")
    return seed, None


def _may_be_array(x: Any) -> bool:
    """Or, of `explain`, its shape."""
    return not isinstance(x, (str, bytes, list, dict, set))


def _number(name: str, x: Any) -> float | None:
    if x is None:
        return None
    plain = isinstance(x, numbers.Real) and not isinstance(x, bool)
    if not plain and (not hasattr(x, "__float__") or getattr(x, "shape", None) != () or _odd(x)):
        raise TypeError(f"{name} is {x!r}; it must be a real number or None")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    except Exception as error:  # traced by JAX, vmapped by PyTorch: no number is there yet
        raise TypeError(f"{name} is {x!r}; it must be a real number or None") from error
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def _odd(scalar: Any) -> bool:
    """Whether an array of no dimensions holds no real number, or one that a gradient is expected for."""
    kind = str(getattr(scalar, "dtype", ""))
    return "complex" in kind or "bool" in kind or getattr(scalar, "requires_grad", False)


def fold_descales(options: dict[str, Any], q: Any, descales: dict[str, Any]) -> dict[str, Any]:
    """The arrays of DESCALES, by name. A number becomes a part of the options `scale` or `out_scale`.

    q: an array or a `View`, of which shape and dtype are asked.
    """
    arrays, folded = {}, {"scale": "", "out_scale": ""}
    for name, x in descales.items():
        if x is None:
            continue
        if not isinstance(x, numbers.Real):
            if not _may_be_array(x):
                raise TypeError(
                    f"{name} is {x!r}; it must be a number, or an array with one for each head or block of a head"
                )
            arrays[name] = x
            continue
        if (dtype := float_name(getattr(q, "dtype", None))) in FLOATS:
            raise TypeError(f"{name} is given with q of {dtype}; it is for inputs of {FLOAT8}")
        value = _positive(name, x)
        if name == "v_descale":
            option, before = "out_scale", _check_out_scale(options.get("out_scale"))
        else:
            dim = tuple(getattr(q, "shape", ()))[-1:] or (0,)
            usual = 1.0 / math.sqrt(dim[0]) if dim[0] else 1.0
            scale = check_scale(options.get("scale"))
            option, before = "scale", usual if scale is None else scale
        options[option] = before * value
        folded[option] += f" times {name}"
    for option, names in folded.items():
        if names:
            _in_range(option + names, FLOAT8, options[option], None)
    return arrays


def mask_kind(block_mask: Any) -> MaskKind | None:
    kind = getattr(block_mask, "kind", None)
    if block_mask is not None and not isinstance(kind, MaskKind):
        name = f"{type(block_mask).__module__}.{type(block_mask).__qualname__}".removeprefix("builtins.")
        also = "; cupyflash.torch.flex_attention takes PyTorch's" if name.startswith("torch.") else ""
        raise TypeError(f"block_mask is a {name}; it must be what cupyflash.block_mask made, or None{also}")
    return kind


def _check_block_mask(block_mask: Any) -> tuple[str, ...] | None:
    kind = mask_kind(block_mask)
    return None if kind is None else kind.axes


def _check_out_dtype(dtype: Any) -> str | None:
    name = float_name(dtype)
    if name not in (None, *OF_FLOAT8):
        raise ValueError(f"out_dtype is {dtype!r}; it must be {', '.join(OF_FLOAT8)} or None")
    return name


def _check_out_scale(scale: Any) -> float:
    return 1.0 if scale is None else _positive("out_scale", scale)


def _positive(name: str, x: Any) -> float:
    value = _number(name, x)
    if value is None or not 1e-30 <= value <= 1e30:  # float32 has it, and its inverse
        raise ValueError(f"{name} is {value}; it must be more than 0, from 1e-30 to 1e+30")
    return value


def check_layout(layout: Any) -> str:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}")
    return layout


def check_flag(name: str, x: Any) -> bool:
    if type(x).__name__ not in ("bool", "bool_"):  # NumPy's too
        raise TypeError(f"{name} is {x!r}; it must be True or False")
    return bool(x)


def pass_of(backward: Any) -> Pass:
    """What `backward=` asks for."""
    return BACKWARD if check_flag("backward", backward) else FORWARD


def _check_score(score: Any) -> Any:
    if score is not None and not callable(score) and not isinstance(score, (str, Score)):
        raise TypeError(
            f"score is {score!r}; it must be a function of (s, b, h, i, j, and the arrays of score_arrays by name), an "
            "expression as text, or None"
        )
    return score


_check_deterministic = functools.partial(check_flag, "deterministic")


OPTIONS = (
    OptionRule("causal", False, "No query sees keys to the right of its diagonal.", _check_causal),
    OptionRule("window", None, "(left, right): keys that a query sees beside its diagonal.", _check_window),
    OptionRule("scale", None, "What scores are multiplied by; default 1 / sqrt(dim).", check_scale, number=True),
    OptionRule("softcap", None, "c: scores become c tanh(score / c).", _check_softcap, number=True),
    OptionRule("score", None, "New score, an expression in C of s, b, h, i, j.", _check_score, text=True),
    OptionRule(
        "block_mask", None, "Blocks of pairs that are there, and bits of some.", _check_block_mask, written=False
    ),
    OptionRule("dropout", 0.0, "Share of the probabilities that become 0; needs a seed.", _check_dropout, number=True),
    OptionRule(
        "out_dtype", None, "Of the result: bf16 (the default), fp16 or fp8, for inputs of fp8.", _check_out_dtype
    ),
    OptionRule("out_scale", 1.0, "What the result is multiplied by, for inputs of fp8.", _check_out_scale, number=True),
    OptionRule("layout", "bshd", "Where the heads stand: bshd or bhsd.", check_layout),
    OptionRule("deterministic", False, "The same bits in every run.", _check_deterministic, backward=True),
)
ARRAYS = (
    ArrayRule("key_mask", ("batch", "key"), ("bool",), "key mask", "True: the key may be attended", rows=True),
    ArrayRule("mask", AXES, ("bool",), "mask", "True: the query may attend the key"),
    ArrayRule("bias", AXES, ("q", "float32"), "bias", "added to the score", adds=True, gradient=True),
    ArrayRule(
        "alibi_slopes", ("batch", "head"), ("float32", "q"), "ALiBi slopes", "times the distance, taken off", adds=True, gradient=True
    ),
    ArrayRule("sinks", ("head",), ("q", "float32"), "sinks", "a score more in the denominator of each row", gradient=True),
    ArrayRule("seed", (), INTEGERS, "seed", "of dropout"),
    ArrayRule("q_descale", ("batch", "head", "query_block"), ("float32",), "scale of q", "what q is multiplied by", of_float8=True),
    ArrayRule("k_descale", ("batch", "key_head", "key_block"), ("float32",), "scale of k", "what k is multiplied by", of_float8=True),
    ArrayRule("v_descale", ("batch", "key_head", "key_block"), ("float32",), "scale of v", "what v is multiplied by", of_float8=True),
)  # fmt: skip

_RULES = {row.name: row for row in ARRAYS}
DESCALES = tuple(row.name for row in ARRAYS if row.of_float8)


def check_options(function: str, names: Iterable[str], also: tuple[str, ...] = ()) -> None:
    """What Python says of a keyword argument that a function does not have, for one that hands its options on."""
    known = (*(row.name for row in OPTIONS), *(row.name for row in ARRAYS), *also)
    for name in names:
        if name not in known:
            raise unexpected(function, name, known)


def check_wrt(wrt: Any, arrays: dict[str, Any], score: Score | None = None) -> tuple[str, ...]:
    """The optional arrays whose gradients are asked for, by what they are called among the `arrays` of the call: in the order
    of ARRAYS, then of those that its score function reads.
    """
    if isinstance(wrt, tuple) and not wrt:
        return ()
    reads = dict(zip([x.name for x in score.arrays], score.keys)) if score else {}
    floats = [x.name for x in score.arrays if kind_of(x.dtype) == "float"] if score else []
    can = [row.name for row in ARRAYS if row.gradient] + floats
    must = f"it must hold names of optional arrays that are given, of {', '.join(map(repr, can))}"
    try:
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    except TypeError:
        raise TypeError(f"wrt is {wrt!r}; {must}") from None
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"wrt holds {name!r}; {must}")
        if name in ("q", "k", "v"):
            raise ValueError(f"wrt holds {name!r}, whose gradient comes anyway; {must}")
        if name not in can:
            why = ", which has no gradient" if name in [*(row.name for row in ARRAYS), *reads] else ""
            raise ValueError(f"wrt holds {name!r}{why}; {must}")
        if name not in reads and arrays.get(name) is None:
            raise ValueError(f"wrt holds {name!r}, but {name} is not given; {must}")
    return tuple([reads.get(name, name) for name in can if name in names])


def check_wanted(wrt: Iterable[str], arrays: dict[str, Any], score: Score | None) -> tuple[str, ...]:
    """What `check_wrt` gives, where it comes from elsewhere: gradients have memory by it."""
    names = tuple(wrt)
    can = [row.name for row in ARRAYS if row.gradient] + [
        x.key for x in (score.arrays if score else ()) if x.kind == "float"
    ]
    if names != tuple([name for name in can if name in names and arrays.get(name) is not None]):
        raise ValueError(
            f"wrt is {names}; it must hold names of arrays that are given, of {', '.join(can)}, in this order"
        )
    return names


def apart(wrt: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The names of one run of kernels each, in the same order: the optional arrays, and those that a score function reads."""
    named = tuple([name for name in wrt if name in _RULES])
    read = wrt[len(named) :]
    assert not any(name in _RULES for name in read), wrt  # else results would go to each other's memory
    return [names for names in (named, read) if names]


def lengths_of(wrt: tuple[str, ...], views: dict[str, View]) -> dict[str, tuple[int, ...]]:
    """What a plan for their gradients asks of them: along AXES; of arrays that a score function reads, along their own."""
    rules = {name: _RULES.get(name) for name in wrt}
    return {name: rule.lengths(views[name].shape) if rule else views[name].shape for name, rule in rules.items()}


_NUMBERED = [(row.name, row.check) for row in OPTIONS if row.number]
_CHECK_WINDOW = next(row.check for row in OPTIONS if row.name == "window")
_NUMBERS = (float, int, type(None))


def lasting(options: dict[str, Any]) -> dict[str, Any]:
    """With the numbers that arrays and lists among the values hold now: later they may hold others."""
    for name, check in _NUMBERED:
        if type(options.get(name)) not in _NUMBERS:
            options = options | {name: check(options[name])}
    window = options.get("window")
    if window is not None and not (type(window) is tuple and all(type(x) in _NUMBERS for x in window)):
        options = options | {"window": _CHECK_WINDOW(window)}
    return options


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """Every option, in the order of OPTIONS: what is given, and the default of what is not."""
    return {row.name: options.get(row.name, row.default) for row in OPTIONS}


# ---- the problem ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call without its data. Every array is thought of as (batch, sequence, heads, dim)."""

    dtype: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    dim: int
    dim_v: int
    scale: float
    causal: str | None = None  # None, "bottom_right", "top_left": said already by diagonal and right
    diagonal: int = 0  # query i stands on key i + diagonal
    left: int | None = None  # keys visible to the left of the diagonal, None = all
    right: int | None = None  # keys visible to the right of it, None = all; causal means 0
    softcap: float | None = None
    score: Score | None = None
    block_mask: tuple[str, ...] | None = None  # of a block mask, the axes along which it has several patterns
    dropout: float = 0.0  # the share of the probabilities that become 0
    out_dtype: str | None = None  # of the result; None: that of q
    out_scale: float = 1.0  # what it is multiplied by before it is rounded
    deterministic: bool = False
    given: tuple[Given, ...] = ()  # the optional arrays, in the order of ARRAYS

    def has(self, name: str) -> bool:
        """Whether the optional array `name` is given."""
        return self.array(name) is not None

    def array(self, name: str) -> Given | None:
        """The optional array `name`, where it is given."""
        return next((x for x in self.given if x.name == name), None)

    def reads(self, name: str) -> bool:
        """Whether `name`, among the arrays of a call, is one that the score function reads."""
        return self.score is not None and self.score.array(name) is not None

    def extent(self, axis: str) -> int:
        """Length of an axis of ARRAYS."""
        lengths = {
            "batch": self.batch, "head": self.heads_q, "query": self.seq_q, "key": self.seq_k, "key_head": self.heads_k,
            "query_block": -(-self.seq_q // BLOCK), "key_block": -(-self.seq_k // BLOCK),
        }  # fmt: skip
        return lengths[axis]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_k

    @property
    def dropped_below(self) -> int:
        """Of DROPOUT_STEPS numbers, how many drop a probability: never all."""
        return min(round(self.dropout * DROPOUT_STEPS), DROPOUT_STEPS - 2)

    @property
    def kept(self) -> float:
        """The share of the probabilities that is kept, exactly."""
        return 1 - self.dropped_below / DROPOUT_STEPS

    @property
    def result_dtype(self) -> str:
        """Of out, and of gradients."""
        return self.out_dtype or self.dtype

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def live(self) -> tuple[range, range]:
        """The queries that see a key by position (causal, window), and the keys that a query sees; where none does, all."""
        q, k, d = range(self.seq_q), range(self.seq_k), self.diagonal
        first_q = 0 if self.right is None else max(0, -d - self.right)
        end_q = len(q) if self.left is None else min(len(q), len(k) - d + self.left)
        first_k = 0 if self.left is None else max(0, d - self.left)
        end_k = len(k) if self.right is None else min(len(k), len(q) + d + self.right)
        return (q[first_q:end_q], k[first_k:end_k]) if first_q < end_q and first_k < end_k else (q, k)

    @property
    def empty(self) -> bool:
        """True where no score exists, so that results are zeros (or have no elements) and no kernel is needed.

        lse is -inf then, or the sinks.
        """
        return 0 in (self.batch, self.seq_q, self.seq_k, self.heads_q)

    @property
    def visible(self) -> int:
        """Number of (query, key) pairs that the band (causal and window) leaves, per head."""

        def up_to(n: int) -> int:  # the sum over all x < n of the nearest to x of 0, ..., seq_k
            inside = min(max(n, 0), self.seq_k)
            return inside * (inside - 1) // 2 + max(n - self.seq_k, 0) * self.seq_k

        def before(shift: int) -> int:  # pairs with j < i + shift
            return up_to(shift + self.seq_q) - up_to(shift)

        hidden = 0 if self.left is None else before(self.diagonal - self.left)
        return (self.seq_q * self.seq_k if self.right is None else before(self.diagonal + self.right + 1)) - hidden

    def flops(self, of: Pass = FORWARD) -> int:
        """Multiplications and additions of the matrix products (the papers' count: backward is 5 products to 2)."""
        pairs = self.batch * self.heads_q * self.visible
        if of is BACKWARD:
            return 2 * pairs * (3 * self.dim + 2 * self.dim_v)
        return 2 * pairs * (self.dim + self.dim_v)


def describe(q: View, k: View, v: View, **given: Any) -> AttentionProblem:
    """Check q, k, v and what else is given, and return the problem that they state.

    `given` holds options (OPTIONS) as they are and optional arrays (ARRAYS) as `View`s or None, by name; as "score_arrays"
    the arrays that a score function reads, by their names.
    """
    score_arrays = given.pop("score_arrays", None) or {}
    check_options("describe", given)
    options = {row.name: row.check(given.get(row.name, row.default)) for row in OPTIONS}
    layout, (left, right) = options.pop("layout"), options.pop("window")
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if x.dtype not in INPUTS:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(INPUTS)}")
        if len(x.shape) not in (2, 3, 4):
            axes = "(batch, sequence, heads, dim)" if layout == "bshd" else "(batch, heads, sequence, dim)"
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, shape {x.shape}; it must have 4 {axes}, "
                "3 (the same without batch) or 2 (sequence, dim)"
            )
    for name, x in (("k", k), ("v", v)):
        if len(x.shape) != len(q.shape):
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, shape {x.shape}, but q has {len(q.shape)}, shape {q.shape}; "
                "they must have the same number"
            )
        _same(name, x, "q", q)
    (batch, sq, hq, d), (bk, sk, hk, dk), (bv, sv, hv, dv) = (to_bshd(x.shape, layout) for x in named.values())
    for name, b in (("k", bk), ("v", bv)):
        if b != batch:
            raise ValueError(f"{name} has batch {b}, shape {named[name].shape}; it must be that of q, {batch}")
    if dk != d:
        raise ValueError(f"k has head dimension {dk}, shape {k.shape}; it must be that of q, {d}")
    if sv != sk:
        raise ValueError(f"v has {sv} keys, shape {v.shape}; it must have as many as k, {sk}")
    if hv != hk:
        raise ValueError(f"v has {hv} heads, shape {v.shape}; it must have as many as k, {hk}")
    if (hk == 0) != (hq == 0) or (hk and hq % hk):
        raise ValueError(f"q has {hq} heads and k has {hk}; the heads of q must be a multiple of those of k")

    diagonal = 0 if options["causal"] == "top_left" else sk - sq
    if options["causal"] is not None:
        right = 0 if right is None else min(right, 0)
    # A bound that hides nothing is no bound: fewer kernels to compile, fewer instructions in them.
    if left is not None and left >= max(0, sq - 1 + diagonal):
        left = None
    if right is not None and right >= max(0, sk - 1 - diagonal):
        right = None
    options["scale"] = _in_range("scale", q.dtype, options["scale"], 1.0 / math.sqrt(d) if d else 1.0)
    options["softcap"] = _in_range("softcap", q.dtype, options["softcap"], None)
    options["score"] = score_of(options["score"], score_arrays, q)
    if options["score"] is not None and options["softcap"] is not None:
        raise ValueError(
            f"softcap is {options['softcap']}, and score is given too; with a score function it must be None: write the cap "
            "into that, as c * tanh(s / c)"
        )
    for name, given_, usual in (("out_dtype", options["out_dtype"], None), ("out_scale", options["out_scale"], 1.0)):
        if q.dtype != FLOAT8 and given_ != usual:
            raise ValueError(
                f"{name} is {given_}; with q of {q.dtype} it must be {usual}: it is for inputs of {FLOAT8}"
            )
    if q.dtype == FLOAT8 and options["out_dtype"] is None:
        options["out_dtype"] = OF_FLOAT8[0]
    options["dropout"] *= round(options["dropout"] * DROPOUT_STEPS) > 0  # a share that never drops anything is none
    arrays = [(row, given[row.name]) for row in _arrays_in(given) if options["dropout"] or row.name != "seed"]
    problem = AttentionProblem(
        dtype=q.dtype, batch=batch, seq_q=sq, seq_k=sk, heads_q=hq, heads_k=hk, dim=d, dim_v=dv, diagonal=diagonal,
        left=left, right=right, **options,
        given=tuple(Given(row.name, x.dtype, row.spread(x, len(q.shape))) for row, x in arrays),
    )  # fmt: skip
    for row in _arrays_in(given):
        _check_array(row, given[row.name], problem, q)
    if (kind := mask_kind(given.get("block_mask"))) is not None:
        _check_mask_kind(kind, problem, q)
    return problem


def _check_mask_kind(kind: MaskKind, problem: AttentionProblem, q: View) -> None:
    want = tuple(problem.extent(axis) for axis in AXES)
    if any(n not in (1, whole) for n, whole in zip(kind.shape[:2], want)) or kind.shape[2:] != want[2:]:
        raise ValueError(
            f"block_mask has shape {kind.shape}; it must be {want}, (batch, head, query, key), where batch and head may be 1"
        )
    if q.kind != "shape" and kind.device != q.device:
        raise ValueError(f"block_mask is on {kind.device} but q is on {q.device}; make it with like=q")


def score_of(score: Any, arrays: dict[str, View], q: View, inlined: bool = False) -> Score | None:
    """The score function that is asked for, traced, once the arrays that it reads are what they must be; `inlined` as for
    `trace`."""
    score = _check_score(score)
    if score is None:
        if arrays:
            raise ValueError(
                f"score_arrays holds {', '.join(map(repr, arrays))}, but no score is given that reads them"
            )
        return None
    if len(arrays) > SCORE_ARRAYS:
        raise ValueError(f"score_arrays holds {len(arrays)} arrays; it must hold at most {SCORE_ARRAYS}: stack some")
    dtypes = list(dict.fromkeys([*([] if q.dtype == FLOAT8 else [q.dtype]), "float32", "int32", "int64", "bool"]))
    for name, x in arrays.items():
        what = f"score_arrays[{name!r}]"
        if x.dtype not in dtypes:
            raise TypeError(f"{what} has dtype {x.dtype}; it must be {', '.join(dtypes[:-1])} or {dtypes[-1]}")
        if not 1 <= len(x.shape) <= 4 or 0 in x.shape:
            raise ValueError(f"{what} has shape {x.shape}; it must have 1 to 4 dimensions, none of length 0")
        _same(what, x, "q", q, dtype=False)
    return trace(score, {name: (x.dtype, len(x.shape), not inlined and wide(x)) for name, x in arrays.items()}, inlined)


def wide(x: View) -> bool:
    """Whether offsets of its elements may have more than 32 bits. Of lengths that are symbols it is not known yet."""
    plain = all(type(n) is int for n in (*x.shape, *x.strides))
    return plain and sum((n - 1) * abs(stride) for n, stride in zip(x.shape, x.strides)) >= 2**31


def _arrays_in(given: dict[str, Any]) -> list[ArrayRule]:
    return [row for row in ARRAYS if given.get(row.name) is not None]


def _check_array(row: ArrayRule, x: View, problem: AttentionProblem, q: View) -> None:
    if row.of_float8 and q.dtype != FLOAT8:
        raise TypeError(f"{row.name} is given with q of {q.dtype}; it is for inputs of {FLOAT8}")
    dtypes = row.taken(q.dtype)
    if x.dtype not in dtypes:
        raise TypeError(f"{row.name} has dtype {x.dtype}; it must be {' or '.join(dtypes)} ({row.entry})")
    rank = len(q.shape)
    want = row.shape(problem, rank)
    if not row.axes and math.prod(x.shape) != 1:
        raise ValueError(f"{row.name} has shape {x.shape}; it must have one element ({row.entry})")
    if row.axes and (
        len(x.shape) > len(want) or any(n not in (1, whole) for n, whole in zip(reversed(x.shape), reversed(want)))
    ):
        raise ValueError(
            f"{row.name} has shape {x.shape}; it must be {want}, ({', '.join(row.has(rank))}), where a length of 1 stands "
            f"for all, and leading axes may be left out ({row.entry})"
        )
    _same(row.name, x, "q", q, dtype=False)


def _in_range(name: str, dtype: str, value: float | None, default: float | None) -> Any:
    if value is None:
        return default
    largest = 1e290 if dtype == "float64" else 1e30  # what scores are computed in takes it, and its inverse
    if value and not 1 / largest <= abs(value) <= largest:
        raise ValueError(
            f"{name} is {value}; for {dtype} inputs its size must be from {1 / largest:.0e} to {largest:.0e}, or 0"
        )
    return value


def state(
    views: dict[str, View], targets: dict[str, View], options: dict[str, Any], of: Pass
) -> tuple[AttentionProblem, dict[str, tuple[int, ...]]]:
    """Check a whole call: the problem, and the shapes of its results by name (out; dq, dk, dv).

    `views` are q, k, v, the optional arrays that are given and, in the backward, dout, out, lse and perhaps dlse; `targets`
    what results are to be written to, where that is given.
    """
    q, k, v = (views[name] for name in "qkv")
    score = options.get("score")
    reads = {x.name: views[x.key] for x in score.arrays} if isinstance(score, Score) else {}
    problem = describe(q, k, v, **options, **{row.name: views.get(row.name) for row in ARRAYS}, score_arrays=reads)
    if of is FORWARD:
        problem = replace(problem, **{row.name: row.default for row in OPTIONS if row.backward})
    out, lse = out_shape(q.shape, problem), lse_shape(len(q.shape), problem)
    if of is BACKWARD:
        refuse_backward(problem.dtype)
        check_like("dout", views["dout"], out, problem.dtype, q)
        check_like("out", views["out"], out, problem.dtype, q)
        check_like("lse", views["lse"], lse, problem.lse_dtype, q)
        if "dlse" in views:
            check_like("dlse", views["dlse"], lse, problem.lse_dtype, q)
    results = {f"d{name}": views[name].shape for name in "qkv"} if of is BACKWARD else {"out": out}
    for name, target in targets.items():
        check_like(target_name(name), target, results[name], problem.result_dtype, q)
    return problem, results


def refuse_backward(dtype: str) -> None:
    if dtype == FLOAT8:
        raise TypeError(
            f"q has dtype {FLOAT8}, of which there is a forward alone; attention_backward takes {', '.join(FLOATS)}"
        )


@functools.cache
def target_name(name: str) -> str:
    """What a user gave to have the result `name` written to."""
    return name if name == "out" else f"grads: {name}"


def whole(row: ArrayRule, problem: AttentionProblem, q: View) -> View:
    """An array given for a row of ARRAYS, in full and contiguous, where there are shapes and no arrays."""
    shape = row.shape(problem, len(q.shape))
    return View(shape, contiguous(shape), row.taken(q.dtype)[0], q.device, q.kind)


def check_like(name: str, x: View, shape: tuple[int, ...], dtype: str, like: View) -> None:
    """Check an array that the problem already fixes: out, lse, dout, or one given as out=."""
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
    _same(name, x, "q", like, dtype=False)


def out_shape(q_shape: tuple[int, ...], problem: AttentionProblem) -> tuple[int, ...]:
    """Shape of out, in the rank and layout of q."""
    return (*q_shape[:-1], problem.dim_v)


def lse_shape(rank: int, problem: AttentionProblem) -> tuple[int, ...]:
    """Shape of lse: (B, Hq, Sq), without the axes that q does not have."""
    return (problem.batch, problem.heads_q, problem.seq_q)[4 - rank :]


def to_bshd(quad: tuple[int, ...], layout: str, fill: int = 1) -> tuple[int, int, int, int]:
    """A shape (or, with fill=0, strides) in the caller's rank and layout as (batch, sequence, heads, dim)."""
    if len(quad) == 2:
        return (fill, quad[0], fill, quad[1])
    if len(quad) == 3:
        quad = (fill, *quad)
    b, x, y, d = quad
    return (b, x, y, d) if layout == "bshd" else (b, y, x, d)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous array."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))[: len(shape)]


def _same(name: str, x: View, other: str, like: View, dtype: bool = True) -> None:
    if x.kind != like.kind:
        raise TypeError(
            f"{name} is a {x.kind} array but {other} is a {like.kind} array; all arrays must come from one library"
        )
    if dtype and x.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {x.dtype} but {other} has {like.dtype}; all arrays must have one dtype")
    if x.device != like.device and x.device and like.device:  # of what JAX traces it is not known
        raise ValueError(f"{name} is on {x.device} but {other} is on {like.device}; all arrays must be on one device")
