"""The Hopper forward from 321 to 512 columns, which the two blocks of a cluster share out, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda_on_cpu import cases, needs_compiler
from on_cpu import check
from score_functions import relative

from cupyflash.gpu.device import Arch

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)  # one cluster takes tile after tile
TWO = Arch("sm_90a", 90, 4, 232448)
ONE: dict[str, Any] = {"batch": 1, "heads": (1, 1)}
GROUP: dict[str, Any] = {"batch": 1, "heads": (2, 1)}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("bfloat16", {"seq": (200, 330), "dims": (512, 512), **ONE}, {}),
    "causal": ("bfloat16", {"seq": (300, 420), "dims": (512, 512), **GROUP}, {"causal": True}),
    "unseen-queries": ("float16", {"seq": (300, 150), "dims": (328, 500), **GROUP}, {"causal": True}),
    "window": ("float16", {"seq": (300, 500), "dims": (448, 400), **ONE}, {"window": (50, 9)}),
    "long-window": ("bfloat16", {"seq": (200, 700), "dims": (384, 384), **ONE}, {"window": (300, 0)}),
    "key-mask": ("float16", {"seq": (150, 300), "dims": (328, 336), "key_mask": True, **GROUP},
        {"rows_aligned": False}),
    "key-mask-causal": ("bfloat16", {"seq": (150, 300), "dims": (500, 321), "batch": 2, "heads": (2, 1),
        "key_mask": True}, {"causal": "top_left", "rows_aligned": False}),
    "scores": ("float16", {"seq": (150, 290), "dims": (512, 512), "given": ("alibi_slopes", "sinks", "seed"), **GROUP},
        {"causal": True, "dropout": 0.2, "softcap": 2.0}),
    "large": ("bfloat16", {"seq": (100, 300), "dims": (512, 512), **ONE}, {"scale": -1.0}),
    "many-tiles": ("float16", {"seq": (260, 260), "dims": (384, 328), "batch": 2, "heads": (2, 2)}, {"causal": True}),
    "score": ("float16", {"seq": (100, 260), "dims": (512, 512), "score": "relative", **GROUP},
        {"score": relative, "causal": True}),
}  # fmt: skip


@cases(CASES, "causal", "key-mask")
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    check("sm90", TWO if case == "many-tiles" else GPU, rng, *CASES[case], backward=False)
