"""Plain CUDA kernels without a GPU: their source compiled as C++, the threads of a block run as fibers (cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, assert_as_good, standard, standard_in_own_precision, state
from semantics import draw_inputs

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import KernelPlan, plan
from cupyflash.gpu.source import generate
from cupyflash.problem import AttentionProblem

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="needs Linux and g++ to compile the kernels for the CPU",
)

GPU = Arch.of("sm_75")

# The fields of kernels_cu/attention/params.cuh.
POINTERS = (
    "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "delta", "dq_sum", "m", "l", "o_sum", "counters", "mask",
)  # fmt: skip
STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

SIMT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float32", {}, {}),
    "group": ("float32", {"heads": (4, 2), "dims": (32, 59)}, {"causal": True}),
    "several-parts": ("float32", {"seq": (40, 50), "dims": (300, 270), "batch": 1}, {"causal": True}),
    "window": ("float32", {"seq": (200, 130)}, {"window": (17, 4), "scale": -0.3}),
    "key-mask": ("float64", {"key_mask": True, "dims": (140, 7)}, {"causal": "top_left", "window": (40, None)}),
    "scale-0": ("float64", {"dims": (1, 17)}, {"causal": True, "scale": 0.0}),
    "16-bit": ("bfloat16", {"seq": (40, 50), "dims": (300, 260), "batch": 1}, {"window": (9, 9)}),
}
FLASH1: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float32", {"seq": (67, 130)}, {}),
    "group": ("float32", {"heads": (4, 2), "dims": (32, 59)}, {"causal": True}),
    "window": ("float32", {"seq": (200, 130), "dims": (128, 100), "batch": 1}, {"window": (17, 4), "scale": -0.3}),
    "key-mask": ("float32", {"key_mask": True, "dims": (14, 7)}, {"causal": "top_left", "window": (40, None)}),
    "scale-0": ("float32", {"dims": (1, 17)}, {"causal": True, "scale": 0.0}),
    "one-key": ("float32", {"seq": (130, 1), "dims": (59, 111)}, {}),  # dP - D is exactly 0
    "no-columns": ("float32", {"seq": (5, 7), "dims": (0, 16)}, {}),
    "16-bit": ("bfloat16", {"seq": (40, 150), "heads": (2, 1), "dims": (64, 60)}, {"window": (90, 9)}),
}
CASES = [("simt", name) for name in SIMT] + [("flash1", name) for name in FLASH1]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_on_cpu(family: str, case: str, rng: np.random.Generator, tmp_path: Path) -> None:
    dtype, shapes, options = (SIMT if family == "simt" else FLASH1)[case]
    q, k, v, dout, key_mask = draw_inputs(rng, dtype, **shapes)
    if key_mask is not None:
        key_mask[0] = False  # queries that see no key
        k[~key_mask], v[~key_mask] = np.nan, np.inf  # what is hidden must not matter
    problem = state(q, k, v, key_mask, **options)
    exact = standard(problem, q, k, v, key_mask, dout)
    own = standard_in_own_precision(problem, q, k, v, key_mask, dout)

    given = {"q": q, "k": k, "v": v, "dout": dout} | ({} if key_mask is None else {"mask": key_mask})
    plans = {backward: plan(problem, GPU, backward, family) for backward in (False, True)}
    kernels = {backward: compile_for_cpu(plans[backward], backward, tmp_path) for backward in plans}
    for last_first in (False, True):
        arrays = given | {"lse": np.full(exact.lse.shape, np.nan, problem.lse_dtype)}
        arrays |= {
            name: np.full(getattr(exact, name).shape, np.nan, DTYPES[dtype]) for name in ("out", "dq", "dk", "dv")
        }
        for backward, kernel_plan in plans.items():
            run(kernels[backward], kernel_plan, problem, arrays, last_first)
        for name in exact._fields:  # without fused multiply-add, a product rounds by itself
            assert_as_good(arrays[name], getattr(exact, name), getattr(own, name), name, unit=2)


def compile_for_cpu(kernel_plan: KernelPlan, backward: bool, folder: Path) -> ctypes.CDLL:
    """The kernels of a plan, each as a C function that runs it on every block of its grid."""
    header = Path(__file__).with_name("cuda_on_cpu.h")
    size = max(launch.shared_memory for launch in kernel_plan.launches)  # what a launch asks for has a size only there
    kernels = re.sub(r"extern (__shared__ .*)\[\];", rf"\1[{size}];", generate(kernel_plan))
    source = f'#include "{header}"\n{kernels}\nstatic Params params;\n'
    for launch in kernel_plan.launches:
        source += (
            f'extern "C" bool run_{launch.name}(const Params* given, int grid, int threads, bool last_first) {{\n'
            f"    params = *given;\n    kernel = [] {{ {launch.name}(params); }};\n"
            "    return launch(grid, threads, last_first);\n}\n"
        )
    name = folder / f"{'backward' if backward else 'forward'}.so"
    name.with_suffix(".cpp").write_text(source)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", name.with_suffix(".cpp"), "-o", name]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(name))


def run(
    kernels: ctypes.CDLL,
    kernel_plan: KernelPlan,
    problem: AttentionProblem,
    arrays: dict[str, np.ndarray],
    last_first: bool,
) -> None:
    p = problem
    arrays |= {space.name: np.full(space.shape, np.nan, space.dtype) for space in kernel_plan.workspace}
    pointers = [arrays[name].ctypes.data if name in arrays else 0 for name in POINTERS]
    strides = [stride // arrays[name].itemsize for name in STRIDED for stride in arrays[name].strides[:3]]
    params = struct.pack(
        f"{len(pointers)}Q{len(strides)}q q d f 12i", *pointers, *strides, p.seq_k, abs(p.scale), abs(p.scale), p.batch,
        p.heads_q, p.heads_k, p.seq_q, p.seq_k, p.dim, p.dim_v, p.diagonal, p.left or 0, p.right or 0, 0, 0,
    )  # fmt: skip
    for launch in kernel_plan.launches:
        function = getattr(kernels, f"run_{launch.name}")
        function.restype = ctypes.c_bool
        assert function(params, launch.grid, launch.threads, last_first), (
            f"{launch.name}: threads at different barriers"
        )
