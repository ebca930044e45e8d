"""2^x in double precision: the arithmetic of kernels_cu/ptx/math.cuh itself, which runs on a CPU as it does on
a GPU."""

from __future__ import annotations

import ctypes
import re

import numpy as np
from cuda_on_cpu import compile_all, needs_compiler

from cupyflash.gpu.source import kernels_folder

pytestmark = needs_compiler

# What is CUDA's own in it.
CUDA = """
#define __constant__
static int __double2hiint(double x) { return int(bits<long long>(x) >> 32); }
static int __double2loint(double x) { return int(bits<long long>(x)); }
static double __hiloint2double(int high, int low) { return bits<double>((long long)high << 32 | unsigned(low)); }
"""
RUN = """
extern "C" void powers(const double* x, double* y, int n) {
    for (int i = 0; i < n; i++) y[i] = exp2_approx(x[i]);
}
"""


def powers(x: np.ndarray) -> np.ndarray:
    text = (kernels_folder() / "ptx" / "math.cuh").read_text(encoding="utf-8")
    found = re.search(r"static __constant__ double POWER.*?\n}\n", text, re.DOTALL)
    assert found
    (library,) = compile_all(CUDA + found[0] + RUN)
    y = np.full_like(x, np.nan)
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (x, y))
    library.powers(*pointers, ctypes.c_int(x.size))
    return y


def test_accuracy(rng: np.random.Generator) -> None:
    """Less than a unit in the last place, judged by extended precision."""
    x = np.concatenate([-rng.random(100_000), rng.uniform(-40, 9, 100_000), rng.uniform(-1020, 1020, 100_000)])
    exact = np.exp2(x.astype(np.longdouble))
    assert float(np.abs((powers(x) - exact) / exact).max()) < 2**-52
    whole = np.arange(-1020.0, 1021.0)
    assert np.array_equal(powers(whole), np.exp2(whole))


def test_what_is_no_ordinary_number() -> None:
    nan = np.array([0x7FF8 << 48, 0xFFF8 << 48, 2**63 - 1, 2**64 - 1], np.uint64)
    assert np.isnan(powers(nan.view(float))).all()
    assert np.array_equal(powers(np.array([-np.inf, -1e300, -1e10, -1021.0])), np.zeros(4))
    assert np.array_equal(powers(np.array([np.inf, 1e300, 1e10, 1021.0])), np.full(4, np.inf))
    assert np.array_equal(powers(np.array([0.0, -0.0, 5e-324, -5e-324])), np.ones(4))
