"""CUDA source to cubin with NVRTC, kept on disk; needs neither a GPU nor a driver. `load` alone needs them.

The disk cache may be read-only, full, corrupt, shared by many processes or deleted at any moment: whatever happens to
it costs a compilation, never an error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..folders import user_folder
from .device import INSTALL, import_cupy, version_text

CACHE_LIMIT = 512 << 20  # bytes on disk; the entries that were not read for longest go first

# The errors of a driver that is too old for a cubin, or of another kind of GPU.
_REFUSALS = ("NO_BINARY_FOR_GPU", "INVALID_IMAGE", "INVALID_PTX", "UNSUPPORTED_PTX_VERSION", "INVALID_SOURCE")


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log, which names our file and line."""


@dataclass(frozen=True)
class Resources:
    """What ptxas gave one kernel: registers per thread; bytes per thread spilled and on the stack; bytes per block."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclass(frozen=True, eq=False)
class Compiled:
    """One source, compiled for one architecture; `cached` says whether the cubin came from the disk cache."""

    arch: str
    cubin: bytes
    log: str
    resources: dict[str, Resources]
    cached: bool


@dataclass(frozen=True)
class CacheInfo:
    path: Path
    entries: int
    bytes: int


@functools.lru_cache(maxsize=256)
def compile_source(source: str, arch: str) -> Compiled:
    """Compile `source` for `arch` ("sm_80", "sm_90a", ...), or take it from this process or from the disk cache.

    CompileError carries NVRTC's log; ImportError says what to install where NVRTC or cuda-core is missing.
    """
    key = _key(source, arch)
    found = _read(key)
    if found is not None:
        return _compiled(arch, *found, cached=True)
    compiled = compile_uncached(source, arch)
    _write(key, compiled)
    return compiled


def compile_uncached(source: str, arch: str) -> Compiled:
    """`compile_source` without any cache."""
    core = _cuda_core()
    log = io.StringIO()
    try:
        version = nvrtc_version()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ImportError(f"compiling kernels needs NVRTC, which cannot be loaded ({reason}); run {INSTALL}") from error
    try:
        code = core.Program(source, "c++", _options(arch)).compile("cubin", logs=log).code
    except Exception as error:  # cuda.core keeps its error types private
        raise CompileError(f"NVRTC {version} cannot compile for {arch}: {error}") from error
    return _compiled(arch, bytes(code), log.getvalue().rstrip("\0\n"), cached=False)


def nvrtc_version() -> str:
    """NVRTC's version, "13.2"; RuntimeError where it cannot be loaded."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


_importing = threading.Lock()  # two threads that import cuda.core at once see half of it


def _cuda_core() -> Any:
    try:
        with _importing:
            import cuda.core
            from cuda.core.utils import make_program_cache_key  # noqa: F401  (old releases have none)
    except ImportError as error:
        raise ImportError(f"compiling kernels needs cuda-core 1.2 or newer ({error}); run {INSTALL}") from error
    return cuda.core


def _options(arch: str) -> Any:
    return _cuda_core().ProgramOptions(
        name="cupyflash",
        arch=arch,
        std="c++17",
        ptxas_options=["-v"],
        device_as_default_execution_space=True,  # NVRTC 13.0 takes generic lambdas for host functions otherwise
    )


def _compiled(arch: str, cubin: bytes, log: str, cached: bool) -> Compiled:
    return Compiled(arch, cubin, log, parse_resources(log), cached)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_FRAME = r"Function properties for {}\s[^\d]*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


def parse_resources(log: str) -> dict[str, Resources]:
    """The kernels' resources in a `ptxas -v` log, by kernel name."""
    resources = {}
    for name, text in _ENTRY.findall(log):
        frame = re.search(_FRAME.format(name), text)
        registers = re.search(r"Used (\d+) registers", text)
        if frame and registers:
            shared = re.search(r"(\d+) bytes smem", text)
            stack, stores, loads = map(int, frame.groups())
            resources[name] = Resources(int(registers[1]), stores, loads, stack, int(shared[1]) if shared else 0)
    return resources


