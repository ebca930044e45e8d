"""JAX arrays, eager ones. On a GPU a call borrows their memory as CuPy arrays: see `jax_gpu`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from ..problem import View
from .numpy_ import dtype_name

kind = "jax"


def objection(cls: type) -> str | None:
    if issubclass(cls, jax.core.Tracer):
        return (
            "it must be a concrete array: calls inside jax.jit, vmap or scan are not supported yet; call outside them, "
            "and for gradients use cupyflash.jax.attention (jax.grad outside jit) or cupyflash.attention_backward"
        )
    return None if issubclass(cls, jax.Array) else "it must be an array"


def on_gpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "gpu"


def view(x: jax.Array) -> View:
    strides = [1]
    for extent in reversed(x.shape[1:]):
        strides.append(strides[-1] * extent)
    dtype = dtype_name(x.dtype) if isinstance(x.dtype, np.dtype) else str(x.dtype)
    device = next(iter(x.devices()))
    where = f"cuda:{device.local_hardware_id}" if device.platform == "gpu" else device.platform
    return View(x.shape, tuple(reversed(strides))[: len(x.shape)], dtype, where, kind)


def wants_grad(arrays: list[Any]) -> bool:
    return False  # jax.grad gives tracers, which are no arrays


def borrow(named: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The arrays of one call for its backend: themselves on a CPU, CuPy arrays over their memory on a GPU."""
    given = {name: x for name, x in named.items() if x is not None}
    for name in ("dq", "dk", "dv") if "dout" in named else ("out",):
        if name in given:
            raise TypeError(f"{name} is given to be written, but JAX arrays are immutable; use the result instead")
    for name, x in given.items():
        if len(x.devices()) > 1:
            raise ValueError(f"{name} is sharded over {len(x.devices())} devices; it must be on one")
        if not on_gpu(x) and view(x).device != "cpu":
            raise ValueError(f"{name} is on a {view(x).device}; it must be on a CPU or a GPU")
    if not any(on_gpu(x) for x in given.values()):
        return sys.modules[__name__], list(named.values())
    from .jax_gpu import Loan

    for name, x in given.items():
        if not on_gpu(x):
            raise ValueError(f"{name} is on {view(x).device} but other arrays are on a GPU; all must be on one device")
    loan = Loan()
    return loan, [None if x is None else loan.take(x) for x in named.values()]


def to_numpy(x: jax.Array) -> np.ndarray:
    return np.asarray(x)


def from_numpy(a: np.ndarray) -> jax.Array:
    return jax.device_put(a, None if jax.default_backend() == "cpu" else jax.devices("cpu")[0])
