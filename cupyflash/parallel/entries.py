"""The public functions, by the library of q."""

from __future__ import annotations

import functools
from typing import Any

from . import calls
from .adapters import named


@functools.wraps(calls.attention)
def attention(q: Any, k: Any, v: Any, group: Any = None, **given: Any) -> Any:
    if not _tensor(q):
        return calls.attention(q, k, v, named(group), **given)
    from . import torch_

    return torch_.attention(q, k, v, named(group, "torch"), **given)


@functools.wraps(calls.attention_backward)
def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, group: Any = None, **given: Any) -> Any:
    if not _tensor(q):
        return calls.attention_backward(dout, q, k, v, out, lse, named(group), **given)
    from . import torch_

    return torch_.attention_backward(dout, q, k, v, out, lse, named(group, "torch"), **given)


@functools.wraps(calls.merge)
def merge(out: Any, lse: Any, group: Any = None, **given: Any) -> tuple[Any, Any]:
    if not _tensor(out):
        return calls.merge(out, lse, named(group), **given)
    from . import torch_

    return torch_.merge(out, lse, named(group, "torch"), **given)


def _tensor(x: Any) -> bool:
    """Whether it is PyTorch's; TypeError for JAX's, which have functions of their own."""
    module = type(x).__module__.partition(".")[0]
    if module in ("jax", "jaxlib"):
        raise TypeError(
            "an array of JAX is given; it must be another library's, or the call that of cupyflash.jax.parallel (from "
            "cupyflash.jax import parallel), inside shard_map"
        )
    return module == "torch"
