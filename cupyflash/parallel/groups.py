"""What a plan asks of the ranks that share the work: transfers, each started and waited for."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Until what is received is there, for who computes next, and what is sent may be written to."""


class Group(Protocol):
    """Some ranks. Each makes the same calls, in the same order.

    It may also have `refuses(kind, on_gpu, ordinal)`, which says of arrays of a library on a device what they must be
    in their place, or None; `prepare(kind)`, which all ranks call before calls of a new kind send such arrays;
    `meet()`, which they call before what is asked is looked at; `beside`, whether it pays to send while one computes
    (default: it does); and `window`, through which ranks write into each other's memory, or None.
    """

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    @property
    def size(self) -> int: ...

    @property
    def eager(self) -> bool:
        """Whether a small message costs little, so that every call compares what the ranks were asked for."""

    @property
    def known(self) -> set[Any]:
        """Where it costs more: what was compared already, to be added to."""

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Pending:
        """Start to send contiguous arrays to ranks, and to receive such. What two ranks send each other comes in the
        order in which it is sent."""

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """The same number of bytes of each rank, uint8 (n,), as (size, n): of plans, never of data."""


def of_one_host(group: Group) -> bool:
    """Whether all ranks are; all ask at once."""
    name = np.frombuffer(socket.gethostname().encode()[:64].ljust(64, b"\0"), np.uint8)
    return bool((group.all_gather(name) == name).all())


class Alone:
    """The only rank."""

    rank, size, eager = 0, 1, True
    known: ClassVar[set[Any]] = set()

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Pending:
        assert not sends and not receives
        return Done()

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        return x[None]


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        pass


def bytes_of(x: np.ndarray) -> np.ndarray:
    """A contiguous array as uint8 (n,), sharing its memory: any dtype can be sent so."""
    return x.reshape(-1).view(np.uint8)
