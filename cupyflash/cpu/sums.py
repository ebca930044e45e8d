"""Gradients of optional arrays: sums over the pairs, or the queries, that an element of the array stands for."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..problem import AXES, ArrayRule, AttentionProblem
from .crew import Crew, Turns
from .pairs import Pairs, Place
from .tiles import TERMS, row_sums, work_dtype

Visit = tuple[int, int, int]  # batch entry, head, and where the tile of queries begins


class Long:
    """A sum of many terms: the last ones in the working precision, `recent`, and all before them in float64."""

    def __init__(self, shape: tuple[int, ...], work: Any) -> None:
        self.recent: np.ndarray = np.zeros(shape, work)
        self._before: np.ndarray | None = None
        self._terms = 0

    def step(self) -> None:
        """A term has been added."""
        self._terms += 1
        if self._terms % TERMS == 0 and self.recent.dtype != np.float64:
            self._before = self.total().astype(np.float64, copy=False)
            self.recent[...] = 0

    def total(self) -> np.ndarray:
        return self.recent if self._before is None else self._before + self.recent


class InOrder:
    """The gradient of an array that a score function reads: a part of it from each task, added in the order of the
    tasks."""

    def __init__(self, x: np.ndarray) -> None:
        self._x, self._sum = x, np.zeros(x.size)
        self._next, self._waiting, self._lock = 0, dict[int, np.ndarray](), threading.Lock()

    def part(self) -> np.ndarray:
        """A task's own, flat."""
        return np.zeros(self._x.size)

    def add(self, task: int, part: np.ndarray) -> None:
        with self._lock:
            self._waiting[task] = part
            while self._next in self._waiting:
                self._sum += self._waiting.pop(self._next)
                self._next += 1

    def total(self) -> np.ndarray:
        """Shaped and typed like the array."""
        return self._sum.reshape(self._x.shape).astype(self._x.dtype)


class Sum:
    """The gradient of one array, to which the tasks of a crew add.

    Of an array without a key axis a number for each query is kept, of one without a query axis a row of keys for each
    task and head: nobody else adds to these. What has both axes may be as large as the scores, so that there is but one
    of it, and who adds to the same queries of it does so in turn, as `visits` are ordered.
    """

    def __init__(
        self, rule: ArrayRule, x: np.ndarray, problem: AttentionProblem, crew: Crew, parts: int, visits: Iterable[Visit]
    ) -> None:
        self._shape, self._dtype, self._own = x.shape, x.dtype, rule.lengths(x.shape)
        whole = batch, heads, queries, keys = tuple(problem.extent(axis) for axis in AXES)
        dtype: Any = np.float64
        self._turns: Turns | None = None
        if self._own[3] == 1:
            self._lengths = (batch, heads, 1, queries, 1)
        elif self._own[2] != queries:
            self._lengths = (batch, heads, parts, 1, keys)
        else:
            self._lengths = (*self._own[:2], 1, queries, keys)
            # As large as it is, it is kept in float64 only where much is added to an element.
            terms = batch * heads // max(1, self._own[0] * self._own[1])
            dtype = x.dtype if self._own == whole else work_dtype(problem) if terms <= TERMS else np.float64
            if self._own != whole:
                self._turns = Turns(crew, ((self._place(*visit), visit) for visit in visits))
        self._sums = np.zeros(self._lengths, dtype)

    def add(self, of: Pairs, at: Place, part: int, values: np.ndarray) -> None:
        """What a tile of pairs contributes; for an array without a key axis a column will do."""
        for (b, h), x in zip(of.each(at.heads), values.reshape(-1, *values.shape[2:])):
            self._add((b, h, at.rows.start), at, of, part, x)

    def _add(self, visit: Visit, at: Place, of: Pairs, part: int, values: np.ndarray) -> None:
        b, h, _ = self._place(*visit)
        piece = self._sums[b, h, part % self._lengths[2]]
        over = tuple(axis for axis in (0, 1) if piece.shape[axis] == 1)
        where = tuple(slice(1) if axis in over else x for axis, x in enumerate((at.rows, of.columns(at))))
        if 1 in over:
            values = row_sums(values)
        if 0 in over:
            values = row_sums(values.T).T
        with self._turns.passing(visit, of.positions[at.keys.stop - 1]) if self._turns else nullcontext():
            piece[where] += values

    def leave(self, visit: Visit) -> None:
        """All tiles of a visit have been added."""
        if self._turns:
            with self._turns.passing(visit, math.inf):
                pass

    def total(self) -> np.ndarray:
        """Shaped and typed like the array."""
        own = *self._own[:2], 1, *self._own[2:]
        over = tuple(axis for axis in range(5) if own[axis] != self._lengths[axis])
        total = self._sums.sum(axis=over, keepdims=True) if over else self._sums
        return total.reshape(self._shape).astype(self._dtype, copy=False)

    def _place(self, b: int, h: int, first: int) -> Visit:
        """What a visit adds to."""
        return b % self._lengths[0], h % self._lengths[1], first
