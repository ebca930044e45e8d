"""The last step of the corridor: pack Params, launch on the caller's stream. The only step that needs a GPU."""

from __future__ import annotations

import functools
import struct
from typing import Any

import cupy
import numpy as np

from ..problem import ITEMSIZE, AttentionProblem, View
from .plan import KernelPlan
from .strides import padded
from .tensormap import Maps

# The fields of kernels_cu/attention/params.cuh, in its order.
POINTERS = (
    "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "delta", "dq_sum", "m", "l", "o_sum", "counters", "mask",
)  # fmt: skip
STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_POINTERS = struct.Struct(f"{len(POINTERS)}Q")
_REST = struct.Struct(f"{3 * len(STRIDED)}q q d f 12i 4x")
PARAMS = np.dtype(f"V{_POINTERS.size + _REST.size}")

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
    """A plan with its kernels loaded on one device and everything packed that a call does not change."""

    def __init__(
        self,
        plan: KernelPlan,
        functions: list[Any],
        problem: AttentionProblem,
        strides: dict[str, tuple[int, int, int]],
        mask_batch: int,
        device: int,
    ) -> None:
        self.device = device
        self._kernels = [
            (function, (launch.grid,), (launch.threads,), launch.shared_memory)
            for function, launch in zip(functions, plan.launches)
        ]
        rows = [s for name in STRIDED for s in strides.get(name, (0, 0, 0))]
        p = problem
        self._rest = _REST.pack(
            *rows, mask_batch, abs(p.scale), abs(p.scale), p.batch, p.heads_q, p.heads_k, p.seq_q, p.seq_k, p.dim, p.dim_v,
            p.diagonal, p.left or 0, p.right or 0, plan.together, plan.kept,
        )  # fmt: skip
        self._maps = Maps(plan, problem, strides) if plan.maps else None
        self._arguments = functools.lru_cache(_KEPT)(self._packed)
        self._mapped = [POINTERS.index(box.array) for box in plan.maps]
        self._offsets, self.workspace = [], 0
        for space in plan.workspace:
            self._offsets.append((POINTERS.index(space.name), self.workspace))
            self.workspace += -(-space.nbytes // 256) * 256

    def __call__(self, pointers: list[int], stream: int, workspace: int = 0) -> None:
        """Launch on `stream`. `pointers` in the order of POINTERS; those into the workspace are filled in here."""
        for index, offset in self._offsets:
            pointers[index] = workspace + offset
        arguments = self._arguments(tuple(pointers))
        if cupy.cuda.runtime.getDevice() == self.device:
            self._launch(arguments, _stream(stream))
        else:
            with cupy.cuda.Device(self.device):
                self._launch(arguments, _stream(stream))

    def _packed(self, pointers: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """The kernels' arguments. CuPy passes a NumPy array of one element by value; a launch copies it."""
        params = np.ndarray((), PARAMS, _POINTERS.pack(*pointers) + self._rest)
        if self._maps is None:
            return (params,)
        return params, self._maps.parameter(*[pointers[i] for i in self._mapped])

    def _launch(self, arguments: tuple[np.ndarray, ...], stream: Stream) -> None:
        for function, grid, block, shared in self._kernels:
            function(grid, block, arguments, shared, stream)


def on_device(pointer: int, view: View, device: int) -> cupy.ndarray:
    """The memory behind a view as a CuPy array of unsigned integers (for copies and fills: no bit changes)."""
    size = ITEMSIZE[view.dtype]
    memory = cupy.cuda.UnownedMemory(pointer, 1, None, device)
    strides = tuple(s * size for s in view.strides)
    return cupy.ndarray(view.shape, _UNSIGNED[size], cupy.cuda.MemoryPointer(memory, 0), strides)


def padded_copy(lib: Any, x: Any, alignment: int, device: int, stream: int) -> Any:
    """Copy x to where `padded` says, in memory from the caller's allocator, on its stream. Returns what holds it."""
    view = lib.view(x)
    copy = padded(view, alignment)
    buffer = lib.empty((copy.strides[0] * copy.shape[0],), view.dtype, device)
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        if copy.strides[-2] != copy.shape[-1]:
            on_device(lib.pointer(buffer), lib.view(buffer), device)[...] = 0
        on_device(lib.pointer(buffer), copy, device)[...] = on_device(lib.pointer(x), view, device)
    return buffer


def copy_into(lib: Any, target: Any, source: Any, device: int, stream: int) -> None:
    """target[...] = source for two arrays of one library and shape, on its stream."""
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        on_device(lib.pointer(target), lib.view(target), device)[...] = on_device(
            lib.pointer(source), lib.view(source), device
        )


def fill(lib: Any, x: Any, value: float, device: int, stream: int) -> None:
    """Fill an array of any library with 0 or -inf, on its stream."""
    view = lib.view(x)
    pattern = np.array(value, {2: np.float16, 4: np.float32, 8: np.float64}[ITEMSIZE[view.dtype]])
    bits = pattern.view(_UNSIGNED[pattern.itemsize]).item()
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(Stream(stream)):
        on_device(lib.pointer(x), view, device)[...] = bits
