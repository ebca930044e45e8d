"""What is asked: the attention problem as plain data, frozen and hashable, and the tables of what a call may be given.

`OPTIONS` and `ARRAYS` are what there is beside q, k and v, each row with what its values must be. The public functions,
their backends, PyTorch, JAX, `explain`, `tune`, `precompile` and the command line go over them. rules.py makes a
problem of a call's arrays, each described as a `View`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .counts import check_at, check_hint, check_latent, check_sms, check_window
from .other_names import unexpected
from .passes import BACKWARD, FORWARD, Pass
from .reals import positive, real
from .scalars import check_flag, told
from .score import Score

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
FLOAT8 = "float8_e4m3fn"
EIGHT = (FLOAT8, "int8")  # what k and v may be beside q of 16 bits
INPUTS = (*FLOATS, FLOAT8)
OF_FLOAT8 = ("bfloat16", "float16", FLOAT8)  # what results of it may be, the first unless asked for
INTEGERS = ("int64", "uint64", "int32", "uint32")
OFFSETS = ("int32", "int64")
ITEMSIZE = {
    "float8_e4m3fn": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int64": 8,
    "uint64": 8, "int32": 4, "uint32": 4,
}  # fmt: skip
SHORT = {"fp8": FLOAT8, "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
LAYOUTS = ("bshd", "bhsd")
CAUSALS = {False: None, True: "bottom_right", "bottom_right": "bottom_right", "top_left": "top_left"}
AXES = ("batch", "head", "query", "key")  # of arrays over pairs
# Axes of other arrays, and in whose place they stand: heads of keys, and blocks of rows that share a scale.
PLACES = {
    "key_head": "head", "query_block": "query", "key_block": "key",
    "offset": "batch", "sequence": "batch", "page": "key",  # of lengths.py
    "axis": "key",  # of AXES, each of which has one
}  # fmt: skip
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


def float_name(dtype: Any) -> str | None:
    """What a short name, or a dtype of NumPy, PyTorch or JAX, is called here; text for what is unknown, None
    for None."""
    if dtype is None or isinstance(dtype, str):
        return SHORT.get(dtype, dtype) if dtype else dtype
    name = getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    return name if name in INPUTS else repr(dtype)


# ---- the tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionRule:
    """A scalar option of a call: a row of OPTIONS. What `check` returns is the problem's field of the same name, if
    any."""

    name: str
    default: Any
    help: str
    check: Callable[[Any], Any]  # the value as the problem has it; TypeError or ValueError
    of_gradients: bool = False  # changes nothing but the gradients
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
    ragged: bool = False  # says where rows lie, of sequences whose lengths are data (lengths.py)
    placed: bool = False  # says where rows stand. Programs without one of these two have no room for it

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
        length, stride = problem.extent(axis), self.strides(view, problem, rank)[AXES.index(PLACES.get(axis, axis))]
        if axis not in self.has(rank) or length <= 1 or stride == 1:
            return None
        return view._replace(shape=(*view.shape[:-1], length), strides=(*view.strides[:-1], stride))


def _check_causal(causal: Any) -> str | None:
    try:
        return CAUSALS[causal]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"causal is {told(causal)!r}; it must be False, True, 'bottom_right' or 'top_left'") from None


def check_scale(scale: Any) -> float | None:
    return real("scale", scale)


def _check_softcap(softcap: Any) -> float | None:
    value = real("softcap", softcap)
    if value is not None and value < 0:
        raise ValueError(f"softcap is {told(value)}; it must be more than 0, or None (or 0) for none")
    return value or None


def check_dropout(dropout: Any) -> float:
    value = real("dropout", dropout) or 0.0
    if not 0 <= value < 1:
        value = told(value)
        raise ValueError(f"dropout is {value}; it must be a share of the probabilities, 0 or more and less than 1")
    return value


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
    if name not in (None, *OF_FLOAT8, "float32"):
        raise ValueError(f"out_dtype is {dtype!r}; it must be None, {', '.join(OF_FLOAT8)} or, of gradients, float32")
    return name


def check_out_scale(scale: Any) -> float:
    return 1.0 if scale is None else positive("out_scale", scale)


def check_layout(layout: Any) -> str:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}")
    return layout


def check_score(score: Any) -> Any:
    if score is not None and not callable(score) and not isinstance(score, (str, Score)):
        raise TypeError(
            f"score is {score!r}; it must be a function of (s, b, h, i, j, and the arrays of score_arrays by name), an "
            "expression as text, or None"
        )
    return score


_check_deterministic = functools.partial(check_flag, "deterministic")
_check_invariant = functools.partial(check_flag, "batch_invariant")
_check_most_q, _check_most_k = (functools.partial(check_hint, f"max_seqlen_{x}") for x in "qk")


OPTIONS = (
    OptionRule("causal", False, "No query sees keys to the right of its diagonal.", _check_causal),
    OptionRule("window", None, "(left, right): keys that a query sees beside its diagonal.", check_window),
    OptionRule("scale", None, "What scores are multiplied by; default 1 / sqrt(dim).", check_scale, number=True),
    OptionRule("softcap", None, "c: scores become c tanh(score / c).", _check_softcap, number=True),
    OptionRule("score", None, "New score, an expression in C of s, b, h, i, j.", check_score, text=True),
    OptionRule(
        "block_mask", None, "Blocks of pairs that are there, and bits of some.", _check_block_mask, written=False
    ),
    OptionRule("at", None, "Where the first batch entry, head, query and key stand.", check_at, written=False),
    OptionRule("latent", None, "V is the first so many columns of K.", check_latent),
    OptionRule("dropout", 0.0, "Share of the probabilities that become 0; needs a seed.", check_dropout, number=True),
    OptionRule(
        "out_dtype", None, "Of the result: bf16 (the default), fp16 or fp8, for inputs of fp8.", _check_out_dtype
    ),
    OptionRule("out_scale", 1.0, "What the result is multiplied by, for inputs of fp8.", check_out_scale, number=True),
    OptionRule("layout", "bshd", "Where the heads stand: bshd or bhsd.", check_layout),
    OptionRule("max_seqlen_q", None, "A hint: how many queries a packed sequence has at most.", _check_most_q),
    OptionRule("max_seqlen_k", None, "A hint: how many keys a sequence has at most.", _check_most_k),
    OptionRule("batch_invariant", False, "A sequence's bits do not depend on the others.", _check_invariant),
    OptionRule("sms", None, "How many multiprocessors a call takes at most.", check_sms),
    OptionRule("deterministic", False, "The same bits in every run.", _check_deterministic, of_gradients=True),
)
ARRAYS = (
    ArrayRule("key_mask", ("batch", "key"), ("bool",), "key mask", "True: the key may be attended", rows=True),
    ArrayRule("mask", AXES, ("bool",), "mask", "True: the query may attend the key"),
    ArrayRule("bias", AXES, ("q", "float32"), "bias", "added to the score", adds=True, gradient=True),
    ArrayRule(
        "alibi_slopes", ("batch", "head"), ("float32", "q"), "ALiBi slopes", "times the distance, taken off", adds=True,
        gradient=True
    ),
    ArrayRule("sinks", ("head",), ("q", "float32"), "sinks", "a score more in the denominator of each row",
        gradient=True),
    ArrayRule("seed", (), INTEGERS, "seed", "of dropout"),
    ArrayRule("at", ("axis",), OFFSETS, "places", "where the first batch entry, head, query and key stand", rows=True,
        placed=True),
    ArrayRule("cu_seqlens_q", ("offset",), OFFSETS, "offsets of q", "where each sequence begins in q", rows=True,
        ragged=True),
    ArrayRule("cu_seqlens_k", ("offset",), OFFSETS, "offsets of k and v", "where each sequence begins in k and v",
        rows=True, ragged=True),
    ArrayRule("seqlens_k", ("sequence",), OFFSETS, "lengths of caches", "how many rows each sequence has filled",
        rows=True, ragged=True),
    ArrayRule("page_table", ("sequence", "page"), OFFSETS, "page table", "which page has the next rows of a sequence",
        rows=True, ragged=True),
    ArrayRule("q_descale", ("batch", "head", "query_block"), ("float32",), "scale of q", "what q is multiplied by",
        of_float8=True),
    ArrayRule("k_descale", ("batch", "key_head", "key_block"), ("float32",), "scale of k", "what k is multiplied by",
        of_float8=True),
    ArrayRule("v_descale", ("batch", "key_head", "key_block"), ("float32",), "scale of v", "what v is multiplied by",
        of_float8=True),
)  # fmt: skip

ARRAY_RULES = {row.name: row for row in ARRAYS}
DESCALES = tuple(row.name for row in ARRAYS if row.of_float8)


def check_options(function: str, names: Iterable[str], also: tuple[str, ...] = ()) -> None:
    """What Python says of a keyword argument that a function does not have, for one that hands its options on."""
    known = (*(row.name for row in OPTIONS), *(row.name for row in ARRAYS), *also)
    for name in names:
        if name not in known:
            raise unexpected(function, name, known)


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
    at: tuple[int, int, int, int] | None = None  # where the first batch entry, head, query and key stand, as numbers
    latent: int | None = None  # V is the first so many columns of K, in its memory
    dropout: float = 0.0  # the share of the probabilities that become 0
    out_dtype: str | None = None  # of results; None: that of q
    dq_dtype: str | None = None  # of dq, where that is another
    cache_dtype: str | None = None  # of k and v, where that is of 8 bits beside q of 16 (cached.py)
    out_scale: float = 1.0  # what it is multiplied by before it is rounded
    deterministic: bool = False
    add: bool = False  # whether gradients are added to what their targets hold
    # Where lengths are data (lengths.py), seq_q and seq_k are the most that shapes allow. Nothing is of values.
    rows_q: int | None = None  # of all sequences together, where q is packed
    rows_k: int | None = None  # the same of k and v
    cache: int | None = None  # of each sequence, where k and v are caches that are no pages
    page: int | None = None  # rows of a page, where k and v are pools of pages
    pages: int = 0  # of a pool
    max_seqlen_q: int | None = None  # hints, as powers of two: what is right does not depend on them
    max_seqlen_k: int | None = None
    batch_invariant: bool = False  # tiles and shares follow from a sequence's own length
    sms: int | None = None  # multiprocessors that kernels take at most; None: all
    given: tuple[Given, ...] = ()  # the optional arrays, in the order of ARRAYS
    tangents: tuple[Given, ...] = ()  # those that are given to a pass that takes them, by what they are tangents of

    def has(self, name: str) -> bool:
        """Whether the optional array `name` is given."""
        return self.array(name) is not None

    def array(self, name: str) -> Given | None:
        """The optional array `name`, where it is given."""
        return next((x for x in self.given if x.name == name), None)

    def moves(self, *names: str) -> bool:
        """Whether a tangent of any of these arrays is given."""
        return any(x.name in names for x in self.tangents)

    def reads(self, name: str) -> bool:
        """Whether `name`, among the arrays of a call, is one that the score function reads."""
        return self.score is not None and self.score.array(name) is not None

    @property
    def ragged(self) -> bool:
        """Whether lengths are data. Then query i of a sequence stands on key i + diagonal, and where causal is not
        "top_left" as many further as it has more keys than queries."""
        return self.rows_q is not None or self.rows_k is not None or self.has("seqlens_k")

    @property
    def shifts(self) -> bool:
        """Whether it is data on which keys queries stand. Then `diagonal` is a guess, for what costs time alone."""
        return self.ragged or self.has("at")

    def extent(self, axis: str) -> int:
        """Length of an axis of ARRAYS."""
        lengths = {
            "batch": self.batch, "head": self.heads_q, "query": self.seq_q, "key": self.seq_k, "key_head": self.heads_k,
            "query_block": -(-self.seq_q // BLOCK), "key_block": -(-self.seq_k // BLOCK),
            "sequence": self.batch, "offset": self.batch + 1, "page": -(-self.seq_k // (self.page or 1)),
            "axis": len(AXES),
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
        """Of out, and of gradients (`dtype_of`)."""
        return self.out_dtype or self.dtype

    def dtype_of(self, name: str) -> str:
        """Of a result by its name."""
        return self.dq_dtype if self.dq_dtype and name == "dq" else self.result_dtype

    @property
    def widened(self) -> bool:
        """Whether results of 16-bit inputs go to arrays of float32, and are not rounded."""
        return self.dtype in HALVES and self.out_dtype == "float32"

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def live(self) -> tuple[range, range]:
        """The queries that see a key by position (causal, window), and the keys that a query sees; where none does, or
        positions are data, all."""
        q, k, d = range(self.seq_q), range(self.seq_k), self.diagonal
        if self.shifts:
            return q, k
        first_q = 0 if self.right is None else max(0, -d - self.right)
        end_q = len(q) if self.left is None else min(len(q), len(k) - d + self.left)
        first_k = 0 if self.left is None else max(0, d - self.left)
        end_k = len(k) if self.right is None else min(len(k), len(q) + d + self.right)
        return (q[first_q:end_q], k[first_k:end_k]) if first_q < end_q and first_k < end_k else (q, k)

    @property
    def empty(self) -> bool:
        """True where no score exists, so that results are zeros (or have no elements) and no kernel is needed.

        lse is -inf then, or the sinks. (Of a sequence, not of rows that belong to none: kernels tell these apart.)
        """
        rows = (self.batch, self.seq_q, self.heads_q)
        return 0 in rows or (self.seq_k == 0 and not (self.ragged and self.has("sinks")))

    @property
    def visible(self) -> int:
        """Number of (query, key) pairs that the band (causal and window) leaves, per head; at most, if it is data."""
        if self.shifts:
            return self.seq_q * self.seq_k

        def up_to(n: int) -> int:  # the sum over all x < n of the nearest to x of 0, ..., seq_k
            inside = min(max(n, 0), self.seq_k)
            return inside * (inside - 1) // 2 + max(n - self.seq_k, 0) * self.seq_k

        def before(shift: int) -> int:  # pairs with j < i + shift
            return up_to(shift + self.seq_q) - up_to(shift)

        hidden = 0 if self.left is None else before(self.diagonal - self.left)
        return (self.seq_q * self.seq_k if self.right is None else before(self.diagonal + self.right + 1)) - hidden

    def flops(self, of: Pass = FORWARD) -> int:
        """Multiplications and additions of the matrix products (the papers' count: backward is 5 products to 2)."""
        over_d, over_dv = products(of, [x.name for x in self.tangents])
        return 2 * self.batch * self.heads_q * self.visible * (over_d * self.dim + over_dv * self.dim_v)


def products(of: Pass, moves: Collection[str] = ()) -> tuple[int, int]:
    """The matrix products of a tile over D and over Dv, where these arrays have tangents."""
    over_d, over_dv = (3, 2) if of is BACKWARD else (1, 1)
    if of.moved:
        q, k, v, dout = (name in moves for name in ("q", "k", "v", "dout"))
        scores = any(name not in ("v", "dout", "dlse") for name in moves)  # these have tangents
        over_d, over_dv = 1 + q + k, scores + v
        if of.of_gradients:
            over_d, over_dv = over_d + 2 + q + k, 2 * scores + v + 2 * dout
    return over_d, over_dv


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
