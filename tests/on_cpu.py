"""CUDA kernels without a GPU: their source compiled as C++, the instructions of kernels_cu/ptx replaced by the twins in
ptx_on_cpu/, the threads of a block run as fibers (cuda_on_cpu.h).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import assert_as_good, standard, standard_in_own_precision, state
from semantics import draw_inputs

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import Box, KernelPlan, plan
from cupyflash.gpu.source import generate
from cupyflash.problem import AttentionProblem

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="needs Linux and g++ to compile the kernels for the CPU",
)

TESTS = Path(__file__).parent
FOLDER = Path(tempfile.mkdtemp(prefix="kernels-on-cpu-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

# The fields of kernels_cu/attention/params.cuh.
POINTERS = (
    "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "delta", "dq_sum", "m", "l", "o_sum", "counters", "mask",
)  # fmt: skip
STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def check(
    family: str,
    arch: Arch,
    rng: np.random.Generator,
    dtype: str,
    shapes: dict[str, Any],
    options: dict[str, Any],
    unit: float = 1.0,
) -> None:
    """One problem forward and backward, in both orders (cuda_on_cpu.h); every result must be as good as the reference.

    To the bit the same in both, too, but for dq where that is not asked for.
    """
    options = dict(options)
    deterministic = options.pop("deterministic", False)
    q, k, v, dout, key_mask = draw_inputs(rng, dtype, **shapes)
    if key_mask is not None:
        key_mask[0] = False  # queries that see no key
        plain = family in ("simt", "flash1")  # tensor cores multiply what is hidden by 0
        k[~key_mask], v[~key_mask] = (np.nan, np.inf) if plain else (100, 100)  # what is hidden must not matter
    problem = state(q, k, v, key_mask, deterministic=deterministic, **options)
    exact = standard(problem, q, k, v, key_mask, dout)
    own = standard_in_own_precision(problem, q, k, v, key_mask, dout)

    plans = {backward: plan(problem, arch, backward, family) for backward in (False, True)}
    libraries = compile_all([plans[False], plans[True]])
    inputs = {"q": q, "k": k, "v": v, "dout": dout} | ({} if key_mask is None else {"mask": key_mask})
    spaces = {b: {x.name: Guarded(x.shape, x.dtype) for x in plans[b].workspace} for b in plans}
    before: dict[str, bytes] = {}  # the second time, the workspace is as it was left
    for last_first in (False, True):
        arrays = {name: Guarded(x.shape, x.dtype, x) for name, x in inputs.items()}
        arrays["lse"] = Guarded(exact.lse.shape, np.dtype(problem.lse_dtype))
        for name in ("out", "dq", "dk", "dv"):
            arrays[name] = Guarded(getattr(exact, name).shape, q.dtype)
        for backward in (False, True):
            run(libraries[backward], plans[backward], problem, arrays | spaces[backward], last_first, in_flight=arch.sms)
        for name in exact._fields:
            assert_as_good(arrays[name].array, getattr(exact, name), getattr(own, name), name, unit)
        for name, array in (arrays | spaces[True]).items():
            if deterministic or name not in ("dq", "dq_sum"):
                bits = array.array.tobytes()
                assert name == "counters" or before.setdefault(name, bits) == bits, f"{name} depends on the order"


class Guarded:
    """An array amid memory that nobody may read or write, where rows of 16-bit numbers start at multiples of 16 bytes.

    It holds `values`, or NaN. What follows a row up to the next such multiple is zeros, as the corridor pads it.
    """

    AROUND = 512

    def __init__(self, shape: tuple[int, ...], dtype: Any, values: np.ndarray | None = None) -> None:
        dtype = np.dtype(dtype)
        rows = len(shape) == 4 and dtype.itemsize == 2
        padded = (*shape[:-1], -(-shape[-1] // 8) * 8 + 8) if rows else shape
        size = int(np.prod(padded)) * dtype.itemsize
        memory = np.full(size + 2 * self.AROUND + 64, 0xFF, np.uint8)
        start = self.AROUND + -(memory.ctypes.data + self.AROUND) % 64
        whole = memory[start : start + size].view(dtype).reshape(padded)
        self.array = whole[..., : shape[-1]] if rows else whole
        if values is not None:
            if rows:
                whole[..., : -(-shape[-1] // 8) * 8] = 0
            self.array[...] = values
        self._memory, self._start, self._size, self._whole = memory, start, size, whole
        self._copy = memory.copy() if values is not None else None

    def check(self, name: str) -> None:
        """Nothing around it may be written, and nothing of an input."""
        if self._copy is not None:
            assert np.array_equal(self._memory, self._copy), f"{name} was written"
        around = np.concatenate([self._memory[: self._start], self._memory[self._start + self._size :]])
        assert (around == 0xFF).all(), f"memory around {name} was written"
        gap = self._whole[..., self.array.shape[-1] :] if self._copy is None else self._whole[:0]
        assert np.isnan(gap.astype(np.float32)).all(), f"memory between the rows of {name} was written"


def without_assembly(source: str) -> str:
    """The few instructions that stand outside of ptx: marks in their order, which mean nothing here, and a barrier."""
    source = re.sub(r'asm volatile\("\{ \.reg \.pred never;.*?"memory"\);', ";", source, flags=re.DOTALL)
    source = re.sub(r'asm volatile\("" : "\+f"\(.*?\)::"memory"\);', ";", source)
    return re.sub(r'asm volatile\("bar\.sync %0, 64;" ::"r"\((.*?)\) : "memory"\);', r"sync_threads<64>(\1);", source)


def source_for_cpu(kernel_plan: KernelPlan) -> str:
    """The plan's CUDA source as C++: a twin in the place of each file of ptx, shared memory of the block that runs."""
    barrier = TESTS / "ptx_on_cpu" / "barrier.h"  # also where a kernel has that instruction by hand
    lines, skipping, twins = [f'#include "{barrier}"'], False, {barrier}
    for line in without_assembly(generate(kernel_plan)).splitlines():
        mark = re.match(r'#line \d+ "(.*)"', line)
        if mark:
            twin = TESTS / "ptx_on_cpu" / mark[1].removeprefix("ptx/").replace(".cuh", ".h")
            skipping = mark[1].startswith("ptx/")
            if skipping and twin not in twins:
                assert twin.exists(), f"{mark[1]} has no twin in tests/ptx_on_cpu"
                twins.add(twin)
                lines.append(f'#include "{twin}"')
        if not skipping:
            lines.append(line)
    source = "\n".join(lines) + "\n"
    source = re.sub(r"extern __shared__ .*?(\w+)\[\];", r"static char*& \1 = on_cpu::dynamic_shared;", source)
    count = iter(range(1000))
    source = re.sub(
        r"__shared__ (?:alignas\(\d+\) )?([\w:]+) (\w+)((?:\[[^\]]+\])*);",
        lambda m: f"auto& {m[2]} = on_cpu::fixed_shared<{m[1]}{m[3]}, {next(count)}>();",
        source,
    )
    for launch in kernel_plan.launches:
        source += (
            f'extern "C" const char* run_{launch.name}(const void* params, const void* maps, const on_cpu::Launch& how) {{\n'
            f"    return on_cpu::launch(on_cpu::call({launch.name}, params, maps), how);\n}}\n"
        )
    return source


