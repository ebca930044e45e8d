"""FlashAttention-3's names (its module is flash_attn_interface), with its arguments.

What is not served (qv, chunks) raises NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..other_names import renaming
from ..scalars import check_no_text
from ..signature import unscripted
from ..torch.dropout import check_tensors
from . import flash_attn, kvcache
from .used import check_used, readable
from .windows import window_of

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"]


@unscripted
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
    check_no_text(causal=causal, return_attn_probs=return_attn_probs)
    _refuse(attention_chunk, qv=qv)
    descales: dict[str, Any] = {}
    for name, x, of in (("q_descale", q_descale, q), ("k_descale", k_descale, k), ("v_descale", v_descale, v)):
        if x is not None:
            check_tensors(**{name: x})
            if x.shape != (of.shape[0], k.shape[-2]):
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {(of.shape[0], k.shape[-2])}, (B, Hk)")
            descales[name] = x.repeat_interleave(of.shape[-2] // k.shape[-2], dim=-1)[..., None].contiguous()
    out, lse = api.attention(
        q, k, v, scale=softmax_scale, causal=bool(causal), window=window_of(window_size), softcap=softcap,
        deterministic=deterministic, return_lse=True, **descales,
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


@unscripted
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
    them.

    seqused_q, seqused_k: (B,) integers, how many rows of each sequence there are, from its first; those behind them get
    0 and are not attended. k and v are copied then, or q and the result. With return_attn_probs=True returns
    (out, lse): lse is (Hq, total_q). Inputs of 8 bits are not served.
    """
    check_no_text(return_attn_probs=return_attn_probs)
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _refuse(attention_chunk, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    back = None
    if seqused_q is not None:
        order, cu_seqlens_q = _used("q", q, cu_seqlens_q, seqused_q)
        q, back = q[order], order.argsort()
    if seqused_k is not None:
        if len(v) != len(k):
            raise ValueError(f"v has shape {tuple(v.shape)}; it must have as many rows as k, {len(k)}")
        order, cu_seqlens_k = _used("k", k, cu_seqlens_k, seqused_k)
        k, v = k[order], v[order]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
        softcap, None, deterministic, True,
    )  # fmt: skip
    if back is not None:
        out, lse = out[back], lse[:, back]
    return (out, lse) if return_attn_probs else out


def _used(side: str, x: torch.Tensor, ends: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of x in another order, those that are used first, and where each sequence begins among these."""
    if ends.dim() != 1 or not len(ends):
        raise ValueError(f"cu_seqlens_{side} has shape {tuple(ends.shape)}; it must be (sequences + 1,)")
    name, sequences = f"seqused_{side}", len(ends) - 1
    check_tensors(**{name: used})
    if used.shape != (sequences,) or used.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} is {used.dtype} of shape {tuple(used.shape)}; it must be int32 or int64 of shape ({sequences},)"
        )
    lengths = ends.diff()
    if readable(ends) and readable(used):
        check_used(name, used, f"cu_seqlens_{side}", ends, len(x), side)
    row = torch.arange(len(x), device=x.device)
    if not sequences:
        return row, ends
    of = torch.searchsorted(ends[1:].contiguous(), row.to(ends.dtype), right=True)
    own = of.clamp(max=sequences - 1)
    there = (of < sequences) & (row - ends[own] < used[own])
    kept = torch.minimum(used.clamp(min=0).to(ends.dtype), lengths).cumsum(0, dtype=ends.dtype)
    return (~there).to(torch.uint8).argsort(stable=True), torch.nn.functional.pad(kept, (1, 0))


@renaming(
    torch.compiler.is_compiling, scale="softmax_scale", window="window_size", seqlens_k="cache_seqlens",
)  # fmt: skip
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """As `cupyflash.compat.flash_attn.flash_attn_with_kvcache`, where page_table is called block_table.

    With cu_seqlens_q, (B + 1,), q and the result are packed, (total_q, Hq, D), and lse is (Hq, total_q); with
    cu_seqlens_k_new k and v are. rotary_seqlens, (B,): the positions of the first new rows and queries, if they are not
    cache_seqlens; ignored without rotary_cos. cache_batch_idx beside page_table: the line of it that is each
    sequence's. scheduler_metadata, num_splits, pack_gqa and sm_margin, which change no result, are ignored.
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_no_text(return_softmax_lse=return_softmax_lse)
    out, lse = kvcache.attend(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, table=page_table, table_name="page_table", softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """No numbers, (0,) int32, on the device of cache_seqlens: a call needs none made before it, and none grow stale."""
    check_tensors(cache_seqlens=cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _refuse(attention_chunk: int, **tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            raise NotImplementedError(f"{name} is given; it is not served: it must be None")
    if attention_chunk:
        raise NotImplementedError(f"attention_chunk is {attention_chunk}; chunks are not served: it must be 0")
