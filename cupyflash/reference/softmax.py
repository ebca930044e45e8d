"""From softmax in three passes to attention in one: what makes tiling possible."""

from __future__ import annotations

from typing import Any

from .trace import Array, Trace, default_scale, namespace, started, with_trace


def safe_softmax(x: Array, *, trace: bool | Trace = False) -> Any:
    """Softmax over the last axis in three passes: the maximum, the sum of e^(x - max), the quotients.

    Milakov & Gimelshein 2018, Algorithm 2: 4 memory accesses per element. Subtracting the maximum keeps e^x from
    overflowing and changes nothing else.

    Parameters
    ----------
    x : (..., N)

    Returns
    -------
    y (..., N)
        A row of -inf gives 0.
    """
    xp = namespace(x=x)
    chip = started(trace)
    y = xp.empty_like(x)
    m = xp.full(x.shape[:-1], -xp.inf, x.dtype)
    d = xp.zeros_like(m)
    for j in range(x.shape[-1]):
        m = xp.maximum(m, chip.load(x[..., j]))
    for j in range(x.shape[-1]):
        d = d + chip.exp(chip.load(x[..., j]), m)
    for j in range(x.shape[-1]):
        chip.store(y, (..., j), chip.over(chip.exp(chip.load(x[..., j]), m), d))
        chip.hold(x[..., j], m, d)
    return with_trace((y,), chip, trace)


def online_softmax(x: Array, *, trace: bool | Trace = False) -> Any:
    """Softmax over the last axis in two passes: maximum and sum together, then the quotients.

    Milakov & Gimelshein 2018, Algorithm 3: 3 memory accesses per element instead of 4. When the maximum grows from m to
    m_new, the sum so far is corrected instead of computed again:

        d ← d · e^(m - m_new) + e^(x - m_new)

    Parameters
    ----------
    x : (..., N)

    Returns
    -------
    y (..., N)
        A row of -inf gives 0.
    """
    xp = namespace(x=x)
    chip = started(trace)
    y = xp.empty_like(x)
    m = xp.full(x.shape[:-1], -xp.inf, x.dtype)
    d = xp.zeros_like(m)
    for j in range(x.shape[-1]):
        x_j = chip.load(x[..., j])
        m_new = xp.maximum(m, x_j)
        d = chip.times(chip.exp(m, m_new), d) + chip.exp(x_j, m_new)
        m = m_new
    for j in range(x.shape[-1]):
        chip.store(y, (..., j), chip.over(chip.exp(chip.load(x[..., j]), m), d))
        chip.hold(x[..., j], m, d)
    return with_trace((y,), chip, trace)


def flash_one_pass(q: Array, k: Array, v: Array, *, scale: float | None = None, trace: bool | Trace = False) -> Any:
    """Attention of one head in one pass over the keys for each row, without tiles.

    The online softmax again, with the output corrected along with the sum, so that no second pass is left:

        o ← o · (d · e^(m - m_new) / d_new) + v · (e^(x - m_new) / d_new)

    That is line 12 of FlashAttention's Algorithm 1 with Br = Bc = 1 and the loops exchanged. Rabe & Staats 2021 have
    the same pass with one division, at the end.

    Parameters
    ----------
    q, k, v : (Sq, D), (Sk, D), (Sk, Dv)

    Returns
    -------
    out (Sq, Dv)
    """
    xp = namespace(q=q, k=k, v=v)
    chip = started(trace)
    tau = default_scale(q, scale)
    out = xp.empty((len(q), v.shape[1]), q.dtype)
    for i in range(len(q)):
        q_i = chip.load(q[i])
        m = xp.full(1, -xp.inf, q.dtype)
        d = xp.zeros(1, q.dtype)
        o = xp.zeros(v.shape[1], q.dtype)
        for j in range(len(k)):
            k_j, v_j = chip.load(k[j]), chip.load(v[j])
            x = chip.times(tau, chip.matmul(q_i, k_j[:, None]))
            m_new = xp.maximum(m, x)
            e = chip.exp(x, m_new)
            kept = chip.times(chip.exp(m, m_new), d)
            d_new = kept + e
            o = chip.rescale(chip.over(kept, d_new), o) + chip.rescale(chip.over(e, d_new), v_j)
            chip.hold(q_i, k_j, v_j, o, x, m, d)
            m, d = m_new, d_new
        chip.store(out, i, o)
    return with_trace((out,), chip, trace)
