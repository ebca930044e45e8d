"""Source to cubin, with no GPU: what comes back, and what is said when it cannot be done."""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cupyflash.gpu import compiler, device, dump, programs
from cupyflash.gpu.compiler import Compiled, CompileError, Resources, parse_resources
from cupyflash.gpu.kernel_plan import KernelPlan, Launch
from cupyflash.gpu.source import kernels_folder
from cupyflash.passes import BACKWARD, FORWARD

pytest.importorskip("cuda.core")

TWO_KERNELS = """
extern "C" __global__ void reverse(float *a) {
  __shared__ float tile[64];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = tile[63 - threadIdx.x];
}
extern "C" __global__ void fill(float *a, float x) { a[blockIdx.x * blockDim.x + threadIdx.x] = x; }
"""

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float *a) {
  float x[100];
  for (int i = 0; i < 100; i++) x[i] = a[i * 1024 + threadIdx.x];
  for (int k = 0; k < 100; k++) {
    __syncthreads();
    for (int i = 0; i < 100; i++) x[i] = x[i] * x[(i + 7) % 100] + a[k];
  }
  for (int i = 0; i < 100; i++) a[i * 1024 + threadIdx.x] = x[i];
}
"""

# The accumulator is touched between two asynchronous products: ptxas has to wait after each.
SERIALIZED = """
extern "C" __global__ void __launch_bounds__(128) serialized(float *out, long long a, long long b, int n) {
  float c[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; i++) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;");
    c[0] += 1.0f;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = c[i];
}
"""

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'main_loop' for 'sm_75'
ptxas info    : Function properties for main_loop
ptxas         .     400 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 400 bytes cumulative stack size, 256 bytes smem, 364 bytes cmem[0]
ptxas info    : Compiling entry function 'main' for 'sm_75'
ptxas info    : Function properties for main
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""


def test_parse_resources():
    assert parse_resources(LOG) == {
        "main_loop": Resources(registers=168, spill_stores=16, spill_loads=24, stack=400, static_shared=256),
        "main": Resources(registers=4, spill_stores=0, spill_loads=0, stack=0, static_shared=0),
    }
    assert parse_resources("") == {}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_compiles_without_a_gpu(arch):
    compiled = compiler.compile_uncached(TWO_KERNELS, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert (compiled.arch, compiled.cached) == (arch, False)
    assert f"for '{arch}'" in compiled.log
    assert set(compiled.resources) == {"reverse", "fill"}
    assert compiled.resources["reverse"].static_shared >= 256  # some architectures reserve more
    assert all(r.registers > 0 and r.spill_stores == 0 for r in compiled.resources.values())


def test_spills_are_seen():
    spills = compiler.compile_uncached(SPILLS, "sm_80").resources["spills"]
    assert spills.spill_stores > 0
    assert spills.spill_loads > 0


def test_the_log_tells_of_serialized_wgmma():
    log = compiler.compile_uncached(SERIALIZED, "sm_90a").log
    assert "wgmma.mma_async instructions are serialized" in log


FUSED = 'extern "C" __global__ void fused(float *a) {{ a[0] = {}; }}'


@pytest.mark.parametrize(
    "source, fused",
    [("a[1] * a[2] + a[3]", False), ("__fmaf_rn(a[1], a[2], a[3])", True), ("fmaf(a[1], a[2], a[3])", True)],
)
def test_the_source_says_where_products_are_fused(source, fused):
    """Left to the compiler, two copies of one line may be rounded differently."""
    made = compiler.ptx(FUSED.format(source), "sm_80")
    assert ("fma.rn.f32" in made) is fused
    assert ("mul" in made and "add" in made) is not fused


# ---- CUPYFLASH_DUMP, CUPYFLASH_LINEINFO -----------------------------------------------------------------------------

MARKED = '#line 7 "sm80/forward.cu"\n' + TWO_KERNELS


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    compiler.compile_source.cache_clear()
    yield
    compiler.compile_source.cache_clear()


@pytest.mark.parametrize("value, lines", [(None, False), ("", False), ("0", False), ("1", True)])
def test_line_numbers_on_request(monkeypatch, own_cache, value, lines):
    """Nsight Compute finds the files by the paths that are in the cubin."""
    plain = compiler.compile_source(MARKED, "sm_80")
    compiler.compile_source.cache_clear()
    if value is not None:
        monkeypatch.setenv("CUPYFLASH_LINEINFO", value)
    compiled = compiler.compile_source(MARKED, "sm_80")
    assert compiled.cached is not lines  # programs with lines lie beside those without
    folder = str(kernels_folder() / "sm80").encode()
    assert (folder in compiled.cubin and b"forward.cu" in compiled.cubin) is lines
    assert folder not in plain.cubin
    assert compiled.resources == plain.resources


def a_plan(**changed):
    constants = (("DIM", 64), ("DIM_V", 32), ("LEFT", False))
    launches = (Launch("reverse", 10, 64, 1000), Launch("fill", 10, 32))
    fixed = {"family": "sm80", "arch": "sm_80", "dtype": "float16", "of": FORWARD, "source": "sm80/forward.cu"}
    return KernelPlan(**{**fixed, "constants": constants, "launches": launches, "alignment": 16, **changed})


def test_dump(monkeypatch, own_cache, tmp_path):
    folder = tmp_path / "not yet" / "dump"
    monkeypatch.setattr(programs, "generate", lambda plan: MARKED)
    programs.program(a_plan())
    assert not folder.exists()
    monkeypatch.setenv("CUPYFLASH_DUMP", str(folder))
    compiled = programs.program(a_plan())  # this process had it; that it uses it is what counts
    files = sorted(folder.iterdir())
    (name,) = {path.stem for path in files}
    assert re.fullmatch(r"sm_80-sm80-forward-float16-d64x32-[0-9a-f]{8}", name)
    assert [path.suffix for path in files] == [".cu", ".cubin", ".ptx", ".txt"]
    source, cubin, ptx, text = files
    assert source.read_text() == MARKED
    assert cubin.read_bytes() == compiled.cubin
    assert ".target sm_80" in ptx.read_text() and ".entry reverse" in ptx.read_text()
    used, told = compiled.resources["reverse"], text.read_text()
    assert (
        f"reverse: 64 threads, {1000 + used.static_shared} bytes of shared memory, {used.registers} registers, "
        "0 bytes spilled, 0 bytes of stack\n"
    ) in told
    assert "fill: 32 threads" in told and "DIM_V = 32" in told and compiled.log in told

    programs.program(a_plan(of=BACKWARD, dtype="float32", constants=(("COLUMNS", 128),), arch="sm_90a"))
    assert len({path.stem for path in folder.iterdir()}) == 2
    assert len(list(folder.glob("sm_90a-sm80-backward-float32-d128-*"))) == 4


def test_dump_once_per_process(monkeypatch, own_cache, tmp_path):
    monkeypatch.setattr(programs, "generate", lambda plan: MARKED)
    monkeypatch.setenv("CUPYFLASH_DUMP", str(tmp_path / "once"))
    programs.program(a_plan())
    calls = []
    monkeypatch.setattr(compiler, "ptx", lambda *given: calls.append(given) or "")
    programs.program(a_plan(launches=(Launch("reverse", 99, 64),)))  # another grid, the same program
    assert not calls
    monkeypatch.setenv("CUPYFLASH_DUMP", str(tmp_path / "elsewhere"))
    programs.program(a_plan())
    assert len(calls) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_dump_follows_no_link(monkeypatch, own_cache, tmp_path):
    """That somebody else has put where it writes: into a folder that all can write."""
    monkeypatch.setattr(programs, "generate", lambda plan: MARKED)
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    folder.mkdir()
    names = [dump.title(a_plan(), MARKED) + suffix for suffix in (".cu", ".ptx", ".cubin", ".txt")]
    for name in names:
        for end in ("", f".{os.getpid()}", ".part"):
            (folder / (name + end)).symlink_to(victim)
    monkeypatch.setenv("CUPYFLASH_DUMP", str(folder))
    programs.program(a_plan())
    assert victim.read_text() == "precious"
    assert all(stat.S_ISREG((folder / name).lstat().st_mode) for name in names)
    assert (folder / names[0]).read_text() == MARKED


def test_dump_where_nothing_can_be_written(monkeypatch, own_cache, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(programs, "generate", lambda plan: MARKED)
    monkeypatch.setenv("CUPYFLASH_DUMP", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"CUPYFLASH_DUMP is '.*file'; it must be a folder that can be written"):
        programs.program(a_plan())


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_leaves_nothing_that_complains(monkeypatch):
    """cuda.core's finalizer does, where a program is collected together with the traceback that holds it."""

    def fail():
        try:
            compiler.compile_uncached("nonsense", "sm_80")
        except CompileError as error:
            held = [error]
            held.append(held)

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    fail()
    gc.collect()
    assert not said


