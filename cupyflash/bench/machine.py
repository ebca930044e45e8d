"""The machine a result belongs to: names, versions, and how fast anything at all could be on it."""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..pip_line import pip_line
from ..problem import FLOAT8
from ..tools.timing import Candidate, gpu_sampler, host_sampler, interleave, significant


class Unavailable(RuntimeError):
    """A suite cannot run here; the message says what it needs."""


def require_gpu(suite: str) -> None:
    """Raise `Unavailable`, with all that is missing, unless PyTorch and CuPy can be imported and PyTorch sees a GPU."""
    absent = {}
    for module, line in {"torch": "pip install torch", "cupy": pip_line("cuda13")}.items():
        try:
            __import__(module)
        except ImportError as error:
            absent[module] = (str(error), line)
    missing = [f"{module} ({error})" for module, (error, _) in absent.items()]
    no_gpu = _no_gpu(torch_too="torch" not in absent)
    if no_gpu is not None:
        missing.insert(0, f"a CUDA GPU ({no_gpu}; suite 'cpu' runs without)")
    if absent:
        missing[-1] += f"; {' && '.join(line for _, line in absent.values())}"
    if missing:
        raise Unavailable(f"bench suite {suite!r} needs {' and '.join(missing)}")


def _no_gpu(torch_too: bool) -> str | None:
    """Why no GPU can be measured; None where one can. Without PyTorch the driver alone is asked."""
    if not torch_too:
        return "nvidia-smi finds none" if driver() is None else None
    import torch

    if torch.cuda.is_available():
        return None
    return f"PyTorch {torch.__version__} sees none" if torch.version.cuda else "PyTorch is built without CUDA"


def require_torch(suite: str) -> None:
    """Raise `Unavailable` unless PyTorch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"bench suite {suite!r} measures beside PyTorch: {error}; pip install torch") from None


def name(gpu: bool) -> str:
    """What the machine is called, as its maker writes it."""
    if gpu:
        import torch

        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def short_name(full: str) -> str:
    """'NVIDIA H200' as 'h200', 'NVIDIA H100 80GB HBM3' as 'h100': the folder that a GPU's results lie in."""
    words = full.lower().replace("/", "-").split()
    told = [word for word in words if not re.fullmatch(r"nvidia|geforce|tesla|\d+gb|hbm\d\w*", word)]
    return "-".join(told) or "gpu"


def driver() -> str | None:
    """The GPU driver's version, None where nvidia-smi cannot tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


class Meter:
    """The clock of the GPU's multiprocessors and its power, as NVML tells them through nvidia-smi, every 50 ms."""

    def __enter__(self) -> Meter:  # noqa: PYI034 - Self is of Python 3.11
        import torch

        self._seen: list[tuple[float, float, float]] = []  # when, MHz, W
        which = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        what = "--query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 50"
        command = ["nvidia-smi", "-i", which, *what.split()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # "[N/A]"
                continue
            self._seen.append((time.monotonic(), clock, power))

    def state(self, since: float) -> str:
        """Medians since a time of `time.monotonic()`, as "1515 MHz, 690 W"."""
        seen = [sample for sample in self._seen if sample[0] >= since]
        if not seen:
            return "clock and power unknown"
        _, clock, power = map(statistics.median, zip(*seen))
        return f"{clock:.0f} MHz, {power:.0f} W"


def ceilings(gpu: bool, dtypes: Iterable[str], min_ms: float) -> dict[str, float | None]:
    """What matrix products and copies reach on this machine, measured in this run."""
    import torch

    device = "cuda" if gpu else "cpu"
    size, unit, scale = (8192, "tflops", 1e12) if gpu else (2048, "gflops", 1e9)
    work: dict[str, float] = {}
    candidates: dict[str, Candidate] = {}
    for dtype in dtypes:
        if dtype == FLOAT8:  # whose products torch.matmul does not know
            continue
        key = f"{gemm_key(dtype)}_{unit}"
        a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        work[key] = 2 * size**3 / scale
        candidates[key] = _into(torch.matmul, a, b, out=torch.empty_like(a))
    amount = min(2 << 30, torch.cuda.mem_get_info()[0] // 4) if gpu else 256 << 20
    source = torch.empty(amount, device=device, dtype=torch.uint8).random_()
    work["copy_gbps"] = 2 * amount / 1e9  # read and written
    candidates["copy_gbps"] = _into(torch.empty_like(source).copy_, source)
    sampler = gpu_sampler(candidates, min_ms) if gpu else host_sampler(candidates, 1)
    seconds, _ = interleave(list(candidates), 3, sampler)
    return {key: significant(work[key] / seconds[key]) if key in seconds else None for key in work}


def gemm_key(dtype: str) -> str:
    """What the ceiling of a dtype's matrix products is called, without its unit."""
    return "gemm_" + dtype.replace("bfloat", "bf").replace("float", "fp")


def _into(function: Any, *args: Any, **kwargs: Any) -> Candidate:
    return Candidate(lambda: (function(*args, **kwargs),))
