"""Groups of NCCL communicators, for CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl

from .groups import of_one_host

_streams: dict[int, Any] = {}  # of each device: transfers go first where both they and kernels could start
_kept: dict[int, _Kept] = {}  # by the numbers of communicators
_PRIORITY = -5  # the highest that there is; a driver takes the nearest that it has


@dataclass
class _Kept:
    """Of a communicator, between calls."""

    comm: Any
    known: set[Any] = field(default_factory=set)  # what its ranks compared
    beside: bool | None = None


class NcclGroup:
    """The ranks of a `cupy.cuda.nccl.NcclCommunicator`, or of a `cupyx.distributed.NCCLBackend`'s.

    Transfers are on a stream of their own, and ordered by events: they begin when what the current stream was given
    until then is done, and `wait` has the current stream wait for them.
    """

    eager = False

    def __init__(self, group: Any) -> None:
        comm = getattr(group, "_comm", group)
        if not isinstance(comm, nccl.NcclCommunicator):
            raise TypeError(
                f"group is a {type(group).__name__}; it must be a cupy.cuda.nccl.NcclCommunicator or a "
                "cupyx.distributed.NCCLBackend"
            )
        if not comm.comm:
            raise ValueError("group is a communicator that was destroyed; it must be one that is there")
        self._comm, self.rank, self.size = comm, comm.rank_id(), comm.size()
        self._device = comm.device_id()
        if id(comm) not in _kept:
            for key in [key for key, x in _kept.items() if not x.comm.comm]:  # destroyed
                del _kept[key]
        self._kept = _kept.setdefault(id(comm), _Kept(comm))
        self.known = self._kept.known

    @property
    def beside(self) -> bool:
        """Whether kernels that move data run beside those that compute, so that it pays to send while one computes."""
        return bool(self._kept.beside)

    def meet(self) -> None:
        """Once, all ranks at the same time: what they can do."""
        if self._kept.beside is None:
            self._kept.beside = not of_one_host(self)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> _Event:
        sends, receives = ([(r, x) for r, x in some if x.nbytes] for some in (sends, receives))
        stream = _stream(self._device)
        if sends or receives:
            stream.wait_event(_recorded(cupy.cuda.get_current_stream()))
            nccl.groupStart()
            try:
                for rank, x in sends:
                    self._comm.send(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, rank, stream.ptr)
                for rank, x in receives:
                    self._comm.recv(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, rank, stream.ptr)
            finally:
                nccl.groupEnd()
        return _Event(_recorded(stream), [x for _, x in (*sends, *receives)])

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        own, found = cupy.asarray(x), cupy.empty((self.size, *x.shape), x.dtype)
        stream = cupy.cuda.get_current_stream()
        self._comm.allGather(own.data.ptr, found.data.ptr, own.nbytes, nccl.NCCL_UINT8, stream.ptr)
        return cupy.asnumpy(found)

    def refuses(self, kind: str, on_gpu: bool, ordinal: int | None) -> str | None:
        """Why such arrays cannot be sent: what they must be."""
        if kind != "cupy":
            return "a CuPy array, as group is one of NCCL's"
        return None if ordinal == self._device else f"on GPU {self._device}, as group is"


class _Event:
    """What transfers are done. Who frees an array on the current stream may do so once that waits."""

    def __init__(self, event: Any, arrays: list[Any]) -> None:
        self._event, self._arrays = event, arrays

    def wait(self) -> None:
        cupy.cuda.get_current_stream().wait_event(self._event)
        self._arrays = []


def _recorded(stream: Any) -> Any:
    return stream.record(cupy.cuda.Event(disable_timing=True))


def of_mpi(comm: Any) -> NcclGroup:
    """A communicator of NCCL's for the ranks of one of MPI's: made once, and kept by it."""
    from mpi4py import MPI

    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval()
    found = comm.Get_attr(_keyval)
    if found is None:
        number = comm.bcast(nccl.get_unique_id() if comm.Get_rank() == 0 else None)
        found = nccl.NcclCommunicator(comm.Get_size(), number, comm.Get_rank())
        comm.Set_attr(_keyval, found)
    return NcclGroup(found)


_keyval: Any = None


def _stream(device: int) -> Any:
    if device not in _streams:
        with cupy.cuda.Device(device):
            _streams[device] = cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY)
    return _streams[device]
