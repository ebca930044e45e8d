"""`cupyflash.attention` and `attention_backward` as one autograd function."""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..interop import torch_
from ..lse_gradient import attention_backward


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    family: str | None = None,
) -> Any:
    """Exact attention on tensors, differentiable with respect to q, k and v.

    Takes and returns what `cupyflash.attention` does, out and lse both differentiable, with these restrictions:
    gradients cannot be differentiated again, and torch.func transforms are not supported.

    Raises
    ------
    TypeError
        q, k or v is no tensor.
    ValueError
        `out` is given although a gradient is wanted: autograd cannot follow a write into it.
    RuntimeError
        Where gradients are differentiated again, and under a torch.func transform.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "layout": layout, "deterministic": deterministic,
        "family": family,
    }  # fmt: skip
    if not torch_.wants_grad([q, k, v, out]):
        return api.attention(q, k, v, key_mask=key_mask, return_lse=return_lse, out=out, **options)
    if out is not None:
        raise ValueError(
            "out is given but a gradient is wanted, and autograd cannot follow a write into out; leave it out, or call "
            "under torch.no_grad()"
        )
    o, lse = _Attention.apply(q, k, v, key_mask, options)
    return (o, lse) if return_lse else o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = api.attention(q, k, v, key_mask=key_mask, return_lse=True, **options)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, key_mask, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 5
        q, k, v, key_mask, out, lse = ctx.saved_tensors
        grads = attention_backward("torch", dout, dlse, q, k, v, out, lse, key_mask=key_mask, **ctx.options)
        return *grads, None, None
