"""Where the demo measures: NumPy, CuPy or PyTorch; each makes inputs, waits, and knows the memory that is used."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
DIM = 64


@dataclass
class Peak:
    """The most bytes that were allocated at a time; None where nobody counts them."""

    nbytes: int | None = None


class Place:
    """What `beside.measure` asks for."""

    library: str
    dtype: str
    heads: int
    out_of_memory: type[BaseException] = MemoryError
    warms = False  # whether a first call with other lengths may compile

    @property
    def name(self) -> str:
        """Of the device."""
        return f"the CPU ({cores()} cores)"

    def make(self, rows: int) -> tuple[Array, Array, Array]:
        """q, k and v, (1, rows, heads, DIM)."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until all is computed."""

    def peak(self) -> contextlib.AbstractContextManager[Peak]:
        """Counts what is allocated inside."""
        raise NotImplementedError

    def free(self) -> int | None:
        """Bytes; None where nobody says."""
        return free_memory()

    def difference(self, a: Array, b: Array) -> float:
        """The largest one of their elements."""
        return float(abs(a - b).max())


class NumpyPlace(Place):
    """float32 on the CPU."""

    xp: Any = np
    library, dtype, itemsize, heads = "NumPy", "float32", 4, 2

    def make(self, rows: int) -> tuple[Array, Array, Array]:
        q, k, v = np.random.default_rng(rows).standard_normal((3, 1, rows, self.heads, DIM), dtype=np.float32)
        return q, k, v

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        found, own = Peak(), not tracemalloc.is_tracing()
        if own:
            tracemalloc.start()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            yield found
            found.nbytes = tracemalloc.get_traced_memory()[1] - before
        finally:
            if own:
                tracemalloc.stop()


class CupyPlace(Place):
    """float16 on the current GPU."""

    library, dtype, itemsize, heads, warms = "CuPy", "float16", 2, 8, True

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    @property
    def name(self) -> str:
        runtime = self.xp.cuda.runtime
        return str(runtime.getDeviceProperties(self.xp.cuda.Device().id)["name"].decode())

    def make(self, rows: int) -> tuple[Array, Array, Array]:
        rng = self.xp.random.default_rng(rows)
        q, k, v = rng.standard_normal((3, 1, rows, self.heads, DIM), dtype=np.float32).astype(self.dtype)
        return q, k, v

    def wait(self) -> None:
        self.xp.cuda.Device().synchronize()

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        found, pool = Peak(), self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(pool.malloc):
            yield found
        found.nbytes = pool.total_bytes()  # a pool gives nothing back by itself

    def free(self) -> int | None:
        self.xp.get_default_memory_pool().free_all_blocks()
        return int(self.xp.cuda.runtime.memGetInfo()[0])

    def difference(self, a: Array, b: Array) -> float:
        return float(abs(a.astype("float32") - b.astype("float32")).max())


class TorchPlace(Place):
    """bfloat16 of PyTorch's."""

    library, dtype, heads, warms = "PyTorch", "bfloat16", 16, True

    def __init__(self, device: str = "cuda") -> None:
        import torch

        self.torch, self.device = torch, device
        self.out_of_memory: type[BaseException] = torch.OutOfMemoryError
        self._on_gpu = torch.device(device).type == "cuda"

    @property
    def name(self) -> str:
        return str(self.torch.cuda.get_device_name(self.device)) if self._on_gpu else super().name

    def make(self, rows: int) -> tuple[Array, Array, Array]:
        generator = self.torch.Generator(self.device).manual_seed(rows)
        q, k, v = self.torch.randn(
            (3, 1, rows, self.heads, DIM), generator=generator, device=self.device, dtype=self.torch.bfloat16
        )
        return q, k, v

    def wait(self) -> None:
        if self._on_gpu:
            self.torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        found = Peak()
        if not self._on_gpu:
            yield found
            return
        self.torch.cuda.reset_peak_memory_stats(self.device)
        before = self.torch.cuda.memory_allocated(self.device)
        yield found
        found.nbytes = self.torch.cuda.max_memory_allocated(self.device) - before

    def free(self) -> int | None:
        if not self._on_gpu:
            return super().free()
        self.torch.cuda.empty_cache()
        return int(self.torch.cuda.mem_get_info(self.device)[0])

    def difference(self, a: Array, b: Array) -> float:
        return float((a.float() - b.float()).abs().max())


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, or of the container that it is in."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1]))
    for most, used in (
        ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    ):  # fmt: skip
        with contextlib.suppress(OSError, ValueError):
            folder = root / "sys/fs/cgroup"
            found.append(max(0, int((folder / most).read_text()) - int((folder / used).read_text())))
    if not found:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # macOS; Windows says nothing
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(found, default=None)
