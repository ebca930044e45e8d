"""What a GPU is, as far as planning goes: plain data, for the GPU at hand or for one that is not there."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from ..pip_line import pip_line

OLDEST = 75

# compute capability: multiprocessors of a typical GPU, largest shared memory of one block in bytes
_TYPICAL = {
    75: (40, 65536),
    80: (108, 166912),
    86: (84, 101376),
    87: (16, 166912),
    89: (128, 101376),
    90: (132, 232448),
    100: (148, 232448),
    103: (148, 232448),
    110: (20, 232448),
    120: (170, 101376),
    121: (48, 101376),
}


@dataclass(frozen=True)
class Arch:
    """The facts about a GPU that a plan rests on.

    `name` is what its kernels are compiled for ("sm_80", "sm_90a"), `cc` its compute capability (90 for 9.0), `sms`
    the number of its multiprocessors, `shared_memory` the bytes of shared memory that one block may ask for.
    """

    name: str
    cc: int
    sms: int
    shared_memory: int

    @classmethod
    def of(cls, name: str) -> Arch:
        """A typical GPU of an architecture ("sm_80", "sm_90a", ...), so that planning and compiling need no GPU.

        A suffix is not needed and not looked at: kernels are compiled for what `current` would name on such a GPU.
        ValueError for an architecture that is unknown or older than sm_75.
        """
        match = re.fullmatch(r"sm_(\d+)[af]?", str(name))
        cc = int(match[1]) if match else 0
        if cc not in _TYPICAL:
            known = ", ".join(_target(known) for known in _TYPICAL)
            raise ValueError(f"arch is {name!r}; it must be one of {known}")
        return cls(_target(cc), cc, *_TYPICAL[cc])


@functools.cache
def current(ordinal: int) -> Arch:
    """The GPU with this CUDA ordinal.

    ImportError where CuPy is not installed; RuntimeError where there is no driver, no such GPU, a driver too old for
    CuPy or a GPU older than sm_75. Each says what was found and what to do.
    """
    cuda = import_cupy().cuda
    count = _count(cuda.runtime)
    if not 0 <= ordinal < count:
        raise RuntimeError(
            f"GPU {ordinal} was asked for, but CUDA sees {count} GPU{'s' * (count != 1)}; "
            "choose another or look at CUDA_VISIBLE_DEVICES"
        )
    cc = int(cuda.Device(ordinal).compute_capability)
    if cc < OLDEST:
        raise RuntimeError(
            f"GPU {ordinal} has compute capability {cc // 10}.{cc % 10}; the kernels need 7.5 (Turing) or newer. "
            "Pass NumPy arrays to compute on the CPU"
        )
    sms, shared_memory = (
        cuda.runtime.deviceGetAttribute(attribute, ordinal)
        for attribute in (
            cuda.runtime.cudaDevAttrMultiProcessorCount,
            cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin,
        )
    )
    return Arch(_target(cc), cc, sms, shared_memory)


def install() -> str:
    """What to type where CuPy, cuda-core or NVRTC is missing."""
    return f"{pip_line('cuda13')} (NVIDIA driver 580 or newer) or {pip_line('cuda12')}"


def import_cupy() -> Any:
    """CuPy, or an ImportError that says how to install it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"arrays on a GPU need CuPy, which cannot be imported ({error}); run {install()}") from error
    except OSError as error:  # it makes a folder in the user's home, which a container may not have
        raise ImportError(
            f"arrays on a GPU need CuPy, which cannot be imported ({error}); let CUPY_CACHE_DIR name a folder that can "
            "be written"
        ) from error
    return cupy


def _target(cc: int) -> str:
    return "sm_90a" if cc == 90 else f"sm_{cc}"  # wgmma and TMA need the "a"


def _count(runtime: Any) -> int:
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        if driver == 0:
            found = (
                "no NVIDIA driver was found; install one from https://www.nvidia.com/drivers (or start the container "
            )
            found += "with its GPUs), or pass NumPy arrays to compute on the CPU"
        elif driver // 1000 < needed // 1000:
            found = f"the NVIDIA driver is for CUDA {version_text(driver)} but this CuPy is for CUDA "
            found += f"{version_text(needed)}; update the driver or choose the packages for it: {install()}"
        else:
            found = "CUDA sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        raise RuntimeError(f"{found} ({error})") from error


def version_text(version: int) -> str:
    """CUDA's 12040 as "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"
