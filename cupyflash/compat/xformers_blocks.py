"""xFormers' block-diagonal biases: sequences one after another, each attending to keys of its own.

They are known by the names of their classes, and read by the attributes that xFormers documents: q_seqinfo and
k_seqinfo with seqstart, seqlen and padding, block_tables and page_size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# What each hides of a sequence's own keys: (causal, whether there is a window).
MASKS: dict[str, tuple[bool | str, bool]] = {
    "BlockDiagonalMask": (False, False),
    "BlockDiagonalCausalMask": ("top_left", False),
    "BlockDiagonalCausalFromBottomRightMask": (True, False),
    "BlockDiagonalCausalLocalAttentionMask": ("top_left", True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, True),
    "BlockDiagonalPaddedKeysMask": (False, False),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (True, False),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (False, True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (True, True),
    "BlockDiagonalGappyKeysMask": (False, False),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (True, False),
    "PagedBlockDiagonalPaddedKeysMask": (False, False),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (True, False),
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": (True, True),
}


class Placed(NamedTuple):
    """Rows of sequences, and where each of them lies."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]


def of_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., G, H, K) as (..., heads, K): of keys and values one for each group where its H are the same in memory,
    unless somebody may look at the gradient of each. ValueError where they have other G and H than query."""
    groups, heads = query.shape[-3:-1]
    for name, x in (("key", key), ("value", value)):
        if x.shape[-3] != groups or x.shape[-2] not in (1, heads) or x.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, and query {tuple(query.shape)}; it must have as many groups, "
                f"{groups}, and heads of each, {heads}"
            )
    one = all(x.shape[-2] == 1 or (x.stride(-2) == 0 and not _watched(x)) for x in (key, value))
    k, v = (x.select(-2, 0) if one else x.flatten(-3, -2) for x in (key, value))
    return query.flatten(-3, -2), k, v


def _watched(x: torch.Tensor) -> bool:
    followed = x.requires_grad and not torch.compiler.is_compiling()
    return followed and (x.is_leaf or x.retains_grad or bool(x._backward_hooks))


def placed(bias: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Placed | None:
    """None where `bias` is none of these."""
    name = type(bias).__name__
    if name not in MASKS:
        return None
    if query.dim() not in (4, 5) or any(len(x) != 1 for x in (query, key, value)):
        raise ValueError(
            f"query has shape {tuple(query.shape)}; with a {name} it must be (1, rows of all sequences, heads, dim), "
            "or (1, rows, groups, heads, dim), and key and value too"
        )
    q, k, v = (x[0] for x in (of_groups(query, key, value) if query.dim() == 5 else (query, key, value)))
    if len(v) != len(k):
        raise ValueError(f"value has shape {tuple(value.shape)}; it must have as many rows as key, {len(k)}")
    causal, local = MASKS[name]
    options: dict[str, Any] = {"cu_seqlens_q": bias.q_seqinfo.seqstart, "causal": causal}
    if local and causal:
        options["window"] = (bias._window_size - 1, 0)
    elif local:
        options["window"] = (bias.window_left, bias.window_right)
    of_k = bias.k_seqinfo
    if name.startswith("Paged"):
        if len(k) % bias.page_size:
            raise ValueError(
                f"key has shape {tuple(key.shape)}; its rows must be whole pages of {bias.page_size}, as page_size says"
            )
        k, v = (x.unflatten(0, (-1, bias.page_size)) for x in (k, v))
        return Placed(q, k, v, options | {"seqlens_k": of_k.seqlen, "page_table": bias.block_tables})
    if "PaddedKeys" in name:
        padding, sequences = of_k.padding, len(of_k.seqlen)
        if len(k) != padding * sequences:
            raise ValueError(
                f"key has shape {tuple(key.shape)}; it must have {padding * sequences} rows, {padding} for each of "
                f"{sequences} sequences"
            )
        k, v = (x.unflatten(0, (sequences, padding)) for x in (k, v))
        return Placed(q, k, v, options | {"seqlens_k": of_k.seqlen})
    if "GappyKeys" in name:
        last = 0
        for begin, n in zip(getattr(of_k, "seqstart_py", ()), of_k.seqlen_py):
            last = max(last, begin + n) if n else last
        if last > len(k):
            raise ValueError(
                f"key has shape {tuple(key.shape)}; it must have {last} rows or more, as kv_seqstarts and kv_seqlen say"
            )
        k, v, ends = _gathered(k, v, of_k)
        return Placed(q, k, v, options | {"cu_seqlens_k": ends})
    return Placed(q, k, v, options | {"cu_seqlens_k": of_k.seqstart})


def _gathered(k: torch.Tensor, v: torch.Tensor, of: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of keys without the gaps between sequences, and where each begins there."""
    ends = torch.nn.functional.pad(of.seqlen.cumsum(0, dtype=torch.int32), (1, 0))
    row = torch.arange(sum(of.seqlen_py), device=k.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends[1:].contiguous(), row, right=True)
    place = of.seqstart[sequence] + row - ends[sequence]
    return k[place], v[place], ends
