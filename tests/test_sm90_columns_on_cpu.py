"""The Hopper backward above 320 columns, which the two blocks of a cluster share out, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from lengths_on_cpu import Sequences
from lengths_on_cpu import check as check_lengths
from on_cpu import check
from score_functions import without_s

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_backward_cost

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 4, 232448)  # two clusters take tile after tile

# (dtype, shapes, options) as `check` takes them.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float16", {"seq": (130, 150), "dims": (512, 512), "heads": (1, 1), "batch": 1, "dlse": 1.0}, {}),
    "causal": ("bfloat16", {"seq": (170, 250), "dims": (512, 400), "heads": (2, 1), "batch": 1}, {"causal": True}),
    "large": ("bfloat16", {"seq": (100, 200), "dims": (512, 512), "heads": (1, 1), "batch": 1}, {"scale": 1.0}),
    # Of the second block's columns some, or all, are none.
    "few-columns": ("float16", {"seq": (100, 150), "dims": (324, 331), "heads": (2, 2), "batch": 1},
        {"window": (50, 9), "rows_aligned": False}),
    "few-of-v": ("bfloat16", {"seq": (100, 150), "dims": (384, 33), "heads": (2, 1), "batch": 1}, {"causal": True}),
    "few-of-q": ("float16", {"seq": (100, 150), "dims": (24, 512), "heads": (2, 1), "batch": 1, "key_mask": True}, {}),
    "odd-blocks": ("float16", {"seq": (70, 100), "dims": (150, 512), "heads": (2, 1), "batch": 1}, {"causal": True}),
    "in-order": (
        "bfloat16", {"seq": (130, 330), "dims": (328, 328), "heads": (1, 1), "batch": 2}, {"deterministic": True},
    ),
    "in-turn": ("float16", {"seq": (70, 70), "dims": (328, 300), "heads": (4, 4), "batch": 3}, {"scale": -0.1}),
    "key-mask": (
        "float16", {"seq": (170, 250), "dims": (512, 512), "heads": (2, 1), "batch": 1, "key_mask": True,
            "given": ("sinks",)},
        {"causal": "top_left"},
    ),
    "bias": ("float16", {"seq": (70, 150), "dims": (330, 257), "heads": (2, 1), "batch": 1,
        "given": ("bias", "alibi_slopes", "seed")}, {"dropout": 0.3, "causal": True}),
    "softcap": ("bfloat16", {"seq": (100, 150), "dims": (300, 512), "heads": (1, 1), "batch": 1},
        {"softcap": 7.5, "window": (90, 60)}),
    "blocks": ("float16", {"seq": (200, 250), "dims": (512, 512), "heads": (2, 1), "batch": 1},
        {"blocks": ((64, 64),), "deterministic": True}),
    "score": (
        "bfloat16", {"seq": (70, 150), "dims": (320, 512), "heads": (2, 1), "batch": 1, "score": "without_s"},
        {"score": without_s},
    ),
    "shares": ("float16", {"seq": (200, 150), "dims": (328, 328), "heads": (4, 1), "batch": 1}, {"causal": True}),
}  # fmt: skip


@cases(CASES, "plain", "few-columns", "in-order", "key-mask")
def test_on_cpu(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "shares":
        monkeypatch.setattr(sm90_backward_cost, "shares", lambda *_: sm90_backward_cost.Dealt(3))
    check("sm90", GPU, rng, *CASES[case])


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_in_memory(masked: bool, rng: np.random.Generator) -> None:
    drawn: dict[str, Any] = {
        "queries": [70, 0, 1, 90],
        "keys": [80, 3, 0, 70],
        "dims": (384, 320),
        "dtype": "float16",
        "heads": (2, 1),
    }
    others = {"mask": rng.random((1, 2, 90, 80)) < 0.8} if masked else {}
    check_lengths("sm90", GPU, Sequences(rng, **drawn), {"causal": True}, others)
