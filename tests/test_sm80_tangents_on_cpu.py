"""The kernels for Ampere's tensor cores that take tangents, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import on_cpu_tangents
import pytest
from cuda_on_cpu import cases, needs_compiler
from kernel_cover import problem as of_usual_size
from on_cpu_tangents import check
from tangents import Moving
from test_sm80_on_cpu import A10, A100, CASES, H200

from cupyflash.gpu import compiler
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD_JVP, JVP, Pass
from cupyflash.problem import Given

# There is no room for tiles of these with all their tangents: `simt` takes them.
TOO_WIDE = (
    "narrow-tiles", "float32-on-little-memory", "float32-wide", "float32-narrow-tiles", "double-192", "double-wide",
    "double-dropout",
)  # fmt: skip
MOVING = {
    name: (arch, dtype, shapes, {x: y for x, y in options.items() if x not in ("tiles", "rows_aligned")})
    for name, (arch, dtype, shapes, options) in CASES.items()
    if name not in TOO_WIDE
}


@needs_compiler
@cases(MOVING, "scores", "float32-odd", "double-group")
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    arch, *rest = MOVING[case]
    check("sm80", arch, rng, *rest)


SMALL: dict[str, Any] = {"seq": (70, 100), "dims": (40, 24), "heads": (4, 2), "dlse": 1.0}
OF_SCORES = (
    A100, "float16", SMALL | {"given": ("bias", "alibi_slopes", "sinks", "seed")},
    {"softcap": 2.0, "causal": True, "dropout": 0.2},
)  # fmt: skip
WIDE = {"seq": (70, 100), "heads": (1, 1), "batch": 1, "dlse": 1.0}
# What is given alone: others are not computed. And tiles of which some warps compute S, others dP.
ALONE: dict[str, tuple[Any, tuple[str, ...]]] = {
    **{name: (OF_SCORES, (name,)) for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks", "dout", "dlse")},
    "q-and-dout": (OF_SCORES, ("q", "dout")),
    "float32-k": ((A100, "float32", SMALL, {"softcap": 2.0}), ("k",)),
    "float32-v-and-dout": ((A10, "float32", SMALL, {}), ("v", "dout")),
    "apart": ((H200, "float64", WIDE | {"dims": (90, 128)}, {"causal": True}), ("q", "k", "v", "dout")),
    "apart-v": ((H200, "float64", WIDE | {"dims": (128, 90)}, {}), ("v",)),
}  # fmt: skip


@needs_compiler
@cases(ALONE, "v", "apart")
def test_what_is_given_alone(case: str, rng: np.random.Generator) -> None:
    (arch, *asked), moves = ALONE[case]
    check("sm80", arch, rng, *asked, moves)


@needs_compiler
def test_what_the_tangents_of_all_keys_share_costs_no_bits(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c takes it off before products are rounded."""
    draw = on_cpu_tangents.draw_tangents

    def shifted(*args: Any) -> Any:
        moved = draw(*args)
        moved["k"] = (moved["k"] + 16).astype(moved["k"].dtype)
        return moved

    def judge(self: Moving, name: str, actual: np.ndarray) -> None:
        exact, own = self.exact[name], self.own[name]
        if name == "tout":
            assert np.abs(actual.astype(np.float64) - exact).max() < 0.25 * np.abs(own - exact).max()

    monkeypatch.setattr(on_cpu_tangents, "draw_tangents", shifted)
    monkeypatch.setattr(Moving, "judge", judge)
    check("sm80", A100, rng, "float16", {"seq": (40, 150), "dims": (32, 32), "heads": (1, 1)}, {}, ("k",))


def products(of: Pass, dtype: str, *moves: str) -> int:
    """Tensor core instructions of a tile."""
    pytest.importorskip("cuda.core")
    problem = of_usual_size(dtype, 32, tangents=tuple(Given(name, dtype, ()) for name in moves))
    made = plan(problem, Arch.of("sm_80"), of, "sm80")
    text = compiler.ptx(generate(made), made.arch)
    return text.split(f".entry attention_{of}(")[1].count("mma.sync")


@pytest.mark.parametrize("of, all_of_it", [(JVP, 5), (BACKWARD_JVP, 10)])
def test_products_of_what_has_no_tangent_are_left_out(of: Pass, all_of_it: int) -> None:
    """There are S, tS (2), w V, P tV; S, tS (2), dP, tdP, tdQ (2), tdK (2), tdV. (Where v alone moves, dP is not
    needed.)"""
    whole = products(of, "bfloat16", "q", "k", "v")
    for moves, left in (("k", (3, 7)), ("v", (2, 4))):
        assert products(of, "bfloat16", moves) * all_of_it == whole * left[of is BACKWARD_JVP]


@pytest.mark.parametrize("dtype, dim", [("float64", 192), ("float32", 256)])
def test_what_does_not_fit_goes_to_another_family(dtype: str, dim: int) -> None:
    problem = of_usual_size(dtype, dim, tangents=tuple(Given(name, dtype, ()) for name in "qkv"))
    made = plan(problem, Arch.of("sm_80"), BACKWARD_JVP)
    assert made.family == "simt"
    assert any(f"sm80 has no {dtype} backward_jvp for head dimensions {dim}" in text for text in made.passed_over)
