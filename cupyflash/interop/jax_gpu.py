"""What XLA calls back on a GPU: the corridor, on XLA's stream, with XLA's memory for results and workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import cupy
import jax

from ..call import Call
from ..gpu import corridor
from ..problem import ITEMSIZE, View, contiguous, mask_kind

_KEPT = 256  # calls whose launches are kept

# (A prototype of our own: whoever sets types of ctypes.pythonapi's sets them for all.)
_pointer = ctypes.PYFUNCTYPE(ctypes.POINTER(ctypes.c_size_t), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Buffer:
    """Memory of XLA's, as the corridor's arrays."""

    __slots__ = ("address", "owner", "view")

    def __init__(self, address: int, view: View, owner: Any = None) -> None:
        self.address, self.view, self.owner = address, view, owner


class Memory:
    """The adapter of one call: `empty` gives `results`, from the last one, and then pieces of workspace."""

    kind = "jax"

    def __init__(self, ordinal: int, stream: int = 0, scratch: int = 0, size: int = 0) -> None:
        self._ordinal, self._stream, self.scratch, self._end = ordinal, stream, scratch, scratch + size
        self.results: list[int] = []

    def on_gpu(self, x: Buffer) -> bool:
        return True

    def view(self, x: Buffer) -> View:
        return x.view

    def signature(self, x: Buffer) -> tuple[Any, ...]:
        return (x.view.shape, x.view.dtype, self._ordinal)

    def pointer(self, x: Buffer) -> int:
        return x.address

    def device(self, x: Buffer) -> int:
        return self._ordinal

    def stream(self, device: int) -> int:
        return self._stream

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Buffer:
        view = View(shape, contiguous(shape), dtype, f"cuda:{device}", self.kind)
        if self.results:
            address = self.results.pop()
            return Buffer(address, view._replace(ptr=address))
        size = ITEMSIZE[dtype]
        for n in shape:
            size *= n
        address, self.scratch = self.scratch, self.scratch + -(-size // 256) * 256
        if self.scratch <= self._end:
            return Buffer(address, view._replace(ptr=address))
        # More than was planned: inputs that start at no multiple of 16 bytes are copied. CuPy's pool reuses on this
        # stream alone.
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(self._stream):
            own = cupy.empty(size, "uint8")
        return Buffer(own.data.ptr, view._replace(ptr=own.data.ptr), own)

    def written(self, x: Buffer) -> None:
        pass


class Callback:
    """One call of a pass on arrays like `views`, planned and compiled while JAX lowers it."""

    def __init__(self, call: Call, views: dict[str, View]) -> None:
        self._call = call
        device = jax.local_devices(backend="gpu")[0].local_hardware_id
        self._device = 0 if device is None else device
        self._views = {name: x._replace(device=f"cuda:{self._device}") for name, x in views.items()}
        self._latent = call.options["latent"] is not None  # then k stands for v too
        arrays = self._arrays([0] * len(views))
        traced = call.but(lib=Memory(self._device), arrays=arrays)
        self._prepared = corridor.prepare(traced, [0] * len(arrays), self._device)
        self.scratch = self._prepared.scratch
        steps = self._prepared.steps
        self.plain = all(x.plan and not x.copies for x in steps)  # launches alone, of kernels that are loaded
        mask = call.options["block_mask"]
        self._keeps = self.plain and mask is None
        self._launched: dict[tuple[int, ...], list[tuple[Any, Sequence[int]]]] = {}
        if mask is not None:  # what the kernels read of it is made now: in the callback nothing may wait for the GPU
            for use in [use for x in steps if x.plan for use in x.plan.lists]:
                mask.list_for(use)

    def _arrays(self, addresses: Sequence[int]) -> dict[str, Buffer]:
        arrays = {name: Buffer(at, view) for (name, view), at in zip(self._views.items(), addresses)}
        return arrays | {"v": arrays["k"]} if self._latent else arrays

    def __call__(self, ctx: Any, out: Sequence[Any], *inputs: Any) -> None:
        ordinal = inputs[0].__dlpack_device__()[1]
        places = tuple([_address(x) for x in (*inputs, *out)])
        if ordinal == self._device and (before := self._launched.get(places)) is not None:
            for kernels, pointers in before:
                kernels.again(pointers, ctx.stream)
            return
        *results, scratch = places[len(inputs) :]
        lib: Any = Memory(ordinal, ctx.stream, scratch, self.scratch)
        arrays = self._arrays(places[: len(inputs)])
        addresses = [x.address for x in arrays.values()]
        mask = mask_kind(self._call.options["block_mask"])
        if mask is not None and mask.device != f"cuda:{ordinal}":  # not known when this was traced
            raise ValueError(f"block_mask is on {mask.device} but q is on cuda:{ordinal}; make it with like=q")
        other = ordinal != self._device or any(at & 15 for at in addresses)
        call = self._call.but(lib=lib, arrays=arrays)
        prepared, workspace = corridor.prepare(call, addresses, ordinal) if other else self._prepared, None
        launched: list[tuple[Any, Sequence[int]]] = []
        for step in prepared.steps:
            count = len(step.shapes) + (call.return_lse or step.always_rows)
            lib.results, results = results[:count][::-1], results[count:]
            ran = step.run(call, addresses, workspace)
            launched.append((step, ran.pointers))
            if prepared.keeps:
                workspace = workspace or ran.workspace
            else:
                lib.scratch = scratch  # is the next one's: kernels run one after the other
        if self._keeps and not other:  # all is where it was planned, and XLA gives the same places again
            if len(self._launched) >= _KEPT:
                self._launched.clear()
            self._launched[places] = launched


def _address(buffer: Any) -> int:
    """Where a buffer of XLA's lies: the first field of what DLPack hands over (bfloat16 has no CUDA array
    interface)."""
    capsule = buffer.__dlpack__()  # owns what it points to
    return _pointer(capsule, b"dltensor")[0]
