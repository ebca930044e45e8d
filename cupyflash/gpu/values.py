"""Values of lengths, offsets, pages and places on a device, looked at before kernels read them, where that is asked."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from .. import lengths, places, rules
from ..call import Call
from . import launch


def check(call: Call) -> None:
    """ValueError, naming the place, where one is not what it must be. Waits for the caller's stream."""
    lib, names = call.lib, [*lengths.stated(call.arrays), *(x for x in ("at",) if x in call.arrays)]
    views = {name: lib.view(x) for name, x in call.arrays.items()}
    problem, _ = rules.state(views, {name: lib.view(x) for name, x in call.targets.items()}, call.options, call.of)
    found = read(lib, {name: call.arrays[name] for name in names}, call.arrays["q"])
    lengths.check_values(problem, found)
    places.check_values(problem, found)


def read(lib: Any, arrays: dict[str, Any], beside: Any) -> dict[str, np.ndarray]:
    """Integers as int64, of arrays on the device of `beside`; ValueError where the stream is captured."""
    ordinal = lib.device(beside)
    stream = lib.stream(ordinal)
    if runtime.streamIsCapturing(stream):
        raise ValueError(
            "check is True, or CUPYFLASH_CHECK=1, but the stream is captured as a CUDA graph, where "
            f"{next(iter(arrays))} cannot be looked at; check must be False there"
        )
    return {name: on_host(lib, x, ordinal, stream) for name, x in arrays.items()}


def on_host(lib: Any, x: Any, device: int, stream: int) -> np.ndarray:
    """A copy of integers, as int64."""
    view = lib.view(x)
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(launch.Stream(stream)):
        found: np.ndarray = launch.on_device(lib.pointer(x), view, device).get().view(view.dtype)
    return found.astype(np.int64)
