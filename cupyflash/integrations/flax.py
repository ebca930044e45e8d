"""Flax: `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`; parameters, decoding caches and all else are the
stock layer's."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx

from ..jax import attention
from ..weights import attention_weights


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Any = nnx.nn.dtypes.promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """nnx.dot_product_attention, of query (..., length, heads, dim), key and value (..., keys, heads, dim).

    mask and bias: (..., heads, length, keys), of which any length may be 1. Dropout draws for each batch entry and
    head; broadcast_dropout and precision are not looked at. With `module` (sow_weights=True) the weights are made, too,
    and given to it: NotImplementedError beside dropout, which does not apply to them here.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    lead = query.shape[:-3]

    def folded(x: jax.Array) -> jax.Array:  # axes before the last three as one
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) if len(lead) > 1 else x

    def of_pairs(name: str, x: jax.Array) -> jax.Array:
        own = x.shape[:-3]
        if len(lead) > 1 and math.prod(own) > 1 and own != lead:
            if len(own) > len(lead) or any(a not in (1, b) for a, b in zip(own[::-1], lead[::-1])):
                raise ValueError(f"{name} has shape {x.shape}; before its last three axes it must have {lead}, or 1")
            x = jax.numpy.broadcast_to(x, (*lead, *x.shape[-3:]))
        return folded(x)

    options: dict[str, Any] = {"causal": "top_left" if is_causal else False}
    if mask is not None:
        options["mask"] = of_pairs("mask", mask.astype(bool))
    if bias is not None:
        options["bias"] = of_pairs("bias", bias)
    drops = dropout_rate > 0 and not deterministic
    if module is not None:
        if drops:
            raise NotImplementedError(
                f"sow_weights is True and dropout_rate is {dropout_rate}; weights are those before dropout: it must be "
                "0, or deterministic True"
            )
        weights = attention_weights(folded(query), folded(key), **options)
        module.sow(nnx.Intermediate, "attention_weights", weights.reshape(*lead, *weights.shape[-3:]))
    if drops:
        options |= {"dropout": dropout_rate, "seed": jax.random.bits(dropout_rng, (1,), "uint32")}
    out: jax.Array = attention(folded(query), folded(key), folded(value), **options)
    return out.reshape(*lead, *out.shape[-3:])
