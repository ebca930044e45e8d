"""What a backward and its tangent share: query tiles that are tasks, and sums over them of what keys and arrays get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..gradients import Gradients
from ..problem import ARRAYS, AttentionProblem
from .crew import Crew
from .entries import Entries, all_entries
from .pairs import Place
from .sums import InOrder, Long, Sum
from .tiles import Tiling, group_of, key_tiles, over_groups, pieces, query_tiles, result_dtype, work_dtype

SUMS = 8  # of dK and dV that deterministic gradients are made of, on however many cores


class Task:
    """Every parts-th query tile of the heads that share the key/value heads `own` of some batch entries, and what it
    sums."""

    def __init__(self, gathering: Gathering, of: Entries, own: slice, part: int) -> None:
        self.of, self.pairs, self.part, self._of = of, of.pairs, part, gathering
        keys, values = of.of_heads(slice(own.start * gathering.group, own.stop * gathering.group))
        self._dk, self._dv = Long(keys.shape, gathering.work), Long(values.shape, gathering.work)
        self.of_function = {name: x.part() for name, x in gathering.of_function.items()}

    def tiles(self, heads: slice, rows: slice) -> Iterator[Place]:
        """The tiles of keys that a tile of queries visits."""
        of = self._of
        yield from of.crew.steps(key_tiles(self.pairs, heads, rows, of.tiling))
        self._dk.step()
        self._dv.step()
        for x in of.of_pairs.values():
            for b, h in self.pairs.each(heads):
                x.leave((b, h, rows.start))

    def add(self, at: Place, dk: np.ndarray, dv: np.ndarray) -> None:
        """What the keys of a tile get from each query head."""
        for whole, x in ((self._dv, dv), (self._dk, dk)):
            whole.recent[..., at.keys, :] += over_groups(x, whole.recent.shape[1])

    def add_of_pairs(self, at: Place, ds: np.ndarray) -> None:
        """What arrays over pairs get of the gradients of a tile's scores."""
        for name, x in self._of.of_pairs.items():
            x.add(self.pairs, at, self.part, self.pairs.through(name, ds, at))

    def add_of_sinks(self, heads: slice, rows: slice, values: np.ndarray) -> None:
        assert self._of.of_sinks is not None
        self._of.of_sinks.add(self.pairs, Place(heads, rows, slice(0)), self.part, values)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """dk and dv."""
        dk, dv = self._dk.total(), self._dv.total()
        if self.pairs.factor_k != 1:
            dk *= self._of.work(self.pairs.factor_k)
        if self.pairs.kept != 1:
            dv *= self._of.work(1 / self.pairs.kept)
        return dk, dv


class Gathering:
    """The gradients of q, k, v and of what `wrt` names, or the tangents of these."""

    def __init__(
        self,
        problem: AttentionProblem,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        given: dict[str, Any],
        wrt: tuple[str, ...],
    ) -> None:
        self.work, self.crew, self.group = work_dtype(problem), Crew(problem), group_of(problem)
        self.tiling = Tiling.of(problem, queries_apart=False)
        self._problem, self._wrt = problem, wrt
        dtype = result_dtype(problem)
        self._dq, self._dk, self._dv = np.empty_like(q, dtype), np.zeros_like(k, dtype), np.zeros_like(v, dtype)
        heads_k = max(1, self.tiling.heads // self.group)  # that a task takes together

        # A task sums dK and dV over query tiles of its key/value heads: over all of them if there are tasks enough for
        # the threads, else over every parts-th.
        with np.errstate(all="ignore"):
            entries = all_entries(problem, self.tiling.batches, k, v, given)
        self._stacks = [(of, own) for of in entries for own in pieces(problem.heads_k, heads_k)]
        self._parts = -(-(SUMS if problem.deterministic else self.crew.size) // max(1, len(self._stacks)))
        self._tasks = [(of, own, part) for of, own in self._stacks for part in range(self._parts)]
        order = [
            (b, h, rows.start)
            for of, own, part in (self._tasks if wrt else ())
            for heads, rows in self._visits(own, part)
            for b, h in of.pairs.each(heads)
        ]
        wanted = {
            x.name: Sum(x, given[x.name], problem, self.crew, self._parts, order)
            for x in (ARRAYS if wrt else ())
            if x.name in wrt
        }
        self.of_sinks = wanted.pop("sinks", None)
        self.of_pairs = wanted
        self.of_function = {name: InOrder(given[name]) for name in wrt if problem.reads(name)}

    def run(self, visit: Callable[[Task, slice, slice], np.ndarray]) -> Gradients:
        """`visit` is called with a task and the heads and rows of a query tile of it, and returns what these queries
        get."""
        sums: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

        def run(number: int, of: Entries, own: slice, part: int) -> None:
            task = Task(self, of, own, part)
            for heads, rows in self._visits(own, part):
                found = visit(task, heads, rows)
                found *= self.work(of.pairs.factor_q)
                self._dq[of.pairs.batches, rows, heads] = found.transpose(0, 2, 1, 3)
            totals = task.totals()
            for name, total in task.of_function.items():
                self.of_function[name].add(number, total)
            if self._parts == 1:
                self._put(of, own, *totals)
            else:
                sums[of.pairs.batches.start, own.start, part] = totals

        self.crew.run(run, ((number, *x) for number, x in enumerate(self._tasks)))
        with np.errstate(all="ignore"):
            for of, own in self._stacks if self._parts > 1 else ():
                found = [sums.pop((of.pairs.batches.start, own.start, part)) for part in range(self._parts)]
                self._put(of, own, *(sum(x.astype(np.float64) for x in parts_of) for parts_of in zip(*found)))
            named: dict[str, Any] = {"sinks": self.of_sinks, **self.of_pairs, **self.of_function}
            return Gradients(self._dq, self._dk, self._dv, {name: named[name].total() for name in self._wrt})

    def _visits(self, own: slice, part: int) -> list[tuple[slice, slice]]:
        """The query tiles of a task, with their heads."""
        first, end = own.start * self.group, own.stop * self.group
        heads = [slice(first + x.start, first + x.stop) for x in pieces(end - first, self.tiling.heads)]
        return [(some, rows) for some in heads for rows in query_tiles(self._problem, self.tiling)][part :: self._parts]

    def _put(self, of: Entries, own: slice, dk: Any, dv: Any) -> None:
        """Into the results, those of keys that somebody sees."""
        for whole, x in ((self._dk, dk), (self._dv, dv)):
            whole[of.pairs.batches, :, own][:, of.pairs.keys] = x.transpose(0, 2, 1, 3)


def of_row(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x · y of each row; 0 where y is, whatever x holds: a row that sees no key has an `out` of 0, and no gradient."""
    found = (x * y).sum(axis=-1, keepdims=True)
    if not np.isfinite(found).all():
        np.copyto(found, 0, where=~y.any(axis=-1, keepdims=True))
    return found
