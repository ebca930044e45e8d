"""Attention backward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 2, with the query tiles in the outer loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem import ARRAYS, AttentionProblem, Gradients
from .crew import Crew
from .entries import Entries, all_entries
from .pairs import Place
from .sums import InOrder, Long, Sum
from .tiles import Tiling, group_of, key_tiles, over_groups, pieces, product, query_tiles, rows_of, work_dtype

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
    work, crew, group = work_dtype(problem), Crew(problem), group_of(problem)
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    tiling = Tiling.of(problem, queries_apart=False)
    heads_k = max(1, tiling.heads // group)  # that a task takes together

    # A task sums dK and dV over query tiles of its key/value heads: over all of them if there are tasks enough for the
    # threads, else over every parts-th.
    entries = all_entries(problem, tiling.batches, k, v, given)
    stacks = [(of, own) for of in entries for own in pieces(problem.heads_k, heads_k)]
    parts = -(-(PARTS if problem.deterministic else crew.size) // max(1, len(stacks)))
    sums: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    tasks = [(of, own, part) for of, own in stacks for part in range(parts)]

    def visits(own: slice, part: int) -> list[tuple[slice, slice]]:
        """The query tiles of a task, with their heads."""
        first, end = own.start * group, own.stop * group
        heads = [slice(first + x.start, first + x.stop) for x in pieces(end - first, tiling.heads)]
        return [(some, rows) for some in heads for rows in query_tiles(problem, tiling)][part::parts]

    order = (
        [
            (b, h, rows.start)
            for of, own, part in tasks
            for heads, rows in visits(own, part)
            for b, h in of.pairs.each(heads)
        ]
        if wrt
        else []
    )
    wanted = {x.name: Sum(x, given[x.name], problem, crew, parts, order) for x in ARRAYS if x.name in wrt}
    of_sinks = wanted.get("sinks")
    of_pairs = {name: x for name, x in wanted.items() if name != "sinks"}
    of_function = {name: InOrder(given[name]) for name in wrt if problem.reads(name)}

    @np.errstate(all="ignore")  # infinities and NaN in the inputs do what IEEE says
    def task(number: int, of: Entries, own: slice, part: int) -> None:
        pairs, batches = of.pairs, of.pairs.batches
        keys, values = of.of_heads(slice(own.start * group, own.stop * group))
        factor_q, factor_k = work(pairs.factor_q), work(pairs.factor_k)
        sum_dk, sum_dv = Long(keys.shape, work), Long(values.shape, work)
        own_sums = {name: x.part() for name, x in of_function.items()}
        for heads, rows in visits(own, part):
            kh, vh = of.of_heads(heads)
            qi = rows_of(q, batches, heads, rows, work)
            qi *= factor_q
            do = rows_of(dout, batches, heads, rows, work)
            norm = lse[batches, heads, rows, None]
            unseen = np.isneginf(norm)  # no key, or all scores -inf: every probability is 0
            of_out = rows_of(out, batches, heads, rows, work)
            delta = (do * of_out).sum(axis=-1, keepdims=True)
            finite = of.finite and not (pairs.scores_hide and any(not np.isfinite(x).all() for x in (qi, do)))
            # A row that sees no key has out 0, and no gradient whatever dout holds there.
            if not np.isfinite(delta).all():
                np.copyto(delta, 0, where=~of_out.any(axis=-1, keepdims=True))
            if dlse is not None:
                delta -= np.where(unseen, 0, dlse[batches, heads, rows, None])
            norm = np.where(unseen, np.inf, norm)
            sink = pairs.sink(heads)
            if of_sinks is not None:
                of_sinks.add(pairs, Place(heads, rows, slice(0)), part, -np.exp(sink - norm) * delta)
            sum_dq, dq_part = Long(qi.shape, work), np.empty(qi.shape, work)
            size, n = qi.shape[:2], qi.shape[2]
            scores, dscores = (pairs.tile(size, n, tiling.keys, work) for _ in range(2))
            dk_part, dv_part = (np.empty((*size, tiling.keys, x), work) for x in (problem.dim, problem.dim_v))
            for at in crew.steps(key_tiles(pairs, heads, rows, tiling)):
                m = at.keys.stop - at.keys.start
                s, dp = scores[..., :m], dscores[..., :m]
                product(qi, kh[..., at.keys, :].swapaxes(-1, -2), out=s)
                slope, products = pairs.slope(s, at), s.copy() if own_sums else s
                pairs.score(s, at)
                seen = pairs.visible(at)
                if not finite:
                    seen = pairs.visible_by_score(seen, s)
                np.subtract(s, norm, out=s)
                p = np.exp(s, out=s)
                product(do, vh[..., at.keys, :].swapaxes(-1, -2), out=dp)
                keeps = pairs.keeps(at)
                if keeps is not None:
                    dp *= work(1 / pairs.kept)
                    np.copyto(dp, 0, where=~keeps)
                np.subtract(dp, delta, out=dp)
                ds = np.multiply(dp, p, out=dp)
                if seen is not None:
                    np.copyto(p, 0, where=~seen)
                    np.copyto(ds, 0, where=~seen)
                for name, x in of_pairs.items():
                    x.add(pairs, at, part, pairs.through(name, ds, at))
                for name, total in own_sums.items():
                    pairs.through_function(name, total, ds, products, at)
                if slope is not None:
                    where = p != 0 if problem.score is not None else True if seen is None else seen
                    np.multiply(ds, slope, out=ds, where=where)
                if keeps is not None:
                    np.copyto(p, 0, where=~keeps)
                of_keys = None if seen is None else seen.swapaxes(-1, -2)
                product(p.swapaxes(-1, -2), do, out=dv_part[..., :m, :], seen=of_keys)
                product(ds, kh[..., at.keys, :], out=dq_part, seen=seen)
                sum_dq.recent += dq_part
                sum_dq.step()
                product(ds.swapaxes(-1, -2), qi, out=dk_part[..., :m, :], seen=of_keys)
                for whole, visit in ((sum_dv, dv_part), (sum_dk, dk_part)):
                    whole.recent[..., at.keys, :] += over_groups(visit[..., :m, :], kh.shape[1])
            sum_dk.step()
            sum_dv.step()
            for x in of_pairs.values():
                for b, h in pairs.each(heads):
                    x.leave((b, h, rows.start))
            dqi = sum_dq.total()
            dqi *= factor_q
            dq[batches, rows, heads] = dqi.transpose(0, 2, 1, 3)
        dks, dvs = sum_dk.total(), sum_dv.total()
        dks *= factor_k
        dvs *= work(1 / pairs.kept)
        for name, total in own_sums.items():
            of_function[name].add(number, total)
        if parts == 1:
            _put(of, own, dks, dvs)
        else:
            sums[batches.start, own.start, part] = dks, dvs

    def _put(of: Entries, own: slice, dks: Any, dvs: Any) -> None:
        """Into the results, those of keys that somebody sees."""
        for whole, x in ((dk, dks), (dv, dvs)):
            whole[of.pairs.batches, :, own][:, of.pairs.keys] = x.transpose(0, 2, 1, 3)

    crew.run(task, ((number, *x) for number, x in enumerate(tasks)))
    with np.errstate(all="ignore"):
        for of, own in stacks if parts > 1 else ():
            found = [sums.pop((of.pairs.batches.start, own.start, part)) for part in range(parts)]
            _put(of, own, *(sum(x.astype(np.float64) for x in parts_of) for parts_of in zip(*found)))
        return Gradients(dq, dk, dv, {name: x.total() for name, x in (wanted | of_function).items()})
