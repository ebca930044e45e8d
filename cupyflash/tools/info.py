"""What this machine has, for `cupyflash info`: looks without importing PyTorch or JAX, and works with nothing there."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from .. import __version__

PACKAGES = {  # what it is called here: distributions that may hold it
    "NumPy": ("numpy",),
    "ml_dtypes": ("ml-dtypes",),
    "threadpoolctl": ("threadpoolctl",),
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda-core": ("cuda-core",),
    "PyTorch": ("torch",),
    "JAX": ("jax",),
}

SETTINGS = {  # environment variables, and what each does
    "CUPYFLASH_CACHE_DIR": "the folder of compiled kernels",
    "CUPYFLASH_CONFIG_DIR": "the folder of what `cupyflash tune` found",
    "CUPYFLASH_DUMP": "a folder to write source, PTX, cubin and resources of every program to that a process uses",
    "CUPYFLASH_LINEINFO": "1: programs carry line numbers, so that Nsight Compute shows our lines",
    "CUPYFLASH_TRACEBACK": "1: the command line shows where an error came from",
}


def facts() -> list[tuple[str, str]]:
    """(what, value) pairs; where something is missing the value says what to install or do."""
    from ..bench.machine import driver
    from ..gpu.cache import cache_info
    from ..gpu.source import kernels_folder, sources_digest

    cache = cache_info()
    return [
        ("cupyflash", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"),
        *_gpus(),
        ("driver", driver() or "unknown: nvidia-smi is not there"),
        ("NVRTC", _nvrtc()),
        *[(name, _version(distributions)) for name, distributions in PACKAGES.items()],
        ("cache", f"{cache.path}: {cache.note or f'{cache.entries} programs, {cache.bytes / 2**20:.1f} MiB'}"),
        ("tuning", _tuning()),
        *[(name, os.environ.get(name) or f"not set ({what})") for name, what in SETTINGS.items()],
        ("kernels", f"{kernels_folder()}, SHA-256 {sources_digest()[:16]}"),
    ]


def _gpus() -> list[tuple[str, str]]:
    from ..gpu.device import current, import_cupy, version_text

    try:
        current(0)
        runtime = import_cupy().cuda.runtime
    except (ImportError, RuntimeError) as error:
        return [("GPU", f"none can be used: {error}"), ("", "NumPy arrays are computed on the CPU")]
    found = []
    for ordinal in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(ordinal)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
        try:
            arch = current(ordinal)
            text = f"compute capability {arch.cc / 10}, kernels for {arch.name}, {arch.sms} multiprocessors"
        except RuntimeError as error:
            text = str(error)
        found.append((f"GPU {ordinal}", f"{name}, {memory:.0f} GiB, {text}"))
    versions = (version_text(version()) for version in (runtime.runtimeGetVersion, runtime.driverGetVersion))
    return [*found, ("CUDA", "runtime {}, driver for up to {}".format(*versions))]


def _tuning() -> str:
    from ..gpu import tuned

    found = tuned.stored()
    return found.note or f"{tuned.path()}: {len(found.entries)} tiles"


def _nvrtc() -> str:
    from ..gpu.compiler import nvrtc_version
    from ..gpu.device import install

    try:
        return nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"not found, so no kernel can be compiled ({error}); {install()}"


def _version(distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            return f"{metadata.version(distribution)} ({distribution})"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