def cache_dir() -> Path:
    """CUPYFLASH_CACHE_DIR, or "cupyflash" in the user's cache folder."""
    return user_folder(
        "CUPYFLASH_CACHE_DIR", ("LOCALAPPDATA", "AppData/Local"), "Library/Caches", ("XDG_CACHE_HOME", ".cache")
    )


def cache_info() -> CacheInfo:
    """Where the disk cache is and what it holds."""
    sizes = []
    for folder, _, names in os.walk(_programs()):
        for name in names:
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                sizes.append(os.path.getsize(os.path.join(folder, name)))
    return CacheInfo(cache_dir(), len(sizes), sum(sizes))


def clear_cache() -> CacheInfo:
    """Empty the disk cache; returns what it held."""
    info = cache_info()
    shutil.rmtree(_programs(), ignore_errors=True)
    compile_source.cache_clear()
    return info


def share_cache() -> None:
    """Let every user read the disk cache, for a container that root fills and another user runs."""
    for folder, _, names in os.walk(_programs()):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(OSError):
                os.chmod(path, 0o755 if path == folder else 0o644)


def _programs() -> Path:
    return cache_dir() / "programs"  # a folder that is ours alone, wherever CUPYFLASH_CACHE_DIR points


def _key(source: str, arch: str) -> bytes:
    return _cuda_core().utils.make_program_cache_key(
        code=source, code_type="c++", options=_options(arch), target_type="cubin"
    )


def _read(key: bytes) -> tuple[bytes, str] | None:
    """(cubin, log), or None where the cache has no whole entry."""
    with contextlib.suppress(OSError):
        entry = _cuda_core().utils.FileStreamProgramCache(_programs()).get(key, b"")
        digest, _, payload = entry.partition(b"\n")
        if digest == _digest(payload):
            log, _, cubin = payload.partition(b"\n")
            return cubin, json.loads(log)
    return None


def _write(key: bytes, compiled: Compiled) -> None:
    payload = json.dumps(compiled.log).encode() + b"\n" + compiled.cubin
    with contextlib.suppress(OSError):
        cache = _cuda_core().utils.FileStreamProgramCache(_programs(), max_size_bytes=CACHE_LIMIT)
        cache[key] = _digest(payload) + b"\n" + payload


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()


def load(compiled: Compiled, kernels: Sequence[tuple[str, int]], ordinal: int) -> list[Any]:
    """Load a cubin onto the GPU `ordinal` and return its kernels, each a `cupy.cuda.Function`.

    `kernels` holds (name, bytes of dynamic shared memory that its launches take). RuntimeError says what to install
    where the driver refuses the cubin.
    """
    cupy = import_cupy()
    functions = []
    with cupy.cuda.Device(ordinal), tempfile.TemporaryDirectory(prefix="cupyflash-") as folder:
        path = os.path.join(folder, "kernels.cubin")
        Path(path).write_bytes(compiled.cubin)
        module = cupy.RawModule(path=path)
        try:
            for name, shared_memory in kernels:
                kernel = module.get_function(name)
                if shared_memory:
                    kernel.max_dynamic_shared_size_bytes = shared_memory
                functions.append(kernel.kernel)  # the driver's function, for this device: RawKernel looks it up each time
        except cupy.cuda.driver.CUDADriverError as error:
            raise _load_error(error, compiled.arch, cupy.cuda.runtime.driverGetVersion()) from error
    return functions


def _load_error(error: Exception, arch: str, driver: int) -> RuntimeError:
    """The driver's error in loading a cubin, as one that says what to do."""
    text = f"the NVIDIA driver (for CUDA {version_text(driver)}) cannot load a kernel for {arch} "
    text += f"that NVRTC {nvrtc_version()} compiled ({error})"
    if any(refusal in str(error) for refusal in _REFUSALS):
        text += f"; update the driver, or choose the packages that match it: {INSTALL}"
    return RuntimeError(text)
