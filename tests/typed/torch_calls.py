"""What a type checker makes of calls on PyTorch tensors; never run."""

from typing import Any

import torch
from typing_extensions import assert_type

import cupyflash
import cupyflash.torch


def right(q: torch.Tensor, weight: torch.nn.Parameter) -> None:
    for attention in (cupyflash.attention, cupyflash.torch.attention):
        assert_type(attention(q, q, q, layout="bhsd"), torch.Tensor)
        assert_type(attention(q, weight, q)[0], torch.Tensor)
        assert_type(attention(q, q, q, return_lse=True), tuple[torch.Tensor, Any])
    assert_type(cupyflash.merge([q], [q]), tuple[torch.Tensor, torch.Tensor])


def wrong(q: torch.Tensor) -> None:
    cupyflash.torch.attention(q, q, 1.0)  # type: ignore[call-overload]
    cupyflash.torch.attention(q, q, q, dropout_p=0.1)  # type: ignore[call-overload]
