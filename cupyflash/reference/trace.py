"""What the rungs share: the chip that does and counts the work, and three small helpers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = Any


@dataclass
class Trace:
    """A model of one processor beside a large memory (HBM): it does the arithmetic of an algorithm and counts it.

    The algorithms move data by `load` and `store` and compute by `matmul`, `times`, `rescale` and `exp`, so that the
    counts are of what was done and not of what a formula says. Additions and maxima are not counted.
    """

    read: int = 0  # elements read from HBM
    written: int = 0  # elements written to HBM
    on_chip: int = 0  # the most elements held at once: the tiles, and the statistics kept for each row
    exponentials: int = 0
    multiplications: int = 0  # and divisions; those of matrix products included
    rescalings: int = 0  # the part of them that scales output elements outside matrix products

    @property
    def moved(self) -> int:
        """HBM accesses in all."""
        return self.read + self.written

    def load(self, x: Array) -> Array:
        """x, read from HBM."""
        self.read += x.size
        return x

    def store(self, memory: Array, at: Any, x: Array) -> None:
        """memory[at] = x in HBM."""
        memory[at] = x
        self.written += memory[at].size

    def hold(self, *arrays: Array) -> None:
        """These arrays are on the chip at the same time."""
        self.on_chip = max(self.on_chip, sum(x.size for x in arrays))

    def matmul(self, a: Array, b: Array) -> Array:
        """a b"""
        self.multiplications += a.size * b.shape[-1]
        return a @ b

    def times(self, a: Array, b: Array) -> Array:
        """a ∘ b, where b has the shape of the result."""
        self.multiplications += b.size
        return a * b

    def rescale(self, factor: Array, x: Array) -> Array:
        """diag(factor) x, a factor for each row of an output tile."""
        self.rescalings += x.size
        return self.times(factor, x)

    def over(self, x: Array, total: Array) -> Array:
        """x / total; 0 where total is 0, in rows whose keys are all hidden (x is 0 there)."""
        self.multiplications += x.size
        return x / (total + (total == 0))

    def exp(self, x: Array, top: Array) -> Array:
        """e^(x - top); 0 where both are -inf, in rows that have seen no key so far."""
        xp = _module(x)
        self.exponentials += x.size
        return xp.exp(x - xp.where(top == -xp.inf, xp.zeros_like(top), top))

    def add(self, part: Trace) -> None:
        """What another processor did: the work adds up, and each has a chip of its own."""
        self.on_chip = max(self.on_chip, part.on_chip)
        for name in ("read", "written", "exponentials", "multiplications", "rescalings"):
            setattr(self, name, getattr(self, name) + getattr(part, name))


def namespace(**arrays: Array) -> ModuleType:
    """numpy or cupy, whichever the arrays come from; TypeError for others, for mixtures and for 16-bit floats."""
    first, *_ = arrays.values()
    for name, x in arrays.items():
        library = type(x).__module__.partition(".")[0]
        if library not in ("numpy", "cupy") or type(x).__name__ != "ndarray":
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a NumPy or CuPy array")
        if type(x) is not type(first):
            raise TypeError(f"{name} is a {library} array; all must come from one library")
        if x.dtype not in (np.float32, np.float64) or x.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; all must be float32, or all float64")
    return _module(first)


def _module(x: Array) -> ModuleType:
    if isinstance(x, (np.ndarray, np.generic)):  # np.generic: NumPy makes scalars of results without dimensions
        return np
    import cupy

    return cupy


def started(trace: bool | Trace) -> Trace:
    """The chip to work on: the caller's own, or a new one."""
    return trace if isinstance(trace, Trace) else Trace()


def default_scale(q: Array, scale: float | None) -> float:
    """`scale`, by default 1/sqrt(D)."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def tiles(length: int, size: int) -> list[slice]:
    """⌈length / size⌉ ranges; the last one may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def with_trace(results: tuple[Array, ...], chip: Trace, trace: bool | Trace) -> Any:
    """What a rung returns: its results, and the trace where it was asked for."""
    results = (*results, chip) if trace else results
    return results if len(results) > 1 else results[0]
