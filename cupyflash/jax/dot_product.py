"""jax.nn.dot_product_attention, with its signature and semantics."""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any

import jax
from jax import numpy as jnp

from .. import api
from ..other_names import renaming
from ..scalars import check_no_text


@renaming(q="query", k="key", v="value", window="local_window_size")
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Exact attention in the place of jax.nn.dot_product_attention.

    Parameters
    ----------
    query : (B, T, N, H), or (T, N, H)
    key, value : (B, S, K, H), or without B
        N is a multiple of K. float16, bfloat16, float32 or float64.
    bias : broadcasts to (B, N, T, S), optional
        Added to the scores; differentiable. float32 or the dtype of query; others are cast to that.
    mask : broadcasts to (B, N, T, S), optional
        True where a query may attend a key. Queries that may attend no key get 0 (the mean of value in jax.nn).
    scale : float, optional
        Default 1 / sqrt(H).
    is_causal : bool
        Query i attends keys j <= i.
    query_seq_lengths, key_value_seq_lengths : (B,) int32, optional
        Queries from there on get 0, and a residual of -inf; keys from there on are not attended.
    local_window_size : int or (left, right), optional
        Keys that a query attends beside its own position.
    implementation : None, "xla" or "cudnn"
        What jax.nn takes; these kernels compute in any case.
    return_residual : bool
        Also return the log-sum-exp of each row, (B, T, N), in the dtype of query, through which no gradient flows.

    Returns
    -------
    Shaped as query, or (that, residual).

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it is and what it must be.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            f"implementation is {implementation!r}; it must be None, 'xla' or 'cudnn', beside which nothing changes"
        )
    check_no_text(is_causal=is_causal, return_residual=return_residual)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None:
            raise TypeError(f"{name} is None; it must be an array")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if query.ndim not in (3, 4):
        raise ValueError(f"query has shape {query.shape}; it must be (B, T, N, H) or (T, N, H)")
    options: dict[str, Any] = {"scale": scale}
    if bias is not None:
        bias = _fitting(jnp.asarray(bias), query.ndim)
        options["bias"] = bias if bias.dtype in (query.dtype, jnp.float32) else bias.astype(query.dtype)
    seen = None if mask is None else _fitting(jnp.asarray(mask), query.ndim)
    (t, s), diagonal = (query.shape[-3], key.shape[-3]), key.shape[-3] - query.shape[-3]
    if is_causal:
        options["causal"] = "top_left"
    if local_window_size is not None:
        left, right = _window(local_window_size)
        if is_causal or diagonal == 0:  # whose diagonal is the one of jax.nn
            options["window"] = (left, right)
        else:  # without causal it is at the bottom right here
            band = jnp.arange(s)[None] - jnp.arange(t)[:, None]
            inside = (band >= -left) & (band <= right)
            seen = inside if seen is None else jnp.atleast_2d(seen)
            seen &= inside.reshape(
                (1,) * (seen.ndim - 2) + inside.shape
            )  # no rank is promoted: JAX may be told to refuse it
    if seen is not None:
        options["mask"] = seen
    if key_value_seq_lengths is not None:
        options["key_mask"] = _below(key_value_seq_lengths, s, query.shape, "key_value_seq_lengths")
    own = None
    if query_seq_lengths is not None:  # what is in the rows behind reaches no gradient either
        own = _below(query_seq_lengths, t, query.shape, "query_seq_lengths")[..., None]
        query = jnp.where(own[..., None], query, 0)
    found: Any = api.attention(query, key, value, return_lse=return_residual, **options)
    out, lse = found if return_residual else (found, None)
    if own is not None:
        out = jnp.where(own[..., None], out, 0)
    if lse is None:  # nor asked for: an lse of -inf stops who runs with jax_debug_infs
        return out
    lse = lse.swapaxes(-1, -2)
    if own is not None:
        lse = jnp.where(own, lse, -jnp.inf)
    return out, jax.lax.stop_gradient(lse.astype(query.dtype))


def _fitting(x: jax.Array, rank: int) -> jax.Array:
    """An array over pairs that has the axis of the batch only if query has it."""
    return x[0] if x.ndim == 4 and rank == 3 and x.shape[0] == 1 else x


def _window(size: Any) -> tuple[int, int]:
    try:
        left, right = map(operator.index, (size,) * 2 if isinstance(size, Integral) else size)
        if left >= 0 and right >= 0:
            return left, right
    except (TypeError, ValueError):
        pass
    raise ValueError(f"local_window_size is {size!r}; it must be an integer, 0 or more, or two of them (left, right)")


def _below(lengths: Any, n: int, shape: tuple[int, ...], name: str) -> jax.Array:
    """(B, n) booleans: position < length; (n,) where query, of this shape, has no batch."""
    lengths, batch = jnp.asarray(lengths), shape[0] if len(shape) == 4 else 1
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"{name} has shape {lengths.shape} and dtype {lengths.dtype}; it must be ({batch},) and int32")
    seen = jnp.arange(n, dtype=jnp.int32)[None] < lengths[:, None]
    return seen if len(shape) == 4 else seen[0]
