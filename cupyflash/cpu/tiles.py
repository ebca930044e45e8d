"""What forward and backward share: the tiles that they walk over, and products of stacks of tiles.

A tile of scores stays in a core's L2 cache, so that the passes of the softmax over it are cheap. Where sequences are
short it is those of several heads, and of several batch entries, so that it is worth what Python takes for a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..problem import AttentionProblem
from . import crew
from .pairs import Pairs, Place

# Of float32; float64 has half as many queries.
QUERIES = 512
KEYS = 512
# Times as many of one where there are few of the other: rows of Q, K and their gradients take room, too.
LONGEST = 8
# Numbers of one sign drift when they are added one by one, since each rounding may have the same sign. So many are;
# their sums are added in float64, or, of matrices of products, as a few more.
TERMS = 16
IN_A_ROW = 64
IN_A_PRODUCT = 512
TASKS = 16  # that are left at least, where heads are put together in a call that is worth several threads


def work_dtype(problem: AttentionProblem) -> type[np.floating[Any]]:
    """16-bit inputs are computed in float32."""
    return np.float64 if problem.dtype == "float64" else np.float32


def result_dtype(problem: AttentionProblem) -> type[np.floating[Any]] | None:
    """Of out and of gradients; None: that of the inputs."""
    return np.float32 if problem.widened else None


def group_of(problem: AttentionProblem) -> int:
    """Query heads that share one of K and V; 1 where there are none."""
    return problem.group if problem.heads_k else 1


class Tiling(NamedTuple):
    """How much of each axis of the scores a tile has at most. The numbers of cores do not enter, so that results are
    the same bits on any."""

    batches: int
    heads: int  # a divisor of the heads that share K and V, or a multiple of their number
    queries: int
    keys: int

    @classmethod
    def of(cls, problem: AttentionProblem, queries_apart: bool) -> Tiling:
        """`queries_apart`: whether query tiles are tasks, and not heads alone."""
        return _tiling(problem, queries_apart, *limits())


def limits() -> tuple[int, ...]:
    """What decides how a problem is shared out, besides itself."""
    return QUERIES, KEYS, LONGEST, crew.WORTH_THREADS


@functools.lru_cache(256)
def _tiling(problem: AttentionProblem, queries_apart: bool, most: int, most_keys: int, longest: int, _: int) -> Tiling:
    most = most * 4 // np.dtype(work_dtype(problem)).itemsize
    size, group = most * most_keys, group_of(problem)
    queries = min(max(1, problem.seq_q), most)
    keys = min(max(1, problem.seq_k), max(most_keys, size // queries), longest * most_keys)
    if problem.right is None:  # else tiles are not to stand out far beyond the diagonal
        queries = min(max(1, problem.seq_q), max(most, size // keys), longest * most)
    fit = min(size // (queries * keys), longest * most // queries, longest * most_keys // keys)
    if fit < group:
        return Tiling(1, max(n for n in range(1, fit + 1) if group % n == 0), queries, keys)
    tasks = problem.batch * problem.heads_k * (-(-problem.seq_q // queries) if queries_apart else 1)
    heads_k = min(fit // group, max(1, tasks // TASKS) if crew.worth_threads(problem) else fit)
    # Keys that key_mask hides are left out, others in each batch entry.
    batches = 1 if problem.has("key_mask") else max(1, heads_k // max(1, problem.heads_k))
    return Tiling(batches, group * max(1, min(heads_k, problem.heads_k)), queries, keys)


def pieces(length: int, size: int) -> list[slice]:
    """An axis in slices of `size`."""
    if 0 < length <= size:
        return [slice(0, length)]
    return [slice(x, min(x + size, length)) for x in range(0, length, max(1, size))]


def query_tiles(problem: AttentionProblem, tiling: Tiling) -> list[slice]:
    """The query tiles, last first: under a causal mask those have the most to do."""
    return pieces(problem.seq_q, tiling.queries)[::-1]


def key_tiles(pairs: Pairs, heads: slice, rows: slice, tiling: Tiling) -> list[Place]:
    """The tiles that the queries `rows` of some heads visit; those outside the band (causal and window), and those that
    a block mask hides, are left out."""
    begin, end = pairs.walk(rows)
    places = [Place(heads, rows, slice(j, min(j + tiling.keys, end))) for j in range(begin, end, tiling.keys)]
    return places if pairs.blocks is None else [at for at in places if not pairs.empty(at)]


def rows_of(
    x: np.ndarray, entries: slice, heads: slice, rows: slice, work: Any, factor: float | None = None
) -> np.ndarray:
    """A copy of a part of a (B, S, H, D) array, as (batches, heads, rows, D); times a factor."""
    part = x[entries, rows, heads].transpose(0, 2, 1, 3)
    if factor is None:
        return np.array(part, work, order="C")
    return np.multiply(part.astype(work, copy=False), work(factor), order="C")


def operand(x: np.ndarray, work: Any) -> np.ndarray:
    """x as BLAS takes it: the elements of a row lie side by side, wherever the rows are."""
    x = x.astype(work, copy=False)
    row, element = x.strides[-2:]
    return x if lies_for_blas(x.shape[-1], row, element, x.itemsize) else np.ascontiguousarray(x)


def lies_for_blas(columns: int, row: int, element: int, size: int = 1) -> bool:
    """Whether BLAS reads rows of so many elements where they are. Strides and size in one unit."""
    return element == size and row % size == 0 and row >= columns * size


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, seen: np.ndarray | None = None) -> None:
    """out = a @ b for (batches, heads, m, n) matrices; b may have fewer heads, each of which serves several of a.

    Where `seen`, which broadcasts to a, is False a is 0 and the term is left out, also if b is infinite or NaN there.
    """
    group = a.shape[1] // max(1, b.shape[1])
    multiply: Callable[..., Any] = _in_pieces if crew.member.cuts else np.matmul
    if seen is not None:
        finite = np.isfinite(b)
        if not finite.all():
            finite = finite.all(axis=-1)
            b, finite, seen = b.repeat(group, 1), finite.repeat(group, 1), np.broadcast_to(seen, a.shape)
            multiply(a, np.where(finite[..., None], b, 0), out=out)
            for j in np.flatnonzero(~finite.all(axis=(0, 1))):
                bad = seen[..., j, None] & ~finite[..., j, None, None]
                out += np.where(bad, a[..., j, None] * b[..., j, None, :], 0)
            return
    if group > 1:
        heads = a.shape[0], b.shape[1], group
        a, out, b = a.reshape(*heads, *a.shape[2:]), out.reshape(*heads, *out.shape[2:]), b[:, :, None]
    if a.shape[-1] <= IN_A_PRODUCT:
        multiply(a, b, out=out)
        return
    first, *others = pieces(a.shape[-1], IN_A_PRODUCT)
    multiply(a[..., first], b[..., first, :], out=out)
    for some in others:
        out += a[..., some] @ b[..., some, :]


def _in_pieces(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    rows = crew.WORTH_HOLDING // max(1, b.shape[-2] * b.shape[-1])
    for some in pieces(a.shape[-2], max(8, rows // 8 * 8)):
        np.matmul(a[..., some, :], b, out=out[..., some, :])


def products(
    terms: Iterable[tuple[np.ndarray | None, np.ndarray | None]], out: np.ndarray, seen: np.ndarray | None = None
) -> np.ndarray | None:
    """out = the sum of `product` of each; those of which one is not there are 0. None where all are."""
    room = None
    for a, b in terms:
        if a is None or b is None:
            continue
        if room is None:
            product(a, b, out=out, seen=seen)
            room = out
        else:
            room = np.empty_like(out) if room is out else room
            product(a, b, out=room, seen=seen)
            out += room
    return None if room is None else out


def turned(x: np.ndarray | None, at: Place | None = None) -> Any:
    """The last two axes exchanged, of the keys of a tile or of all; None of what is not there."""
    return None if x is None else (x if at is None else x[..., at.keys, :]).swapaxes(-1, -2)


def row_sums(x: np.ndarray, dtype: Any = np.float64) -> np.ndarray:
    """Sums over the last axis, which stays, in float64, and then as `dtype`."""
    length = x.shape[-1]
    ones = _ones(x.dtype)
    if length <= IN_A_ROW:  # BLAS is faster than sum
        return (x @ ones[:length]).astype(dtype, copy=False)
    n = length // IN_A_ROW * IN_A_ROW
    parts = x[..., :n].reshape(*x.shape[:-1], -1, IN_A_ROW).swapaxes(-2, -3) @ ones
    total = parts.sum(axis=-3, dtype=np.float64)
    if n < length:
        total += x[..., n:] @ ones[: length - n]
    return total.astype(dtype, copy=False)


@functools.cache
def _ones(dtype: np.dtype) -> np.ndarray:
    ones = np.ones((IN_A_ROW, 1), dtype)
    ones.flags.writeable = False
    return ones


def over_groups(x: np.ndarray, heads_k: int) -> np.ndarray:
    """Sums over the heads that share one of K and V: (batches, heads, ...) to (batches, heads_k, ...)."""
    group = x.shape[1] // max(1, heads_k)
    if group == 1:
        return x
    apart = x.reshape(x.shape[0], heads_k, group, *x.shape[2:])
    return apart.sum(axis=2, dtype=np.float64 if group > TERMS else None)