GXX = ("g++", "-std=c++17", "-O1", "-march=native", "-fPIC", "-U_FORTIFY_SOURCE", "-w")  # fortified: no jumps between stacks


@functools.cache
def machine() -> Path:
    """cuda_on_cpu.cpp, compiled and loaded, and the header that kernels are compiled with, compiled too."""
    header = FOLDER / "cuda_on_cpu.h"
    commands = [
        [*GXX, "-x", "c++-header", TESTS / "cuda_on_cpu.h", "-o", f"{header}.gch"],
        [*GXX, "-shared", TESTS / "cuda_on_cpu.cpp", "-o", FOLDER / "machine.so"],
    ]
    assert all([compiler.wait() == 0 for compiler in [subprocess.Popen(command) for command in commands]])
    ctypes.CDLL(str(FOLDER / "machine.so"), ctypes.RTLD_GLOBAL)
    return header


def compile_all(plans: list[KernelPlan]) -> list[ctypes.CDLL]:
    """A library for each plan; what is not compiled yet is compiled at the same time."""
    libraries, compilers = [], []
    for source in map(source_for_cpu, plans):
        library = FOLDER / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
        libraries.append(library)
        if not library.exists():
            library.with_suffix(".cpp").write_text(source)
            command = [*GXX, "-include", machine(), "-I", TESTS, "-shared", library.with_suffix(".cpp"), "-o", library]
            compilers.append(subprocess.Popen(command))
    assert all([compiler.wait() == 0 for compiler in compilers]), "a kernel does not compile as C++"
    return [ctypes.CDLL(str(library)) for library in libraries]


