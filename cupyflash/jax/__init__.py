"""Attention for JAX: `attention`, and `dot_product_attention` in the place of jax.nn's, on CPU and GPU.

Under jit, grad, jvp, hessian, vmap (the mapped axis becomes a part of the batch), scan, remat and shard_map. XLA calls
back into Python, on its own stream and with its own memory (`jax.experimental.buffer_callback`), so what is traced
cannot be exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import api
from ..latent import operands
from ..later import later
from ..problem import ARRAYS, DESCALES
from ..scalars import check_flag
from ..signature import like
from .dot_product import dot_product_attention

__all__ = ["attention", "dot_product_attention"]

if TYPE_CHECKING:
    from . import parallel as parallel
else:
    __getattr__, __dir__ = later(__name__, "parallel")


@like(api.attention, without=("out",))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array | None = None, *, return_lse: bool = False, **options: Any
) -> Any:
    """Exact attention on JAX arrays, traced or not, twice differentiable by q, k, v, bias, alibi_slopes, sinks and
    what is in score_arrays: in forward mode, in reverse mode, or in both.

    Takes and returns what `cupyflash.attention` does, out and lse both differentiable, but for `out`, as JAX arrays are
    immutable. What is wrong with a call is said while it is traced.

    Raises
    ------
    TypeError, ValueError
        q, k or v is no JAX array, or another one neither that nor NumPy's; and as `cupyflash.attention` does.
    NotImplementedError
        A third derivative; one of second order in forward mode alone, when it is compiled; sinks, their tangents or
        their gradients that have an axis of vmap, in forward mode or in a second derivative.
    """
    check_flag("return_lse", return_lse)
    required = operands(options.get("latent"), v)
    arrays = {"q": q, "k": k, "v": v, **{row.name: options.get(row.name) for row in ARRAYS if not row.placed}}
    numbers = {"seed": Integral, **dict.fromkeys(DESCALES, Real)}  # what may be one in the place of an array
    arrays = {name: x for name, x in arrays.items() if name not in numbers or not isinstance(x, numbers[name])}
    read = options.get("score_arrays")
    arrays |= {f"score_arrays[{name!r}]": x for name, x in read.items()} if isinstance(read, Mapping) else {}
    for name, x in arrays.items():
        if not isinstance(x, jax.Array) and (name in required or not (x is None or isinstance(x, np.ndarray))):
            more = "" if name in "qkv" else " or a numpy.ndarray"
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array{more}")
    return api.attention(q, k, v, return_lse=return_lse, **options)
