"""Attention and its gradients against standard attention in float64: of any q, k and v, and of a layer as trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import attention, attention_backward
from cupyflash.arrays import on_host

from .model import Array, Model


@dataclass(frozen=True)
class Check:
    """Largest errors of one result against float64: ours, and standard attention's in the dtype of the inputs."""

    name: str
    error: float
    standard: float

    @property
    def limit(self) -> float:
        """Four times the error of standard attention plus 1e-5.

        The criterion of FlashAttention's authors is twice; the largest errors of a single trained layer are few
        numbers, and in 192 such checks of float32 twice was missed two times by chance.
        """
        return 4 * self.standard + 1e-5

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN


def check_layer(model: Model, tokens: Array, layer: int, seed: int = 0) -> tuple[list[Check], np.ndarray]:
    """`check_attention` of the queries, keys and values that a layer computes from tokens (1, S)."""
    _, (_, q, k, v, *_), *_ = model.logits(tokens)[1][layer]
    return check_attention(model.xp, q, k, v, seed)


def check_attention(xp: Any, q: Array, k: Array, v: Array, seed: int = 0) -> tuple[list[Check], np.ndarray]:
    """Check out, dq, dk and dv of causal attention over (1, S, H, D), for a random dout.

    Returns the checks and the attention probabilities (H, S, S).
    """
    dout = xp.asarray(np.random.default_rng(seed).normal(size=v.shape)).astype(v.dtype)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    ours = (out, *attention_backward(dout, q, k, v, out, lse, causal=True))
    *exact, odds = standard_attention(xp, dout, q, k, v, "float64")
    *same, _ = standard_attention(xp, dout, q, k, v, q.dtype)
    checks = [
        Check(name, _error(a, e), _error(s, e)) for name, a, s, e in zip(("out", "dq", "dk", "dv"), ours, same, exact)
    ]
    return checks, on_host(odds[0])


def standard_attention(xp: Any, dout: Array, q: Array, k: Array, v: Array, dtype: Any) -> tuple[Array, ...]:
    """out, dq, dk, dv and the probabilities (B, H, S, S) of causal attention over (B, S, H, D), all in `dtype`."""
    dout, q, k, v = (x.astype(dtype).transpose(0, 2, 1, 3) for x in (dout, q, k, v))
    scale = q.shape[-1] ** -0.5
    s = (q @ k.swapaxes(-1, -2)) * scale
    s = s + xp.asarray(np.triu(np.full(s.shape[-2:], -np.inf), 1)).astype(dtype)
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    out = p @ v
    ds = p * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(axis=-1, keepdims=True)) * scale
    results = (out, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout)
    return (*(x.transpose(0, 2, 1, 3) for x in results), p)


def _error(x: Array, exact: Array) -> float:
    return float(abs(x.astype("float64") - exact).max())
