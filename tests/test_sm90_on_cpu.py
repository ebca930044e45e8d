"""The kernels for Hopper without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_cpu import check, needs_compiler

from cupyflash.gpu.device import Arch

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float16", {"dims": (64, 48), "seq": (300, 300)}, {}),
    "group": ("bfloat16", {"heads": (4, 2), "seq": (300, 362)}, {"causal": True}),
    "128": ("float16", {"seq": (400, 430), "dims": (128, 100), "batch": 1}, {"causal": True}),
    "window": ("float16", {"seq": (200, 430), "dims": (128, 128), "batch": 1}, {"window": (17, 140), "scale": -0.3}),
    "left": ("float16", {"seq": (200, 266), "dims": (90, 96), "batch": 1}, {"window": (0, None)}),
    "key-mask": ("bfloat16", {"seq": (130, 400), "key_mask": True, "dims": (59, 111)}, {"causal": "top_left"}),
    "in-order": ("float16", {"heads": (4, 2), "seq": (150, 633), "batch": 1}, {"deterministic": True}),
    "in-order-causal": ("float16", {"heads": (2, 2), "seq": (400, 433), "batch": 1}, {"causal": True, "deterministic": True}),
    "192": ("float16", {"seq": (170, 250), "dims": (192, 128), "key_mask": True}, {"window": (50, 50)}),
    "wide": ("float16", {"seq": (170, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1}, {"causal": True}),
    "wide-in-order": ("bfloat16", {"seq": (70, 350), "dims": (200, 256), "batch": 1}, {"deterministic": True}),
    "in-turn": ("float16", {"heads": (4, 4), "seq": (70, 100), "batch": 3}, {}),  # more heads than sums of dQ have room
    "few-queries": ("float16", {"seq": (5, 400), "heads": (12, 2), "dims": (64, 64)}, {"causal": True}),
    "one-query": ("bfloat16", {"seq": (1, 300), "heads": (6, 2), "dims": (128, 128)}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    check("sm90", GPU, rng, *CASES[case])
