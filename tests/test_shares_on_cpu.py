"""How one result is made of what shares of keys leave in memory (attention/shares.cuh), without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from on_cpu import check

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares, sm80, sm90_forward, sm90_forward_cost
from cupyflash.gpu.families.shares import Dealt
from cupyflash.gpu.kernel_plan import KernelPlan

pytestmark = needs_compiler

GPUS = {"sm80": Arch("sm_80", 80, 108, 166912), "sm90": Arch("sm_90a", 90, 132, 232448)}
# Family, dtype, head dimensions, lanes along columns, and how many warps then have a row. Of the columns that kernels
# are compiled for some have no lane, or lanes no columns.
COMBINED: dict[str, tuple[str, str, tuple[int, int], int, int]] = {
    "eight of a row": ("sm90", "float16", (64, 120), 4, 8),
    "four": ("sm90", "bfloat16", (64, 128), 8, 4),
    "two": ("sm90", "float16", (64, 40), 8, 2),
    "one": ("sm90", "float16", (64, 128), 32, 1),
    "three, of 96 columns": ("sm80", "float16", (64, 96), 8, 3),
    "rows of 33 numbers": ("sm80", "bfloat16", (33, 33), 4, 3),
    "float32": ("sm80", "float32", (32, 48), 4, 3),
    "float64": ("sm80", "float64", (32, 80), 16, 2),
    "of one lane's columns": ("sm80", "float64", (16, 3), 4, 1),
}


@cases(COMBINED, "eight of a row")
def test_a_row_by_several_warps(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more shares than there are key tiles, and fewer than lanes that take them in turn."""
    family, dtype, dims, lanes, warps = COMBINED[case]
    seen: list[KernelPlan] = []
    module = sm90_forward if family == "sm90" else sm80
    make = module.plan
    monkeypatch.setattr(module, "plan", lambda *args, **named: seen.append(make(*args, **named)) or seen[-1])
    monkeypatch.setattr(sm90_forward_cost, "dealt", lambda *_: Dealt(5, 0))
    monkeypatch.setattr(shares, "shares", lambda *_: Dealt(5, 0))
    monkeypatch.setattr(shares, "LANES", (lanes,))
    monkeypatch.setattr(shares, "LEAST_SHARES", 0)
    shape: dict[str, Any] = {"seq": (3, 400), "dims": dims, "heads": (2, 2), "batch": 1}
    check(family, GPUS[family], rng, dtype, shape, {"causal": True}, backward=False)
    made = seen[0]
    assert dict(made.scalars) == {"shares": 5, "combine_lanes": lanes}
    assert made.launches[-1].grid == -(-6 * warps // 4)  # of two heads with three queries
