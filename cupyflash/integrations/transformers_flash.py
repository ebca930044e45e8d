"""What transformers asks of a name with "flash": flash-attn's functions, for packed, unpadded and cached sequences.

It looks them up in one place, `modeling_flash_attention_utils._lazy_imports`, and reads from their signatures which
options it may hand over: one that a function does not name is dropped there without a word.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from ..compat import flash_attn, kvcache
from ..other_names import renaming
from ..torch.dropout import check_tensors
from .transformers_arguments import HARMLESS

# What layers give that transformers' own function of flash-attn reads, or that changes no result.
_TAKEN = {
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "deterministic", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "cache", "block_table", "k_cache", "v_cache", "read_index",
    "write_index", "logits_indices", "logits_processor_args",
}  # fmt: skip
_THEIRS = {"scale": "softmax_scale", "window": "window_size", "sinks": "s_aux"}
_names: set[str] = set()


# ---- flash-attn's functions, with sinks -----------------------------------------------------------------------------


@renaming(torch.compiler.is_compiling, **_THEIRS)
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cupyflash.compat.flash_attn.flash_attn_func` with s_aux, (Hq,): a score more in the denominator of each row."""
    check_tensors(q=q, k=k, v=v)
    return _out(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux)


@renaming(torch.compiler.is_compiling, **_THEIRS)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same of sequences one after another: q (total_q, Hq, D), k and v (total_k, Hk, D).

    cu_seqlens_q, cu_seqlens_k: (B + 1,) integers. max_seqlen_q, max_seqlen_k: hints; in training they are tensors of no
    axis, which are not read: that would wait for the device.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _out(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip


def _out(
    q: Any, k: Any, v: Any, dropout_p: Any, scale: Any, causal: Any, window: Any, softcap: Any, deterministic: Any,
    sinks: Any, **lengths: Any,
) -> torch.Tensor:  # fmt: skip
    out, _ = flash_attn._attention(
        q, k, v, dropout_p, scale, causal, window, softcap, None, deterministic, sinks=sinks, **lengths
    )  # fmt: skip
    return out


@renaming(torch.compiler.is_compiling, **_THEIRS, page_table="block_table", seqlens_k="cache_seqlens")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cupyflash.compat.flash_attn.flash_attn_with_kvcache` of pages, with s_aux.

    q (N, 1, Hq, D) attends to pools k_cache and v_cache, (pages, page, Hk, D), views that may interleave, after k and
    v, (N, 1, Hk, D), are written there behind the cache_seqlens rows of each sequence. A sequence of -1 rows pads a
    graph: it writes nothing, and its result is 0.
    """
    out, _ = kvcache.attend(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, table=block_table, table_name="block_table",
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, sinks=s_aux,
    )  # fmt: skip
    return out


# ---- what transformers calls ----------------------------------------------------------------------------------------


def answer(name: str) -> None:
    """Let transformers find these functions where it looks for those of flash-attn by `name`.

    ValueError where it does so for another by that name, ImportError where this version has no such place.
    """
    import transformers
    from transformers import modeling_flash_attention_utils as theirs

    if not re.fullmatch(r"\w+", name) or re.fullmatch(r"flash_attention_\d", name):
        raise ValueError(
            f"name is {name!r}; it must be letters, digits and _, and none of transformers' own: such as 'cupyflash2'"
        )
    own, look = dict(vars(theirs)), getattr(theirs, "_lazy_imports", None)
    if look is not None and not _names:

        @functools.wraps(look)
        def _lazy_imports(implementation: Any, *args: Any, **options: Any) -> Any:
            if implementation not in _names:
                return look(implementation, *args, **options)
            ours = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
            return *ours, theirs._pad_input, theirs._unpad_input

        theirs._lazy_imports = _lazy_imports
    _names.add(name)
    try:
        found: Any = theirs.lazy_import_flash_attention(name)[0][1]
    except (NameError, AttributeError, ImportError, TypeError, ValueError, LookupError, OSError):
        found = None
    if found is not flash_attn_varlen_func:
        _names.remove(name)
        vars(theirs).update(own)
        raise ImportError(
            f"transformers {transformers.__version__} does not ask modeling_flash_attention_utils._lazy_imports for "
            f"three functions of flash-attn and two of padding, as 5.23 does: name is "
            f"{name!r}; it must not hold 'flash' here"
        )


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: torch.Tensor | None = None, use_vmap: bool = False, config: Any = None, **options: Any,
) -> torch.Tensor | None:  # fmt: skip
    """transformers' mask of flash-attn: (B, kv_length) booleans, False where padding is, or None.

    ValueError where that cannot say what is hidden: more than causality, windows and padding.
    """
    from transformers import masking_utils as theirs

    of = f"the model of {type(config).__name__}"
    hides = getattr(mask_function, "__qualname__", "")
    if use_vmap or hides.startswith("or_masks"):
        raise refused(f"{of} shows or hides more than causality, windows and padding do")
    if attention_mask is None and mask_function is not theirs.bidirectional_mask_function:
        if isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
            raise refused(f"{of} has no attention_mask that says which keys of a static cache are there")
        if batch_size > 1 and not torch.compiler.is_compiling() and _of_packed(mask_function):
            raise refused(f"{of} has position_ids that start anew, in a batch of {batch_size}; packed, it must be of 1")
    return theirs.flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, config=config, **options
    )


def _of_packed(mask_function: Any) -> bool:
    """Whether a mask function keeps sequences apart that are packed into rows of a batch."""
    if getattr(mask_function, "__qualname__", "").startswith("packed_sequence_mask_function"):
        return True
    held = [x.cell_contents for x in getattr(mask_function, "__closure__", None) or ()]
    return any(_of_packed(f) for x in held if isinstance(x, tuple) for f in x if callable(f))


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' own function of flash-attn, after a look at what it drops, or reads otherwise than it is meant."""
    from transformers.integrations.flash_attention import flash_attention_forward

    layer = type(module).__name__
    given = {name: x for name, x in options.items() if x is not None}
    packed = "cu_seq_lens_q" in given
    for name, x in given.items():
        if name not in _TAKEN | HARMLESS and not (name == "seq_idx" and packed):
            raise refused(f"{layer} gives its attention {name}, a {type(x).__name__}, which is not understood")
    if packed != ("cu_seq_lens_k" in given):
        raise refused(f"{layer} gives one of cu_seq_lens_q and cu_seq_lens_k alone")
    if attention_mask is not None and (packed or attention_mask.dim() != 2):
        beside = " beside cu_seq_lens_q" if packed else ""
        raise refused(f"{layer} has a mask of shape {tuple(attention_mask.shape)}{beside}")
    if query.dtype is torch.float32 and not any(isinstance(x, torch.nn.Linear) for x in module.modules()):
        raise refused(f"{layer} is given float32 and has no torch.nn.Linear, by which transformers sees what was meant")
    window, causal = given.get("sliding_window"), given.get("is_causal", getattr(module, "is_causal", True))
    if window is not None and not causal and window == vars(module.config).get("sliding_window"):
        raise refused(f"{layer} shows sliding_window - 1 = {window - 1} keys to each side, and its mask one more")
    queries, keys = query.shape[2], key.shape[2]
    others = queries != keys or getattr(module, "is_decoder", False)  # queries of another sequence than keys
    if attention_mask is not None and not causal and queries > 1 and others:
        raise refused(f"{layer} has {queries} queries beside a mask of keys, which transformers reads as theirs too")
    if packed:  # longest lengths are hints, but without them the offsets are not looked at
        for name, x in (("max_length_q", query), ("max_length_k", key)):
            if options.get(name) is None:
                options[name] = x.shape[2]
    return flash_attention_forward(module, query, key, value, attention_mask, **options)


def refused(why: str) -> ValueError:
    return ValueError(f"{why}; its attn_implementation must be 'eager', or a name without 'flash'")
