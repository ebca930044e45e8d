"""Attention of sequences whose lengths are data, on NumPy arrays: each is a dense problem on views of its rows.

So its results are, to the bit, those of a call on it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..gradients import Gradients
from ..lengths import LENGTHS, by_line, check_values
from ..passes import BY_ROWS, PER_QUERY, Pass
from ..problem import ARRAY_RULES, BLOCK, FLOAT8, PLACES, AttentionProblem
from ..rules import bounds
from . import float8
from .crew import Crew, multiplications, stays_here, worth_threads
from .tiles import result_dtype

Dense = Callable[..., Any]  # what computes a dense problem
# k, v, their gradients and tangents, scales of rows of caches: rows of keys
OF_KEYS = frozenset((*(x for x in BY_ROWS if x.endswith(("k", "v"))), "k_descale", "v_descale"))


class Rows(NamedTuple):
    """Where a sequence lies."""

    number: int
    queries: slice  # of those of its batch entry, or of all
    keys: slice
    pages: np.ndarray | None

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


def run(dense: Dense, of: Pass, problem: AttentionProblem, given: dict[str, Any], wrt: tuple[str, ...] = ()) -> Any:
    """As `dense(problem, **given)`, of which rows of elements are (1, T, H, D) where they are packed, and numbers for
    each query (1, H, T)."""
    integers = {name: np.array(given[name], np.int64) for name in LENGTHS if name in given}
    given = {name: x for name, x in given.items() if name not in integers}
    check_values(problem, integers)
    sequences = _sequences(problem, integers)
    results = _empty(of, problem, given)
    sums = Sums(problem, given, wrt)
    given |= sums.exact
    problems = [_alone(problem, *rows.lengths, rows.number) for rows in sequences]
    own = range(len(sequences))
    large = [n for n in own if worth_threads(problems[n])]
    small = [n for n in own if not worth_threads(problems[n])]
    place = {n: at for at, n in enumerate((*large, *small))}

    def task(n: int) -> None:
        rows, lq = sequences[n], problems[n].seq_q
        if not lq:
            sums.leave(place[n])
            return
        inputs = {name: _part(name, x, rows, problem) for name, x in given.items()}
        found = dense(problems[n], **inputs, **({"wrt": wrt} if of.of_gradients else {}))
        for (name, whole), x in zip(results.items(), found):
            _of_rows(name, whole, rows, problem)[...] = x
        sums.add(place[n], rows, found.of_arrays if of.of_gradients else {})

    for n in large:
        task(n)
    here = all(stays_here(problems[n]) for n in small)
    Crew(sum(multiplications(problems[n]) for n in small), here).run(task, ((n,) for n in small))
    if of.of_gradients:
        dq, dk, dv = results.values()
        return Gradients(dq, dk, dv, sums.totals())
    return tuple(results.values())


def _sequences(problem: AttentionProblem, integers: dict[str, np.ndarray]) -> list[Rows]:
    """Where each lies."""
    n, page = problem.batch, problem.page
    first_q, first_k = np.zeros((2, n), np.int64)
    end_q, end_k = np.full(n, problem.seq_q), np.full(n, problem.seq_k)
    if "cu_seqlens_q" in integers:
        first_q, end_q = integers["cu_seqlens_q"][:-1], integers["cu_seqlens_q"][1:]
    if "cu_seqlens_k" in integers:
        first_k, end_k = integers["cu_seqlens_k"][:-1], integers["cu_seqlens_k"][1:]
    elif "seqlens_k" in integers:
        end_k = integers["seqlens_k"]
    table = integers.get("page_table")
    numbers = zip(first_q.tolist(), end_q.tolist(), first_k.tolist(), end_k.tolist())
    return [
        Rows(at, slice(a, b), slice(c, d), None if table is None else table[at, : -(-d // (page or 1))])
        for at, (a, b, c, d) in enumerate(numbers)
    ]


def _alone(problem: AttentionProblem, seq_q: int, seq_k: int, number: int) -> AttentionProblem:
    """The dense problem of one sequence."""
    diagonal = 0 if problem.causal == "top_left" else seq_k - seq_q
    left, right = bounds(problem.left, problem.right, diagonal, seq_q, seq_k)
    return replace(
        problem, batch=1, seq_q=seq_q, seq_k=seq_k, diagonal=diagonal, left=left, right=right, rows_q=None, rows_k=None,
        page=None, pages=0, at=(number, 0, 0, 0),
        given=tuple(x for x in problem.given if not ARRAY_RULES[x.name].ragged),
    )  # fmt: skip


def _empty(of: Pass, problem: AttentionProblem, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """The results of rows that belong to nobody."""
    found = {}
    q = given["q"]
    for row in of.rows:
        if not row.result:
            continue
        if row.per_query:
            nothing = 0.0 if of.moved else -np.inf
            found[row.name] = np.full((q.shape[0], problem.heads_q, q.shape[1]), nothing, problem.lse_dtype)
        else:
            like = given[row.name[-1]] if of.of_gradients else q
            shape = like.shape if of.of_gradients else (*q.shape[:-1], problem.dim_v)
            dtype = float8.DTYPES[problem.result_dtype] if problem.dtype == FLOAT8 else result_dtype(problem)
            found[row.name] = np.zeros_like(like, dtype, shape=shape)
    return found


def _part(name: str, x: Any, rows: Rows, problem: AttentionProblem) -> Any:
    """Of an array of the call what a sequence has of it; all of what a score function reads, or of a seed."""
    if name == "block_mask":
        return OfSequence(x, rows.number)
    if name in BY_ROWS or name in PER_QUERY or (problem.cache_dtype and name in OF_KEYS):
        return _of_rows(name, x, rows, problem)
    return _of_array(name.removeprefix("t"), x, rows, problem)


def _of_rows(name: str, x: np.ndarray, rows: Rows, problem: AttentionProblem) -> np.ndarray:
    """A view; of pages a copy."""
    keyed = name in OF_KEYS
    if keyed and rows.pages is not None:
        return x[rows.pages].reshape(1, -1, *x.shape[2:])[:, rows.keys]
    packed = problem.rows_k if keyed else problem.rows_q
    entry = slice(None) if packed is not None else slice(rows.number, rows.number + 1)
    own = rows.keys if keyed else rows.queries
    return x[entry, :, own] if name in PER_QUERY else x[entry, own]


def _of_array(name: str, x: Any, rows: Rows, problem: AttentionProblem) -> Any:
    """A view of an optional array, or of its gradient."""
    rule = ARRAY_RULES.get(name)
    if rule is None:
        return x
    queries, keys = rows.lengths
    if by_line(rule, x.shape, problem):
        return x[None, :, rows.queries, : keys if x.shape[2] != 1 else 1]
    ends = {"query": queries, "key": keys, "query_block": -(-queries // BLOCK), "key_block": -(-keys // BLOCK)}
    index = []
    for axis, n in zip(reversed(rule.axes), reversed(x.shape)):
        if n == 1:
            index.append(slice(None))
        elif PLACES.get(axis, axis) == "batch":
            index.append(slice(rows.number, rows.number + 1))
        else:
            index.append(slice(ends.get(axis)))
    return x[tuple(reversed(index))]


class OfSequence(NamedTuple):
    """A block mask as the only batch entry of a sequence asks for it."""

    mask: Any
    number: int

    def pairs(self, b: int, h: int, rows: slice, keys: Any) -> Any:
        return self.mask.pairs(self.number + b, h, rows, keys)


class Sums:
    """Gradients of optional arrays: parts that are a sequence's own, or sums over sequences, in a fixed order."""

    def __init__(self, problem: AttentionProblem, given: dict[str, Any], wrt: Sequence[str]) -> None:
        self._problem, self._arrays = problem, {name: given[name] for name in wrt}
        self._shared = {name for name, x in self._arrays.items() if not self._apart(name, x)}
        self._totals = {
            name: np.zeros(x.shape, np.float64 if name in self._shared else x.dtype) for name, x in self._arrays.items()
        }
        self._lock, self._next, self._waiting = threading.Lock(), 0, dict[int, tuple[Rows, dict[str, Any]] | None]()

    @property
    def exact(self) -> dict[str, np.ndarray]:
        """Those that sequences share, as numbers that make their parts come unrounded."""
        return {name: self._arrays[name].astype(np.float64) for name in self._shared}

    def leave(self, place: int) -> None:
        """Nothing comes of the sequence that is the place-th to be added."""
        self._put(place, None)

    def add(self, place: int, rows: Rows, parts: dict[str, Any]) -> None:
        self._put(place, (rows, parts) if parts else None)

    def _put(self, place: int, part: tuple[Rows, dict[str, Any]] | None) -> None:
        with self._lock:
            self._waiting[place] = part
            while self._next in self._waiting:
                taken = self._waiting.pop(self._next)
                self._next += 1
                for name, x in taken[1].items() if taken else ():
                    assert taken is not None
                    into = _of_array(name, self._totals[name], taken[0], self._problem)
                    into += x.reshape(into.shape)

    def totals(self) -> dict[str, np.ndarray]:
        return {name: x.astype(self._arrays[name].dtype, copy=False) for name, x in self._totals.items()}

    def _apart(self, name: str, x: np.ndarray) -> bool:
        """Whether each element is read for one sequence alone."""
        rule = ARRAY_RULES.get(name)
        if rule is None:
            return False
        of_sequences = "batch" in rule.axes and x.ndim == len(rule.axes) and len(x) > 1
        return of_sequences or by_line(rule, x.shape, self._problem)
