"""Attention backward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 2, with the query tiles in the outer loop."""

from __future__ import annotations

import numpy as np

from ..problem import AttentionProblem
from .tiles import KEYS, chosen_keys, key_tiles, product, query_tiles, run, threads, work_dtype


def backward(
    problem: AttentionProblem,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    key_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv, shaped and typed like q, k, v, from what `forward` took and returned and from dout, the gradient of out.

    With P = exp(S - lse) recomputed tile by tile:  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P · (dP - rowsum(dO · O)),
    dQ = scale · dS K,  dK = scale · dSᵀ Q.
    """
    work = work_dtype(problem)
    dq = np.empty(q.shape, q.dtype)
    dk, dv = np.zeros(k.shape, k.dtype), np.zeros(v.shape, v.dtype)
    chosen = [chosen_keys(problem, key_mask, b) for b in range(problem.batch)]
    positions = [np.arange(problem.seq_k)[c] for c in chosen]
    keys = [np.ascontiguousarray(k[b][c].transpose(1, 0, 2), work) for b, c in enumerate(chosen)]  # (Hk, keys, D)
    keys_t = [np.ascontiguousarray(x.transpose(0, 2, 1)) for x in keys]
    values_t = [np.ascontiguousarray(v[b][c].transpose(1, 2, 0), work) for b, c in enumerate(chosen)]

    # A task sums dK and dV over query tiles of one key/value head: over all of them if there are heads enough for the
    # threads, else over every parts-th.
    parts = -(-threads() // max(1, problem.batch * problem.heads_k))

    @np.errstate(all="ignore")  # infinities and NaN in the inputs do what IEEE says
    def task(b: int, hk: int, part: int) -> tuple[np.ndarray, np.ndarray]:
        kh, kt, vt = keys[b][hk], keys_t[b][hk], values_t[b][hk]
        dkh, dvh = np.zeros_like(kh), np.zeros(vt.shape[::-1], work)
        heads = range(hk * problem.group, (hk + 1) * problem.group)
        for h, rows in [(h, rows) for h in heads for rows in query_tiles(problem)][part::parts]:
            qi = q[b, rows, h].astype(work) * work(problem.scale)
            do = dout[b, rows, h].astype(work)
            delta = (do * out[b, rows, h].astype(work)).sum(axis=1, keepdims=True)
            norm = lse[b, h, rows, None]
            norm = np.where(np.isneginf(norm), np.inf, norm)  # all scores -inf: every probability is 0
            dqi, dq_part = np.zeros_like(qi), np.empty_like(qi)
            scores, dscores = np.empty((2, len(qi), KEYS), work)
            dk_part, dv_part = np.empty((KEYS, problem.dim), work), np.empty((KEYS, problem.dim_v), work)
            for at, hidden in key_tiles(problem, rows, positions[b]):
                n = at.stop - at.start
                seen_by = None if hidden is None else hidden.T
                s, dp = scores[:, :n], dscores[:, :n]
                product(qi, kt[:, at], out=s)
                np.subtract(s, norm, out=s)
                p = np.exp(s, out=s)
                product(do, vt[:, at], out=dp)
                np.subtract(dp, delta, out=dp)
                ds = np.multiply(dp, p, out=dp)
                if hidden is not None:
                    np.copyto(p, 0, where=hidden)
                    np.copyto(ds, 0, where=hidden)
                product(p.T, do, out=dv_part[:n], hidden=seen_by)
                dvh[at] += dv_part[:n]
                product(ds, kh[at], out=dq_part, hidden=hidden)
                dqi += dq_part
                product(ds.T, qi, out=dk_part[:n], hidden=seen_by)
                dkh[at] += dk_part[:n]
            dq[b, rows, h] = dqi * work(problem.scale)
        return dkh, dvh

    heads = [(b, hk) for b in range(problem.batch) for hk in range(problem.heads_k)]
    sums = run(problem, task, ((b, hk, part) for b, hk in heads for part in range(parts)))
    for b, hk in heads:
        pairs = [next(sums) for _ in range(parts)]
        with np.errstate(all="ignore"):
            dk[b, chosen[b], hk] = sum(dkh for dkh, _ in pairs)
            dv[b, chosen[b], hk] = sum(dvh for _, dvh in pairs)
    return dq, dk, dv
