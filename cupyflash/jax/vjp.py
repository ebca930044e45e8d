"""`cupyflash.attention` and `attention_backward` as one function with a custom derivative."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from .. import api
from ..problem import ARRAYS, check_flag, seed_of
from ..signature import like

Arrays = dict[str, Any]


@like(api.attention, without=("out",))
def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: bool = False, **options: Any) -> Any:
    """Exact attention on JAX arrays, differentiable by `jax.grad` and `jax.vjp`: by q, k, v, bias, alibi_slopes and sinks.

    Takes and returns what `cupyflash.attention` does, with these restrictions: there is no `out`, as JAX arrays are
    immutable; and arrays must be concrete, so no `jax.jit`, `vmap` or `scan` around the call yet. out and lse are both
    differentiable.

    Raises
    ------
    TypeError
        An array is traced or is no JAX array.
    """
    check_flag("return_lse", return_lse)
    arrays = {"q": q, "k": k, "v": v, **{row.name: options.pop(row.name, None) for row in ARRAYS}}
    arrays["seed"], number = seed_of(arrays["seed"], options.get("dropout", 0.0))
    read = options.pop("score_arrays", None) or {}
    options["score_arrays"] = tuple(read)  # their names
    arrays |= {f"score_arrays[{name!r}]": x for name, x in read.items()}
    for name, x in arrays.items():
        if not isinstance(x, jax.Array) and (x is not None or name in "qkv"):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array")
    o, lse = _attention(arrays, options if number is None else {**options, "seed": number})
    return (o, lse) if return_lse else o


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(arrays: Arrays, options: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    return api.attention(**_arguments(arrays, options), return_lse=True)


def _arguments(arrays: Arrays, options: dict[str, Any]) -> dict[str, Any]:
    """Those of a call: the arrays that a score function reads as a dict by name."""
    keys = {f"score_arrays[{name!r}]": name for name in options["score_arrays"]}
    read = {name: arrays[key] for key, name in keys.items()}
    return {**{name: x for name, x in arrays.items() if name not in keys}, **options, "score_arrays": read or None}


def _forward(arrays: Arrays, options: dict[str, Any]) -> tuple[Any, Any]:
    optional = [row.name for row in ARRAYS if row.gradient and arrays[row.name] is not None]
    optional += [name for name in arrays if name.startswith("score_arrays[")]
    wanted = {name: () for name in optional if arrays[name].perturbed}  # keys alone: what is kept is a pytree of arrays
    arrays = {name: None if x is None else x.value for name, x in arrays.items()}
    out, lse = _attention.fun(arrays, options)
    return (out, lse), (arrays, out, lse, wanted)


def _backward(options: dict[str, Any], kept: Any, cotangents: tuple[Any, Any]) -> tuple[Arrays]:
    arrays, out, lse, wanted = kept
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    dout = jax.numpy.zeros_like(out) if dout is None else dout
    keys = {f"score_arrays[{name!r}]": name for name in options["score_arrays"]}
    wrt = [keys.get(name, name) for name in wanted]
    grads = api.attention_backward(dout, out=out, lse=lse, dlse=dlse, wrt=wrt, **_arguments(arrays, options))
    return ({name: getattr(grads, f"d{name}", None) for name in arrays},)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)  # else what the loss does not depend on comes as zeros
