"""torch.nn.functional.scaled_dot_product_attention, with its signature and semantics."""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..other_names import renaming
from ..scalars import check_no_text
from .dropout import check_tensors, dropout_options


@renaming(torch.compiler.is_compiling, q="query", k="key", v="value", mask="attn_mask", bias="attn_mask")
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Exact attention in the place of torch.nn.functional.scaled_dot_product_attention.

    Parameters
    ----------
    query : (..., Hq, L, E)
    key : (..., H, S, E)
    value : (..., H, S, Ev)
        float16, bfloat16, float32 or float64. Axes before the heads, none or more, broadcast.
    attn_mask : broadcasts to (..., Hq, L, S), optional
        Booleans, True where a query may attend a key, or numbers added to the scores (float32 or query's dtype; they
        get gradients). Queries that may attend no key get 0. Or causal_upper_left or causal_lower_right of
        torch.nn.attention.bias.
    dropout_p : float
        Probabilities become 0 with this chance, and the others are divided by 1 - dropout_p; of 1 nothing is left.
        Which follows from a number drawn from PyTorch's generator of query's device, so torch.manual_seed repeats it.
    is_causal : bool
        Query i attends keys j <= i (aligned at the top left), of those that attn_mask leaves.
    scale : float, optional
        Default 1 / sqrt(E).
    enable_gqa : bool
        Hq may be a multiple of H.

    Returns
    -------
    (..., Hq, L, Ev)

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it is and what it must be.
    """
    check_no_text(is_causal=is_causal, enable_gqa=enable_gqa)
    check_tensors(query=query, key=key, value=value, **({} if attn_mask is None else {"attn_mask": attn_mask}))
    if not (query.dim() == key.dim() == value.dim() and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]):
        query, key, value = _spread(query, key, value)
    lead, heads = query.shape[:-3], query.shape[-3] if query.dim() > 2 else 1
    for name, x in (("key", key), ("value", value)):
        if not enable_gqa and x.dim() > 2 and x.shape[-3] not in (1, heads):
            raise ValueError(
                f"{name} has {x.shape[-3]} heads but query has {heads}; they must be the same, or enable_gqa=True given"
            )
    options: dict[str, Any] = dropout_options("dropout_p", dropout_p, query)
    causal: bool | str = "top_left" if is_causal else False
    if type(attn_mask).__name__ == "CausalBias":
        if is_causal:
            raise ValueError("is_causal is True and attn_mask is a CausalBias; it must be one or the other")
        causal, attn_mask = _diagonal(attn_mask, query.shape[-2], key.shape[-2]), None
    if attn_mask is not None and _stands_for_some(attn_mask, lead):  # it would be copied for each
        each = zip(query, key, value, attn_mask)
        return torch.stack([scaled_dot_product_attention(*x, dropout_p, is_causal, scale, enable_gqa) for x in each])
    if query.dim() > 4:
        query, key, value = (x.flatten(0, -4) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
    if attn_mask is not None:
        options["mask" if attn_mask.dtype is torch.bool else "bias"] = attn_mask
    out: torch.Tensor = api.attention(query, key, value, causal=causal, scale=scale, layout="bhsd", **options)
    return out.unflatten(0, lead) if len(lead) > 1 else out


def _stands_for_some(mask: torch.Tensor, lead: Any) -> bool:
    """Whether a mask has entries of its own along the first axis before the heads, and one for all along another."""
    own = mask.shape[:-3]
    return len(own) == len(lead) > 1 and own[0] > 1 and any(n == 1 < m for n, m in zip(own, lead))


def _spread(query: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All with the axes before the heads that they broadcast to; nothing is copied."""
    lead: Any = query.shape[:-3]
    for name, x in zip(("key", "value"), others):
        try:
            lead = torch.broadcast_shapes(lead, x.shape[:-3])
        except RuntimeError:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} but query has {tuple(query.shape)}; their axes before the heads "
                "must be the same, or broadcast"
            ) from None
    rank = max(x.dim() for x in (query, *others))
    whole = [x[(None,) * (rank - x.dim())] for x in (query, *others)]
    return tuple([x.expand(*lead, *x.shape[-3:]) for x in whole])


def _diagonal(bias: Any, queries: int, keys: int) -> str:
    """Of a bias of torch.nn.attention.bias, a tensor that is known by its kind and has no elements."""
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise ValueError(
            f"attn_mask is for {bias.seq_len_q} queries and {bias.seq_len_kv} keys, but query has {queries} and key "
            f"{keys}; make one for these lengths"
        )
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"
