"""`at` as an array, which the kernels read, on kernels that run without a GPU, judged against the reference with the
same as numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import on_cpu
import on_cpu_tangents
import pytest
import test_float8_on_cpu
from cuda_on_cpu import cases, needs_compiler
from float8_problems import quantize

from cupyflash.counts import check_window
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.problem import ARRAYS, AttentionProblem, Given

pytestmark = needs_compiler

PLAIN, A100, H200 = Arch("sm_75", 75, 2, 65536), Arch("sm_80", 80, 3, 166912), Arch("sm_90a", 90, 3, 232448)
FAMILIES = {"simt": PLAIN, "sm80": A100, "sm90": H200}


def table(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """Of the distance, and of each of batch entry, head and query by itself."""
    return s + t[h, j - i + 300] * (b + 1) + 0.01 * (i % 7)


def where(at: tuple[int, ...], options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options by which `check` asks the reference; what it asks the kernels has `at` as an array of them."""
    left, right = check_window(options.get("window"))
    right = 0 if options.get("causal") else right
    order = [row.name for row in ARRAYS]

    def placed(problem: AttentionProblem) -> AttentionProblem:
        given = (*problem.given, Given("at", dtype, ("axis",)))
        given = tuple(sorted(given, key=lambda x: order.index(x.name)))
        return replace(problem, at=None, diagonal=0, left=left, right=right, given=given)

    def run(library: Any, kernels: Any, problem: Any, given: dict[str, Any], *rest: Any) -> None:
        places = np.array(at, dtype)
        own(library, kernels, placed(problem), given | {"at": on_cpu.Guarded(places.shape, dtype, places)}, *rest)

    own = on_cpu.run
    for module in (on_cpu, on_cpu_tangents):
        monkeypatch.setattr(module, "plan", lambda problem, *more, **named: plan(placed(problem), *more, **named))
    for module in (on_cpu, on_cpu_tangents, test_float8_on_cpu):
        monkeypatch.setattr(module, "run", run)
    return options | {"at": at}


SMALL: dict[str, Any] = {"seq": (150, 210), "dims": (64, 48), "heads": (4, 2), "batch": 2, "dlse": 1.0}
SLOPES = SMALL | {"given": ("alibi_slopes",)}
# Places, shapes, options. What is dead by position lies before, behind, and on both sides of what is not.
ASKED: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "whole": ((0, 0, 0, 0), SMALL, {"causal": "top_left"}),
    "dead-queries": ((0, 0, 64, 139), SMALL, {"causal": True}),
    "dead-keys": ((1, 2, 900, 800), SMALL | {"given": ("sinks",)}, {"window": (40, 3)}),
    "left": ((0, 0, 500, 330), SLOPES, {"window": (30, None)}),
    "nothing": ((0, 0, 16, 400), SMALL | {"given": ("sinks",)}, {"causal": True}),
    "nothing-of-few": ((0, 0, 16, 400), SMALL | {"seq": (150, 40)}, {"causal": True}),
    "everything": ((0, 0, 2**31 - 200, 0), SMALL, {"causal": True}),
    "masked": ((0, 0, 32, 80), SMALL | {"key_mask": True}, {"causal": True, "deterministic": True}),
    "dropout": ((3, 5, 64, 128), SMALL | {"given": ("seed",)}, {"causal": True, "dropout": 0.3}),
    "blocks": ((0, 0, 48, 100), SMALL, {"causal": True, "blocks": ((32, 64),)}),
}
CASES = {f"{family}-{name}": (family, name) for family in FAMILIES for name in ASKED}


@cases(
    CASES, "simt-left", "simt-dropout", "sm80-dead-keys", "sm80-dead-queries", "sm90-dead-keys", "sm90-dead-queries",
    "sm90-nothing-of-few",
)  # fmt: skip
def test_kernels_read_where_a_part_stands(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    family, name = CASES[case]
    at, shapes, options = ASKED[name]
    dtype = "float32" if family == "simt" else "bfloat16"
    options = where(at, options, "int64" if max(at) > 2**20 else "int32", monkeypatch)
    on_cpu.check(family, FAMILIES[family], rng, dtype, dict(shapes), options)


TANGENTS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "simt": ("float32", (0, 0, 128, 160), SLOPES, {"window": (60, 5)}, ()),
    "sm80": ("float16", (0, 0, 128, 200), SLOPES, {"causal": True}, ()),
    "sm80-left": ("bfloat16", (0, 0, 400, 240), SMALL, {"window": (30, None)}, ()),
    "sm90": ("bfloat16", (0, 1, 64, 32), SLOPES, {}, ("q", "k", "v", "dout", "dlse")),
}


@cases(TANGENTS, "sm80")
def test_so_do_those_of_tangents(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, at, shapes, options, moves = TANGENTS[case]
    family = case.partition("-")[0]
    shapes = shapes | {"seq": (100, 150)}
    on_cpu_tangents.check(family, FAMILIES[family], rng, dtype, shapes, where(at, options, "int32", monkeypatch), moves)


def test_so_do_those_of_8_bits(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [rng.standard_normal((1, n, 2, 64)).astype(np.float32) for n in (150, 400, 400)]
    options = where((0, 0, 200, 150), {"window": (60, 0)}, "int32", monkeypatch)
    test_float8_on_cpu.check(quantize(rng, *drawn, by="head"), causal=False, **options)
