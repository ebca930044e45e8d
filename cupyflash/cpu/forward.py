"""Attention forward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 1, one query tile of one or some heads per
task."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..problem import AttentionProblem
from .crew import Crew, cuts, member, stays_here
from .entries import Entries, of_queries
from .hiding import hide, silence
from .pairs import LOWEST, Pairs, Place
from .tiles import (
    TERMS,
    Tiling,
    key_tiles,
    limits,
    operand,
    pieces,
    product,
    result_dtype,
    row_sums,
    rows_of,
    work_dtype,
)


def forward(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(score(Q Kᵀ)) V and the log-sum-exp of the scores, without the score matrix in memory.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), any strides; `given`: the optional arrays of the problem, and
    its block mask.
    Returns out (B, Sq, Hq, Dv) in the dtype of q, float32 where the problem is `widened`, and lse (B, Hq, Sq) in
    float32, float64 for float64.
    """
    tile = _only_tile(problem, *limits())
    if tile is not None and (found := _at_once(problem, tile, q, k, v, given)):
        return found
    work, crew, tiling = work_dtype(problem), Crew(problem), Tiling.of(problem, queries_apart=True)
    out = _room(problem, q, result_dtype(problem))
    lse = np.empty((problem.batch, problem.heads_q, problem.seq_q), problem.lse_dtype)

    def task(of: Entries, heads: slice, rows: slice) -> None:
        pairs, batches, (kh, vh) = of.pairs, of.pairs.batches, of.of_heads(heads)
        qi = rows_of(q, batches, heads, rows, work, pairs.factor_q)
        sink, places = pairs.sink(heads), key_tiles(pairs, heads, rows, tiling)

        def walk(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            parts = (
                online_softmax(pairs, qi, kh, values, crew.steps(places[some]), tiling.keys, of.finite)
                for some in pieces(len(places), TERMS) or [slice(0)]
            )
            found = functools.reduce(together, parts)
            return found if sink is None else together(found, (0.0, 1.0, sink.astype(work)))

        acc, total, top = walk(vh)
        total = total.astype(work)
        sums = _divisors(total, pairs)
        mean = acc / sums
        if not np.isfinite(mean).all():  # perhaps the sum alone is too large for its format, and the mean is not
            small = work(2.0 ** -(vh.shape[2].bit_length()))
            acc, *_ = walk(vh * small)
            mean = np.where(np.isfinite(mean), mean, acc / sums / small)
        out[batches, rows, heads] = mean.transpose(0, 2, 1, 3)
        np.add(top, np.log(total, out=total), out=top)
        lse[batches, heads, rows] = top[..., 0]

    crew.run(task, of_queries(problem, tiling, k, v, given))
    return out, lse


class _Tile(NamedTuple):
    """All scores of a problem, where that is one tile."""

    at: Place
    work: Any
    pairs: Pairs | None  # where it has no arrays of its own
    cuts: bool  # products


@functools.lru_cache(256)
def _only_tile(problem: AttentionProblem, *limits: int) -> _Tile | None:
    """None where there is more to do than what `_at_once` does. `limits`: by which that is decided."""
    whole = problem.batch, problem.heads_q, problem.seq_q, problem.seq_k
    if (
        0 in whole or len(problem.live[1]) < problem.seq_k
        or any(map(operator.lt, Tiling.of(problem, queries_apart=True), whole))
        or not stays_here(problem)
        or problem.has("key_mask") or problem.has("sinks") or problem.has("bias")
        or problem.score is not None or problem.block_mask is not None
    ):  # fmt: skip
        return None
    at = Place(*(slice(0, n) for n in whole[1:]))
    plain = not problem.given and not problem.dropout
    pairs = Pairs(problem, slice(0, problem.batch), {}) if plain else None
    return _Tile(at, work_dtype(problem), pairs, cuts(problem))


def _at_once(
    problem: AttentionProblem, tile: _Tile, q: np.ndarray, k: np.ndarray, v: np.ndarray, given: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray] | None:
    """The same of a single tile, in fewest steps: these are what a small call takes its time for. None where sums have
    no finite mean."""
    at, work, pairs, member.cuts = tile
    if pairs is None:
        pairs = Pairs(problem, slice(0, problem.batch), given)
    kh, vh = operand(k.transpose(0, 2, 1, 3), work), operand(v.transpose(0, 2, 1, 3), work)
    with np.errstate(all="ignore"):
        if pairs.factor_k != 1:
            kh = kh * work(pairs.factor_k)
        qi = np.multiply(q.astype(work, copy=False).transpose(0, 2, 1, 3), work(pairs.factor_q), order="C")
        p = pairs.tile(qi.shape[:2], problem.seq_q, problem.seq_k, work)
        total, top, seen = _exponentials(pairs, at, qi, kh, p, True, None, work)
        acc, out = np.empty((*qi.shape[:3], problem.dim_v), work), _room(problem, q, work)
        product(p, vh, out=acc, seen=seen)
        np.divide(acc, _divisors(total, pairs), out=out.transpose(0, 2, 1, 3))
        if not np.isfinite(out).all():
            return None
        top += np.log(total, out=total)
        dtype = result_dtype(problem) or q.dtype
        return out if dtype == work else out.astype(dtype), top[..., 0]


def _room(problem: AttentionProblem, q: np.ndarray, dtype: Any) -> np.ndarray:
    """For the result, with the axes of q in memory."""
    return np.empty_like(q, dtype, shape=(*q.shape[:-1], problem.dim_v))


def _divisors(total: np.ndarray, pairs: Pairs) -> np.ndarray:
    """A row's sum is at least 1, as its largest term is, or 0 where it saw no key: then the result is 0, and lse
    -inf."""
    sums = np.maximum(total, total.dtype.type(1))
    if pairs.kept != 1:
        sums *= total.dtype.type(pairs.kept)
    return sums


def online_softmax(
    pairs: Pairs,
    qi: np.ndarray,
    kh: np.ndarray,
    vh: np.ndarray,
    places: Iterable[Place],
    most_keys: int,
    finite: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For a tile of queries, over some tiles of keys: sum of exp(S - top) V, sum of exp(S - top), and top, S's maximum.

    `finite`: that of the `Entries`.
    """
    work, (*heads, n, _) = qi.dtype, qi.shape
    scores = pairs.tile(heads, n, most_keys, work)
    shape = *heads, n, vh.shape[-1]
    # Not -inf: a row that has seen no key yet must not compute inf - inf.
    top, total = np.full((*heads, n, 1), LOWEST[work]), np.zeros((*heads, n, 1))
    acc = part = None
    for at in places:
        keys = at.keys.stop - at.keys.start
        p, before = scores[..., :keys], top
        own, top, seen = _exponentials(pairs, at, qi, kh[..., at.keys, :], p, finite, before)
        if acc is None:
            acc, total = np.empty(shape, work), own
            product(p, vh[..., at.keys, :], out=acc, seen=seen)
        else:
            shrink = np.exp(before - top)
            total *= shrink
            acc *= shrink
            total += own
            part = np.empty_like(acc) if part is None else part
            product(p, vh[..., at.keys, :], out=part, seen=seen)
            acc += part
    if acc is None:
        acc = np.zeros(shape, work)
    return acc, total, top


def _exponentials(
    pairs: Pairs,
    at: Place,
    qi: np.ndarray,
    kh: np.ndarray,
    p: np.ndarray,
    finite: bool,
    before: np.ndarray | None,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """To p: exp(S - top) of a tile, 0 where dropout says so. Their sums without dropout, as `dtype`; top, S's maximum
    and at least `before`; which pairs may meet."""
    product(qi, kh.swapaxes(-1, -2), out=p)
    pairs.score(p, at)
    seen = pairs.visible(at)
    if seen is not None:
        hide(p, seen)
    if not finite:
        seen = pairs.visible_by_score(seen, p)
    top = np.maximum.reduce(p, axis=-1, keepdims=True, initial=LOWEST[qi.dtype])
    if before is not None:
        np.maximum(top, before, out=top)
    np.subtract(p, top, out=p)
    np.exp(p, out=p)
    sums, keeps = row_sums(p, dtype), pairs.keeps(at)
    if keeps is not None:
        silence(p, keeps)
    return sums, top, seen


def together(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Such sums over disjoint sets of keys as those over all of them, in float64. A sink is a score with no value."""
    top = np.maximum(a[2], b[2])
    of_a, of_b = (np.exp(x[2] - top, dtype=np.float64) for x in (a, b))
    return a[0] * of_a + b[0] * of_b, a[1] * of_a + b[1] * of_b, top
