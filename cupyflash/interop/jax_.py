"""JAX arrays, eager ones. On a GPU a call borrows their memory as CuPy arrays: see `jax_gpu`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from ..problem import View, contiguous
from .numpy_ import dtype_name
from .protocol import Arrays

kind = "jax"


def objection(cls: type) -> str | None:
    return None if issubclass(cls, (jax.Array, jax.core.Tracer)) else "it must be an array"


def on_gpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "gpu"


def view(x: jax.Array) -> View:
    dtype = dtype_name(x.dtype) if isinstance(x.dtype, np.dtype) else str(x.dtype)
    return View(x.shape, contiguous(x.shape), dtype, _where(x), kind)


def _where(x: jax.Array) -> str:
    if isinstance(x, jax.core.Tracer):
        return ""  # will be known when what is traced runs
    device = next(iter(x.devices()))
    return f"cuda:{device.local_hardware_id}" if device.platform == "gpu" else device.platform


def recorder(arrays: Arrays, backward: bool = False) -> None:
    return None  # jax.grad gives tracers, which `lend` refuses


def check_target(name: str, x: jax.Array) -> None:
    raise TypeError(f"{name} is given to be written, but JAX arrays are immutable; use the result instead")


def written(x: jax.Array) -> None:
    pass


def wrap(name: str, x: Any) -> jax.Array:
    raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array, as q is")


def lend(arrays: Arrays) -> tuple[Any, Arrays]:
    """The arrays of one call for its backend: themselves on a CPU, CuPy arrays over their memory on a GPU."""
    given = {name: x for name, x in arrays.items() if x is not None}
    for name, x in given.items():
        if isinstance(x, jax.core.Tracer):
            cls = type(x)
            raise TypeError(
                f"{name} is a {cls.__module__}.{cls.__qualname__}; it must be a concrete array: calls inside jax.jit, vmap "
                "or scan are not supported yet; call outside them, and for gradients use cupyflash.jax.attention (jax.grad "
                "outside jit) or cupyflash.attention_backward"
            )
        if x.is_deleted():
            raise ValueError(f"{name} is deleted; it must be an array that was not donated to a jitted function")
        if len(x.devices()) > 1:
            raise ValueError(f"{name} is sharded over {len(x.devices())} devices; it must be on one")
        if not on_gpu(x) and _where(x) != "cpu":
            raise ValueError(f"{name} is on a {_where(x)}; it must be on a CPU or a GPU")
    if not any(on_gpu(x) for x in given.values()):
        return sys.modules[__name__], arrays
    from .jax_gpu import Loan

    for name, x in given.items():
        if not on_gpu(x):
            raise ValueError(f"{name} is on {_where(x)} but other arrays are on a GPU; all must be on one device")
    loan = Loan()
    return loan, {name: None if x is None else loan.take(x) for name, x in arrays.items()}


def to_numpy(x: jax.Array) -> np.ndarray:
    return np.asarray(x)


def from_numpy(a: np.ndarray) -> jax.Array:
    return jax.device_put(a, None if jax.default_backend() == "cpu" else jax.devices("cpu")[0])
