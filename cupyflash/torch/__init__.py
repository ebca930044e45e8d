"""Attention for PyTorch: differentiable by autograd, on CPU and CUDA tensors.

`cupyflash.attention` does the same when a tensor requires grad; this entry takes tensors only.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..signature import like

__all__ = ["attention"]


@like(api.attention)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Exact attention on tensors, differentiable with respect to q, k, v, bias, alibi_slopes and sinks.

    Takes and returns what `cupyflash.attention` does, out and lse both differentiable, with these restrictions:
    gradients cannot be differentiated again, and torch.func transforms are not supported.

    Raises
    ------
    TypeError
        q, k or v is no tensor.
    ValueError
        `out` is given although a gradient is wanted: autograd cannot follow a write into it.
    RuntimeError
        Where gradients are differentiated with create_graph=True, and under a torch.func transform.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    return api.attention(q, k, v, **options)
