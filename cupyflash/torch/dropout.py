"""What the functions in the place of others share: what tensors are, and what a dropout probability becomes here."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch


def dropout_options(name: str, p: float, q: torch.Tensor) -> dict[str, Any]:
    """Options of `attention` on q for the probability p, given as `name`; the seed is drawn from PyTorch's generator.

    It is a tensor on q's device, so that nothing waits for the GPU, torch.compile follows it, and a CUDA graph draws
    another in each run. Of p = 1 nothing is left: no key is seen.
    """
    if not isinstance(p, (Real, torch.Tensor)):
        raise TypeError(f"{name} is {p!r}; it must be a number from 0 to 1")
    if not 0 <= p <= 1:
        raise ValueError(f"{name} is {p}; it must be from 0 to 1")
    if not p:
        return {}
    if p == 1:
        return {"key_mask": torch.zeros(1, dtype=torch.bool, device=q.device)}
    return {"dropout": p, "seed": torch.randint(2**63 - 1, (1,), device=q.device)}


def check_tensors(**given: Any) -> None:
    """TypeError where one of these is no dense tensor."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.is_nested:
            raise TypeError(f"{name} is a nested tensor; it must be a dense one: pad the sequences")
