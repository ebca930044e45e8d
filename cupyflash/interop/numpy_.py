"""NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..call import Call
from ..problem import View

kind = "numpy"


def objection(cls: type) -> str | None:
    if not issubclass(cls, np.ndarray):
        return "it must be an array"
    if issubclass(cls, np.ma.MaskedArray):
        return "its mask would be lost; pass its data, and what it hides as key_mask"
    if issubclass(cls, np.matrix):
        return "it must be an array; pass numpy.asarray of it"
    return None


def on_gpu(x: np.ndarray) -> bool:
    return False


def view(x: np.ndarray) -> View:
    strides = tuple(s // max(1, x.itemsize) for s in x.strides)  # 0: strings and records of nothing
    return View(x.shape, strides, dtype_name(x.dtype), "cpu", kind, x.__array_interface__["data"][0])


def signature(x: np.ndarray) -> tuple[Any, ...]:
    return x.shape, x.strides, x.dtype


def recorder(call: Call) -> None:
    return None


def check_target(name: str, x: np.ndarray) -> None:
    if not x.flags.writeable:
        raise ValueError(f"{name} is read-only; it must be an array that can be written")


def written(x: np.ndarray) -> None:
    pass


def to_numpy(x: np.ndarray) -> np.ndarray:
    return np.asarray(x)  # a subclass may have operators of its own


def from_numpy(a: np.ndarray) -> np.ndarray:
    return a


def wrap(name: str, x: Any) -> np.ndarray:
    """Memory of a DLPack producer on the CPU as an array."""
    try:
        taken = np.from_dlpack(x)
        if not taken.flags.writeable and hasattr(
            x, "__array_interface__"
        ):  # Warp's DLPack is too old to say that it may be written
            taken = np.asarray(x)
        return taken
    except Exception as error:  # bfloat16, which NumPy's DLPack does not know, for one
        raise TypeError(f"{name} is a {type(x).__name__} that NumPy cannot take by DLPack: {error}") from error


def dtype_name(dtype: np.dtype) -> str:
    """float32, bfloat16, bool, ...; >f4 for what is not in this machine's byte order."""
    return dtype.name if dtype.isnative else dtype.str
