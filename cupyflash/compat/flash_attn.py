"""The functions of the package flash-attn (2.x): change `from flash_attn import` to `from cupyflash.compat.flash_attn
import`.

Shapes and options as there; any dtype, head dimension and device that `cupyflash.attention` takes. Packed sequences are
padded to the longest one inside. What is not served (a key/value cache, pages) raises NotImplementedError.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, NoReturn

import torch

from .. import api
from ..other_names import renaming
from ..torch.dropout import check_tensors, dropout_options

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
    (out, lse, None): lse is (B, Hq, Sq), and the probabilities, which flash-attn returns for tests alone, are never in
    memory.
    """
    check_tensors(q=q, k=k, v=v)
    out, lse = _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool,
    key_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if isinstance(causal, str):  # "top_left" means nothing there, and "no" would be yes
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    out, lse = api.attention(
        q, k, v, scale=softmax_scale, causal=bool(causal), window=window_of(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes, key_mask=key_mask, deterministic=deterministic, return_lse=True,
        **dropout_options("dropout_p", dropout_p, q),
    )  # fmt: skip
    return out, lse


@renaming(torch.compiler.is_compiling, scale="softmax_scale", window="window_size")
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

    cu_seqlens_q, cu_seqlens_k: (B + 1,) integers, where each of them begins, and the end. max_seqlen_q, max_seqlen_k:
    the greatest lengths; B sequences of these lengths are computed. lse is (Hq, total_q). block_table must be None.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is not None:
        raise NotImplementedError("block_table is given; pages are not served yet: it must be None")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (rows of all sequences, heads, dim)")
    of_q, of_k = _Packed("q", q, cu_seqlens_q, max_seqlen_q), _Packed("k", k, cu_seqlens_k, max_seqlen_k)
    out, lse = _attention(
        of_q.padded(q), of_k.padded(k), of_k.padded(v), dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, of_k.there,
    )  # fmt: skip
    rows = out[of_q.places]
    return (rows, lse.transpose(1, 2)[of_q.places].transpose(0, 1), None) if return_attn_probs else rows


class _Packed:
    """Where the rows of packed sequences are in a batch that is padded at the left: there the ends are aligned, as
    causal and window_size are. Nothing of it waits for a GPU."""

    def __init__(self, name: str, x: torch.Tensor, ends: torch.Tensor, longest: int) -> None:
        if ends.dim() != 1 or not len(ends) or ends.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_seqlens_{name} is {ends.dtype} of shape {tuple(ends.shape)}; it must be integers, (batch + 1,)"
            )
        self.longest, ends = operator.index(longest), ends.long()
        lengths = ends.diff()
        if ends.device.type == "cpu" and not torch.compiler.is_compiling():
            if ends[0] != 0 or ends[-1] != len(x) or (lengths < 0).any():
                raise ValueError(
                    f"cu_seqlens_{name} is {ends.tolist()}; it must rise from 0 to {len(x)}, the rows of {name}"
                )
            if (lengths > self.longest).any():
                raise ValueError(
                    f"max_seqlen_{name} is {longest}; it must be {int(lengths.max())}, the greatest length, or more"
                )
        row = torch.arange(len(x), device=x.device)
        batch = torch.searchsorted(ends[1:].contiguous(), row, right=True)
        self.places = batch, row - ends[1:][batch] + self.longest
        self.there = torch.arange(self.longest, device=x.device) >= (self.longest - lengths)[:, None]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(B, longest, heads, dim) of rows."""
        return x.new_zeros(len(self.there), self.longest, *x.shape[1:]).index_put(self.places, x)


def _taking(function: Any, *tensors: str) -> Any:
    """Shows one as a function with these in the place of q, k and v, and of k and v's lengths."""

    def shown(own: Any) -> Any:
        signature = inspect.signature(function)
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in tensors]
        given = [x for x in signature.parameters.values() if x.default is not x.empty]
        own.__signature__ = signature.replace(parameters=[*first, *given])
        return own

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


def window_of(window: tuple[int, int]) -> tuple[int | None, int | None]:
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window!r}; it must be two integers, -1 where a side is unbounded") from None
    return None if left < 0 else left, None if right < 0 else right


def _later(name: str, what: str, instead: str = "give the keys and values as k and v") -> Any:
    def refused(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {what} are not served yet; {instead}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = "Raises NotImplementedError: not served yet."
    return refused


flash_attn_with_kvcache = _taking(flash_attn_func, "q", "k_cache", "v_cache")(
    _later("flash_attn_with_kvcache", "key/value caches")
)
# diffusers imports these two by name with the others; it calls them for parts of a sequence on several GPUs.
_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = (
    _later(f"_wrapped_flash_attn_{x}", "parts of a sequence on several GPUs", "call flash_attn_func on the whole one")
    for x in ("forward", "backward")
)
