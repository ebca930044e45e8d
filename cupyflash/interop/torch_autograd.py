"""A call on tensors as one autograd function: the gradients of out and of lse go through the call's own backward."""

from __future__ import annotations

from typing import Any

import torch

from .protocol import Arrays, Passes


def record(passes: Passes, arrays: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the call, differentiable with respect to its arrays as far as its backward gives gradients."""
    return _Attention.apply(passes, tuple(arrays), *arrays.values())


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, names: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = passes.forward(dict(zip(names, tensors)))
        ctx.passes, ctx.names = passes, names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of attention cannot be differentiated again: call backward() or torch.autograd.grad() "
                "without create_graph=True"
            )
        if dout is None and dlse is None:
            return (None,) * (2 + len(ctx.names))
        *tensors, out, lse = ctx.saved_tensors
        given = {"dout": torch.zeros_like(out) if dout is None else dout, "out": out, "lse": lse}
        if dlse is not None:
            given["dlse"] = dlse
        wanted = zip(ctx.names, ctx.needs_input_grad[2:])
        wrt = tuple(name for name, needed in wanted if needed and name not in ("q", "k", "v"))
        grads = ctx.passes.backward(dict(zip(ctx.names, tensors)) | given, wrt)
        return None, None, *(getattr(grads, f"d{name}", None) for name in ctx.names)