class Launch(ctypes.Structure):
    """`on_cpu::Launch`."""

    _fields_ = [(name, ctypes.c_uint) for name in ("grid", "threads", "cluster", "in_flight", "shared_start", "shared_bytes")]
    _fields_ += [("last_first", ctypes.c_bool)]


def run(
    kernels: ctypes.CDLL,
    kernel_plan: KernelPlan,
    problem: AttentionProblem,
    given: dict[str, Guarded],
    last_first: bool,
    in_flight: int,
) -> None:
    """Launch the plan's kernels on these arrays and workspaces."""
    p = problem
    pointers = [given[name].array.ctypes.data if name in given else 0 for name in POINTERS]
    strides = [stride // x.itemsize for x in (given[name].array for name in STRIDED) for stride in x.strides[:3]]
    params = struct.pack(
        f"{len(pointers)}Q{len(strides)}q q d f 12i 4x", *pointers, *strides, p.seq_k, abs(p.scale), abs(p.scale), p.batch,
        p.heads_q, p.heads_k, p.seq_q, p.seq_k, p.dim, p.dim_v, p.diagonal, p.left or 0, p.right or 0,
        kernel_plan.together, kernel_plan.kept,
    )  # fmt: skip
    maps = tensor_maps(kernel_plan, problem, given) if kernel_plan.maps else None
    align = re.search(r"extern __shared__ __align__\((\d+)\)", generate(kernel_plan))
    for launch in kernel_plan.launches:
        function = getattr(kernels, f"run_{launch.name}")
        function.restype = ctypes.c_char_p
        cluster = dict(kernel_plan.constants).get("CLUSTER", 1) if launch.threads > 128 else 1
        start = 1024 if align and align[1] == "1024" else 1040  # no more aligned than asked for
        how = Launch(launch.grid, launch.threads, cluster, in_flight, start, launch.shared_memory, last_first)
        wrong = function(params, maps, ctypes.byref(how))
        assert wrong is None, f"{launch.name}: {wrong.decode()}"
    for name, array in given.items():
        array.check(name)


def tensor_maps(kernel_plan: KernelPlan, problem: AttentionProblem, arrays: dict[str, Guarded]) -> bytes:
    """What gpu/tensormap.py makes for a launch, with our maps in the place of the driver's."""
    tensormap = pytest.importorskip("cupyflash.gpu.tensormap", reason="needs CuPy")

    def encode(pointer: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: Box) -> bytes:
        text = struct.pack("QQ4q3q4i", 0x70614D20726F736E, pointer, *shape, *strides, 64, box.rows, box.heads, 1)
        return text.ljust(tensormap.BYTES, b"\0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensormap, "encode", encode)
        strides = {box.array: tuple(s // 2 for s in arrays[box.array].array.strides[:3]) for box in kernel_plan.maps}
        made = tensormap.Maps(kernel_plan, problem, strides)
        return made.parameter(*[arrays[box.array].array.ctypes.data for box in kernel_plan.maps]).tobytes()
