"""The patterns of `cupyflash.masks`, which says what they are for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import interop
from ..scalars import integer


class Pattern:
    """A function of (batch, head, query, key), arrays of integers that broadcast, which says what is visible.

    `lengths`: (argument, axis, length) of the arrays that it looks up. Beyond their ends CuPy would read from the start
    again.
    """

    def __init__(self, function: Callable[[Any, Any, Any, Any], Any], *lengths: tuple[str, int, int]) -> None:
        self._function, self._lengths = function, lengths

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self._function(b, h, i, j)

    def __and__(self, other: Pattern) -> Pattern:
        return self._with("&", operator.and_, other)

    def __or__(self, other: Pattern) -> Pattern:
        return self._with("|", operator.or_, other)

    __rand__, __ror__ = __and__, __or__

    def _with(self, sign: str, combine: Callable[[Any, Any], Any], other: Any) -> Pattern:
        made_by = getattr(other, "__module__", None) == __name__ and not isinstance(other, Pattern)
        if not callable(other) or made_by:
            what = f"masks.{other.__name__}, which is to be called" if made_by else f"a {type(other).__name__}"
            raise TypeError(
                f"a pattern stands beside {what} at {sign}; it must be a pattern or a function of (b, h, i, j)"
            )
        return Pattern(lambda *at: combine(self(*at), other(*at)), *self._lengths, *getattr(other, "_lengths", ()))

    def __invert__(self) -> Pattern:
        return Pattern(lambda *at: ~self(*at), *self._lengths)

    def __bool__(self) -> bool:
        raise TypeError("a pattern has no truth value; combine patterns by &, | and ~, not by and, or and not")

    def check(self, shape: tuple[int, ...]) -> None:
        """ValueError where what it was made for is no mask of this shape."""
        for name, axis, length in self._lengths:
            if length != shape[axis]:
                what = ("batch entries", "heads", "queries", "keys")[axis]
                raise ValueError(f"{name} is for {length} {what}; shape is {shape}, so it must be for {shape[axis]}")


def causal(diagonal: int = 0) -> Pattern:
    """Keys up to the query's own."""
    _integer("diagonal", diagonal)
    return Pattern(lambda b, h, i, j: j <= i + diagonal)


def window(left: int, right: int | None = None, diagonal: int = 0) -> Pattern:
    """`left` keys before the query's own and `right` behind it (default: as many), that one included (Beltagy et al.
    2020)."""
    right = left if right is None else right
    _integer("left", left, 0)
    _integer("right", right, 0)
    _integer("diagonal", diagonal)
    return Pattern(lambda b, h, i, j: (j >= i + diagonal - left) & (j <= i + diagonal + right))


def prefix(length: Any) -> Pattern:
    """The first keys, for all queries: `length` of them, a number, or an array with one for each batch entry.

    With `causal` it makes a prefix-LM (Raffel et al. 2020, section 3.2.1); a few beside a window are attention sinks
    (Xiao et al. 2023).
    """
    lengths = _integers("length", length, "an integer, or an array with one for each batch entry")
    if lengths.ndim > 1:
        raise ValueError(f"length has shape {lengths.shape}; it must be a number or have one for each batch entry")
    if not lengths.ndim:
        return Pattern(lambda b, h, i, j: j < int(lengths))
    return Pattern(lambda b, h, i, j: j < _on(lengths, j)[b], ("length", 0, len(lengths)))


def documents(ids: Any, keys: Any = None) -> Pattern:
    """Keys of the query's own document, in sequences packed together.

    `ids`: an integer for each position, (S,) or (batch, S); `keys`: those of the keys, where they are not those of the
    queries.
    """
    of_queries = _integers("ids", ids)
    of_keys = of_queries if keys is None else _integers("keys", keys)
    for name, x in (("ids", of_queries), ("keys", of_keys)):
        if x.ndim not in (1, 2):
            raise ValueError(f"{name} has shape {x.shape}; it must be (sequence,) or (batch, sequence)")

    def of(x: np.ndarray, b: Any, position: Any) -> Any:
        return _on(x, position)[position] if x.ndim == 1 else _on(x, position)[b, position]

    both = (("ids", 2, of_queries), ("ids" if keys is None else "keys", 3, of_keys))
    lengths = [(name, axis, x.shape[-1]) for name, axis, x in both]
    lengths += [(name, 0, len(x)) for name, _, x in both if x.ndim == 2]
    return Pattern(lambda b, h, i, j: of(of_queries, b, i) == of(of_keys, b, j), *lengths)


def dilated(reach: int, step: int, diagonal: int = 0) -> Pattern:
    """Every `step`-th key within `reach` steps of the query's own, to both sides (Beltagy et al. 2020, section 3.1)."""
    _integer("reach", reach, 0)
    _integer("step", step, 1)
    _integer("diagonal", diagonal)
    return Pattern(
        lambda b, h, i, j: ((i + diagonal - j) % step == 0) & (abs(i + diagonal - j) <= reach * step)
    )  # fmt: skip


def strided(stride: int) -> Pattern:
    """The last `stride` keys, and of those before every `stride`-th (Child et al. 2019, section 4.2); causal."""
    _integer("stride", stride, 1)
    return Pattern(lambda b, h, i, j: (j <= i) & ((i - j < stride) | ((i - j) % stride == 0)))


def bigbird(
    seq_q: int,
    seq_k: int | None = None,
    *,
    block: int = 64,
    around: int = 1,
    globally: int = 1,
    random: int = 3,
    seed: int = 0,
) -> Pattern:
    """Blocks: `around` to both sides of the query's own, the first `globally` as queries and as keys, and for each
    block of queries `random` further ones (Zaheer et al. 2020, section 2; appendix D has the blocks).
    """
    seq_k = seq_q if seq_k is None else seq_k
    _integer("block", block, 1)
    for name, n in (("seq_q", seq_q), ("seq_k", seq_k), ("around", around), ("globally", globally), ("random", random)):
        _integer(name, n, 0)
    rows, columns = -(-seq_q // block), -(-seq_k // block)
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = (abs(i - j) <= around) | (i < globally) | (j < globally)
    draws = np.where(
        seen, 2.0, np.random.default_rng(seed).random(seen.shape)
    )  # those that are not seen yet come first
    chosen = np.argsort(draws, axis=1)[:, :random]
    np.put_along_axis(seen, chosen, True, axis=1)
    return Pattern(lambda b, h, i, j: _on(seen, j)[i // block, j // block], ("seq_q", 2, seq_q), ("seq_k", 3, seq_k))


def _integers(name: str, x: Any, what: str = "an array of integers") -> np.ndarray:
    """Small arrays of any library, on the CPU."""
    if isinstance(x, (bool, float, complex, str, bytes, dict, set)):
        raise TypeError(f"{name} is {x!r}; it must be {what}")
    if not isinstance(x, (int, np.integer, list, tuple)):
        interop.library(name, x)  # TypeError where that is no array
    for to_host in ("get", "cpu"):  # CuPy's, PyTorch's
        x = getattr(x, to_host, lambda x=x: x)()
    found = np.asarray(x)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {found.dtype}; it must be {what}")
    return found.astype(np.int64)


def _integer(name: str, n: Any, least: int | None = None) -> None:
    number = integer(name, n)
    if least is not None and number < least:
        raise ValueError(f"{name} is {n}; it must be {least} or more")


def _on(x: np.ndarray, like: Any) -> Any:
    """x where the positions are: in NumPy or CuPy."""
    if isinstance(like, np.ndarray):
        return x
    import cupy

    return cupy.asarray(x)