def test_an_error_names_our_file_and_line():
    source = '#line 7 "sm80/forward.cu"\nextern "C" __global__ void k(int *a) { *a = nowhere; }'
    with pytest.raises(
        CompileError, match=r'NVRTC [\d.]+ cannot compile for sm_80(.|\n)*sm80/forward.cu\(7\).*"nowhere"'
    ):
        compiler.compile_uncached(source, "sm_80")


def test_an_architecture_nvrtc_does_not_know():
    with pytest.raises(CompileError, match=r"cannot compile for sm_999(.|\n)*invalid value for --gpu-architecture"):
        compiler.compile_uncached(TWO_KERNELS, "sm_999")


def test_no_nvrtc(monkeypatch):
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    def missing():
        raise DynamicLibNotFoundError("No such file: libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(ImportError, match=r"needs NVRTC.*libnvrtc.so.13.*pip install "):
        compiler.compile_uncached(TWO_KERNELS, "sm_80")


def test_no_cuda_core(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs cuda-core.*pip install "):
        compiler.compile_source(TWO_KERNELS, "sm_80")


class CUDADriverError(RuntimeError):
    """Stands for CuPy's, which cannot be made without a driver."""


@pytest.mark.parametrize(
    "message, says_what_to_install",
    [
        ("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device", True),
        ("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid", True),
        ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with an unsupported toolchain.", True),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", False),
    ],
)
def test_a_driver_that_refuses(monkeypatch, message, says_what_to_install):
    class RawModule:
        def __init__(self, path):
            assert Path(path).read_bytes() == b"cubin"

        def get_function(self, name):
            raise CUDADriverError(message)

    cuda = SimpleNamespace(
        Device=lambda ordinal: contextlib.nullcontext(),
        driver=SimpleNamespace(CUDADriverError=CUDADriverError),
        runtime=SimpleNamespace(driverGetVersion=lambda: 12040),
    )
    monkeypatch.setattr(compiler, "import_cupy", lambda: SimpleNamespace(cuda=cuda, RawModule=RawModule))
    with pytest.raises(RuntimeError, match=r"driver \(for CUDA 12.4\) cannot load a kernel for sm_80 .*NVRTC \d+") as e:
        compiler.load(Compiled("sm_80", b"cubin", "", {}, False), [("k", 0)], 0)
    assert message in str(e.value)
    assert ("update the driver" in str(e.value) and "pip install" in str(e.value)) is says_what_to_install


@pytest.mark.gpu
def test_load_and_launch():
    cupy = pytest.importorskip("cupy")
    source = (
        TWO_KERNELS
        + """
    extern "C" __global__ void far(float *a) {
      extern __shared__ float tile[];
      tile[15000] = 3.0f;
      a[0] = tile[15000];
    }"""
    )
    compiled = compiler.compile_source(source, device.current(0).name)
    reverse, far = compiler.load(compiled, [("reverse", 0), ("far", 60004)], 0)
    a = cupy.arange(64, dtype="float32")
    reverse((1,), (64,), (a,))
    np.testing.assert_array_equal(cupy.asnumpy(a), np.arange(64, dtype="float32")[::-1])
    far((1,), (1,), (a,), 60004)
    assert float(a[0]) == 3.0


@pytest.mark.gpu
def test_a_cubin_for_another_gpu():
    pytest.importorskip("cupy")
    other = "sm_80" if device.current(0).cc >= 90 else "sm_90a"
    with pytest.raises(RuntimeError, match=rf"cannot load a kernel for {other} .*update the driver"):
        compiler.load(compiler.compile_source(TWO_KERNELS, other), [("fill", 0)], 0)
