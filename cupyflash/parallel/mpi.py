"""A group of an mpi4py communicator: for NumPy arrays, and for CuPy's by way of NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .arrays import library
from .groups import Done, Pending, bytes_of

_MOST = 1 << 30  # bytes of one message: counts of MPI have 31 bits


class MpiGroup:
    """The ranks of a communicator, or of one that was made of it: whoever else sends over it should have his own."""

    eager = True
    known: ClassVar[set[Any]] = set()  # of an eager group nobody asks

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def prepare(self, kind: str) -> None:
        """Before anything is sent: the first time that CuPy arrays are, all ranks make a communicator of NCCL's."""
        if kind == "cupy":
            from .nccl import of_mpi

            of_mpi(self._comm)

    def refuses(self, kind: str, on_gpu: bool, ordinal: int | None) -> str | None:
        """Why such arrays cannot be sent: what they must be."""
        return None if kind in ("numpy", "cupy") else "a NumPy or CuPy array, as group is one of MPI's"

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Pending:
        if not sends and not receives:
            return Done()
        if library((*sends, *receives)[0][1]) == "cupy":
            from .nccl import of_mpi

            return of_mpi(self._comm).exchange(sends, receives)
        started = [self._comm.Irecv(part, source=rank) for rank, x in receives for part in _parts(x)]
        started += [self._comm.Isend(part, dest=rank) for rank, x in sends for part in _parts(x)]
        return _Requests(started)

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        found = np.empty((self.size, *x.shape), x.dtype)
        self._comm.Allgather(x, found)
        return found


class _Requests:
    def __init__(self, started: list[Any]) -> None:
        self._started = started

    def wait(self) -> None:
        for x in self._started:
            x.Wait()


def _parts(x: np.ndarray) -> list[np.ndarray]:
    flat = bytes_of(x)
    return [flat[n : n + _MOST] for n in range(0, flat.size, _MOST)]
