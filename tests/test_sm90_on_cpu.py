"""The kernels for Hopper without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import needs_compiler
from on_cpu import check
from score_functions import documents, grid, relative, without_s

from cupyflash.gpu.device import Arch

pytestmark = needs_compiler

# With so few multiprocessors two blocks (two clusters where the backward is wide) take tile after tile.
GPU, WIDE = Arch("sm_90a", 90, 2, 232448), Arch("sm_90a", 90, 4, 232448)

SCORES = ("mask", "bias", "alibi_slopes", "sinks")
# (dtype, shapes, options) as `check` takes them. Lengths are such that tiles end at, and just beyond, a mask's edge.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float16", {"dims": (64, 48), "seq": (300, 300), "dlse": 1.0}, {}),
    "large": ("float16", {"seq": (200, 500), "batch": 1}, {"scale": 3.0}),  # maxima grow from tile to tile
    "large-128": ("bfloat16", {"seq": (200, 500), "dims": (128, 128), "batch": 1}, {"scale": 3.0}),
    "group": ("bfloat16", {"heads": (4, 2), "seq": (300, 362)}, {"causal": True}),
    "128": ("float16", {"seq": (400, 430), "dims": (128, 100), "batch": 1}, {"causal": True}),
    "window": ("float16", {"seq": (200, 430), "dims": (128, 128), "batch": 1}, {"window": (17, 140), "scale": -0.3}),
    "left": (
        "float16", {"seq": (200, 266), "dims": (90, 96), "batch": 1}, {"window": (0, None), "deterministic": True},
    ),
    "key-mask": (
        "bfloat16", {"seq": (130, 400), "key_mask": True, "dims": (59, 111)},
        {"causal": "top_left", "rows_aligned": False},
    ),
    "in-order": ("float16", {"heads": (4, 2), "seq": (150, 633), "batch": 1}, {"deterministic": True}),
    "in-order-causal": ("float16", {"seq": (400, 433), "batch": 1}, {"causal": True, "deterministic": True}),
    "192": ("float16", {"seq": (170, 250), "dims": (192, 128), "key_mask": True}, {"window": (50, 50)}),
    "wide": (
        "float16", {"seq": (170, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1, "dlse": 1.0}, {"causal": True},
    ),
    "wide-in-order": (
        "bfloat16", {"seq": (130, 700), "dims": (201, 256), "heads": (1, 1), "batch": 1},
        {"deterministic": True, "rows_aligned": False},
    ),
    "in-turn": ("float16", {"heads": (4, 4), "seq": (70, 100), "batch": 6}, {}),  # more heads than sums of dQ have room
    "few-queries": ("float16", {"seq": (5, 400), "heads": (12, 2)}, {"causal": True}),
    "softcap": ("bfloat16", {"seq": (100, 250), "batch": 1}, {"softcap": 1.5, "scale": -0.3}),
    "bias": ("float16", {"seq": (200, 250), "batch": 1, "given": ("bias",), "full": "hqk"}, {}),
    "bias-float32": (
        "bfloat16", {"seq": (200, 250), "dims": (128, 128), "batch": 2, "given": ("bias", "mask"), "full": "bqk", "bias": "float32"},
        {"causal": True},
    ),
    "bias-of-keys": ("float16", {"seq": (200, 266), "given": ("bias", "mask"), "full": "bk"}, {}),
    "bias-wide": ("float16", {"seq": (70, 150), "dims": (192, 128), "batch": 1, "given": ("bias",), "bias": "float32"}, {}),
    "scores": ("float16", {"seq": (200, 250), "heads": (4, 2), "batch": 1, "given": SCORES}, {"softcap": 2.0, "causal": True}),
    "scores-128": ("bfloat16", {"seq": (200, 250), "dims": (128, 128), "batch": 1, "given": SCORES}, {"window": (50, 9)}),
    "scores-wide": ("float16", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1, "given": SCORES[1:]}, {"deterministic": True}),
    "scores-of-few-queries": ("float16", {"seq": (5, 200), "heads": (12, 2), "given": SCORES}, {"softcap": 2.0, "causal": True}),
    "score": ("float16", {"heads": (4, 2), "seq": (290, 400), "score": "relative"}, {"score": relative, "causal": True}),
    "score-128": (
        "float16", {"seq": (200, 250), "dims": (128, 128), "batch": 1, "score": "documents"},
        {"score": documents, "scale": -0.3, "deterministic": True},
    ),
    "score-wide": (
        "bfloat16", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1, "score": "without_s"}, {"score": without_s},
    ),
    "score-of-few-queries": ("bfloat16", {"seq": (5, 200), "heads": (12, 2), "score": "grid"}, {"score": grid, "causal": True}),
    "one-query": ("bfloat16", {"seq": (1, 300), "heads": (6, 2), "dims": (128, 128)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    check("sm90", WIDE if "wide" in case else GPU, rng, *CASES[case])
