"""`cupyflash.attention` and `attention_backward` as one function with a custom derivative."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from .. import api


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
    immutable; lse carries no gradient (as under `jax.lax.stop_gradient`); and arrays must be concrete, so no `jax.jit`,
    `vmap` or `scan` around the call yet.

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


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array | None, options: dict[str, Any]
) -> tuple[Any, Any]:
    out, lse = api.attention(q, k, v, key_mask=key_mask, return_lse=True, **options)
    return (out, lse), (q, k, v, key_mask, out, lse)


def _backward(options: dict[str, Any], kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, key_mask, out, lse = kept
    dout, _ = cotangents
    return *api.attention_backward(dout, q, k, v, out, lse, key_mask=key_mask, **options), None


_attention.defvjp(_forward, _backward)
