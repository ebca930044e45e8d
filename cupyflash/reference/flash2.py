"""FlashAttention-2 (Dao 2023): queries in the outer loop, O scaled once, one number kept for each row; and
split keys."""

from __future__ import annotations

from typing import Any

from ..api import merge
from .trace import Array, Trace, default_scale, namespace, started, tiles, with_trace


def flash2_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    rows: int = 64,
    keys: int = 64,
    causal: bool = False,
    scale: float | None = None,
    trace: bool | Trace = False,
) -> Any:
    """FlashAttention-2's Algorithm 1: O stays on the chip, unscaled, until all keys have been visited.

    Against FlashAttention: rows never meet another tile's rows, so O, ℓ and m never leave the chip between steps; O is
    divided by ℓ once, at the end; and only the log-sum-exp L = m + log ℓ is stored for the backward (section 3.1.1).

    Parameters
    ----------
    q, k, v : (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv)
        Hq a multiple of Hk (section 3.1.2, "Multi-query attention and grouped-query attention"), or ValueError.
    rows, keys : int
        Br and Bc, the tile sizes.
    causal : bool
        The last query sees the last key, as in `cupyflash.attention`. Tiles that nobody sees are skipped.

    Returns
    -------
    out (B, Sq, Hq, Dv), lse (B, Hq, Sq)
        Rows that see no key: 0 and -inf.
    """
    xp = namespace(q=q, k=k, v=v)
    chip = started(trace)
    group = _group(q, k)
    out = xp.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = xp.empty((q.shape[0], q.shape[2], q.shape[1]), q.dtype)
    tau = default_scale(q, scale)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            shared = h // group  # K and V are never repeated in memory
            head = q[b, :, h], k[b, :, shared], v[b, :, shared]
            _algorithm_1(chip, *head, out[b, :, h], lse[b, h, :, None], rows, keys, causal, tau)
    return with_trace((out, lse), chip, trace)


def _algorithm_1(
    chip: Trace, q: Array, k: Array, v: Array, out: Array, lse: Array, rows: int, keys: int, causal: bool, tau: float
) -> None:
    """One head, written to out and lse."""
    xp = namespace(q=q, k=k, v=v)
    diagonal = len(k) - len(q)
    for i in tiles(len(q), rows):  # line 3
        q_i = chip.load(q[i])  # line 4
        o = xp.zeros((len(q_i), v.shape[1]), q.dtype)  # line 5
        ell = xp.zeros((len(q_i), 1), q.dtype)
        m = xp.full((len(q_i), 1), -xp.inf, q.dtype)
        for j in tiles(len(k), keys):  # line 6
            if causal and _hidden(i, j, diagonal):
                continue
            k_j, v_j = chip.load(k[j]), chip.load(v[j])  # line 7
            s = _scores(chip, q_i, k_j, i, j, diagonal, causal, tau)  # line 8
            m_new = xp.maximum(m, s.max(1, keepdims=True))  # line 9
            p = chip.exp(s, m_new)
            kept = chip.exp(m, m_new)
            ell = chip.times(kept, ell) + p.sum(1, keepdims=True)
            o = chip.rescale(kept, o) + chip.matmul(p, v_j)  # line 10
            m = m_new
            chip.hold(q_i, k_j, v_j, o, s, ell, m)
        chip.store(out, i, chip.rescale(chip.over(xp.ones_like(ell), ell), o))  # lines 12 and 14
        chip.store(lse, i, m + xp.log(ell + (ell == 0)))  # lines 13 and 15; m is -inf where ell is 0


