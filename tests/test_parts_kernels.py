"""A part of a whole (`at`), results in float32 and gradients that are added, on kernels that run without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from kernel_cover import COMPILED, problem
from parts_on_cpu import Whole, check

from cupyflash.gpu.compiler import compile_source
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD

pytestmark = needs_compiler

PLAIN, A100, H200 = Arch("sm_75", 75, 2, 65536), Arch("sm_80", 80, 3, 166912), Arch("sm_90a", 90, 3, 232448)
SIMT: tuple[str, Arch, str] = ("simt", PLAIN, "float32")
SM80: tuple[str, Arch, str] = ("sm80", A100, "float16")
SM90: tuple[str, Arch, str] = ("sm90", H200, "bfloat16")
CUTS = {"queries": [0, 64, 160], "keys": [0, 96, 224]}  # some see nothing of a part, or all

ASKED: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": "top_left"}},
    "window": {"options": {"window": (40, 9)}, "slopes": True},
    "dropout": {"options": {"causal": "top_left", "dropout": 0.3, "seed": np.array(77)}},
    "table": {"options": {"window": (50, None)}, "table": True},
}
CASES = {f"{family[0]}-{name}": (family, name) for family in (SIMT, SM80, SM90) for name in ASKED}


@cases(CASES, "simt-causal", "simt-dropout", "sm80-dropout", "sm90-table")
def test_parts_are_the_whole(case: str, rng: np.random.Generator) -> None:
    family, name = CASES[case]
    check(Whole(*family, rng, **ASKED[name]), **CUTS)


@cases(CASES, "simt-table", "sm80-window", "sm90-dropout")
def test_parts_that_read_where_they_stand_are_the_whole(case: str, rng: np.random.Generator) -> None:
    family, name = CASES[case]
    check(Whole(*family, rng, by_array=True, **ASKED[name]), **CUTS)


WIDE: dict[str, tuple[tuple[str, Arch, str], tuple[int, int]]] = {
    "simt": (("simt", PLAIN, "bfloat16"), (64, 48)),
    "sm80": (SM80, (64, 48)),
    "sm80-dims": (SM80, (47, 33)),
    "sm90": (SM90, (64, 48)),
    "sm90-dims": (SM90, (100, 90)),
    "sm90-160": (SM90, (160, 140)),
    "sm90-wide": (SM90, (256, 200)),
}


@cases(WIDE, "simt", "sm80", "sm90")
def test_results_in_float32_are_what_is_rounded_else(case: str, rng: np.random.Generator) -> None:
    """To the bit; and with what targets hold they are added up before they are rounded."""
    family, dims = WIDE[case]
    whole = Whole(*family, rng, options={"causal": "top_left"}, dims=dims)
    rows, others, at = whole.cut(1, slice(0, 4), slice(0, 160), slice(80, 224))  # with tiles that see nothing
    forward = whole.run(rows, others, at)
    out, lse = forward["out"], forward["lse"]
    rounded = forward | whole.run(rows, others, at, out, lse)
    whole.out_dtype = "float32"
    wide = whole.run(rows, others, at) | whole.run(rows, others, at, out, lse)
    for name, x in rounded.items():
        assert wide[name].dtype == np.float32
        assert np.array_equal(wide[name].astype(x.dtype), x), name
        assert name == "lse" or not np.array_equal(wide[name], x.astype("f4")), name
    whole.dq_rounded = True
    mixed = whole.run(rows, others, at, out, lse)
    for name in ("dq", "dk", "dv"):
        expected = (rounded if name == "dq" else wide)[name]
        assert mixed[name].dtype == expected.dtype
        assert np.array_equal(mixed[name], expected), name
    for dtype, dq_rounded in ((None, False), ("float32", False), ("float32", True)):
        whole.out_dtype, whole.dq_rounded = dtype, dq_rounded
        kind = np.dtype(dtype) if dtype else rows["q"].dtype
        kinds = {"dq": rows["q"].dtype if dq_rounded else kind, "dk": kind, "dv": kind}
        whole.before = {name: rng.standard_normal(wide[name].shape).astype(kinds[name]) for name in kinds}
        added = whole.run(rows, others, at, out, lse)
        for name, x in whole.before.items():
            assert added[name].dtype == kinds[name]
            assert np.array_equal(added[name], (x.astype("f4") + wide[name]).astype(kinds[name])), name


@pytest.mark.slow
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("family", "arch", "dim"), COMPILED)
def test_they_spill_no_more_than_is_declared(family: str, arch: str, dim: int, added: bool) -> None:
    wide = replace(problem("float16", dim, right=0, causal="bottom_right"), out_dtype="float32", add=added)
    for of in (BACKWARD,) if added else (FORWARD, BACKWARD):
        made = plan(wide, Arch.of(arch), of, family)
        compiled = compile_source(generate(made), arch)
        assert max(x.spill_stores for x in compiled.resources.values()) <= made.spills
        assert "serialized" not in compiled.log
