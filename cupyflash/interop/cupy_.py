"""CuPy arrays, and whatever on a GPU becomes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from ..call import Call
from ..gpu.device import current, import_cupy
from ..problem import View
from .numpy_ import dtype_name

try:
    import cupy
    from cupy.cuda import get_current_stream
except (ImportError, OSError):
    import_cupy()  # says what to do
    raise

kind = "cupy"
_DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "bool", "int8", "int32", "int64")}
_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


def objection(cls: type) -> str | None:
    return None if issubclass(cls, cupy.ndarray) else "it must be an array"


def on_gpu(x: cupy.ndarray) -> bool:
    return True


def view(x: cupy.ndarray) -> View:
    if any(s % x.itemsize for s in x.strides):
        raise ValueError(
            f"has shape {x.shape} and strides of {x.strides} bytes, no multiples of its item size "
            f"{x.itemsize}; pass cupy.ascontiguousarray of it"
        )
    strides = tuple(s // x.itemsize for s in x.strides)
    return View(x.shape, strides, dtype_name(x.dtype), f"cuda:{x.data.device_id}", kind, x.data.ptr)


def signature(x: cupy.ndarray) -> tuple[Any, ...]:
    return (x.shape, x.strides, x.dtype, x.data.device_id)


def pointer(x: cupy.ndarray) -> int:
    return x.data.ptr


def device(x: cupy.ndarray) -> int:
    return x.data.device_id


def stream(device: int) -> int:
    return get_current_stream(device).ptr


def empty(shape: tuple[int, ...], dtype: str, device: int) -> cupy.ndarray:
    if device == cupy.cuda.runtime.getDevice():
        return cupy.empty(shape, _DTYPES[dtype])
    with cupy.cuda.Device(device):
        return cupy.empty(shape, _DTYPES[dtype])


def recorder(call: Call) -> None:
    return None


def check_target(name: str, x: cupy.ndarray) -> None:
    pass


def written(x: cupy.ndarray) -> None:
    pass


def wrap(name: str, x: Any) -> cupy.ndarray:
    """Memory of a foreign producer on the GPU as an array, its pending work ordered before ours, without waiting."""
    try:
        return _wrap(x)
    except cupy.cuda.runtime.CUDARuntimeError:
        current(0)  # says what is missing, where that is the driver or the GPU
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(x).__name__} that CuPy cannot take: {error!r}") from error


def _wrap(x: Any) -> cupy.ndarray:
    if hasattr(x, "__dlpack__"):
        return cupy.from_dlpack(x)
    described = dict(x.__cuda_array_interface__)
    producer = described.pop("stream", None)  # cupy.asarray would block the host until this stream has run dry
    array = cupy.asarray(SimpleNamespace(__cuda_array_interface__=described, owner=x))
    with array.device:
        ours = get_current_stream()
        if producer not in (None, ours.ptr or cupy.cuda.runtime.streamLegacy):
            event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, producer)
            ours.wait_event(event)
    return array
