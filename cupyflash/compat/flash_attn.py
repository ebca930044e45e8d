"""The functions of the package flash-attn (2.x): change `from flash_attn import` to `from cupyflash.compat.flash_attn
import`.

Shapes and options as there; any dtype, head dimension and device that `cupyflash.attention` takes. Lengths are
read where they are, on the device. What is not served raises NotImplementedError.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from .. import api
from ..other_names import renaming
from ..scalars import check_no_text
from ..signature import unscripted
from ..torch.dropout import check_tensors, dropout_options
from . import kvcache
from .windows import window_of

__all__ = [
    "_wrapped_flash_attn_backward", "_wrapped_flash_attn_forward",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip


@renaming(torch.compiler.is_compiling, scale="softmax_scale", window="window_size")
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q, (B, Sq, Hq, D), to k and v, (B, Sk, Hk, D), of which Hq is a multiple of Hk.

    causal and window_size, (left, right) with -1 for unbounded, are aligned at the bottom right. softcap: c in
    c · tanh(score / c), 0 for none. alibi_slopes: (Hq,) or (B, Hq), float32. With return_attn_probs=True returns
    (out, lse, None): lse is (B, Hq, Sq), -inf for rows that see no key, where flash-attn has inf; and the
    probabilities, which flash-attn returns for tests alone, are never in memory.
    """
    check_no_text(return_attn_probs=return_attn_probs)
    check_tensors(q=q, k=k, v=v)
    out, lse = _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool,
    **lengths: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_no_text(causal=causal)
    out, lse = api.attention(
        q, k, v, scale=softmax_scale, causal=bool(causal), window=window_of(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=True,
        **dropout_options("dropout_p", dropout_p, q), **lengths,
    )  # fmt: skip
    return out, lse


@renaming(
    torch.compiler.is_compiling, scale="softmax_scale", window="window_size", page_table="block_table",
    seqlens_k="cu_seqlens_k.diff()",
)  # fmt: skip
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """`flash_attn_func` of sequences one after another: q (total_q, Hq, D), k and v (total_k, Hk, D).

    cu_seqlens_q, cu_seqlens_k: (B + 1,) integers, where each of them begins, and the end; rows behind that get 0.
    max_seqlen_q, max_seqlen_k: the greatest lengths, which choose tiles and never change what comes out. lse is
    (Hq, total_q). block_table: (B, pages of one) integers; k and v are (pages, page, Hk, D) then, of which sequence n
    has the first cu_seqlens_k[n + 1] - cu_seqlens_k[n] rows; no gradients.
    """
    check_no_text(return_attn_probs=return_attn_probs)
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if block_table is None:
        lengths["cu_seqlens_k"] = cu_seqlens_k
    else:
        check_tensors(block_table=block_table)
        lengths |= {"seqlens_k": _lengths_of(cu_seqlens_k), "page_table": block_table}
    out, lse = _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **lengths
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _lengths_of(ends: torch.Tensor) -> torch.Tensor:
    if ends.dim() != 1 or not len(ends) or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens_k is {ends.dtype} of shape {tuple(ends.shape)}; it must be int32 or int64, (sequences + 1,)"
        )
    return ends.diff()


def _taking(function: Any, *tensors: str) -> Any:
    """Shows one as a function with these in the place of q, k and v, and of k and v's lengths."""

    def shown(own: Any) -> Any:
        signature = inspect.signature(function)
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in tensors]
        given = [x for x in signature.parameters.values() if x.default is not x.empty]
        own.__signature__ = signature.replace(parameters=[*first, *given])
        return unscripted(own)

    return shown


@_taking(flash_attn_func, "qkv")
def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of q, k and v in one tensor, (B, S, 3, H, D), which is not copied."""
    return flash_attn_func(*_unpacked("qkv", qkv, 3), *args, **options)


@_taking(flash_attn_func, "q", "kv")
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of k and v in one tensor, (B, Sk, 2, Hk, D), which is not copied."""
    return flash_attn_func(q, *_unpacked("kv", kv, 2), *args, **options)


@_taking(flash_attn_varlen_func, "qkv", "cu_seqlens", "max_seqlen")
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor, (total, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, 3, "rows of all sequences")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


@_taking(flash_attn_varlen_func, "q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor, (total_k, 2, Hk, D)."""
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, 2, "rows of all sequences"), *args, **options)


def _unpacked(name: str, x: torch.Tensor, parts: int, before: str = "batch, sequence") -> Any:
    check_tensors(**{name: x})
    axis = before.count(",") + 1
    if x.dim() != axis + 3 or x.shape[axis] != parts:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({before}, {parts}, heads, dim)")
    return x.unbind(axis)


@renaming(
    torch.compiler.is_compiling, scale="softmax_scale", window="window_size", page_table="block_table",
    seqlens_k="cache_seqlens",
)  # fmt: skip
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q, (B, Sq, Hq, D), to caches that are filled in part, after new rows are written behind what is
    there, in place. No gradients.

    Parameters
    ----------
    k_cache, v_cache : (B, S, Hk, D)
        Of more entries the first B. They are written to, and share memory with nothing but the new rows of each. With
        cache_batch_idx (entries, S, Hk, D), with block_table (pages, page, Hk, D), page being any number.
    k, v : (B, new, Hk, D), optional
        New rows, which become those from cache_seqlens on; a row without room is refused on a CPU and left out on a
        GPU.
    rotary_cos, rotary_sin : (positions, half), optional
        Turn k and q by the angles of their positions in the sequence, their first 2 half columns, pairs being (2 i,
        2 i + 1), or with rotary_interleaved=False (i, i + half). Without causal and window_size all queries of a
        sequence have the position of the first one.
    cache_seqlens : int or (B,) int32 or int64, optional
        Rows that are filled before the call; default all. Below 0 nothing is written, and the result is 0.
    cache_batch_idx : (B,) int32 or int64, optional
        The entry of the caches that is each sequence's. Where one is that of two, either's new rows are left there.
    cache_leftpad : (B,) int32 or int64, optional
        The first row of each sequence that is attended.
    block_table : (B, pages of one) int32 or int64, optional
        The pages of each sequence; -1 where none is reached.
    num_splits : int
        Ignored: it changes no more than the time.
    softmax_scale, causal, window_size, softcap, alibi_slopes : as of flash_attn_func

    Returns
    -------
    (B, Sq, Hq, D), or with return_softmax_lse=True (that, lse): lse is (B, Hq, Sq)
    """
    check_no_text(return_softmax_lse=return_softmax_lse)
    out, lse = kvcache.attend(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, table=block_table, table_name="block_table", softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _later(name: str, what: str, instead: str) -> Any:
    def refused(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {what} are not served yet; {instead}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = "Raises NotImplementedError: not served yet."
    return refused


# diffusers imports these two by name with the others; it calls them for parts of a sequence on several GPUs.
_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = (
    _later(f"_wrapped_flash_attn_{x}", "parts of a sequence on several GPUs", "call flash_attn_func on the whole one")
    for x in ("forward", "backward")
)
