"""Heads in portions, on kernels that run without a GPU: every result as with all heads at once, to the bit."""

from __future__ import annotations

from typing import Any

import lengths_on_cpu
import numpy as np
import on_cpu
import on_cpu_tangents
import pytest
from cuda_on_cpu import cases, needs_compiler
from score_functions import relative
from test_lengths_kernels import ARCHS, KEYS, packed
from test_sm80_on_cpu import A100, H200, SCORES

from cupyflash.gpu import portions
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.problem import AttentionProblem

pytestmark = needs_compiler
Bits = list[dict[str, bytes]]


def in_three_quarters(made: KernelPlan, problem: AttentionProblem, arch: Arch) -> tuple[int, ...]:
    """Of two batch entries with two heads of K and V, those of one and a half come first."""
    together = problem.rows_q is not None
    if made.launches[0].name != "attention_split" or together != (problem.rows_k is not None):
        return ()
    total = problem.heads_k * (1 if together else problem.batch)
    first = max(1, 3 * total // 4)
    return (first, total - first) if total > first else ()


class Runs:
    """What plans have left in their results, in order, and in how many portions each ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bits: Bits = []
        self.portions: list[int] = []
        real = on_cpu.run

        def run(library: Any, kernels: KernelPlan, problem: Any, given: dict[str, on_cpu.Guarded], *how: Any) -> None:
            real(library, kernels, problem, given, *how)
            own = {x.name for x in kernels.workspace}
            self.bits.append(
                {name: x.array.tobytes() for name, x in given.items() if not x._is_input and name not in own}
            )
            self.portions.append(len(kernels.portions))

        for module in (on_cpu, on_cpu_tangents, lengths_on_cpu):
            monkeypatch.setattr(module, "run", run)


def the_same_in_portions(check: Any, monkeypatch: pytest.MonkeyPatch, ran: tuple[int, ...]) -> None:
    """`check` passes with all heads at once and in portions, of which the plans have so many, and finds the same."""
    found = []
    for sizes in (lambda *_: (), in_three_quarters):
        with monkeypatch.context() as patch:
            patch.setattr(portions, "sizes", sizes)
            runs = Runs(patch)
            check()
            found.append(runs)
    once, divided = found
    assert not any(once.portions) and tuple(divided.portions[: len(ran)]) == ran
    assert len(once.bits) == len(divided.bits)
    for n, (all_at_once, other) in enumerate(zip(once.bits, divided.bits)):
        for name, bits in all_at_once.items():
            assert other[name] == bits, f"{name} of run {n}"


# (GPU, dtype, shapes, options) as on_cpu.check takes them.
CASES: dict[str, tuple[Arch, str, dict[str, Any], dict[str, Any]]] = {
    "group": (A100, "float32", {"heads": (4, 2), "seq": (150, 140), "dlse": 1.0}, {"causal": True}),
    "everything": (
        H200, "float32", {"seq": (70, 150), "heads": (4, 2), "given": (*SCORES, "seed"), "key_mask": True, "dlse": 1.0},
        {"softcap": 2.0, "window": (90, 9), "dropout": 0.2},
    ),
    "wider": (A100, "float32", {"seq": (70, 90), "dims": (128, 100), "heads": (3, 3)}, {"scale": -0.3}),
    "blocks": (
        A100, "float32", {"seq": (150, 130), "heads": (4, 2), "dims": (32, 48)}, {"blocks": ((16, 48), "bh")},
    ),
    "score": (
        A100, "float32", {"heads": (4, 2), "seq": (150, 100), "score": "relative", "given": ("alibi_slopes",)},
        {"score": relative, "causal": True},
    ),
}  # fmt: skip


@cases(CASES, "group", "everything")
def test_forward_and_backward(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, dtype, shapes, options = CASES[case]
    seed = rng.integers(2**32)

    def check() -> None:
        on_cpu.check("sm80", arch, np.random.default_rng(seed), dtype, dict(shapes), options | {"deterministic": True})

    the_same_in_portions(check, monkeypatch, (2, 2))


@cases(CASES, "everything")
def test_tangents(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, dtype, shapes, options = CASES[case]
    seed = rng.integers(2**32)

    def check() -> None:
        on_cpu_tangents.check(
            "sm80", arch, np.random.default_rng(seed), dtype, dict(shapes), options | {"deterministic": True}
        )

    the_same_in_portions(check, monkeypatch, (2, 2, 2))


LENGTHS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "packed": ({}, (2, 2)),
    "caches": ({"queries": [7] * 4, "q": "dense", "k": "cache"}, (2, 2)),
    "packed on caches": ({"keys": [33, 0, 64, 90], "k": "cache"}, (0, 0)),  # heads of which are numbered in two ways
}


@cases(LENGTHS, "packed")
def test_lengths(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed sequences a portion has heads of all."""
    how, ran = LENGTHS[case]
    seed = rng.integers(2**32)

    def check() -> None:
        of = packed(np.random.default_rng(seed), **{"keys": KEYS, **how})
        lengths_on_cpu.check("sm80", ARCHS["sm80"], of, {"causal": True, "deterministic": True})

    the_same_in_portions(check, monkeypatch, ran)
