"""The last step of the corridor: pack Params, launch on the caller's stream. The only step that needs a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from ..interop.protocol import GpuAdapter
from ..problem import ITEMSIZE, AttentionProblem, View
from .kernel_plan import KernelPlan
from .params import Packer
from .tensormap import Maps

_KEPT = 256  # sets of pointers whose packed arguments are kept
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Stream:
    """The raw handle of a stream in the form that a CuPy launch takes."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


_stream = functools.lru_cache(_KEPT)(Stream)


class Launcher:
    """A plan with its kernels loaded on one device and everything packed that a call does not change.

    `strides` as `params.Packer` takes them. `slots` says where each array's pointer, and a seed's keys, stand in what a call
    is given.
    """

    def __init__(
        self,
        plan: KernelPlan,
        functions: Sequence[Any],
        problem: AttentionProblem,
        strides: Mapping[str, Sequence[int]],
        ordinal: int,
    ) -> None:
        self.device = ordinal
        self._kernels = [
            (function, (launch.grid,), (launch.threads,), launch.shared_memory)
            for function, launch in zip(functions, plan.launches)
        ]
        self._params = Packer(plan, problem, strides)
        self.slots: dict[str, int] = self._params.slots
        self._maps = Maps(plan, problem, strides) if plan.maps else None
        self._arguments = functools.lru_cache(_KEPT)(self._packed)
        self._mapped = [self.slots[box.array] for box in plan.maps]
        self._offsets, self.workspace = [], 0  # bytes; what a plan does not need of it stays null
        self._found = [(self.slots[name], name) for name in plan.found]
        self._places: dict[str, int] = {}
        for space in plan.workspace:
            if space.nbytes and space.name not in plan.found:
                self._offsets.append((self.slots[space.name], self.workspace))
                self._places[space.name] = self.workspace
                self.workspace += -(-space.nbytes // 256) * 256

    def __call__(self, pointers: list[int], stream: int, workspace: int = 0) -> None:
        """Launch on `stream`. `pointers` in the order of `slots`; those into the workspace are filled in here."""
        for index, offset in self._offsets:
            pointers[index] = workspace + offset
        arguments = self._arguments(tuple(pointers))
        if cupy.cuda.runtime.getDevice() == self.device:
            self._launch(arguments, _stream(stream))
        else:
            with cupy.cuda.Device(self.device):
                self._launch(arguments, _stream(stream))

    def find(self, pointers: list[int], first: Launcher, workspace: int) -> None:
        """Fill in the pointers into the workspace of the plan that has run before."""
        for index, name in self._found:
            if name in first._places:  # else it is empty
                pointers[index] = workspace + first._places[name]

    def _packed(self, pointers: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """The kernels' arguments. CuPy passes a NumPy array of one element by value; a launch copies it."""
        params = _by_value(self._params(pointers))
        if self._maps is None:
            return (params,)
        return params, _by_value(self._maps(*[pointers[i] for i in self._mapped]))

    def _launch(self, arguments: tuple[np.ndarray, ...], stream: Stream) -> None:
        for function, grid, block, shared in self._kernels:
            function(grid, block, arguments, shared, stream)


def _by_value(packed: bytes) -> np.ndarray:
    return np.ndarray((), _opaque(len(packed)), packed)


@functools.cache
def _opaque(size: int) -> np.dtype[np.void]:
    return np.dtype((np.void, size))


def on_device(pointer: int, view: View, device: int) -> cupy.ndarray:
    """The memory behind a view as a CuPy array of unsigned integers (for copies and fills: no bit changes)."""
    size = ITEMSIZE[view.dtype]
    memory = cupy.cuda.UnownedMemory(pointer, 1, None, device)
    strides = tuple(s * size for s in view.strides)
    return cupy.ndarray(view.shape, _UNSIGNED[size], cupy.cuda.MemoryPointer(memory, 0), strides)


def copy_of(lib: GpuAdapter, pointer: int, view: View, copy: View, device: int, stream: int) -> Any:
    """Copy the array `view` at `pointer` to where `strides.padded` says, `copy`, in memory from the caller's allocator, on
    its stream. Returns what holds it.
    """
    buffer = lib.empty((copy.strides[0] * copy.shape[0],), view.dtype, device)
    at = lib.pointer(buffer)
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        if copy.strides[0] * copy.shape[0] != math.prod(copy.shape):  # what lies between rows is read too
            on_device(at, lib.view(buffer), device)[...] = 0
        on_device(at, copy, device)[...] = on_device(pointer, view, device)
    return buffer


def copy_into(lib: GpuAdapter, target: Any, source: Any, device: int, stream: int) -> None:
    """target[...] = source for two arrays of one library and shape, on its stream."""
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        on_device(lib.pointer(target), lib.view(target), device)[...] = on_device(
            lib.pointer(source), lib.view(source), device
        )


def spread(lib: GpuAdapter, rows: Any, pointer: int, view: View, device: int, stream: int) -> None:
    """Fill rows, (B, H, S) in float32 or float64, with the numbers at `pointer`, one for each head, on its stream."""
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        numbers = on_device(pointer, view, device)
        if view.dtype == "bfloat16":  # the upper half of a float32
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = numbers.view(view.dtype)
        kind = lib.view(rows)
        on_device(lib.pointer(rows), kind, device).view(kind.dtype)[...] = numbers[..., None]


def fill(lib: GpuAdapter, x: Any, value: float, device: int, stream: int) -> None:
    """Fill an array of any library with 0 or -inf, on its stream."""
    view = lib.view(x)
    floats = {1: ml_dtypes.float8_e4m3fn, 2: np.float16, 4: np.float32, 8: np.float64}
    pattern = np.array(value, floats[ITEMSIZE[view.dtype]])
    bits = pattern.view(_UNSIGNED[pattern.itemsize]).item()
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        on_device(lib.pointer(x), view, device)[...] = bits
