"""Ranks of one process that write into each other's memory, as `parallel.window.Window` has GPUs do."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from copies_on_cpu import by_numpy

from cupyflash.gpu.copies import Copies
from cupyflash.problem import ITEMSIZE

POISON = 0xFF  # a float of such bytes is NaN


def address_of(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


class Memory:
    """Of all ranks."""

    def __init__(self, size: int, most: int | None = None) -> None:
        self.most = most  # bytes that are to be had
        self.of = [np.zeros(0, np.uint8)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class Window:
    """As `parallel.window.Window`, of NumPy's arrays. Copies beside what computes are made at the last moment; in each
    call memory is poisoned, and new where more is asked for."""

    copied = staticmethod(by_numpy)

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank, self._size, self.calls = memory, rank, 0, 0
        self._late: list[tuple[np.ndarray, int]] = []
        self._kept: dict[Any, Any] = {}

    def begin(self, size: int) -> bool:
        if self._memory.most is not None and size > self._memory.most:
            return False
        self._memory.barrier.wait()  # all are done with what was there
        if size > len(self._memory.of[self._rank]):
            self._memory.of[self._rank], self._kept = np.empty(size, np.uint8), {}
        self._memory.of[self._rank][...] = POISON
        self._size = size
        self.calls += 1
        self._memory.barrier.wait()
        return True

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def array(self, offset: int, shape: tuple[int, ...], like: np.ndarray, dtype: Any = None) -> np.ndarray:
        kind = like.dtype if dtype is None else np.dtype(dtype)
        count = int(np.prod(shape)) * kind.itemsize
        assert offset % 16 == 0 and offset + count <= self._size
        return self._memory.of[self._rank][offset : offset + count].view(kind).reshape(shape)

    @property
    def places(self) -> list[int]:
        return [address_of(x) for x in self._memory.of]

    @staticmethod
    def address(x: np.ndarray) -> int:
        return address_of(x)

    def put(self, copies: Copies, addresses: Sequence[int]) -> None:
        for x in copies.pieces:
            for side in (x.to, x.source, *x.added) if 0 not in x.lengths else ():
                first = addresses[side.array] + side.at
                size = x.itemsize if side is not x.to or copies.dtypes is None else ITEMSIZE[copies.dtypes[1]]
                end = first + sum((n - 1) * stride for n, stride in zip(x.lengths, side.strides)) + size
                for begin, size in ((address_of(y), len(y)) for y in self._memory.of):
                    assert not begin <= first < begin + size or end <= begin + size
        self.copied(copies, addresses)

    def push(self, parts: Sequence[tuple[int, int, int, int]], beside: bool) -> None:
        assert all(rank != self._rank for rank, _, _, _ in parts)
        for rank, offset, address, count in parts:
            target = self._memory.of[rank][offset : offset + count]
            assert len(target) == count and offset + count <= self._size
            self._late.append((target, address))
        if not beside:
            self._copied()

    def _copied(self) -> None:
        for target, address in self._late:
            ctypes.memmove(target.ctypes.data, address, target.nbytes)
        self._late = []

    def arrived(self) -> None:
        self._copied()
        self._memory.barrier.wait()

    def end(self) -> None:
        assert not self._late


class Near:
    """A simulated group whose ranks have a window."""

    def __init__(self, group: Any, memory: Memory) -> None:
        self._group, self.rank, self.size, self.eager, self.known = group, group.rank, group.size, True, group.known
        self.exchange, self.all_gather, self.refuses = group.exchange, group.all_gather, group.refuses
        self.window = Window(memory, group.rank)
