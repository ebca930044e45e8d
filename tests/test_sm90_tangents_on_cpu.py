"""The Hopper kernels of the passes that take tangents, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from on_cpu_tangents import check
from score_functions import relative
from test_sm90_on_cpu import SCORES

from cupyflash.gpu.device import Arch

pytestmark = needs_compiler
pytest.importorskip("cupyflash.gpu.tensormap", reason="needs CuPy")

HOPPER = Arch("sm_90a", 90, 3, 232448)
INPUTS = ("q", "k", "v", "dout", "dlse")  # what these kernels take tangents of
CASES: dict[str, tuple[tuple[str, dict[str, Any], dict[str, Any]], tuple[str, ...]]] = {
    "plain": (("float16", {"dims": (64, 43), "seq": (300, 300), "dlse": 1.0}, {}), INPUTS),
    "group": (("bfloat16", {"heads": (4, 2), "seq": (200, 262)}, {"causal": True}), ("q", "k", "v")),
    "unaligned": (("bfloat16", {"seq": (100, 130), "dims": (64, 59), "batch": 1}, {"rows_aligned": False}), INPUTS),
    "window": (("float16", {"seq": (200, 430), "dims": (128, 128), "batch": 1}, {"window": (17, 140), "scale": -0.3}),
        INPUTS),
    "left": (("bfloat16", {"seq": (230, 200), "dims": (96, 72), "batch": 1}, {"window": (40, None)}), ("q", "dout")),
    "key-mask": (("float16", {"seq": (100, 210), "key_mask": True, "heads": (4, 2)}, {}), INPUTS),
    "key-mask-wide": (("bfloat16", {"seq": (130, 100), "dims": (128, 96), "key_mask": True}, {"causal": True}), INPUTS),
    "narrow": (("bfloat16", {"seq": (200, 170), "dims": (32, 20)}, {}), INPUTS),
    "softcap": (("bfloat16", {"seq": (100, 150), "batch": 1}, {"softcap": 1.5, "scale": -0.3}), INPUTS),
    "near-cap": (("bfloat16", {"seq": (130, 150), "dims": (128, 128), "batch": 1}, {"softcap": 9.0, "causal": True}),
        INPUTS),
    "scores": (("float16", {"seq": (130, 150), "heads": (4, 2), "batch": 1, "given": SCORES},
        {"softcap": 2.0, "causal": True}), INPUTS),
    "bias": (("float16", {"seq": (130, 150), "dims": (128, 128), "batch": 1, "given": ("bias",), "full": "hqk"}, {}),
        ("q", "k", "v")),
    "dropout": (("bfloat16", {"seq": (200, 162), "heads": (4, 2), "given": ("seed",), "dlse": 1.0}, {"dropout": 0.2}),
        INPUTS),
    "dropout-sinks": (("float16", {"seq": (70, 150), "key_mask": True, "given": ("seed", "sinks")}, {"dropout": 0.2}),
        INPUTS),
    "blocks": (("float16", {"seq": (300, 400), "heads": (4, 2)}, {"blocks": ((128, 128),)}), INPUTS),
    "blocks-causal": (("bfloat16", {"seq": (300, 330), "heads": (2, 2), "batch": 1},
        {"blocks": ((64, 32), "bh"), "causal": True}), INPUTS),
    "score": (("float16", {"heads": (4, 2), "seq": (150, 200), "score": "relative"},
        {"score": relative, "causal": True}), ("q", "k", "v")),
    "sinks-unseen": (("float16", {"seq": (130, 60), "given": ("sinks",), "batch": 1}, {"causal": True}), INPUTS),
    "softcap-key-mask": (("bfloat16", {"seq": (70, 100), "key_mask": True}, {"softcap": 1.5}), INPUTS),
    "unseen": (("float16", {"seq": (300, 100), "batch": 1}, {"causal": True}), INPUTS),
    "unseen-top": (("bfloat16", {"seq": (40, 300)}, {"causal": "top_left"}), INPUTS),
    "one-query": (("bfloat16", {"seq": (1, 300), "heads": (6, 2), "dims": (128, 128)}, {}), INPUTS),
    **{name: (("bfloat16", {"seq": (90, 130), "dims": (64, 40), "dlse": 1.0}, {}), (name,)) for name in INPUTS},
    "wide": (("bfloat16", {"seq": (100, 150), "dims": (256, 256), "batch": 1, "heads": (4, 2)}, {"causal": True}),
        ("q", "k", "v", "dlse")),
    "wide-key-mask": (("float16", {"seq": (70, 140), "dims": (256, 200), "key_mask": True, "given": ("seed",)},
        {"dropout": 0.2, "scale": -0.08}), ("q", "k", "v")),
    "in-turn": (("float16", {"heads": (4, 4), "seq": (70, 140), "batch": 6}, {}), ("q", "k", "v")),
    "in-turn-narrow": (("bfloat16", {"heads": (4, 4), "seq": (70, 140), "batch": 6, "dims": (8, 8)}, {}),
        ("q", "k", "v")),
    "slopes": (("bfloat16", {"heads": (4, 2), "seq": (150, 143), "given": ("alibi_slopes", "sinks")},
        {"causal": True, "scale": -0.3}), INPUTS),
    "in-order": (("float16", {"heads": (4, 2), "seq": (150, 330), "batch": 1}, {"deterministic": True}), INPUTS),
    "wide-blocks": (("float16", {"seq": (150, 200), "dims": (200, 256), "batch": 1}, {"blocks": ((64, 32), "h")}),
        ("q", "k", "v")),
    "middle": (("bfloat16", {"seq": (100, 300), "dims": (128, 96), "batch": 1, "heads": (4, 2)}, {"causal": True}),
        ("q", "k", "v", "dlse")),
    "middle-72": (("float16", {"seq": (70, 140), "dims": (72, 72), "given": ("alibi_slopes",)}, {"window": (40, 30)}),
        ("q", "k", "v")),
    "wide-k": (("bfloat16", {"seq": (40, 70), "dims": (240, 130), "batch": 1}, {}), ("k",)),
    "wide-v": (("bfloat16", {"seq": (40, 70), "dims": (240, 130), "batch": 1}, {}), ("v",)),
    "k-and-dout": (("float16", {"seq": (90, 130)}, {"causal": True}), ("k", "dout")),
}  # fmt: skip


@cases(CASES, "plain", "key-mask", "scores", "sinks-unseen")
def test_sm90(case: str, rng: np.random.Generator) -> None:
    asked, moves = CASES[case]
    if "dlse" in moves and asked[1].get("dlse", 0) == 0:
        asked = (asked[0], asked[1] | {"dlse": 1.0}, asked[2])
    check("sm90", HOPPER, rng, *asked, moves)
