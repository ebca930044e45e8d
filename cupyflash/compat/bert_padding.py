"""flash_attn.bert_padding: batches with padding, (B, S, ...), as the rows that are none, (rows, ...), and back."""

from __future__ import annotations

import torch

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows of `input`, (N, ...), that `indices` names."""
    return input[indices]


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, ...) with `values` in the rows that `indices` names, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The rows of hidden_states, (B, S, ...), where attention_mask, (B, S), is not 0; also those of unused_mask.

    Returns them, (rows, ...), where they were in (B * S), the cumulative lengths, (B + 1,) int32, the greatest length,
    and the lengths by attention_mask alone, (B,) int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, ends, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(batch, seqlen, ...) with hidden_states, (rows, ...), where `indices` says, and 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
