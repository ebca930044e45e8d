"""xformers.ops.memory_efficient_attention and the attention biases that it takes, as far as they are served.

The biases here have the names and constructors of those in xformers.ops.fmha.attn_bias, whose own are taken too.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .. import api
from ..other_names import renaming
from ..signature import unscripted
from ..torch.dropout import check_tensors, dropout_options
from . import xformers_blocks
from .xformers_masks import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalLocalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    check_keys,
)

__all__ = [
    "AttentionBias", "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask", "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask", "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask", "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask", "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp", "PagedBlockDiagonalCausalLocalPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", "PagedBlockDiagonalPaddedKeysMask",
    "memory_efficient_attention", "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad", "unbind",
]  # fmt: skip

_NAMES = {
    "q": "query", "k": "key", "v": "value", "bias": "attn_bias", "mask": "attn_bias",
    "cu_seqlens_q": "attn_bias.q_seqinfo.seqstart", "cu_seqlens_k": "attn_bias.k_seqinfo.seqstart",
    "seqlens_k": "attn_bias.k_seqinfo.seqlen", "page_table": "attn_bias.block_tables",
}  # fmt: skip
unbind = torch.unbind
MemoryEfficientAttentionCutlassOp = MemoryEfficientAttentionFlashAttentionOp = None  # for op, which is ignored


class LowerTriangularMask(AttentionBias):
    """Query i sees keys j <= i."""

    def __init__(self, *tensor_args: Any, **tensor_kwargs: Any) -> None:  # xFormers ignores them too
        pass

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The same, and numbers, (B, H, M, N), added to the scores."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Query i sees keys j <= i + N - M: the last query sees the last key."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The same, and of those keys only the last `window_size`."""

    def __init__(self, _window_size: int) -> None:
        check_keys("_window_size", _window_size, 1)
        self._window_size = _window_size


class LocalAttentionFromBottomRightMask(AttentionBias):
    """Query i sees keys from i + N - M - window_left to i + N - M + window_right."""

    def __init__(self, window_left: int, window_right: int) -> None:
        check_keys("window_left", window_left, 0)
        check_keys("window_right", window_right, 0)
        self.window_left, self.window_right = window_left, window_right


@unscripted
def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of query, (B, M, H, K), to key and value, (B, N, H, K) and (B, N, H, Kv).

    (B, M, K) has one head; (B, M, G, H, K) has H query heads for each of G heads of key and value, which are expanded
    to that shape and not copied. attn_bias: a tensor added to the scores, (B, H, M, N), or one of the biases of this
    module or of xFormers with the same name; with a block-diagonal one query is (1, M, ...), sequences one after
    another, and the log-sum-exp (1, H, M). op is ignored. Returns (B, M, H, Kv), in the dtype of query or output_dtype.
    """
    return memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
    )[0]


memory_efficient_attention_forward = torch.no_grad()(memory_efficient_attention)


@renaming(torch.compiler.is_compiling, **_NAMES)
def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with the log-sum-exp of the scores, (B, H, M), or (B, G, H, M)."""
    check_tensors(query=query, key=key, value=value)
    if not query.dim() == key.dim() == value.dim():
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
        raise ValueError(f"the shapes are {shapes}; query, key and value must have as many dimensions")
    if output_dtype is not None and not (isinstance(output_dtype, torch.dtype) and output_dtype.is_floating_point):
        raise TypeError(f"output_dtype is {output_dtype!r}; it must be None or a floating-point torch.dtype")
    placed = xformers_blocks.placed(attn_bias, query, key, value)
    if placed is not None:
        return _of_blocks(placed, query.shape, p, scale, output_dtype)
    options = _options(attn_bias) | dropout_options("p", p, query)
    if query.dim() > 3 and (unclear := _of_rank(options, query.dim() - 1)):  # of heads, or of the batch?
        shape = tuple(unclear[0][1].shape)
        raise ValueError(f"attn_bias has shape {shape}; it must have as many dimensions as query, {query.dim()}")
    shape = query.shape
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        options |= {name: _of_all(x, shape, key).unsqueeze(1) for name, x in _of_rank(options, 3)}
    elif query.dim() == 5:
        query, key, value = xformers_blocks.of_groups(query, key, value)
        options |= {name: _of_all(x, shape, key).flatten(1, 2) for name, x in _of_rank(options, 5)}
    elif query.dim() != 4:
        raise ValueError(f"query has shape {tuple(shape)}; it must have 3, 4 or 5 dimensions")
    out, lse = api.attention(query, key, value, scale=scale, return_lse=True, **options)
    out = out.reshape(*shape[:-1], value.shape[-1])
    lse = lse.unflatten(1, shape[2:4]) if len(shape) == 5 else lse
    return (out if output_dtype is None else out.to(output_dtype)), lse


