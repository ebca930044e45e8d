"""Where the semantic suite runs: NumPy on the CPU, and each kernel family on a GPU through CuPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from reference import DTYPES

from cupyflash.gpu import device
from cupyflash.gpu.kernel_plan import PAIRWISE
from cupyflash.gpu.plan import FAMILIES
from cupyflash.gpu.plan import plan as make_plan
from cupyflash.passes import BACKWARD, FORWARD, Pass
from cupyflash.problem import FLOAT8, FLOATS, AttentionProblem


@functools.cache
def no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    try:
        device.current(0)
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


@functools.cache
def gpu_count() -> int:
    """GPUs that are there."""
    if no_gpu():
        return 0
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


@dataclass(frozen=True)
class Backend:
    name: str
    family: str | None = None  # None: the CPU

    @property
    def xp(self) -> ModuleType:
        if self.family is None:
            return np
        import cupy

        return cupy

    def put(self, a: np.ndarray) -> Any:
        """A contiguous array of this backend with the values of `a`."""
        return self.xp.asarray(np.array(a, order="C", copy=True if self.family is None else None))

    def get(self, x: Any) -> np.ndarray:
        return x if self.family is None else self.xp.asnumpy(x)

    def get_all(self, arrays: list[Any]) -> list[np.ndarray]:
        """All in one copy, as each waits for the GPU."""
        if self.family is None:
            return arrays
        flat = [self.xp.ascontiguousarray(x).ravel().view(np.uint8) for x in arrays if x.size]
        rest = self.xp.asnumpy(self.xp.concatenate(flat)) if flat else np.empty(0, np.uint8)
        return apart(rest, [(x.shape, x.dtype) for x in arrays])

    def nan(self, shape: tuple[int, ...], dtype: str) -> Any:
        """What outputs hold before they are written."""
        dtype = np.dtype(DTYPES[dtype])
        return self.xp.full(math.prod(shape) * dtype.itemsize, 255, np.uint8).view(dtype).reshape(shape)  # all bits

    def poison(self) -> None:
        """Fill the memory that the next allocations get with NaN, so that nothing right can come of it by chance."""
        if self.family is not None:
            self.xp.get_default_memory_pool().free_all_blocks()
            self.xp.full(8 << 20, np.nan, np.float32)

    def takes(self, dtype: str, dim: int, dim_v: int, **fields: Any) -> bool:
        """Whether this backend states that it takes the head dimensions (and other fields of a problem), on the newest
        GPU that the suite knows; of 8 bits the forward.
        """
        if self.family is None:
            return True
        problem = AttentionProblem(dtype, 1, 16, 16, 1, 1, dim, dim_v, 1 / math.sqrt(max(1, dim)), **fields)
        return not any(FAMILIES[self.family].objection(problem, the_arch(), of) for of in passes(dtype))

    def family_for(self, problem: AttentionProblem) -> str | None:
        """The family to name for a problem; None where this one leaves a mask or bias to others, which are
        judged then."""
        if self.family and any(problem.has(name) for name in PAIRWISE):
            room, arch = FAMILIES[self.family], the_arch()
            if any(room.objection(problem, arch, of) for of in passes(problem.dtype)):
                return None
        return self.family

    def plan(self, problem: AttentionProblem, of: Pass = FORWARD) -> Any:
        return make_plan(problem, device.current(0), of, self.family)


def apart(flat: np.ndarray, forms: Iterable[tuple[tuple[int, ...], Any]]) -> list[np.ndarray]:
    """Arrays of these shapes and dtypes that lie one behind the other."""
    found, start = [], 0
    for shape, dtype in forms:
        size = np.dtype(dtype).itemsize
        end = start + math.prod(shape) * size
        piece = flat[start:end].copy() if start % size else flat[start:end]
        found.append(piece.view(dtype).reshape(shape))
        start = end
    return found


def passes(dtype: str) -> tuple[Pass, ...]:
    return (FORWARD,) if dtype == FLOAT8 else (FORWARD, BACKWARD)


CPU = Backend("cpu")


def the_arch() -> device.Arch:
    """Of this machine's GPU; without one, of the newest that the suite knows."""
    return device.current(0) if no_gpu() is None else device.Arch.of("sm_90a")


def pairs(**fields: Any) -> list[tuple[Backend, str]]:
    """Every backend with every dtype that it takes (and with these fields of a problem)."""
    backends = [CPU, *(Backend(name, name) for name in FAMILIES)]
    return [(backend, dtype) for backend in backends for dtype in FLOATS if backend.takes(dtype, 64, 64, **fields)]


def to_count() -> list[str]:
    """What a run on a GPU has passed tests of: each family with each dtype."""
    eight = [(Backend(name, name), FLOAT8) for name in FAMILIES if Backend(name, name).takes(FLOAT8, 64, 64)]
    return [f"{backend.name}/{dtype}" for backend, dtype in (*pairs(), *eight) if backend.family]


def on_pairs(test: Any) -> Any:
    """Parametrise a test over `backend` and `dtype`; those on a GPU carry the marker."""
    return pytest.mark.parametrize(("backend", "dtype"), [_param(*pair) for pair in pairs()])(test)


def on_pairs_with_scores(test: Any) -> Any:
    """The same where the backend takes soft caps, biases and the like."""
    return pytest.mark.parametrize(("backend", "dtype"), [_param(*pair) for pair in pairs(softcap=1.0)])(test)


def in_turn(name: str, values: Iterable[Any], **fields: Any) -> Any:
    """Parametrise a test over `backend`, `dtype` and `name`, where formats that are computed alike take the values in
    turn.

    A GPU compiles a kernel for each set of features and each format. The 16-bit formats, and float32 beside them,
    differ in how a number is loaded and stored: what every family must do, and what every format must do, are enough.
    `fields` as for `takes`; values of "dims" are pairs of head dimensions (of q and k, of v), of which those are left
    that the backend takes.
    """
    cases = []
    for backend in (CPU, *(Backend(family, family) for family in FAMILIES)):
        for alike in (("float16", "bfloat16", "float32"), ("float64",)):
            dtypes = [dtype for dtype in alike if backend.takes(dtype, 64, 64, **fields)]
            taken = [x for x in values if dtypes and (name != "dims" or backend.takes(dtypes[0], *x, **fields))]
            cases += [_param(backend, dtypes[n % len(dtypes)], x) for n, x in enumerate(taken)]
    return pytest.mark.parametrize(("backend", "dtype", name), cases)


def _param(backend: Backend, dtype: str, *value: Any) -> Any:
    name = "-".join([backend.name, dtype, *("x".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value)])
    return pytest.param(backend, dtype, *value, id=name, marks=[pytest.mark.gpu] if backend.family else [])
