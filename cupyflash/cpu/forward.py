"""Attention forward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 1, one query tile per task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..problem import AttentionProblem
from .crew import Crew
from .pairs import Pairs, Place
from .tiles import KEYS, key_tiles, product, query_tiles, work_dtype


def forward(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(score(Q Kᵀ)) V and the log-sum-exp of the scores, without the score matrix in memory.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), any strides; `given`: the optional arrays of the problem, and
    its block mask.
    Returns out (B, Sq, Hq, Dv) in the dtype of q, and lse (B, Hq, Sq) in float32, float64 for float64.
    """
    work = work_dtype(problem)
    out = np.empty((*q.shape[:-1], problem.dim_v), q.dtype)
    lse = np.empty((problem.batch, problem.heads_q, problem.seq_q), problem.lse_dtype)
    pairs = [Pairs(problem, b, given) for b in range(problem.batch)]
    keys, values, crew = [], [], Crew(problem)
    with np.errstate(all="ignore"):
        for b, of in enumerate(pairs):
            kt = np.ascontiguousarray(k[b][of.keys].transpose(1, 2, 0), work)  # (Hk, D, keys), as S = Q Kᵀ reads it
            keys.append(kt if of.factor_k == 1 else kt * work(of.factor_k))
            values.append(np.ascontiguousarray(v[b][of.keys].transpose(1, 0, 2), work))  # (Hk, keys, Dv)

    @np.errstate(all="ignore")  # infinities and NaN in the inputs do what IEEE says
    def task(b: int, h: int, rows: slice) -> None:
        kt, vh = keys[b][h // problem.group], values[b][h // problem.group]
        qi = q[b, rows, h].astype(work) * work(pairs[b].factor_q)
        sink = pairs[b].sink(h)
        acc, total, top = online_softmax(pairs[b], qi, kt, vh, crew.steps(key_tiles(pairs[b], h, rows)), sink)
        total_or_1 = np.where(total == 0, 1, total) * work(pairs[b].kept)  # a row that saw no key: 0 and -inf
        mean = acc / total_or_1
        if not np.isfinite(mean).all():  # perhaps the sum alone is too large for its format, and the mean is not
            small = work(2.0 ** -(len(vh).bit_length()))
            acc, *_ = online_softmax(pairs[b], qi, kt, vh * small, crew.steps(key_tiles(pairs[b], h, rows)), sink)
            mean = np.where(np.isfinite(mean), mean, acc / total_or_1 / small)
        out[b, rows, h] = mean
        lse[b, h, rows] = (top + np.log(total))[:, 0]

    crew.run(
        task,
        ((b, h, rows) for b in range(problem.batch) for h in range(problem.heads_q) for rows in query_tiles(problem)),
    )
    return out, lse


def online_softmax(
    pairs: Pairs, qi: np.ndarray, kt: np.ndarray, vh: np.ndarray, places: Iterable[Place], sink: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For a tile of queries, over all tiles of keys: sum of exp(S - top) V, sum of exp(S - top), and top, S's maximum.

    A sink is a score like those of the keys, with no value.
    """
    n, work = len(qi), qi.dtype
    scores = np.empty((n, KEYS), work)
    acc, part = np.zeros((n, vh.shape[1]), work), np.empty((n, vh.shape[1]), work)
    # The lowest number, not -inf: a row that has seen no key yet must not compute inf - inf.
    top = np.full((n, 1), np.finfo(work).min, work)
    total = np.zeros((n, 1), work)
    for at in places:
        s = scores[:, : at.keys.stop - at.keys.start]
        product(qi, kt[:, at.keys], out=s)
        pairs.score(s, at)
        seen = pairs.visible(at)
        if seen is not None:
            np.copyto(s, -np.inf, where=~seen)
        new_top = np.maximum(top, s.max(axis=1, keepdims=True))
        shrink = np.exp(top - new_top)
        top = new_top
        np.subtract(s, top, out=s)
        p = np.exp(s, out=s)
        total = total * shrink + p.sum(axis=1, keepdims=True)
        acc *= shrink
        keeps = pairs.keeps(at)
        if keeps is not None:
            np.copyto(p, 0, where=~keeps)
        product(p, vh[at.keys], out=part, seen=seen)
        acc += part
    if sink is not None:
        new_top = np.maximum(top, work.type(sink))
        shrink = np.exp(top - new_top)
        top, total = new_top, total * shrink + np.exp(work.type(sink) - new_top)
        acc *= shrink
    return acc, total, top
