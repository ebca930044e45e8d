"""Tangents of attention's results on NumPy arrays, one query tile of one or some heads per task, from out and lse."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem import AttentionProblem
from .crew import Crew
from .entries import Entries, of_queries
from .hiding import silence
from .sums import Long
from .tiles import Tiling, key_tiles, product, products, row_sums, rows_of, turned, work_dtype


def jvp(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    tq: np.ndarray | None = None,
    **given: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """tout and tlse, shaped and typed like out and lse, along the tangents in `given` (and tq), each named as "t" + its
    array.

    With P = exp(S - lse) recomputed tile by tile, and tS the tangent of the scores:  tlse = rowsum(P · tS),
    tout = (P · (tS - c)) V + P tV - (tlse - c) out  for any c of the row's own: the mean of tS over the first tile that
    it sees. So what all keys share is taken off before anything is rounded. A sink is a key with no value.
    """
    work, crew = work_dtype(problem), Crew(problem)
    tout, tlse = np.zeros_like(q, shape=out.shape), np.zeros_like(lse)
    if not problem.tangents:
        return tout, tlse
    tiling = Tiling.of(problem, queries_apart=True)

    def task(of: Entries, heads: slice, rows: slice) -> None:
        pairs, batches = of.pairs, of.pairs.batches
        (kh, vh), (tkh, tvh) = of.of_heads(heads), of.tangents_of_heads(heads)
        qi = rows_of(q, batches, heads, rows, work, pairs.factor_q)
        tqi = None if tq is None else rows_of(tq, batches, heads, rows, work, pairs.factor_q)
        norm = lse[batches, heads, rows, None]
        unseen = norm == -np.inf
        norm = np.where(unseen, np.inf, norm)
        size, n = qi.shape[:2], qi.shape[2]
        scores, tangents = (pairs.tile(size, n, tiling.keys, work) for _ in range(2))
        part = np.empty((*size, n, problem.dim_v), work)
        acc, total, mass = Long(part.shape, work), np.zeros(norm.shape), np.zeros(norm.shape)
        center = np.zeros(norm.shape, work)
        for at in crew.steps(key_tiles(pairs, heads, rows, tiling)):
            m = at.keys.stop - at.keys.start
            s = scores[..., :m]
            product(qi, turned(kh, at), out=s)
            ts = products(((tqi, turned(kh, at)), (qi, turned(tkh, at))), out=tangents[..., :m])
            ts = pairs.tangent(s, ts, at)
            p, live = pairs.probabilities(s, norm, at)
            keeps, fresh, own = pairs.keeps(at), mass == 0, row_sums(p)
            mass += own
            if ts is not None:
                if fresh.any():
                    mean = row_sums(np.where(live, p * ts, 0)) / own
                    np.copyto(center, mean, where=fresh & (own > 0), casting="same_kind")
                w = np.subtract(ts, center)
                np.multiply(w, p, out=w)
                silence(w, live)
                total += row_sums(w)
                if keeps is not None:
                    silence(w, keeps)
                product(w, vh[..., at.keys, :], out=part, seen=live)
                acc.recent += part
            if tvh is not None:
                if keeps is not None:
                    silence(p, keeps)
                product(p, tvh[..., at.keys, :], out=part, seen=live)
                acc.recent += part
            acc.step()
        sink = pairs.sink(heads)
        if sink is not None:
            moved, of_sink = pairs.tangent_of_sink(heads), np.exp(sink - norm)
            total += of_sink * ((0 if moved is None else moved) - center)
            mass += of_sink
        of_out = rows_of(out, batches, heads, rows, work)
        found = acc.total() * work(1 / pairs.kept) - total * of_out
        tout[batches, rows, heads] = found.transpose(0, 2, 1, 3)
        mean = total / np.where(mass == 0, 1, mass)  # mass is 1 but for how lse is rounded
        tlse[batches, heads, rows] = np.where(unseen, 0, mean + center)[..., 0]

    crew.run(task, of_queries(problem, tiling, k, v, given))
    return tout, tlse
