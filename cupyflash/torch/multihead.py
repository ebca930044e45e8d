"""torch.nn.MultiheadAttention with these kernels: the same parameters, so that the stock module's weights load."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import api
from ..other_names import renaming
from ..signature import refuse_jit_script
from .dropout import check_tensors, dropout_options


@functools.cache
def _say(why: str) -> None:
    warnings.warn(f"{why}: torch.nn.MultiheadAttention's own forward computes that, not cupyflash", stacklevel=3)


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Multi-head attention between (N, L, E) sequences with projections (Vaswani et al. 2017), in the place of
    torch.nn.MultiheadAttention.

    Constructor, parameters, state dict and the arguments of forward are those of the stock module, but that
    need_weights is False unless said: where it is True, and with add_bias_kv or add_zero_attn, PyTorch's own forward
    computes, and a warning says so once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        more = {"add_bias_kv": self.bias_k is not None, "add_zero_attn": self.add_zero_attn}
        self._theirs = next((f"{name} is True" for name, given in more.items() if given), None)
        if self._theirs:
            _say(self._theirs)

    __prepare_scriptable__ = refuse_jit_script

    @renaming(torch.compiler.is_compiling, q="query", k="key", v="value", mask="attn_mask", key_mask="key_padding_mask")
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query, (N, L, E) with batch_first, else (L, N, E), or (L, E), to key and value, of S keys.

        key_padding_mask, (N, S) or (S,), and attn_mask, (L, S) or (N · heads, L, S): booleans, True where a key is
        hidden, or numbers added to the scores. is_causal says that attn_mask is the causal one, which then is not read:
        query i sees keys j <= i. Returns the result, shaped as query, and None, or with need_weights the
        probabilities, averaged over heads or not.
        """
        if need_weights or self._theirs:
            if not self._theirs:
                _say("need_weights is True")
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check(query, key, value)
        for name, x in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if x is not None and x.dtype is not torch.bool and not x.is_floating_point():
                raise TypeError(
                    f"{name} has dtype {x.dtype}; it must be torch.bool (True: hidden) or floating (added to scores)"
                )
        batched = query.dim() == 3
        if batched and not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in self._projected(query, key, value))
        options: dict[str, Any] = dropout_options("dropout", self.dropout if self.training else 0.0, q)
        if is_causal:
            options["causal"], attn_mask = "top_left", None
        queries, keys, heads = q.shape[-3], k.shape[-3], self.num_heads * (q.shape[0] if batched else 1)
        if attn_mask is not None and tuple(attn_mask.shape) not in ((queries, keys), (heads, queries, keys)):
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}; it must be (L, S), {(queries, keys)}, or (N · heads, "
                f"L, S), {(heads, queries, keys)}"
            )
        of_keys = (q.shape[0], keys) if batched else (keys,)
        if key_padding_mask is not None and tuple(key_padding_mask.shape) != of_keys:
            raise ValueError(
                f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be {of_keys} (True: hidden)"
            )
        if attn_mask is not None and attn_mask.dim() == 3 and batched:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        bias = None
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            options["mask"] = ~attn_mask
        elif attn_mask is not None:
            bias = attn_mask
        if key_padding_mask is not None and key_padding_mask.dtype is torch.bool:
            options.setdefault("key_mask", ~key_padding_mask)
        elif key_padding_mask is not None:
            hides = key_padding_mask[:, None, None] if batched else key_padding_mask
            bias = hides if bias is None else bias + hides
        out = self.out_proj(api.attention(q, k, v, bias=bias, **options).flatten(-2))
        return (out.transpose(0, 1) if batched and not self.batch_first else out), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        check_tensors(query=query, key=key, value=value)
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, width in widths:
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; it must be "
                    f"{query.dim() if query.dim() == 2 else 3}-dimensional, with {width} as its last length"
                )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        return tuple(linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases))
