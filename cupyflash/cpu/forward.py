"""Attention forward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 1, one query tile of one or some heads per
task."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..problem import AttentionProblem
from .crew import Crew
from .entries import Entries, of_queries
from .pairs import Pairs, Place
from .tiles import TERMS, Tiling, key_tiles, product, result_dtype, row_sums, rows_of, work_dtype


def forward(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(score(Q Kᵀ)) V and the log-sum-exp of the scores, without the score matrix in memory.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), any strides; `given`: the optional arrays of the problem, and
    its block mask.
    Returns out (B, Sq, Hq, Dv) in the dtype of q, float32 where the problem is `widened`, and lse (B, Hq, Sq) in
    float32, float64 for float64.
    """
    work, crew = work_dtype(problem), Crew(problem)
    # With the axes of q in memory.
    out = np.empty_like(q, result_dtype(problem), shape=(*q.shape[:-1], problem.dim_v))
    lse = np.empty((problem.batch, problem.heads_q, problem.seq_q), problem.lse_dtype)
    tiling = Tiling.of(problem, queries_apart=True)

    @np.errstate(all="ignore")  # infinities and NaN in the inputs do what IEEE says
    def task(of: Entries, heads: slice, rows: slice) -> None:
        pairs, batches, (kh, vh) = of.pairs, of.pairs.batches, of.of_heads(heads)
        qi = rows_of(q, batches, heads, rows, work)
        qi *= work(pairs.factor_q)
        sink = pairs.sink(heads)

        def walk(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            places, found = key_tiles(pairs, heads, rows, tiling), None
            while (some := list(itertools.islice(places, TERMS))) or found is None:
                part = online_softmax(pairs, qi, kh, values, crew.steps(some), tiling.keys, of.finite)
                found = part if found is None else together(found, part)
            return found if sink is None else together(found, (0.0, 1.0, sink.astype(work)))

        acc, total, top = walk(vh)
        total = total.astype(work)
        # A row that saw no key: 0 and -inf.
        total_or_1 = np.where(total == 0, 1, total) * work(pairs.kept)
        mean = acc / total_or_1
        if not np.isfinite(mean).all():  # perhaps the sum alone is too large for its format, and the mean is not
            small = work(2.0 ** -(vh.shape[2].bit_length()))
            acc, *_ = walk(vh * small)
            mean = np.where(np.isfinite(mean), mean, acc / total_or_1 / small)
        out[batches, rows, heads] = mean.transpose(0, 2, 1, 3)
        lse[batches, heads, rows] = (top + np.log(total))[..., 0]

    crew.run(task, of_queries(problem, tiling, k, v, given))
    return out, lse


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
    acc, part = np.zeros((2, *heads, n, vh.shape[-1]), work)
    # The lowest number, not -inf: a row that has seen no key yet must not compute inf - inf.
    top = np.full((*heads, n, 1), np.finfo(work).min, work)
    total = np.zeros((*heads, n, 1))
    for number, at in enumerate(places):
        keys = at.keys.stop - at.keys.start
        s = scores[..., :keys]
        product(qi, kh[..., at.keys, :].swapaxes(-1, -2), out=s)
        pairs.score(s, at)
        seen = pairs.visible(at)
        if seen is not None:
            np.copyto(s, -np.inf, where=~seen)
        if not finite:
            seen = pairs.visible_by_score(seen, s)
        before, top = top, np.maximum(top, s.max(axis=-1, keepdims=True))
        np.subtract(s, top, out=s)
        p = np.exp(s, out=s)
        if number:
            shrink = np.exp(before - top)
            total *= shrink
            acc *= shrink
        total += row_sums(p)
        keeps = pairs.keeps(at)
        if keeps is not None:
            np.copyto(p, 0, where=~keeps)
        product(p, vh[..., at.keys, :], out=part if number else acc, seen=seen)
        if number:
            acc += part
    return acc, total, top


def together(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Such sums over disjoint sets of keys as those over all of them, in float64. A sink is a score with no value."""
    top = np.maximum(a[2], b[2])
    of_a, of_b = (np.exp(x[2] - top, dtype=np.float64) for x in (a, b))
    return a[0] * of_a + b[0] * of_b, a[1] * of_a + b[1] * of_b, top
