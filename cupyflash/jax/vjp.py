"""`cupyflash.attention` and `attention_backward` as one function with a custom derivative."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from .. import api
from ..lse_gradient import attention_backward


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    key_mask: jax.Array | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    family: str | None = None,
) -> Any:
    """Exact attention on JAX arrays, differentiable with respect to q, k and v by `jax.grad` and `jax.vjp`.

    Takes and returns what `cupyflash.attention` does, with these restrictions: there is no `out`, as JAX arrays are
    immutable; and arrays must be concrete, so no `jax.jit`, `vmap` or `scan` around the call yet. out and lse are both
    differentiable.

    Raises
    ------
    TypeError
        An array is traced or is no JAX array.
    """
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "layout": layout, "deterministic": deterministic,
        "family": family,
    }  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array")
    o, lse = _attention(q, k, v, key_mask, options)
    return (o, lse) if return_lse else o


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array | None, options: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    return api.attention(q, k, v, key_mask=key_mask, return_lse=True, **options)


def _forward(q: Any, k: Any, v: Any, key_mask: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    q, k, v = q.value, k.value, v.value
    key_mask = None if key_mask is None else key_mask.value
    out, lse = api.attention(q, k, v, key_mask=key_mask, return_lse=True, **options)
    return (out, lse), (q, k, v, key_mask, out, lse)


def _backward(options: dict[str, Any], kept: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, key_mask, out, lse = kept
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    return *attention_backward("jax", dout, dlse, q, k, v, out, lse, key_mask=key_mask, **options), None


_attention.defvjp(_forward, _backward, symbolic_zeros=True)  # else what the loss does not depend on comes as zeros
