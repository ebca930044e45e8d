"""In the place of CUDA's runtime and driver: which device is current, where a context was asked for, and launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from cupyflash.gpu import launch, tensormap


class Launch(NamedTuple):
    """What the driver was asked for; `table` has the addresses of the kernel's parameters."""

    device: int
    function: int
    grid: int
    threads: int
    shared: int
    stream: int
    table: int

    def parameter(self, index: int, size: int) -> bytes:
        """While what they were packed in lives."""
        at = ctypes.c_void_p.from_address(self.table + 8 * index).value
        assert at is not None
        return ctypes.string_at(at, size)


class Cuda:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.contexts: list[tuple[int, int]] = []  # thread, device
        self.launches: list[Launch] = []
        monkeypatch.setattr(tensormap, "encode", lambda *_: bytes(128))
        monkeypatch.setattr(tensormap, "move", lambda *_: None)
        monkeypatch.setattr(launch, "runtime", self)
        monkeypatch.setattr(launch, "driver", self)
        monkeypatch.setattr(launch.cupy.cuda, "Device", self.Device)
        monkeypatch.setattr(launch, "_thread", launch._Thread())

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, device: int) -> None:
        self.contexts.append((threading.get_ident(), device))

    @contextmanager
    def Device(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def launchKernel(
        self,
        function: int,
        x: int,
        y: int,
        z: int,
        tx: int,
        ty: int,
        tz: int,
        shared: int,
        stream: int,
        table: int,
        extra: int,
    ) -> None:
        assert (y, z, ty, tz, extra) == (1, 1, 1, 1, 0)
        self.launches.append(Launch(self.current, function, x, tx, shared, stream, table))
