"""Rows of tensors that a score_mod captures, as in (table[i] * table[j]).sum(): written out, number by number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..score.value import apply

LONGEST = 64  # numbers: each is an operation for each pair, and a part of a kernel's text


class Element:
    """A tensor that is read, with those of its indices that are known so far."""

    def __init__(self, array: Any, shape: tuple[int, ...], index: tuple[Any, ...]) -> None:
        self.array, self.shape, self.index = array, shape, index
        self.free = [n for n, x in enumerate(index) if x is None]

    def at(self, n: int, index: Any) -> Element:
        return Element(self.array, self.shape, (*self.index[:n], index, *self.index[n + 1 :]))

    def number(self) -> Any:
        return self if self.free else self.array[self.index or (0,)]

    def row(self) -> Row | None:
        """Its numbers, where one index is left, and they are not too many."""
        if len(self.free) != 1 or self.shape[self.free[0]] > LONGEST:
            return None
        return Row(self.at(self.free[0], n).number() for n in range(self.shape[self.free[0]]))


class Row(tuple[Any, ...]):
    """The numbers of a tensor of one dimension."""

    __slots__ = ()


def each(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function of numbers, of each of those of rows where some are given; a row of one goes with all."""
    lengths = [len(x) for x in args if isinstance(x, Row)]
    if not lengths:
        return function(*args)
    longest = 0 if 0 in lengths else max(lengths)
    return Row(function(*[x[k % len(x)] if isinstance(x, Row) else x for x in args]) for k in range(longest))


def _reduced(op: str) -> Callable[..., Any]:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if not isinstance(x, Row):  # a number
            return x
        found = functools.reduce(lambda x, y: apply(op, x, y), x) if x else 0
        return Row((found,)) if keepdim else found

    return reduce


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    length = len(x) if isinstance(x, Row) else 1
    return each(lambda total: apply("div", total, length), (REDUCTIONS["sum"](x, dim, keepdim),))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _reduced("add"), "mean": _mean, "amax": _reduced("maximum"), "amin": _reduced("minimum"),
    "dot": lambda x, y: REDUCTIONS["sum"](each(lambda x, y: apply("mul", x, y), (x, y))),
}  # fmt: skip