def _of_blocks(
    placed: xformers_blocks.Placed, shape: Any, p: float, scale: float | None, output_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sequences one after another, (1, M, ..., H, K)."""
    options = placed.options | dropout_options("p", p, placed.q)
    try:
        out, lse = api.attention(placed.q, placed.k, placed.v, scale=scale, return_lse=True, **options)
    except NotImplementedError as error:  # under vmap
        raise NotImplementedError(re.sub(r"\w+", lambda x: _NAMES.get(x[0], x[0]), str(error))) from error
    out, lse = out.reshape(*shape[:-1], placed.v.shape[-1]), lse[None]
    lse = lse.unflatten(1, shape[2:4]) if len(shape) == 5 else lse
    return (out if output_dtype is None else out.to(output_dtype)), lse


def _of_rank(options: dict[str, Any], rank: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, options[name]) for name in ("bias", "mask") if name in options and options[name].dim() == rank]


def _of_all(x: torch.Tensor, shape: Any, key: torch.Tensor) -> torch.Tensor:
    """x, (B, M, N) or (B, G, H, M, N), with all groups and heads where it has but some; ValueError if it is not so."""
    wanted = (shape[0], *shape[2:-1], shape[1], key.shape[1])
    if any(n not in (1, m) for n, m in zip(x.shape, wanted)):
        raise ValueError(
            f"attn_bias has shape {tuple(x.shape)}; it must be {wanted}, where a length of 1 stands for all"
        )
    some = x.dim() == 5 and 1 in x.shape[1:3] and x.shape[1:3] != (1, 1)
    return x.expand(-1, *shape[2:4], -1, -1) if some else x


def _options(attn_bias: Any) -> dict[str, Any]:
    """What a bias of xFormers is called here."""
    if attn_bias is None:
        return {}
    name = type(attn_bias).__name__  # of xFormers' own classes, too, of which some are tensors without elements
    if name == "LowerTriangularMask":
        return {"causal": "top_left"}
    if name == "LowerTriangularMaskWithTensorBias":
        return {"causal": "top_left", "bias": getattr(attn_bias, "_bias", getattr(attn_bias, "_subtensor", None))}
    if name == "LowerTriangularFromBottomRightMask":
        return {"causal": True}
    if name == "LowerTriangularFromBottomRightLocalAttentionMask":
        return {"causal": True, "window": (attn_bias._window_size - 1, 0)}
    if name == "LocalAttentionFromBottomRightMask":
        return {"window": (attn_bias.window_left, attn_bias.window_right)}
    if isinstance(attn_bias, torch.Tensor) and not hasattr(attn_bias, "HOLDS_DENSE_TENSOR"):
        return {"mask" if attn_bias.dtype is torch.bool else "bias": attn_bias}
    name = f"the class {attn_bias.__name__}" if isinstance(attn_bias, type) else f"a {name}"
    served = ", ".join(x for x in __all__ if "Mask" in x)
    raise NotImplementedError(f"attn_bias is {name}; it must be None, a tensor or one of {served}")
