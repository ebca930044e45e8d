"""Standard attention: the score matrix in memory."""

from __future__ import annotations

from typing import Any

from .trace import Array, Trace, default_scale, namespace, started, with_trace


def standard_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    key_mask: Array | None = None,
    scale: float | None = None,
    trace: bool | Trace = False,
) -> Any:
    """softmax(scale · Q K^T) V, with S and P written to memory and read back.

    Vaswani et al. 2017, equation 1; the reads and writes are those of FlashAttention's Algorithm 0. Its Theorem 2:
    Θ(Nd + N²) HBM accesses. How its matrix products are blocked is left open; the trace's `on_chip` is a row of
    softmax.

    Parameters
    ----------
    q, k, v : (B, Sq, H, D), (B, Sk, H, D), (B, Sk, H, Dv)
    key_mask : (B, Sk) of bool, optional
        False hides a padding key. A row whose keys are all hidden gives 0.

    Returns
    -------
    out (B, Sq, H, Dv), p (B, H, Sq, Sk)
        p is what the backward reads again: the N² elements that FlashAttention never stores.
    """
    xp = namespace(q=q, k=k, v=v)
    chip = started(trace)
    qh, kh, vh = (_heads_first(x) for x in (q, k, v))
    s, p, out = (xp.empty((*qh.shape[:3], n), q.dtype) for n in (k.shape[1], k.shape[1], v.shape[3]))

    # Line 1: S = Q K^T
    chip.store(s, ..., chip.times(default_scale(q, scale), chip.matmul(chip.load(qh), chip.load(kh).swapaxes(-1, -2))))

    # Line 2: P = softmax(S)
    scores = chip.load(s)
    if key_mask is not None:
        scores = xp.where(chip.load(key_mask)[:, None, None, :], scores, -xp.inf)
    e = chip.exp(scores, scores.max(-1, keepdims=True))
    chip.store(p, ..., chip.over(e, e.sum(-1, keepdims=True)))
    chip.hold(p[:1, :1, :1])

    # Line 3: O = P V
    chip.store(out, ..., chip.matmul(chip.load(p), chip.load(vh)))
    return with_trace((_heads_first(out), p), chip, trace)


def standard_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, p: Array, *, scale: float | None = None, trace: bool | Trace = False
) -> Any:
    """Gradients of standard attention from the stored P (FlashAttention, Algorithm 3): Θ(Nd + N²) HBM accesses.

    Parameters
    ----------
    dout : (B, Sq, H, Dv)
    q, k, v, p
        What `standard_attention` was given and returned; a key mask is in p already.

    Returns
    -------
    dq, dk, dv
        Shaped like q, k, v.
    """
    xp = namespace(dout=dout, q=q, k=k, v=v, p=p)
    chip = started(trace)
    tau = default_scale(q, scale)
    do, qh, kh, vh = (_heads_first(x) for x in (dout, q, k, v))
    dq, dk, dv, dp, ds = (xp.empty_like(x) for x in (qh, kh, vh, p, p))

    # Line 1: dV = P^T dO
    chip.store(dv, ..., chip.matmul(chip.load(p).swapaxes(-1, -2), chip.load(do)))

    # Line 2: dP = dO V^T
    chip.store(dp, ..., chip.matmul(chip.load(do), chip.load(vh).swapaxes(-1, -2)))

    # Line 3: dS = P ∘ (dP - rowsum(P ∘ dP))
    probabilities, gradients = chip.load(p), chip.load(dp)
    mean = chip.times(probabilities, gradients).sum(-1, keepdims=True)
    chip.store(ds, ..., chip.times(probabilities, gradients - mean))
    chip.hold(p[:1, :1, :1], dp[:1, :1, :1])

    # Lines 4 and 5: dQ = scale · dS K, dK = scale · dS^T Q
    chip.store(dq, ..., chip.times(tau, chip.matmul(chip.load(ds), chip.load(kh))))
    chip.store(dk, ..., chip.times(tau, chip.matmul(chip.load(ds).swapaxes(-1, -2), chip.load(qh))))
    return with_trace((_heads_first(dq), _heads_first(dk), _heads_first(dv)), chip, trace)


def _heads_first(x: Array) -> Array:
    """(B, S, H, D) as (B, H, S, D), and back."""
    return x.transpose(0, 2, 1, 3)
