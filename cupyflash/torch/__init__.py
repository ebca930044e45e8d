"""Attention for PyTorch: `attention` on tensors, and drop-ins for torch.nn's, on CPU and CUDA tensors.

`cupyflash.attention` does on tensors what `attention` here does; this entry takes tensors only. Either is a custom
operator (torch.ops.cupyflash.attention) to torch.compile, torch.export, torch.func and dispatch modes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import api, interop
from ..latent import operands
from ..signature import like
from .multihead import MultiheadAttention
from .sdpa import scaled_dot_product_attention
from .varlen import varlen_attn, varlen_attn_out

if TYPE_CHECKING:
    from .flex import flex_attention

__all__ = [
    "MultiheadAttention",
    "attention",
    "flex_attention",
    "scaled_dot_product_attention",
    "varlen_attn",
    "varlen_attn_out",
]

interop.library("q", torch.empty(0))  # makes the operators known, for programs that were exported


@like(api.attention)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, **options: Any) -> Any:
    """Exact attention on tensors, differentiable with respect to q, k, v, bias, alibi_slopes, sinks and score_arrays.

    Takes and returns what `cupyflash.attention` does, out and lse both differentiable, also under torch.compile,
    torch.export, torch.func (grad, vjp, vmap: the mapped axis becomes a part of the batch), activation checkpointing
    and torch.autocast, which casts q, k and v as it does for PyTorch's own attention. q, k and v may be jagged nested
    tensors, (N, sequence, heads, dim): packed sequences, of which out is nested as q is, and lse is (Hq, T).

    Raises
    ------
    TypeError
        q, k or v is no tensor.
    ValueError
        `out` is given although a gradient is wanted, or the call is traced: nobody could follow a write into it.
    RuntimeError, NotImplementedError
        For a third derivative, and for forward mode of forward mode.
    """
    for name, x in zip(operands(options.get("latent"), v), (q, k, v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    return api.attention(q, k, v, **options)


def __getattr__(name: str) -> Any:
    """flex_attention comes when it is asked for: with PyTorch's tracers it takes a second to import."""
    if name != "flex_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .flex import flex_attention

    return flex_attention
