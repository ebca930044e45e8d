"""Score functions for the tests, each also written out by hand: what it gives, and its derivatives, on whole arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from reference import DTYPES

from cupyflash.problem import AttentionProblem
from cupyflash.score import ScoreArray, log, maximum, minimum, tanh, trace, where

Arrays = dict[str, np.ndarray]
# Of an array: the indices of the element that each pair reads, and the derivative of the score by it.
Reads = dict[str, tuple[tuple[Any, ...], Any]]


class ByHand(NamedTuple):
    score: np.ndarray
    slope: Any
    reads: Reads
    of_s: Any = 0.0  # the second derivative by s
    of_reads: dict[str, tuple[Any, Any]] = {}  # noqa: RUF012 (of an array, those by s and its element, and by that twice)


class Written(NamedTuple):
    function: Callable[..., Any]
    draw: Callable[[np.random.Generator, int, int, int, int], Arrays]  # for batch, heads, queries, keys; in float32
    by_hand: Callable[..., ByHand]  # s, b, h, i, j, arrays


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """A learned bias by distance, the same for all that is farther than 32."""
    return s + table[h, j - i + 32]


def _relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> ByHand:
    index = h, np.clip(j - i + 32, 0, 64)
    return ByHand(s + table[index], 1.0, {"table": (index, 1.0)})


def documents(s: Any, b: Any, h: Any, i: Any, j: Any, ids: Any, cap: Any) -> Any:
    """Each query sees its own document alone; scores are capped, by each head on its own."""
    return where(ids[b, i] == ids[b, j], cap[h] * tanh(s / cap[h]), -math.inf)


def _documents(s: Any, b: Any, h: Any, i: Any, j: Any, ids: Any, cap: Any) -> ByHand:
    last = ids.shape[1] - 1
    same = ids[b, np.minimum(i, last)] == ids[b, np.minimum(j, last)]
    c = cap[h]
    t = np.tanh(s / c)
    return ByHand(
        np.where(same, c * t, -np.inf), np.where(same, 1 - t**2, 0),
        {"cap": ((h,), np.where(same, t - (1 - t**2) * s / c, 0))},
        np.where(same, -2 * t * (1 - t**2) / c, 0),
        {"cap": tuple(np.where(same, 2 * t * (1 - t**2) * x, 0) for x in (s / c**2, -(s**2) / c**3))},
    )  # fmt: skip


def grid(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Tokens stand in rows of 8: a bias by the offset in both directions."""
    return 0.5 * s + table[(i // 8 - j // 8) & 15, i % 8 - j % 8 + 7]


def _grid(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> ByHand:
    index = (i // 8 - j // 8) % 16, i % 8 - j % 8 + 7
    return ByHand(0.5 * s + table[index], 0.5, {"table": (index, 1.0)})


def without_s(s: Any, b: Any, h: Any, i: Any, j: Any, by_key: Any, by_query: Any) -> Any:
    """Nothing depends on Q and K; of one array each key reads an element, of the other each query."""
    return maximum(by_key[j], 0.25) * 2 - minimum(by_query[b, i] * 3, 1)


def _without_s(s: Any, b: Any, h: Any, i: Any, j: Any, by_key: Any, by_query: Any) -> ByHand:
    of_key, of_query = (j,), (b, i)
    score = np.maximum(by_key[of_key], 0.25) * 2 - np.minimum(by_query[of_query] * 3, 1)
    changes = np.where(by_key[of_key] > 0.25, 2.0, 0.0), np.where(by_query[of_query] * 3 < 1, -3.0, 0.0)
    reads = {"by_key": (of_key, changes[0]), "by_query": (of_query, changes[1])}
    return ByHand(np.broadcast_to(score, s.shape), 0.0, reads)


def nowhere(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Of every twelve keys four are hidden, by a number that has no derivative."""
    x = table[h, j & 7]
    return where(j // 4 % 3 == 1, log(0.0 * s * x), s - 0.75 * x)


def _nowhere(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> ByHand:
    index, there = (h, j & 7), j // 4 % 3 != 1
    reads = {"table": (index, np.where(there, -0.75, 0.0))}
    return ByHand(np.where(there, s - 0.75 * table[index], -np.inf), np.where(there, 1.0, 0.0), reads)


def _draw(**shapes: Callable[[int, int, int, int], tuple[int, ...]]) -> Any:
    def draw(rng: np.random.Generator, *sizes: int) -> Arrays:
        return {name: rng.standard_normal(shape(*sizes)).astype(np.float32) for name, shape in shapes.items()}

    return draw


def _draw_documents(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int) -> Arrays:
    ids = np.sort(rng.integers(0, 4, (batch, max(queries, keys))))
    return {"ids": ids, "cap": (1 + rng.random(heads)).astype(np.float32)}


WRITTEN = {
    "relative": Written(relative, _draw(table=lambda b, h, q, k: (h, 65)), _relative),
    "documents": Written(documents, _draw_documents, _documents),
    "grid": Written(grid, _draw(table=lambda b, h, q, k: (16, 15)), _grid),
    "without_s": Written(
        without_s, _draw(by_key=lambda b, h, q, k: (k,), by_query=lambda b, h, q, k: (b, q)), _without_s
    ),
    "nowhere": Written(nowhere, _draw(table=lambda b, h, q, k: (h, 8)), _nowhere),
}


def of_dtype(arrays: Arrays, dtype: str) -> Arrays:
    """With what is learned in this dtype."""
    return {name: x.astype(DTYPES[dtype]) if x.dtype.kind == "f" else x for name, x in arrays.items()}


def by_hand(problem: AttentionProblem, s: np.ndarray, given: dict[str, Any]) -> ByHand:
    """What the score function of a problem does to scaled products s, (B, Hq, Sq, Sk)."""
    assert problem.score is not None
    arrays = {x.name: np.asarray(given[x.key]) for x in problem.score.arrays}
    form = {x.name: (x.dtype, x.rank, x.wide) for x in problem.score.arrays}
    known = [x for x in WRITTEN.values() if _reads(x, form) and trace(x.function, form) == problem.score]
    arrays = {name: x.astype(s.dtype) if x.dtype.kind not in "iub" else x for name, x in arrays.items()}
    return known[0].by_hand(s, *np.ogrid[tuple(slice(n) for n in s.shape)], **arrays)


def _reads(written: Written, form: dict[str, Any]) -> bool:
    return set(written.function.__annotations__) - {"s", "b", "h", "i", "j", "return"} == set(form)


def key(name: str) -> str:
    return ScoreArray(name, "float32", 1).key
