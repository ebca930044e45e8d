"""What forward and backward share: which key tiles a query tile visits, products that stay on one thread, and the threads.

A score tile of QUERIES x KEYS float32 stays in a core's L2 cache, so that the passes of the softmax over it are cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..problem import AttentionProblem

QUERIES = 512
KEYS = 256

# OpenBLAS runs a product of up to so many multiplications on the thread that calls it. Above that it wakes threads of
# its own, which here would fight with ours: heads and query tiles already occupy every core.
ONE_THREAD = 1 << 18

# Below so many multiplications a call ends sooner than threads start.
WORTH_THREADS = 1 << 22


class Tile(NamedTuple):
    """Some of the keys, and which (query, key) pairs among them may not meet: None where all may."""

    keys: slice
    hidden: np.ndarray | None


def work_dtype(problem: AttentionProblem) -> type[np.floating[Any]]:
    """16-bit inputs are computed in float32."""
    return np.float64 if problem.dtype == "float64" else np.float32


def chosen_keys(problem: AttentionProblem, key_mask: np.ndarray | None, b: int) -> np.ndarray | slice:
    """The keys of batch entry b that key_mask leaves. The others are dropped at once: no tile ever holds them."""
    return slice(problem.seq_k) if key_mask is None else np.flatnonzero(key_mask[b])


def query_tiles(problem: AttentionProblem) -> Iterator[slice]:
    """The query tiles, last first: under a causal mask those have the most to do."""
    for first in reversed(range(0, problem.seq_q, QUERIES)):
        yield slice(first, min(first + QUERIES, problem.seq_q))


def key_tiles(problem: AttentionProblem, rows: slice, positions: np.ndarray) -> Iterator[Tile]:
    """The tiles that the queries `rows` visit among keys that stand at `positions` (ascending).

    Tiles outside the band (causal and window) are not visited; element tests are made only where its edge passes through.
    """
    stands = np.arange(rows.start, rows.stop)[:, None] + problem.diagonal
    first, last = stands[0, 0], stands[-1, 0]
    left, right = problem.left, problem.right
    begin = 0 if left is None else int(np.searchsorted(positions, first - left))
    end = len(positions) if right is None else int(np.searchsorted(positions, last + right, side="right"))
    for j in range(begin, end, KEYS):
        keys = slice(j, min(j + KEYS, end))
        at = positions[keys]
        hidden = None
        if right is not None and at[-1] > first + right:
            hidden = at > stands + right
        if left is not None and at[0] < last - left:
            outside = at < stands - left
            hidden = outside if hidden is None else hidden | outside
        yield Tile(keys, hidden)


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, hidden: np.ndarray | None = None) -> None:
    """out = a @ b, as a stack of products that are each small enough to stay on the calling thread.

    Where `hidden` is True a is 0 and the term is left out, also if b is infinite or NaN there.
    """
    if hidden is not None:
        finite = np.isfinite(b).all(axis=1)
        if not finite.all():
            np.matmul(a, np.where(finite[:, None], b, 0), out=out)
            for j in np.flatnonzero(~finite):
                out += np.where(hidden[:, j, None], 0, a[:, j, None] * b[j])
            return
    (m, k), n = a.shape, b.shape[1]
    rows = max(1, ONE_THREAD // max(1, k * n))
    stack = m // rows
    whole = stack * rows
    np.matmul(a[:whole].reshape(stack, rows, k), b, out=out[:whole].reshape(stack, rows, n))
    np.matmul(a[whole:], b, out=out[whole:])


def run(problem: AttentionProblem, task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """task(*a) for each a, in order. NumPy lets go of the interpreter lock in products and element loops, so threads pay."""
    work = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k * (problem.dim + problem.dim_v)
    workers = threads()
    if workers == 1 or work < WORTH_THREADS:
        yield from (task(*a) for a in arguments)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda a: task(*a), arguments)


def threads() -> int:
    """As many as the process has cores, or as OMP_NUM_THREADS says: what the BLAS libraries do."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
