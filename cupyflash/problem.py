"""What is asked: the attention problem as plain data, and every rule (and message) about shapes, dtypes and options.

Nothing here touches an array: callers describe their arrays as `View`s, and get back a frozen, hashable
`AttentionProblem` or a `TypeError` / `ValueError` that names the argument, what it is and what it must be.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FLOATS = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1}
LAYOUTS = ("bshd", "bhsd")
OPTIONS = ("causal", "window", "scale", "layout", "deterministic")  # that change a problem
CAUSALS = {False: None, True: "bottom_right", "bottom_right": "bottom_right", "top_left": "top_left"}


class View(NamedTuple):
    """An array as the corridor sees it. Strides count elements; `device` is "cpu" or "cuda:N"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    kind: str  # the array library: "numpy", "cupy", "torch", "jax"
    ptr: int = 0


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
    causal: str | None = None  # None, "bottom_right", "top_left"
    left: int | None = None  # keys visible to the left of the diagonal, None = all
    right: int | None = None  # keys visible to the right of it, None = all; causal means 0
    key_mask: bool = False
    deterministic: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_k

    @property
    def diagonal(self) -> int:
        """Query i stands on key i + diagonal."""
        return 0 if self.causal == "top_left" else self.seq_k - self.seq_q

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def empty(self) -> bool:
        """True where no score exists, so that results are zeros (or have no elements) and no kernel is needed."""
        return 0 in (self.batch, self.seq_q, self.seq_k, self.heads_q)

    @property
    def visible(self) -> int:
        """Number of (query, key) pairs that the band (causal and window) leaves, per head."""
        total = 0
        rows = range(self.seq_q) if self.seq_q <= 4096 else range(0, self.seq_q, self.seq_q // 4096)
        for i in rows:
            low = 0 if self.left is None else max(0, i + self.diagonal - self.left)
            high = self.seq_k - 1 if self.right is None else min(self.seq_k - 1, i + self.diagonal + self.right)
            total += max(0, high - low + 1)
        return total * self.seq_q // max(1, len(rows))

    def flops(self, backward: bool = False) -> int:
        """Multiplications and additions of the matrix products (the papers' count: backward is 5 products to 2)."""
        pairs = self.batch * self.heads_q * self.visible
        if backward:
            return 2 * pairs * (3 * self.dim + 2 * self.dim_v)
        return 2 * pairs * (self.dim + self.dim_v)


def describe(
    q: View,
    k: View,
    v: View,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    key_mask: View | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
) -> AttentionProblem:
    """Check q, k, v and the options against the contract and return the problem they state."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}")
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(FLOATS)}")
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

    try:
        causal_kind = CAUSALS[causal]
    except (KeyError, TypeError):
        raise ValueError(f"causal is {causal!r}; it must be False, True, 'bottom_right' or 'top_left'") from None
    diagonal = 0 if causal_kind == "top_left" else sk - sq
    left, right = _window(window)
    if causal_kind is not None:
        right = 0 if right is None else min(right, 0)
    # A bound that hides nothing is no bound: fewer kernels to compile, fewer instructions in them.
    if left is not None and left >= max(0, sq - 1 + diagonal):
        left = None
    if right is not None and right >= max(0, sk - 1 - diagonal):
        right = None

    if scale is None:
        scale = 1.0 / math.sqrt(d) if d else 1.0
    elif isinstance(scale, (bool, str)) or not hasattr(scale, "__float__"):
        raise TypeError(f"scale is {scale!r}; it must be a real number or None")
    scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")

    if key_mask is not None:
        if key_mask.dtype != "bool":
            raise TypeError(f"key_mask has dtype {key_mask.dtype}; it must be bool (True: the key may be attended)")
        want = (batch, sk) if len(q.shape) == 4 else (sk,)
        if key_mask.shape != want:
            raise ValueError(f"key_mask has shape {key_mask.shape}; it must be {want}, one entry for each key")
        _same("key_mask", key_mask, "q", q, dtype=False)

    return AttentionProblem(
        dtype=q.dtype, batch=batch, seq_q=sq, seq_k=sk, heads_q=hq, heads_k=hk, dim=d, dim_v=dv, scale=scale,
        causal=causal_kind, left=left, right=right, key_mask=key_mask is not None, deterministic=bool(deterministic),
    )  # fmt: skip


def check_options(function: str, names: Iterable[str], known: tuple[str, ...] = OPTIONS) -> None:
    """What Python says of a keyword argument that a function does not have, for one that hands its options on."""
    for name in names:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


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


def _same(name: str, x: View, other: str, like: View, dtype: bool = True) -> None:
    if x.kind != like.kind:
        raise TypeError(
            f"{name} is a {x.kind} array but {other} is a {like.kind} array; all arrays must come from one library"
        )
    if dtype and x.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {x.dtype} but {other} has {like.dtype}; all arrays must have one dtype")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device} but {other} is on {like.device}; all arrays must be on one device")


def _window(window: object) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if isinstance(window, (str, bytes)) or not hasattr(window, "__len__") or len(window) != 2:  # type: ignore[arg-type]
        raise ValueError(f"window is {window!r}; it must be None or a pair (left, right) of key counts, None = unbounded")
    bounds = []
    for side, n in zip(("left", "right"), window):  # type: ignore[call-overload]
        if n is not None:
            try:
                n = operator.index(n)
            except TypeError:
                raise TypeError(f"window's {side} bound is {n!r}; it must be an integer or None") from None
            if n < 0:
                raise ValueError(f"window's {side} bound is {n}; it must be 0 or more keys, or None for unbounded")
        bounds.append(n)
    return bounds[0], bounds[1]
