"""The last step of the corridor: pack Params, launch on the caller's stream. The only step that needs a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from cupy.cuda import driver, runtime

from ..interop.protocol import GpuAdapter
from ..problem import ITEMSIZE, AttentionProblem, View
from . import early, portions
from .kernel_plan import KernelPlan
from .params import Packer
from .tensormap import Maps, PlacedMaps

_KEPT = 256  # sets of pointers whose arguments are kept
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Stream:
    """The raw handle of a stream in the form that a CuPy launch takes."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


class _Thread(threading.local):
    """Of each thread: on which GPUs the driver has a context for it."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def here(device: int) -> AbstractContextManager[Any]:
    """In which a GPU is this thread's, and the driver has a context for it."""
    if runtime.getDevice() == device and device in _thread.devices:
        return _HERE
    return _there(device)


@contextmanager
def _there(device: int) -> Iterator[None]:
    with cupy.cuda.Device(device):
        runtime.setDevice(device)  # the driver wants a context, on this thread too
        _thread.devices.add(device)
        yield


_HERE = nullcontext()


class Arguments:
    """A kernel's parameters, and at `address` where each of them lies, as the driver wants them. A launch
    copies them."""

    __slots__ = ("_kept", "address")

    def __init__(self, *parameters: ctypes.Array[ctypes.c_char]) -> None:
        table = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        self._kept, self.address = (parameters, table), ctypes.addressof(table)


class _Filled:
    """What a launcher's kernels are launched with, by one caller at a time. `like`: another, that is kept."""

    def __init__(
        self, packers: Sequence[Packer], maps: Maps | None, mapped: Sequence[int], like: _Filled | None
    ) -> None:
        self._params = [(packer, packer.memory()) for packer in packers]
        self._maps: PlacedMaps | None = None
        if maps is not None:
            self._maps = PlacedMaps(maps, None if like is None else like._maps)
        self._mapped = mapped
        more = () if self._maps is None else (self._maps.memory,)
        self.arguments = [Arguments(memory, *more) for _, memory in self._params]

    def point(self, pointers: Sequence[int]) -> None:
        for packer, memory in self._params:
            packer.fill(memory, pointers)
        if self._maps is not None:
            self._maps.point([pointers[i] for i in self._mapped])


class Launcher:
    """A plan with its kernels loaded on one device and everything packed that a call does not change.

    `strides` as `params.Packer` takes them. `overlaps`: kernels that wait for the one before may start while that one
    runs. `slots` says where each array's pointer, and a seed's keys, stand in what a call is given.
    """

    def __init__(
        self,
        plan: KernelPlan,
        functions: Sequence[Any],
        problem: AttentionProblem,
        strides: Mapping[str, Sequence[int]],
        ordinal: int,
        overlaps: bool = False,
    ) -> None:
        self.device = ordinal
        self._functions = functions  # they keep their modules loaded
        found = {(x.name, x.shared_memory): function.ptr for function, x in zip(functions, plan.launches)}
        packers, self._kernels = list[Packer](), []  # of each portion
        for made in portions.one_by_one(plan):
            packers.append(Packer(made, problem, strides))
            kernels = [
                (found[x.name, x.shared_memory], x.grid, x.threads, x.shared_memory, overlaps and x.waits)
                for x in made.launches
            ]
            self._kernels.append(kernels)
        self.slots: dict[str, int] = packers[0].slots
        mapped = [self.slots[box.array] for box in plan.maps]
        maps = Maps(plan, problem, strides) if plan.maps else None
        self._make = functools.partial(_Filled, packers, maps, mapped)
        self._filled = OrderedDict[tuple[int, ...], _Filled]()  # by their pointers, but those that a launch has
        self._offsets, self.workspace = [], 0  # bytes; what a plan does not need of it stays null
        self._found = [(self.slots[name], name) for name in plan.found]
        self._places: dict[str, int] = {}
        for space in plan.workspace:
            if space.nbytes and space.name not in plan.found:
                self._offsets.append((self.slots[space.name], self.workspace))
                self._places[space.name] = self.workspace
                self.workspace += -(-space.nbytes // 256) * 256

    def __call__(self, pointers: list[int], stream: int, workspace: int = 0, follows: bool = False) -> None:
        """Launch on `stream`. `pointers` in the order of `slots`; those into the workspace are filled in here.
        `follows`: the launch before there is one of ours, and waited for all before it."""
        for index, offset in self._offsets:
            pointers[index] = workspace + offset
        with here(self.device):
            self._launch(pointers, stream, follows)

    def again(self, pointers: Sequence[int], stream: int) -> None:
        """As a call before, in which `pointers` were filled in."""
        with here(self.device):
            self._launch(pointers, stream, False)

    def find(self, pointers: list[int], first: Launcher, workspace: int) -> None:
        """Fill in the pointers into the workspace of the plan that has run before."""
        for index, name in self._found:
            if name in first._places:  # else it is empty
                pointers[index] = workspace + first._places[name]

    def _launch(self, pointers: Sequence[int], stream: int, follows: bool) -> None:
        at = tuple(pointers)
        filled = self._filled.pop(at, None)
        if filled is None:
            filled = self._other()
            filled.point(pointers)  # for which the driver is asked, too
        # By the driver: CuPy's functions look at every argument anew, for some 3 us of a launch.
        for arguments, kernels in zip(filled.arguments, self._kernels):
            for function, grid, threads, shared, waits in kernels:
                if waits and follows:
                    early.launch(function, grid, threads, shared, stream, arguments.address)
                else:
                    driver.launchKernel(function, grid, 1, 1, threads, 1, 1, shared, stream, arguments.address, 0)
                follows = True
        self._filled[at] = filled

    def _other(self) -> _Filled:
        """The oldest of those that are kept, or one more, after it: what of it stays has not to be made anew."""
        try:
            at, oldest = self._filled.popitem(last=False)
        except KeyError:  # none yet, or others have them
            return self._make(None)
        if len(self._filled) + 1 >= _KEPT:
            return oldest
        found = self._make(oldest)
        self._filled[at] = oldest
        return found


def on_device(pointer: int, view: View, device: int) -> cupy.ndarray:
    """The memory behind a view as a CuPy array of unsigned integers (for copies and fills: no bit changes)."""
    size = ITEMSIZE[view.dtype]
    memory = cupy.cuda.UnownedMemory(pointer, 1, None, device)
    strides = tuple(s * size for s in view.strides)
    return cupy.ndarray(view.shape, _UNSIGNED[size], cupy.cuda.MemoryPointer(memory, 0), strides)


def copy_of(lib: GpuAdapter, pointer: int, view: View, copy: View, device: int, stream: int) -> Any:
    """Copy the array `view` at `pointer` to where `strides.padded` says, `copy`, in memory from the caller's allocator,
    on its stream. Returns what holds it.
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
