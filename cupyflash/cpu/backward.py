"""Attention backward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 2, with the query tiles in the
outer loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gradients import Gradients
from ..problem import AttentionProblem
from .gradients import Gathering, Task, of_row
from .hiding import silence
from .sums import Long
from .tiles import product, rows_of


def backward(
    problem: AttentionProblem,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None = None,
    wrt: tuple[str, ...] = (),
    **given: Any,
) -> Gradients:
    """dq, dk, dv, shaped and typed like q, k, v, from what `forward` took and returned and from the gradients of out
    and lse; also of the optional arrays that `wrt` names.

    With P = exp(S - lse) recomputed tile by tile:  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P · (dP - rowsum(dO · O) + dlse),
    dQ = scale · dS K,  dK = scale · dSᵀ Q.  dS is a bias's gradient; a sink's is -exp(sink - lse) · (rowsum(dO · O) -
    dlse). With dropout, what is dropped is 0 in P of dV and in dP, and what is kept is divided by the share of it.
    """
    gathering = Gathering(problem, q, k, v, given, wrt)
    work, most_keys = gathering.work, gathering.tiling.keys

    def visit(task: Task, heads: slice, rows: slice) -> np.ndarray:
        pairs, batches, (kh, vh) = task.pairs, task.pairs.batches, task.of.of_heads(heads)
        qi = rows_of(q, batches, heads, rows, work, pairs.factor_q)
        do = rows_of(dout, batches, heads, rows, work)
        norm = lse[batches, heads, rows, None]
        unseen = norm == -np.inf  # no key, or all scores -inf: every probability is 0
        delta = of_row(do, rows_of(out, batches, heads, rows, work))
        finite = task.of.finite and not (pairs.scores_hide and any(not np.isfinite(x).all() for x in (qi, do)))
        if dlse is not None:
            delta -= np.where(unseen, 0, dlse[batches, heads, rows, None])
        norm = np.where(unseen, np.inf, norm)
        if "sinks" in wrt:
            task.add_of_sinks(heads, rows, -np.exp(pairs.sink(heads) - norm) * delta)
        sum_dq, dq_part = Long(qi.shape, work), np.empty(qi.shape, work)
        size, n = qi.shape[:2], qi.shape[2]
        scores, dscores = (pairs.tile(size, n, most_keys, work) for _ in range(2))
        dk_part, dv_part = (np.empty((*size, most_keys, x), work) for x in (problem.dim, problem.dim_v))
        for at in task.tiles(heads, rows):
            m = at.keys.stop - at.keys.start
            s, dp = scores[..., :m], dscores[..., :m]
            product(qi, kh[..., at.keys, :].swapaxes(-1, -2), out=s)
            slope, products = pairs.slope(s, at), s.copy() if task.of_function else s
            pairs.score(s, at)
            seen = pairs.visible(at)
            if not finite:
                seen = pairs.visible_by_score(seen, s)
            np.subtract(s, norm, out=s)
            p = np.exp(s, out=s)
            product(do, vh[..., at.keys, :].swapaxes(-1, -2), out=dp)
            keeps = pairs.keeps(at)
            ds = pairs.dropped(dp, keeps)
            ds -= delta
            ds *= p
            if seen is not None:
                silence(p, seen)
                silence(ds, seen)
            task.add_of_pairs(at, ds)
            for name, total in task.of_function.items():
                pairs.through_function(name, total, ds, products, at)
            if slope is not None:
                where = p != 0 if problem.score is not None else True if seen is None else seen
                np.multiply(ds, slope, out=ds, where=where)
            if keeps is not None:
                silence(p, keeps)
            of_keys = None if seen is None else seen.swapaxes(-1, -2)
            product(p.swapaxes(-1, -2), do, out=dv_part[..., :m, :], seen=of_keys)
            product(ds, kh[..., at.keys, :], out=dq_part, seen=seen)
            sum_dq.recent += dq_part
            sum_dq.step()
            product(ds.swapaxes(-1, -2), qi, out=dk_part[..., :m, :], seen=of_keys)
            task.add(at, dk_part[..., :m, :], dv_part[..., :m, :])
        return sum_dq.total()

    return gathering.run(visit)
