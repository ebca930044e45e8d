"""CUDA source to cubin with NVRTC, kept on disk (`cache.py`); needs neither a GPU nor a driver. `load` alone needs
them.

With the environment variable CUPYFLASH_LINEINFO=1 programs carry line numbers, so that Nsight Compute and cuda-gdb show
the lines of our files. They run as fast, and lie in the cache beside those without.
"""

from __future__ import annotations

import functools
import io
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache
from .device import import_cupy, install, version_text
from .source import kernels_folder

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


@functools.lru_cache(maxsize=256)
def compile_source(source: str, arch: str) -> Compiled:
    """Compile `source` for `arch` ("sm_80", "sm_90a", ...), or take it from this process or from the disk cache.

    CompileError carries NVRTC's log; ImportError says what to install where NVRTC or cuda-core is missing.
    """
    source = _lined(source)
    key = _key(source, arch)
    found = _kept(key, arch)
    if found is None:
        with cache.turn(key):
            found = _kept(key, arch)  # by the process whose turn it was
            if found is None:
                found = compile_uncached(source, arch)
                cache.write(key, found.log.encode().replace(b"\0", b"") + b"\0" + found.cubin)
    return found


def compile_uncached(source: str, arch: str) -> Compiled:
    """`compile_source` without any cache."""
    _, code, log = _nvrtc(source, arch)
    return _compiled(arch, code, log, cached=False)


def on_disk(source: str, arch: str) -> bool:
    """Whether the disk cache has what `compile_source` would compile."""
    return _kept(_key(_lined(source), arch), arch) is not None


def ptx(source: str, arch: str) -> str:
    """What NVRTC makes of a source, and ptxas a cubin of: PTX, to be read. Compiled anew each time."""
    from cuda.bindings import nvrtc

    program, *_ = _nvrtc(_lined(source), arch)  # compiled to a cubin: cuda.core asks for a driver to make PTX
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return text.decode().rstrip("\0")


def _nvrtc(source: str, arch: str) -> tuple[Any, bytes, str]:
    """The program (cuda.core's), its cubin, and the log."""
    core = _cuda_core()
    log = io.StringIO()
    try:
        version = nvrtc_version()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ImportError(
            f"compiling kernels needs NVRTC, which cannot be loaded ({reason}); run {install()}"
        ) from error
    program = None
    try:
        program = core.Program(source, "c++", _options(arch))
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core keeps its error types private
        program = None  # if it goes together with the error, by garbage collection, it prints a traceback
        raise CompileError(f"NVRTC {version} cannot compile for {arch}: {error}") from error
    return program, code, log.getvalue().rstrip("\0\n")


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
        raise ImportError(f"compiling kernels needs cuda-core 1.2 or newer ({error}); run {install()}") from error
    return cuda.core


def _options(arch: str) -> Any:
    return _cuda_core().ProgramOptions(
        name="cupyflash",
        arch=arch,
        std="c++17",
        ptxas_options=["-v"],
        lineinfo=_with_lines(),
        # A product and a sum are rounded once where the source says fma(), and twice elsewhere. Left to the compiler,
        # that differs between two inlined copies of one line, so between two tiles of one call.
        fma=False,
        device_as_default_execution_space=True,  # NVRTC 13.0 takes generic lambdas for host functions otherwise
    )


_LINE = re.compile(r'^(#line \d+) "([^"]+)"', re.MULTILINE)


def _with_lines() -> bool:
    return os.environ.get("CUPYFLASH_LINEINFO", "0") not in ("", "0")


def _lined(source: str) -> str:
    """With CUPYFLASH_LINEINFO, a source that names our files by their paths, where a profiler finds them."""
    if not _with_lines():
        return source
    return _LINE.sub(lambda mark: f'{mark[1]} "{(kernels_folder() / mark[2]).as_posix()}"', source)


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


def _key(source: str, arch: str) -> bytes:
    key: bytes = _cuda_core().utils.make_program_cache_key(
        code=source, code_type="c++", options=_options(arch), target_type="cubin"
    )
    return key


def _kept(key: bytes, arch: str) -> Compiled | None:
    log, zero, cubin = (cache.read(key) or b"").partition(b"\0")
    return _compiled(arch, cubin, log.decode(errors="replace"), cached=True) if zero else None


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
                functions.append(kernel.kernel)  # the driver's, for this device: RawKernel looks it up each time
        except cupy.cuda.driver.CUDADriverError as error:
            raise _load_error(error, compiled.arch, cupy.cuda.runtime.driverGetVersion()) from error
    return functions


def _load_error(error: Exception, arch: str, driver: int) -> RuntimeError:
    """The driver's error in loading a cubin, as one that says what to do."""
    text = f"the NVIDIA driver (for CUDA {version_text(driver)}) cannot load a kernel for {arch} "
    text += f"that NVRTC {nvrtc_version()} compiled ({error})"
    if any(refusal in str(error) for refusal in _REFUSALS):
        text += f"; update the driver, or choose the packages that match it: {install()}"
    return RuntimeError(text)
