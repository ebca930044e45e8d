"""Attention backward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 2, with the query tiles in the outer loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem import ARRAYS, AttentionProblem, Gradients
from .crew import Crew
from .pairs import Pairs, Place
from .sums import InOrder, Sum
from .tiles import KEYS, key_tiles, product, query_tiles, work_dtype

PARTS = 8  # sums of dK and dV that deterministic gradients are made of, on however many cores


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
    """dq, dk, dv, shaped and typed like q, k, v, from what `forward` took and returned and from the gradients of out and lse;
    also of the optional arrays that `wrt` names.

    With P = exp(S - lse) recomputed tile by tile:  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P · (dP - rowsum(dO · O) + dlse),
    dQ = scale · dS K,  dK = scale · dSᵀ Q.  dS is a bias's gradient; -exp(sink - lse) · (rowsum(dO · O) - dlse) a sink's.
    With dropout, what is dropped is 0 in P of dV and in dP, and what is kept is divided by the share of it.
    """
    work = work_dtype(problem)
    dq = np.empty(q.shape, q.dtype)
    dk, dv = np.zeros(k.shape, k.dtype), np.zeros(v.shape, v.dtype)
    pairs = [Pairs(problem, b, given) for b in range(problem.batch)]
    keys, keys_t, values_t, crew = [], [], [], Crew(problem)
    with np.errstate(all="ignore"):
        for b, of in enumerate(pairs):
            kh = np.ascontiguousarray(k[b][of.keys].transpose(1, 0, 2), work)  # (Hk, keys, D)
            keys.append(kh if of.factor_k == 1 else kh * work(of.factor_k))
            keys_t.append(np.ascontiguousarray(keys[-1].transpose(0, 2, 1)))
            values_t.append(np.ascontiguousarray(v[b][of.keys].transpose(1, 2, 0), work))

    # A task sums dK and dV over query tiles of one key/value head: over all of them if there are heads enough for the
    # threads, else over every parts-th.
    heads = [(b, hk) for b in range(problem.batch) for hk in range(problem.heads_k)]
    parts = -(-(PARTS if problem.deterministic else crew.size) // max(1, len(heads)))
    sums: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    tasks = [(b, hk, part) for b, hk in heads for part in range(parts)]

    def visits(hk: int, part: int) -> list[tuple[int, slice]]:
        """The query tiles of a task, with their heads."""
        group = range(hk * problem.group, (hk + 1) * problem.group)
        return [(h, rows) for h in group for rows in query_tiles(problem)][part::parts]

    order = [(b, h, rows.start) for b, hk, part in tasks for h, rows in visits(hk, part)] if wrt else []
    wanted = {x.name: Sum(x, given[x.name], problem, crew, parts, order) for x in ARRAYS if x.name in wrt}
    of_sinks = wanted.get("sinks")
    of_pairs = {name: x for name, x in wanted.items() if name != "sinks"}
    of_function = {name: InOrder(given[name]) for name in wrt if problem.reads(name)}

    @np.errstate(all="ignore")  # infinities and NaN in the inputs do what IEEE says
    def task(b: int, hk: int, part: int) -> None:
        of, kh, kt, vt = pairs[b], keys[b][hk], keys_t[b][hk], values_t[b][hk]
        factor_q, factor_k = work(of.factor_q), work(of.factor_k)
        dkh, dvh = np.zeros_like(kh), np.zeros(vt.shape[::-1], work)
        own = {name: x.part() for name, x in of_function.items()}
        for h, rows in visits(hk, part):
            qi = q[b, rows, h].astype(work) * factor_q
            do = dout[b, rows, h].astype(work)
            norm = lse[b, h, rows, None]
            unseen = np.isneginf(norm)  # no key, or all scores -inf: every probability is 0
            delta = (do * out[b, rows, h].astype(work)).sum(axis=1, keepdims=True)
            if dlse is not None:
                delta -= np.where(unseen, 0, dlse[b, h, rows, None])
            norm = np.where(unseen, np.inf, norm)
            if of_sinks is not None:
                of_sinks.add(of, Place(h, rows, slice(0)), part, -np.exp(of.sink(h) - norm) * delta)
            dqi, dq_part = np.zeros_like(qi), np.empty_like(qi)
            scores, dscores = np.empty((2, len(qi), KEYS), work)
            dk_part, dv_part = np.empty((KEYS, problem.dim), work), np.empty((KEYS, problem.dim_v), work)
            for at in crew.steps(key_tiles(of, h, rows)):
                n = at.keys.stop - at.keys.start
                s, dp = scores[:, :n], dscores[:, :n]
                product(qi, kt[:, at.keys], out=s)
                slope, products = of.slope(s, at), s.copy() if own else s
                of.score(s, at)
                np.subtract(s, norm, out=s)
                p = np.exp(s, out=s)
                product(do, vt[:, at.keys], out=dp)
                keeps = of.keeps(at)
                if keeps is not None:
                    dp *= work(1 / of.kept)
                    np.copyto(dp, 0, where=~keeps)
                np.subtract(dp, delta, out=dp)
                ds = np.multiply(dp, p, out=dp)
                seen = of.visible(at)
                if seen is not None:
                    np.copyto(p, 0, where=~seen)
                    np.copyto(ds, 0, where=~seen)
                for name, x in of_pairs.items():
                    x.add(of, at, part, of.through(name, ds, at))
                for name, total in own.items():
                    of.through_function(name, total, ds, products, at)
                if slope is not None:
                    where = p != 0 if problem.score is not None else True if seen is None else seen
                    np.multiply(ds, slope, out=ds, where=where)
                if keeps is not None:
                    np.copyto(p, 0, where=~keeps)
                of_keys = None if seen is None else seen.T
                product(p.T, do, out=dv_part[:n], seen=of_keys)
                dvh[at.keys] += dv_part[:n]
                product(ds, kh[at.keys], out=dq_part, seen=seen)
                dqi += dq_part
                product(ds.T, qi, out=dk_part[:n], seen=of_keys)
                dkh[at.keys] += dk_part[:n]
            for x in of_pairs.values():
                x.leave((b, h, rows.start))
            dq[b, rows, h] = dqi * factor_q
        dkh *= factor_k
        dvh *= work(1 / of.kept)
        for name, total in own.items():
            of_function[name].add((b * problem.heads_k + hk) * parts + part, total)
        if parts == 1:
            dk[b, of.keys, hk], dv[b, of.keys, hk] = dkh, dvh
        else:
            sums[b, hk, part] = dkh, dvh

    crew.run(task, tasks)
    with np.errstate(all="ignore"):
        for b, hk in heads if parts > 1 else ():
            of_keys = pairs[b].keys
            dk[b, of_keys, hk], dv[b, of_keys, hk] = (
                sum(column) for column in zip(*(sums.pop((b, hk, part)) for part in range(parts)))
            )
        return Gradients(dq, dk, dv, **{f"d{name}": x.total() for name, x in (wanted | of_function).items()})
