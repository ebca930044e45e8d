"""Kernels that no plan is needed for: a program with Params of its own, and its launch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable
from typing import Any, Protocol

from . import compiler, device


class Program(Hashable, Protocol):
    """Equal ones are compiled once."""

    def source(self) -> str: ...


def launch(program: Program, name: str, params: bytes, grid: tuple[int, int], ordinal: int, stream: int) -> None:
    """Run the kernel of this name, on `grid`, blocks and the threads of each."""
    arguments, of = _arguments(params), _launching()
    with of.here(ordinal):
        function = _function(program, name, ordinal)
        of.driver.launchKernel(function.ptr, grid[0], 1, 1, grid[1], 1, 1, 0, stream, arguments.address, 0)


@functools.lru_cache(256)
def _arguments(params: bytes) -> Any:
    return _launching().Arguments((ctypes.c_char * len(params)).from_buffer_copy(params))


@functools.cache  # an import statement costs 1 us in every launch
def _launching() -> Any:
    from . import launch

    return launch


@functools.lru_cache(128)
def _function(program: Program, name: str, ordinal: int) -> Any:
    compiled = compiler.compile_source(program.source(), device.current(ordinal).name)
    return compiler.load(compiled, [(name, 0)], ordinal)[0]
