"""The public functions, by the library of q."""

from __future__ import annotations

import functools
from typing import Any

from . import calls
from .adapters import named
from .arrays import library


@functools.wraps(calls.attention)
def attention(q: Any, k: Any, v: Any, group: Any = None, **given: Any) -> Any:
    kind = _library(q)
    given.setdefault("rows", None)  # of what is left out all ranks are told
    return _functions(kind).attention(q, k, v, named(group, kind), **given)


@functools.wraps(calls.attention_backward)
def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, group: Any = None, **given: Any) -> Any:
    kind = _library(q)
    given.setdefault("rows", None)
    return _functions(kind).attention_backward(dout, q, k, v, out, lse, named(group, kind), **given)


@functools.wraps(calls.merge)
def merge(out: Any, lse: Any, group: Any = None, **given: Any) -> tuple[Any, Any]:
    kind = _library(out)
    return _functions(kind).merge(out, lse, named(group, kind), **given)


def _library(x: Any) -> str:
    """TypeError for JAX's, which have functions of their own."""
    if (kind := library(x)) in ("jax", "jaxlib"):
        raise TypeError(
            "an array of JAX is given; it must be another library's, or the call that of cupyflash.jax.parallel (from "
            "cupyflash.jax import parallel), inside shard_map"
        )
    return kind


@functools.cache  # an import statement costs 1 us in every call
def _functions(kind: str) -> Any:
    if kind != "torch":
        return calls
    from . import torch_

    return torch_
