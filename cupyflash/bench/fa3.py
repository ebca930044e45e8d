"""FlashAttention-3 as a function that PyTorch differentiates and torch.compile takes whole: its operators alone are
neither."""

from __future__ import annotations

from typing import Any

import torch

from . import peers


@torch.library.custom_op("cupyflash_bench::fa3", mutates_args=())
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = peers.fa3_operators().fwd(q, k, v, is_causal=True, num_splits=1)[:2]
    return out, lse


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=torch.float32)


@torch.library.custom_op("cupyflash_bench::fa3_backward", mutates_args=())
def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    peers.fa3_operators().bwd(dout, q, k, v, out, lse, dq, dk, dv, is_causal=True)
    return dq, dk, dv


@_backward.register_fake
def _(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = _backward(dout.contiguous(), *ctx.saved_tensors)
    return gradients


_forward.register_autograd(_differentiate, setup_context=_keep)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q, k and v (B, S, H, D), float16 or bfloat16."""
    out: torch.Tensor = _forward(q, k, v)[0]
    return out
