"""Attention forward on NumPy arrays: Dao 2023 (FlashAttention-2), Algorithm 1, one query tile per task."""

from __future__ import annotations

import numpy as np

from ..problem import AttentionProblem
from .tiles import KEYS, chosen_keys, key_tiles, product, query_tiles, run, work_dtype


def forward(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, key_mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale · Q Kᵀ + mask) V and the log-sum-exp of the scores, without the score matrix in memory.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), any strides; key_mask (B, Sk) bool or None.
    Returns out (B, Sq, Hq, Dv) in the dtype of q, and lse (B, Hq, Sq) in float32, float64 for float64.
    """
    work = work_dtype(problem)
    out = np.empty((*q.shape[:-1], problem.dim_v), q.dtype)
    lse = np.empty((problem.batch, problem.heads_q, problem.seq_q), problem.lse_dtype)
    positions, keys, values = [], [], []
    for b in range(problem.batch):
        chosen = chosen_keys(problem, key_mask, b)
        positions.append(np.arange(problem.seq_k)[chosen])
        keys.append(np.ascontiguousarray(k[b][chosen].transpose(1, 2, 0), work))  # (Hk, D, keys), as S = Q Kᵀ reads it
        values.append(np.ascontiguousarray(v[b][chosen].transpose(1, 0, 2), work))  # (Hk, keys, Dv)

    @np.errstate(all="ignore")  # infinities and NaN in the inputs do what IEEE says
    def task(b: int, h: int, rows: slice) -> None:
        kt, vh = keys[b][h // problem.group], values[b][h // problem.group]
        qi = q[b, rows, h].astype(work) * work(problem.scale)
        n = len(qi)
        scores = np.empty((n, KEYS), work)
        acc, part = np.zeros((n, problem.dim_v), work), np.empty((n, problem.dim_v), work)
        # The lowest number, not -inf: a row that has seen no key yet must not compute inf - inf.
        top = np.full((n, 1), np.finfo(work).min, work)
        total = np.zeros((n, 1), work)
        for tile in key_tiles(problem, rows, positions[b]):
            s = scores[:, : tile.keys.stop - tile.keys.start]
            product(qi, kt[:, tile.keys], out=s)
            if tile.hidden is not None:
                np.copyto(s, -np.inf, where=tile.hidden)
            new_top = np.maximum(top, s.max(axis=1, keepdims=True))
            shrink = np.exp(top - new_top)
            top = new_top
            np.subtract(s, top, out=s)
            p = np.exp(s, out=s)
            total = total * shrink + p.sum(axis=1, keepdims=True)
            acc *= shrink
            product(p, vh[tile.keys], out=part, hidden=tile.hidden)
            acc += part
        out[b, rows, h] = acc / np.where(total == 0, 1, total)  # a row that saw no key: 0 and -inf
        lse[b, h, rows] = (top + np.log(total))[:, 0]

    tasks = (
        (b, h, rows) for b in range(problem.batch) for h in range(problem.heads_q) for rows in query_tiles(problem)
    )
    for _ in run(problem, task, tasks):
        pass
    return out, lse
