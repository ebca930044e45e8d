"""Keys and heads into each other's memory, among tensors on the GPUs of one host: PyTorch's symmetric memory.

A kernel that moves data, as NCCL's, needs multiprocessors, which an attention kernel holds until it ends: the one waits
for the other, and other ranks with it. The copy engine needs none.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import torch
from cupy.cuda import runtime
from torch.distributed import _symmetric_memory as symmetric

from ..gpu.copies import Copies
from ..gpu.launch import here
from ..interop.torch_ import stream

PATIENCE = 600_000  # milliseconds that a rank waits for others where its group does not say it: NCCL's own default
_ALIGNED = 1024


class Window:
    """Memory on each rank that all may read and write. Who calls says what lies where; it is the same on all ranks."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = weakref.ref(group), device
        self.wait_as_long()
        self._stream, self._pushed = torch.cuda.Stream(device), False
        # Streams are raw handles, of which 0 is the current GPU's, and events are used again: PyTorch's cost the host
        # several us each time.
        self._ordinal = self._stream.device_index
        with here(self._ordinal):
            self._before, self._after, self._read = (cupy.cuda.Event(disable_timing=True) for _ in range(3))
        self._last: int | None = None  # the stream in which it was last read, until `_read`
        self._of_graphs: dict[int, Any] = {}  # memory that captured graphs go on to use
        self._reserve(_ALIGNED)

    def wait_as_long(self) -> None:
        """As the group does by now."""
        self._patience = patience(self._group(), self._device)

    @torch.inference_mode(False)  # or whoever comes later, outside, might not write to it
    def _reserve(self, size: int) -> None:
        self._handle: Any = None
        self._kept: dict[Any, Any] = {}  # they hold what was there
        self._own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        group: Any = self._group()
        self._handle = symmetric.rendezvous(self._own, group)
        self.places = [int(x) for x in self._handle.buffer_ptrs]  # addresses of each rank's

    @property
    def nbytes(self) -> int:
        """Memory that stays with the group, of this GPU."""
        return self._own.numel()

    def begin(self, size: int) -> bool:
        """Before a call that needs so many bytes, the same on all ranks: whether it may use them. (Memory is not made
        while a graph is captured.)"""
        capturing = torch.cuda.is_current_stream_capturing()
        if size > self.nbytes:
            if capturing:
                return False
            torch.cuda.synchronize(self._device)
            self._reserve(-(-size // _ALIGNED) * _ALIGNED)
        if capturing:
            self._of_graphs[id(self._own)] = self._own, self._handle
        now = stream(self._ordinal)
        if self._last not in (None, now) and not capturing:
            with here(self._ordinal):
                runtime.streamWaitEvent(now, self._read.ptr)
        self._handle.barrier(timeout_ms=self._patience)
        return True

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made of its arrays under a key, as long as they are there."""
        if key not in self._kept:
            if len(self._kept) >= 256:
                self._kept.clear()
            with torch.inference_mode(False):
                self._kept[key] = make()
        return self._kept[key]

    @torch.inference_mode(False)
    def array(self, offset: int, shape: tuple[int, ...], like: torch.Tensor, dtype: Any = None) -> Any:
        """One in this rank's memory, of the dtype of `like` unless another is named."""
        kind = like.dtype if dtype is None else getattr(torch, dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=kind, device=self._device)
        return self._own[offset : offset + kind.itemsize * math.prod(shape)].view(kind).view(shape)

    address = staticmethod(torch.Tensor.data_ptr)

    def put(self, copies: Copies, addresses: Sequence[int]) -> None:
        """Copy, for who computes next, to and from any rank's."""
        copies.launch(addresses, self._ordinal, stream(self._ordinal))

    def push(self, parts: Sequence[tuple[int, int, int, int]], beside: bool) -> None:
        """Start to copy, `beside` what computes next or before it: of each part the rank to whom it goes, where it
        begins there, its address and its bytes."""
        to = stream(self._ordinal)
        if beside:
            now, to, self._pushed = to, self._stream.cuda_stream, True
            self._wait(to, now, self._before)
        with here(self._ordinal):  # a handle of 0 is the stream of the GPU that is current
            for rank, offset, address, count in parts:
                runtime.memcpyAsync(self.places[rank] + offset, address, count, runtime.memcpyDefault, to)

    def arrived(self) -> None:
        """For who computes next: what all ranks pushed and put until here is there, and all are done with what they
        computed."""
        if self._pushed:  # a graph may wait for no stream that is not its own
            self._wait(stream(self._ordinal), self._stream.cuda_stream, self._after)
            self._pushed = False
        self._handle.barrier(timeout_ms=self._patience)

    def end(self) -> None:
        """After what was computed with the last that arrived."""
        if not torch.cuda.is_current_stream_capturing():
            self._last = stream(self._ordinal)
            with here(self._ordinal):
                runtime.eventRecord(self._read.ptr, self._last)

    def _wait(self, stream: int, other: int, event: cupy.cuda.Event) -> None:
        """Have a stream wait for what is in another now."""
        with here(self._ordinal):
            runtime.eventRecord(event.ptr, other)
            runtime.streamWaitEvent(stream, event.ptr)


def patience(group: Any, device: torch.device) -> int:
    """Milliseconds that ranks of a group wait for each other: its own time-out."""
    try:
        # (0 would be for ever.)
        return max(1, int(group._get_backend(device).options._timeout.total_seconds() * 1000))
    except (AttributeError, RuntimeError):  # of a backend without options, or without a word about it
        return PATIENCE
