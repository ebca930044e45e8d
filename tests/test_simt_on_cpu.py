"""The simt kernels without a GPU: their source compiled as C++, the threads of a block run as fibers (cuda_on_cpu.h)."""

from __future__ import annotations

import ctypes
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
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.problem import AttentionProblem

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="needs Linux and g++ to compile the kernels for the CPU",
)

# The fields of kernels_cu/attention/params.cuh.
POINTERS = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "delta", "dq_sum", "counters", "mask")
STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float32", {}, {}),
    "group": ("float32", {"heads": (4, 2), "dims": (32, 59)}, {"causal": True}),
    "several-parts": ("float32", {"seq": (40, 50), "dims": (300, 270), "batch": 1}, {"causal": True}),
    "window": ("float32", {"seq": (200, 130)}, {"window": (17, 4), "scale": -0.3}),
    "key-mask": ("float64", {"key_mask": True, "dims": (140, 7)}, {"causal": "top_left", "window": (40, None)}),
    "scale-0": ("float64", {"dims": (1, 17)}, {"causal": True, "scale": 0.0}),
    "16-bit": ("bfloat16", {"seq": (40, 50), "dims": (300, 260), "batch": 1}, {"window": (9, 9)}),
}


@pytest.mark.parametrize("case", CASES)
def test_on_cpu(case: str, rng: np.random.Generator, tmp_path: Path) -> None:
    dtype, shapes, options = CASES[case]
    q, k, v, dout, key_mask = draw_inputs(rng, dtype, **shapes)
    if key_mask is not None:
        key_mask[0] = False  # queries that see no key
        k[~key_mask], v[~key_mask] = np.nan, np.inf  # what is hidden must not matter
    problem = state(q, k, v, key_mask, **options)
    exact = standard(problem, q, k, v, key_mask, dout)
    own = standard_in_own_precision(problem, q, k, v, key_mask, dout)

    given = {"q": q, "k": k, "v": v, "dout": dout} | ({} if key_mask is None else {"mask": key_mask})
    kernels = {backward: compile_for_cpu(problem, backward, tmp_path) for backward in (False, True)}
    for last_first in (False, True):
        arrays = given | {"lse": np.full(exact.lse.shape, np.nan, problem.lse_dtype)}
        arrays |= {
            name: np.full(getattr(exact, name).shape, np.nan, DTYPES[dtype]) for name in ("out", "dq", "dk", "dv")
        }
        for backward in (False, True):
            run(kernels[backward], problem, backward, arrays, last_first)
        for name in exact._fields:
            assert_as_good(arrays[name], getattr(exact, name), getattr(own, name), name)


def compile_for_cpu(problem: AttentionProblem, backward: bool, folder: Path) -> ctypes.CDLL:
    """The kernels of the simt plan, each as a C function that runs it on every block of its grid."""
    simt = plan(problem, Arch.of("sm_75"), backward, "simt")
    header = Path(__file__).with_name("cuda_on_cpu.h")
    source = f'#include "{header}"\n{generate(simt)}\nstatic Params params;\n'
    for launch in simt.launches:
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
    kernels: ctypes.CDLL, problem: AttentionProblem, backward: bool, arrays: dict[str, np.ndarray], last_first: bool
) -> None:
    p = problem
    simt = plan(p, Arch.of("sm_75"), backward, "simt")
    arrays |= {space.name: np.full(space.shape, np.nan, space.dtype) for space in simt.workspace}
    pointers = [arrays[name].ctypes.data if name in arrays else 0 for name in POINTERS]
    strides = [stride // arrays[name].itemsize for name in STRIDED for stride in arrays[name].strides[:3]]
    params = struct.pack(
        f"{len(pointers)}Q{len(strides)}q q d 10i", *pointers, *strides, p.seq_k, abs(p.scale), p.batch, p.heads_q,
        p.heads_k, p.seq_q, p.seq_k, p.dim, p.dim_v, p.diagonal, p.left or 0, p.right or 0,
    )  # fmt: skip
    for launch in simt.launches:
        function = getattr(kernels, f"run_{launch.name}")
        function.restype = ctypes.c_bool
        assert function(params, launch.grid, launch.threads, last_first), (
            f"{launch.name}: threads at different barriers"
        )