def flash2_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    rows: int = 64,
    keys: int = 64,
    causal: bool = False,
    scale: float | None = None,
    trace: bool | Trace = False,
) -> Any:
    """FlashAttention-2's Algorithm 2: P = exp(S - L), and D = rowsum(dO ∘ O) once for each row.

    Keys are in the outer loop. dK and dV of a head that several query heads share are summed over them (section 3.1.2).

    Parameters
    ----------
    dout : (B, Sq, Hq, Dv)
    q, k, v, out, lse, causal, scale
        What `flash2_forward` was given and returned; rows and keys may differ.

    Returns
    -------
    dq, dk, dv
        Shaped like q, k, v.
    """
    xp = namespace(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    chip = started(trace)
    group = _group(q, k)
    tau = default_scale(q, scale)
    diagonal = k.shape[1] - q.shape[1]
    dq, dk, dv = (xp.empty_like(x) for x in (q, k, v))
    chip.store(dq, ..., 0)

    delta = xp.empty_like(lse)  # line 4, the paper's D
    chip.store(delta, ..., chip.times(chip.load(dout), chip.load(out)).sum(3).swapaxes(1, 2))

    for b in range(k.shape[0]):
        for shared in range(k.shape[2]):
            for j in tiles(k.shape[1], keys):  # line 5
                k_j, v_j = chip.load(k[b, j, shared]), chip.load(v[b, j, shared])  # line 6
                dk_j, dv_j = xp.zeros_like(k_j), xp.zeros_like(v_j)  # line 7
                for h in range(shared * group, (shared + 1) * group):
                    for i in tiles(q.shape[1], rows):  # line 8
                        if causal and _hidden(i, j, diagonal):
                            continue
                        # Line 9. The paper loads O too, which D has made superfluous.
                        q_i, do_i, dq_i = (chip.load(x[b, i, h]) for x in (q, dout, dq))
                        lse_i, delta_i = (chip.load(x[b, h, i, None]) for x in (lse, delta))
                        s = _scores(chip, q_i, k_j, i, j, diagonal, causal, tau)  # line 10
                        p = chip.exp(s, lse_i)  # line 11
                        dv_j += chip.matmul(p.T, do_i)  # line 12
                        dp = chip.matmul(do_i, v_j.T)  # line 13
                        ds = chip.times(p, dp - delta_i)  # line 14
                        chip.store(dq, (b, i, h), dq_i + chip.times(tau, chip.matmul(ds, k_j)))  # line 15
                        dk_j += chip.times(tau, chip.matmul(ds.T, q_i))  # line 16
                        chip.hold(q_i, do_i, dq_i, lse_i, delta_i, k_j, v_j, dk_j, dv_j, p, dp)
                chip.store(dk, (b, j, shared), dk_j)  # line 18
                chip.store(dv, (b, j, shared), dv_j)
    return with_trace((dq, dk, dv), chip, trace)


def split_kv(
    q: Array, k: Array, v: Array, parts: int, *, scale: float | None = None, trace: bool | Trace = False
) -> Any:
    """Attention over `parts` ranges of keys, each on its own, combined by their log-sum-exps (Flash-Decoding, Dao et
    al.
    2023): with few queries the key ranges are what keeps a GPU busy.

    Parameters
    ----------
    q, k, v : (Sq, D), (Sk, D), (Sk, Dv)
    parts : int
        How many ranges at most, at least 1, or ValueError.

    Returns
    -------
    out (Sq, Dv), lse (Sq,)
        As `cupyflash.merge` combines them.
    """
    namespace(q=q, k=k, v=v)
    if parts < 1:
        raise ValueError(f"parts is {parts}; it must be at least 1")
    chip = started(trace)
    outs, lses = [], []
    for j in tiles(len(k), -(-len(k) // parts)):
        part = type(chip)()
        out, lse, _ = flash2_forward(*(x[None, :, None] for x in (q, k[j], v[j])), scale=scale, trace=part)
        outs.append(out[0, :, 0])
        lses.append(lse[0, 0])
        chip.add(part)
    out, lse = merge(outs, lses)
    # The merge reads every partial result, makes a weight of each lse and multiplies the partial output by it.
    chip.read += len(outs) * (out.size + lse.size)
    chip.written += out.size + lse.size
    chip.exponentials += len(outs) * lse.size
    chip.multiplications += len(outs) * (out.size + lse.size)
    chip.rescalings += len(outs) * out.size
    return with_trace((out, lse), chip, trace)


def _group(q: Array, k: Array) -> int:
    """How many heads of q share one of k."""
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; the heads of q must be a multiple of those of k"
        )
    return q.shape[2] // k.shape[2]


def _hidden(i: slice, j: slice, diagonal: int) -> bool:
    """Under a causal mask: does no row of tile i see a key of tile j? (Section 3.1.1, "Causal masking")"""
    return j.start > i.stop - 1 + diagonal


def _scores(chip: Trace, q_i: Array, k_j: Array, i: slice, j: slice, diagonal: int, causal: bool, tau: float) -> Array:
    """scale · Q K^T of one tile; elements are tested only where the diagonal crosses it."""
    xp = namespace(q=q_i, k=k_j)
    s = chip.times(tau, chip.matmul(q_i, k_j.T))
    if causal and j.stop - 1 > i.start + diagonal:
        seen = xp.arange(j.start, j.stop) <= xp.arange(i.start, i.stop)[:, None] + diagonal
        s = xp.where(seen, s, -xp.inf)
    return s
