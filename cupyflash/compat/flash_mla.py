"""FlashMLA's names, with its arguments: latent attention of a few queries to caches in pages, the dense part.

What is not served (sparse attention, caches of 8 bits, prefill) raises NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..other_names import renaming
from ..scalars import check_no_text
from ..torch.dropout import check_tensors

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: nothing, which never grows stale."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """What a call may be given and does not look at. Arguments are ignored, as FlashMLA does."""
    return FlashMLASchedMeta(), None


@renaming(
    torch.compiler.is_compiling, scale="softmax_scale", seqlens_k="cache_seqlens", page_table="block_table",
    latent="head_dim_v", k="k_cache",
)  # fmt: skip
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, (B, Sq, Hq, D), to a cache in pages, k_cache (pages, page, Hk, D), of which V is the first
    head_dim_v columns.

    block_table, (B, pages of one), and cache_seqlens, (B,), are int32. causal is aligned at the bottom right.
    softmax_scale is 1 / sqrt(D) unless given. tile_scheduler_metadata and num_splits, of any version, are ignored. No
    multiple of anything is asked of heads, columns and pages. Returns out, (B, Sq, Hq, head_dim_v), and lse,
    (B, Hq, Sq) float32, which is -inf of rows that see no key.
    """
    sparse = {"indices": indices, "attn_sink": attn_sink, "extra_k_cache": extra_k_cache, "topk_length": topk_length}
    sparse |= {"extra_indices_in_kvcache": extra_indices_in_kvcache, "extra_topk_length": extra_topk_length}
    for name, x in sparse.items():
        if x is not None:
            raise NotImplementedError(f"{name} is given, of sparse attention, which is not served: it must be None")
    if is_fp8_kvcache:
        raise NotImplementedError("is_fp8_kvcache is True; caches of 8 bits are not served: it must be False")
    check_tensors(q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    check_no_text(causal=causal)
    out, lse = api.attention(
        q, k_cache, latent=head_dim_v, seqlens_k=cache_seqlens, page_table=block_table, scale=softmax_scale,
        causal=bool(causal), return_lse=True,
    )  # fmt: skip
    return out, lse
