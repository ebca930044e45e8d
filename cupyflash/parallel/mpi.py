"""A group of an mpi4py communicator, for arrays on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .groups import bytes_of

_MOST = 1 << 30  # bytes of one message: counts of MPI have 31 bits


class MpiGroup:
    """The ranks of a communicator, or of one that was made of it: whoever else sends over it should have his own."""

    eager = True
    known: ClassVar[set[bytes]] = set()  # of an eager group nobody asks

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> _Requests:
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
