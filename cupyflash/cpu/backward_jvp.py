"""The tangent of attention's backward on NumPy arrays: a Hessian product, tile by tile as the backward
(backward.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gradients import Gradients
from ..problem import AttentionProblem
from .gradients import Gathering, Task, of_row
from .hiding import silence
from .sums import Long
from .tiles import product, products, rows_of, turned


def backward_jvp(
    problem: AttentionProblem,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    tout: np.ndarray,
    tlse: np.ndarray,
    dlse: np.ndarray | None = None,
    tq: np.ndarray | None = None,
    tdout: np.ndarray | None = None,
    tdlse: np.ndarray | None = None,
    wrt: tuple[str, ...] = (),
    **given: Any,
) -> Gradients:
    """The tangents of what `backward` gives, along those in `given` (and tq, tdout, tdlse), each named as "t" + its
    array. tout and tlse: what `jvp` gave for them.

    Beside what the backward has, and with tS the tangent of the scores, tile by tile:
        tP = P · (tS - tlse),   tdP = dO tVᵀ + tdO Vᵀ,   tdelta = rowsum(dO · tO + tdO · O) - tdlse
        tdS = tP · (dP - delta) + P · (tdP - tdelta),    tdX = slope · tdS + bend · dS   (X: the products of Q and K)
        tdQ = scale · (tdX K + dX tK),   tdK = scale · (tdXᵀ Q + dXᵀ tQ),   tdV = tPᵀ dO + Pᵀ tdO
    """
    gathering = Gathering(problem, q, k, v, given, wrt)
    work, most_keys = gathering.work, gathering.tiling.keys

    def visit(task: Task, heads: slice, rows: slice) -> np.ndarray:
        pairs, batches = task.pairs, task.pairs.batches
        (kh, vh), (tkh, tvh) = task.of.of_heads(heads), task.of.tangents_of_heads(heads)

        def of_rows(x: np.ndarray | None, factor: float | None = None) -> Any:
            return None if x is None else rows_of(x, batches, heads, rows, work, factor)

        qi, tqi, do, tdo = of_rows(q, pairs.factor_q), of_rows(tq, pairs.factor_q), of_rows(dout), of_rows(tdout)
        of_out, moved_out = of_rows(out), of_rows(tout)
        norm, mean = lse[batches, heads, rows, None], tlse[batches, heads, rows, None]
        unseen = norm == -np.inf
        delta, tdelta = of_row(do, of_out), of_row(do, moved_out)
        if tdo is not None:
            tdelta += of_row(tdo, of_out)
        if dlse is not None:
            delta -= np.where(unseen, 0, dlse[batches, heads, rows, None])
        if tdlse is not None:
            tdelta -= np.where(unseen, 0, tdlse[batches, heads, rows, None])
        norm = np.where(unseen, np.inf, norm)
        if "sinks" in wrt:
            of_sink, moved = np.exp(pairs.sink(heads) - norm), pairs.tangent_of_sink(heads)
            change = (0 if moved is None else moved) - mean
            task.add_of_sinks(heads, rows, -of_sink * (change * delta + tdelta))

        sum_dq, dq_part = Long(qi.shape, work), np.empty(qi.shape, work)
        size, n = qi.shape[:2], qi.shape[2]
        tiles = [pairs.tile(size, n, most_keys, work) for _ in range(4)]
        dk_part, dv_part = (np.empty((*size, most_keys, x), work) for x in (problem.dim, problem.dim_v))
        for at in task.tiles(heads, rows):
            m = at.keys.stop - at.keys.start
            s, room, dp, tdp = (x[..., :m] for x in tiles)
            product(qi, turned(kh, at), out=s)
            ts = products(((tqi, turned(kh, at)), (qi, turned(tkh, at))), out=room)
            slope, bend, moved = pairs.slope(s, at), pairs.bend(s, ts, at), pairs.tangent(s, ts, at)
            if moved is None and problem.moves("sinks"):  # then tlse is not 0
                moved = np.zeros_like(s)
            of_products = s.copy() if task.of_function else s
            p, live = pairs.probabilities(s, norm, at)
            keeps = pairs.keeps(at)
            if products(((tdo, turned(vh, at)), (do, turned(tvh, at))), out=tdp) is None:
                tdp[...] = 0
            tds = pairs.dropped(tdp, keeps)
            tds -= tdelta
            tds *= p
            tp, ds = None, None
            if moved is not None:
                product(do, turned(vh, at), out=dp)
                ds = pairs.dropped(dp, keeps)
                ds -= delta
                tp = np.subtract(moved, mean)
                tp *= p
                tds += tp * ds
                ds *= p
            for x in (tp, ds, tds):
                if x is not None:
                    silence(x, live)
            task.add_of_pairs(at, tds)
            for name, total in task.of_function.items():
                pairs.through_tangent(name, total, tds, ds, of_products, ts, at)
            if slope is not None:
                np.multiply(tds, slope, out=tds, where=live)
            if ds is not None and bend is not None:
                np.add(tds, bend * ds, out=tds, where=live)
            if ds is not None and slope is not None:
                np.multiply(ds, slope, out=ds, where=live)
            if keeps is not None:
                for x in (p, tp):
                    if x is not None:
                        silence(x, keeps)
            of_keys = turned(live)
            if products(((turned(tp), do), (turned(p), tdo)), out=dv_part[..., :m, :], seen=of_keys) is None:
                dv_part[...] = 0
            keys, tkeys = kh[..., at.keys, :], None if tkh is None else tkh[..., at.keys, :]
            products(((tds, keys), (ds, tkeys)), out=dq_part, seen=live)
            sum_dq.recent += dq_part
            sum_dq.step()
            products(((turned(tds), qi), (turned(ds), tqi)), out=dk_part[..., :m, :], seen=of_keys)
            task.add(at, dk_part[..., :m, :], dv_part[..., :m, :])
        return sum_dq.total()

    return gathering.run(visit)
