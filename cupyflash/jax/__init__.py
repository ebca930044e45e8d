"""Attention for JAX: differentiable, under jit, vmap, scan, remat and shard_map, on CPU and GPU."""

from __future__ import annotations

from typing import Any

import jax

from .. import api, interop
from ..interop import jax_ops
from ..problem import ARRAYS, check_flag, complete
from ..signature import like

__all__ = ["attention"]


@like(api.attention, without=("out",))
def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: bool = False, **options: Any) -> Any:
    check_flag("return_lse", return_lse)
    arrays = {"q": q, "k": k, "v": v, **{row.name: options.pop(row.name, None) for row in ARRAYS}}
    for name, x in arrays.items():
        if not isinstance(x, jax.Array) and (x is not None or name in "qkv"):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array")
    family = options.pop("family", None)
    o, lse = jax_ops.forward(interop.library("q", q), arrays, {}, return_lse, complete(options), family)
    return (o, lse) if return_lse else o
