"""One call on JAX arrays that live on a GPU.

Eager JAX shows no stream, so the call runs on CuPy's current stream and DLPack orders it: exporting an input makes our
stream wait for what computes it, importing a result makes what JAX computes from it wait for our stream. The host
waits for nothing.
"""

from __future__ import annotations

import functools
import threading
from queue import SimpleQueue
from typing import Any

import cupy
import jax

from ..problem import View
from . import cupy_


class Loan:
    """The adapter of one call: CuPy arrays over the memory of JAX arrays, and results given back to JAX."""

    kind = "jax"
    on_gpu = staticmethod(cupy_.on_gpu)
    signature = staticmethod(cupy_.signature)
    pointer = staticmethod(cupy_.pointer)
    device = staticmethod(cupy_.device)
    stream = staticmethod(cupy_.stream)
    empty = staticmethod(cupy_.empty)
    written = staticmethod(cupy_.written)

    def __init__(self) -> None:
        self._taken: list[cupy.ndarray] = []

    def take(self, x: jax.Array) -> cupy.ndarray:
        array = cupy.from_dlpack(x)
        self._taken.append(array)
        return array

    def view(self, x: cupy.ndarray) -> View:
        return cupy_.view(x)._replace(kind=self.kind)

    def finish(self, x: cupy.ndarray, device: int) -> jax.Array:
        with cupy.cuda.Device(device):
            if self._taken:
                # JAX reuses memory on its own stream as soon as nobody holds it: hold the inputs until the kernels that
                # read them are done.
                done = cupy.cuda.get_current_stream().record(cupy.cuda.Event(block=True, disable_timing=True))
                _keeper().put((done, self._taken))
                self._taken = []
            return jax.dlpack.from_dlpack(x)


@functools.cache
def _keeper() -> SimpleQueue[tuple[Any, list[cupy.ndarray]]]:
    """Where (event, arrays) are put to be held until the event has come."""
    held: SimpleQueue[tuple[Any, list[cupy.ndarray]]] = SimpleQueue()
    threading.Thread(target=_hold, args=(held,), name="cupyflash-jax", daemon=True).start()
    return held


def _hold(held: SimpleQueue[tuple[Any, list[cupy.ndarray]]]) -> None:
    while True:
        done, arrays = held.get()
        done.synchronize()
        del done, arrays
