"""Keys into each other's memory by the copy engine, among tensors on the GPUs of one host: PyTorch's symmetric memory.

A kernel that moves data, as NCCL's, needs multiprocessors, which an attention kernel holds until it ends: the one waits
for the other, and other ranks with it. The copy engine needs none.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import runtime
from torch.distributed import _symmetric_memory as symmetric

PATIENCE = 600_000  # milliseconds that a rank waits for others, as NCCL's own default
_ALIGNED = 1024
_DEFAULT = runtime.cudaMemcpyKind.cudaMemcpyDefault


class Window:
    """Two halves of memory on each rank, which all may write to: one is filled while the other is computed with."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device, self._half = weakref.ref(group), device, 0
        self._stream = torch.cuda.Stream(device)
        self._last: tuple[int, torch.cuda.Event] | None = None  # by whom halves were last read
        self._reserve(_ALIGNED)

    def _reserve(self, size: int) -> None:
        self._handle: Any = None
        self._own = symmetric.empty(2 * size, dtype=torch.uint8, device=self._device)
        group: Any = self._group()
        self._handle, self._half = symmetric.rendezvous(self._own, group), size
        self._places, self._rank = [int(x) for x in self._handle.buffer_ptrs], int(self._handle.rank)
        self._rooms: dict[Any, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory that stays with the group, of this GPU."""
        return 2 * self._half

    def begin(self, size: int) -> bool:
        """Before a call that needs halves of so many bytes, the same on all ranks: whether it may use them. (Memory is
        not made while a graph is captured.)"""
        capturing = torch.cuda.is_current_stream_capturing()
        if size > self._half:
            if capturing:
                return False
            torch.cuda.synchronize(self._device)
            self._reserve(-(-size // _ALIGNED) * _ALIGNED)
        here = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last[0] != here.cuda_stream and not capturing:
            here.wait_event(self._last[1])
        self._handle.barrier(timeout_ms=PATIENCE)
        return True

    def room(self, half: int, offset: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """An array in a half of this rank's."""
        key = half, offset, shape, like.dtype
        if key not in self._rooms:
            if len(self._rooms) >= 256:
                self._rooms.clear()
            begin = half * self._half + offset
            some = self._own[begin : begin + like.element_size() * math.prod(shape)]
            self._rooms[key] = some.view(like.dtype).view(shape)
        return self._rooms[key]

    @staticmethod
    def address(x: torch.Tensor) -> int:
        return x.data_ptr()

    def push(self, half: int, parts: Sequence[tuple[int | None, int, int, int]]) -> None:
        """Start to copy: of each part the rank to whose half it goes, where it begins there, its address and its bytes;
        what goes to no other is this rank's own, and there for who computes next."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        streams = self._stream.cuda_stream, here.cuda_stream
        for rank, offset, address, count in parts:
            target = self._places[self._rank if rank is None else rank] + half * self._half + offset
            (code,) = runtime.cudaMemcpyAsync(target, address, count, _DEFAULT, streams[rank is None])
            if code != runtime.cudaError_t.cudaSuccess:
                raise RuntimeError(f"a copy to rank {rank} of the group failed: {code.name}")

    def arrived(self) -> None:
        """For who computes next: what all ranks pushed until here is there, and all are done with what they
        computed."""
        here = torch.cuda.current_stream(self._device)
        here.wait_stream(self._stream)
        self._handle.barrier(timeout_ms=PATIENCE)

    def end(self) -> None:
        """After what was computed with the last that arrived."""
        if not torch.cuda.is_current_stream_capturing():
            here = torch.cuda.current_stream(self._device)
            self._last = here.cuda_stream, here.record_event()
