"""What forward and backward share: the tiles that they walk over, and products that stay on one thread.

A score tile of QUERIES x KEYS float32 stays in a core's L2 cache, so that the passes of the softmax over it are cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..problem import AttentionProblem
from .pairs import Pairs, Place

QUERIES = 512
KEYS = 256

# OpenBLAS runs a product of up to so many multiplications on the thread that calls it. Above that it wakes threads of
# its own, which here would fight with ours: heads and query tiles already occupy every core.
ONE_THREAD = 1 << 18


def work_dtype(problem: AttentionProblem) -> type[np.floating[Any]]:
    """16-bit inputs are computed in float32."""
    return np.float64 if problem.dtype == "float64" else np.float32


def query_tiles(problem: AttentionProblem) -> Iterator[slice]:
    """The query tiles, last first: under a causal mask those have the most to do."""
    for first in reversed(range(0, problem.seq_q, QUERIES)):
        yield slice(first, min(first + QUERIES, problem.seq_q))


def key_tiles(pairs: Pairs, head: int, rows: slice) -> Iterator[Place]:
    """The tiles that the queries `rows` of a head visit; those outside the band (causal and window), and those that a block mask
    hides, are left out."""
    begin, end = pairs.walk(rows)
    for j in range(begin, end, KEYS):
        at = Place(head, rows, slice(j, min(j + KEYS, end)))
        if not pairs.empty(at):
            yield at


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, seen: np.ndarray | None = None) -> None:
    """out = a @ b, as a stack of products that are each small enough to stay on the calling thread.

    Where `seen` is False a is 0 and the term is left out, also if b is infinite or NaN there.
    """
    if seen is not None:
        finite = np.isfinite(b).all(axis=1)
        if not finite.all():
            np.matmul(a, np.where(finite[:, None], b, 0), out=out)
            for j in np.flatnonzero(~finite):
                out += np.where(seen[:, j, None], a[:, j, None] * b[j], 0)
            return
    (m, k), n = a.shape, b.shape[1]
    rows = max(1, ONE_THREAD // max(1, k * n))
    stack = m // rows
    whole = stack * rows
    np.matmul(a[:whole].reshape(stack, rows, k), b, out=out[:whole].reshape(stack, rows, n))
    np.matmul(a[whole:], b, out=out[whole:])
