"""The kernel that appends, run on the CPU on NumPy arrays: in the place of array operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Launch, as_cpp, compile_all, launch
from on_cpu import Guarded
from reference import DTYPES

from cupyflash import appending, interop, writing
from cupyflash.gpu import append
from cupyflash.gpu.append import NAME, Appending
from cupyflash.interop import numpy_


class OnCpu:
    """As an adapter of a GPU has it, on NumPy arrays: in the place of NumPy's."""

    device, stream = staticmethod(lambda x: 0), staticmethod(lambda n: 0)
    signature = staticmethod(lambda x: (x.shape, x.strides, x.dtype))
    pointer = staticmethod(lambda x: x.ctypes.data)

    def __init__(self) -> None:
        self.launches: list[Appending] = []
        self.made: list[Guarded] = []
        self.told: list[Any] = []  # of which it was said that they are written to

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy_, name)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> np.ndarray:
        self.made.append(Guarded(shape, DTYPES.get(dtype, dtype)))  # NaN, or -1
        return self.made[-1].array

    def written(self, x: Any) -> None:
        self.told.append(x)

    def launch(self, appending: Appending, addresses: list[int], *_: int) -> None:
        size = '\nextern "C" unsigned params() { return sizeof(Params); }\n'
        (library,) = compile_all(as_cpp(appending.program.source(), [NAME]) + size)
        assert library.params() == len(appending.params(addresses))  # what a launch copies
        how = Launch(appending.blocks, appending.program.threads, 1, 2, 1024, 0, len(self.launches) % 2 == 1)
        self.launches.append(appending)
        assert launch(library, NAME, how, appending.params(addresses)) is None


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    """NumPy arrays go to the kernel."""
    lib = OnCpu()
    monkeypatch.setattr(Appending, "launch", lambda *given: lib.launch(*given))
    monkeypatch.setattr(writing, "on_kernel", lambda lib, arrays: append)
    monkeypatch.setattr(writing, "_on_host", lambda *_: None)
    monkeypatch.setattr(appending, "_alike", {})
    monkeypatch.setitem(interop._by_type, np.ndarray, lib)
    yield lib
    for x in lib.made:
        x.check("what was made")
