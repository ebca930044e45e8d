"""The functions of the package flash-attn (2.x): change `from flash_attn import` to `from cupyflash.compat.flash_attn
import`.

Shapes and options as there; any dtype, head dimension and device that `cupyflash.attention` takes. What is not served
(packed sequences, a key/value cache) raises NotImplementedError.
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
    if isinstance(causal, str):  # "top_left" means nothing there, and "no" would be yes
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    out, lse = api.attention(
        q, k, v, scale=softmax_scale, causal=bool(causal), window=window_of(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_lse=True, **dropout_options("dropout_p", dropout_p, q),
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _taking(*tensors: str) -> Any:
    """Shows a function as `flash_attn_func` with these in the place of q, k and v."""

    def shown(function: Any) -> Any:
        own = inspect.signature(flash_attn_func)
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in tensors]
        function.__signature__ = own.replace(parameters=[*first, *list(own.parameters.values())[3:]])
        return function

    return shown


@_taking("qkv")
def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of q, k and v in one tensor, (B, S, 3, H, D), which is not copied."""
    return flash_attn_func(*_unpacked("qkv", qkv, 3), *args, **options)


@_taking("q", "kv")
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of k and v in one tensor, (B, Sk, 2, Hk, D), which is not copied."""
    return flash_attn_func(q, *_unpacked("kv", kv, 2), *args, **options)


def _unpacked(name: str, x: torch.Tensor, parts: int) -> Any:
    check_tensors(**{name: x})
    if x.dim() != 5 or x.shape[2] != parts:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, sequence, {parts}, heads, dim)")
    return x.unbind(2)


def window_of(window: tuple[int, int]) -> tuple[int | None, int | None]:
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window!r}; it must be two integers, -1 where a side is unbounded") from None
    return None if left < 0 else left, None if right < 0 else right


def _later(name: str, what: str, instead: str = "pad the sequences, and hide the padding with key_mask") -> Any:
    def refused(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {what} are not served yet; {instead}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = "Raises NotImplementedError: not served yet."
    return refused


# Others read the arguments of these, and take flash_attn_func to have the same.
_PACKED = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
flash_attn_varlen_func = _taking("q", "k", "v", *_PACKED)(_later("flash_attn_varlen_func", "packed sequences"))
flash_attn_varlen_qkvpacked_func = _taking("qkv", "cu_seqlens", "max_seqlen")(
    _later("flash_attn_varlen_qkvpacked_func", "packed sequences")
)
flash_attn_varlen_kvpacked_func = _taking("q", "kv", *_PACKED)(
    _later("flash_attn_varlen_kvpacked_func", "packed sequences")
)
flash_attn_with_kvcache = _taking("q", "k_cache", "v_cache")(_later("flash_attn_with_kvcache", "key/value caches"))
# diffusers imports these two by name with the others; it calls them for parts of a sequence on several GPUs.
_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = (
    _later(f"_wrapped_flash_attn_{x}", "parts of a sequence on several GPUs", "call flash_attn_func on the whole one")
    for x in ("forward", "backward")
)
