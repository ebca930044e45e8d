"""Standard attention in PyTorch, for its own derivatives of any order: in what dtype q has, with every option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def standard(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Any = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score: Callable[[Any], Any] | None = None,
    keeps: Any = None,
    dropout: float = 0.0,
    layout: str = "bshd",
    return_lse: bool = False,
) -> Any:
    """As cupyflash.attention, but for `score`, a function of the scores, and `keeps`, what dropout keeps of these."""
    if layout == "bshd":
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if score is None else score(s)
    queries, keys = s.shape[-2:]
    stands = torch.arange(queries, device=s.device)[:, None] + (0 if causal == "top_left" else keys - queries)
    away = torch.arange(keys, device=s.device) - stands
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * away.abs()
    s = s if bias is None else s + bias
    left, right = window or (None, None)
    seen = torch.ones_like(away, dtype=torch.bool)
    seen = seen & (away <= 0) if causal else seen
    seen = seen if left is None else seen & (away >= -left)
    seen = seen if right is None else seen & (away <= right)
    seen = seen if mask is None else seen & mask
    seen = seen if key_mask is None else seen & key_mask[..., None, None, :]
    s = torch.where(seen, s, -math.inf)
    top = s.detach().amax(-1, keepdim=True)
    top = (
        torch.where(top == -math.inf, 0.0, top) if sinks is None else torch.maximum(top, sinks.detach()[:, None, None])
    )
    e = torch.exp(torch.where(seen, s, 0.0) - top) * seen
    total = e.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks[:, None, None] - top)
    some = total > 0
    p = e / torch.where(some, total, 1.0)
    p = p if keeps is None else p * keeps / (1 - dropout)
    out = p @ v
    out = out.transpose(-2, -3) if layout == "bshd" else out
    lse = torch.where(some, top + torch.log(torch.where(some, total, 1.0)), -math.inf)[..., 0]
    return (out, lse) if return_lse else out
