"""FlashAttention-3's names (its module is flash_attn_interface), with its arguments.

What is not served (a key/value cache, qv, chunks, seqused) raises NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..torch.dropout import check_tensors
from . import flash_attn
from .flash_attn import flash_attn_with_kvcache, window_of

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q, (B, Sq, Hq, D), to k and v, (B, Sk, Hk, D), of which Hq is a multiple of Hk.

    causal and window_size, (left, right) with -1 for unbounded, are aligned at the bottom right. q_descale, k_descale
    and v_descale, (B, Hk) float32, go with inputs of float8_e4m3fn. num_splits, pack_gqa and sm_margin are ignored.
    With return_attn_probs=True returns (out, lse): lse is (B, Hq, Sq).
    """
    check_tensors(q=q, k=k, v=v)
    _refuse(attention_chunk, qv=qv)
    descales: dict[str, Any] = {}
    for name, x, of in (("q_descale", q_descale, q), ("k_descale", k_descale, k), ("v_descale", v_descale, v)):
        if x is not None:
            descales[name] = x.repeat_interleave(of.shape[2] // x.shape[-1], dim=-1)[..., None].contiguous()
    out, lse = api.attention(
        q, k, v, scale=softmax_scale, causal=bool(causal), window=window_of(window_size), softcap=softcap,
        deterministic=deterministic, return_lse=True, **descales,
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of sequences one after another, as `cupyflash.compat.flash_attn.flash_attn_varlen_func` has
    them. With return_attn_probs=True returns (out, lse): lse is (Hq, total_q). Inputs of 8 bits are not served."""
    _refuse(
        attention_chunk, qv=qv, seqused_q=seqused_q, seqused_k=seqused_k, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    found = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
        softcap, None, deterministic, return_attn_probs,
    )  # fmt: skip
    return found[:2] if return_attn_probs else found


def _refuse(attention_chunk: int, **tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            raise NotImplementedError(f"{name} is given; it is not served: it must be None")
    if attention_chunk:
        raise NotImplementedError(f"attention_chunk is {attention_chunk}; chunks are not served: it must be 0")
