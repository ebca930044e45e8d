"""JAX arrays, traced ones too. A call on them is an operation of JAX's: see `jax_ops`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..call import Arrays, Call
from ..problem import View, contiguous
from .numpy_ import dtype_name
from .protocol import Recorder

kind = "jax"
_jax: Any = jax


def objection(cls: type) -> str | None:
    return None if issubclass(cls, (jax.Array, jax.core.Tracer)) else "it must be an array"


def view(x: jax.Array) -> View:
    dtype = dtype_name(x.dtype) if isinstance(x.dtype, np.dtype) else str(x.dtype)
    return View(tuple(x.shape), contiguous(x.shape), dtype, _where(x), kind)


def _where(x: jax.Array) -> str:
    if isinstance(x, jax.core.Tracer):
        return ""  # will be known when what is traced runs
    if x.is_deleted():
        raise ValueError("is deleted; it must be an array that was not donated to a jitted function")
    if len(x.devices()) > 1:
        raise ValueError(
            f"is sharded over {len(x.devices())} devices; it must be on one, or the call inside jax.shard_map"
        )
    found = named(*x.devices())
    if found is None:
        raise ValueError(f"is on a {next(iter(x.devices())).platform}; it must be on a CPU or a GPU")
    return found


@functools.cache
def named(device: Any) -> str | None:
    """What a view calls a device of JAX's, if it is one that attention is computed on."""
    return {"gpu": f"cuda:{device.local_hardware_id}", "cpu": "cpu"}.get(device.platform)


def constant(x: np.ndarray, q: jax.Array) -> jax.Array:
    """A NumPy array beside q, as JAX's own functions take them; of its own dtype, and where q is."""
    where = None if isinstance(q, jax.core.Tracer) or len(q.devices()) > 1 else next(iter(q.devices()))
    double = _jax.enable_x64 if hasattr(_jax, "enable_x64") else _jax.experimental.enable_x64  # its name before
    with double(True):
        return jax.device_put(x, where)


def recorder(call: Call) -> Recorder:
    from . import jax_ops

    return jax_ops.run


def looked_at(arrays: Arrays, check: bool, look: Callable[..., None], **how: Any) -> Arrays:
    """Integers of a call that is traced, as they come out of `look` when it runs."""
    from . import jax_append

    return jax_append.looked_at(arrays, check, look, **how)


def check_target(name: str, x: jax.Array) -> None:
    raise TypeError(f"{name} is given to be written, but JAX arrays are immutable; use the result instead")


def wrap(name: str, x: Any) -> jax.Array:
    raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array, as q is")


def forward_alone(name: str, x: jax.Array) -> jax.Array:
    """x, of which JAX would find a gradient of 0 where it is rounded to integers."""

    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"{name} is written to caches of 8 bits, of which there is a forward alone, but a gradient is wanted; give "
            f"jax.lax.stop_gradient({name})"
        )

    same = jax.custom_jvp(lambda x: x)
    same.defjvp(refuse)
    return same(x)
