"""Plain CUDA kernels without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda_on_cpu import cases, needs_compiler
from on_cpu import check
from score_functions import documents, grid, nowhere, relative, without_s
from semantics import Inputs

from cupyflash.gpu.device import Arch

pytestmark = needs_compiler

GPU = Arch("sm_75", 75, 2, 65536)

SCORES = ("mask", "bias", "alibi_slopes", "sinks")
SIMT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float32", {"dlse": 1.0}, {}),
    "group": ("float32", {"heads": (4, 2), "dims": (32, 59)}, {"causal": True}),
    "several-parts": ("float32", {"seq": (40, 50), "dims": (300, 270), "batch": 1}, {"causal": True}),
    "window": ("float32", {"seq": (200, 130)}, {"window": (17, 4), "scale": -0.3}),
    "key-mask": ("float64", {"key_mask": True, "dims": (140, 7)}, {"causal": "top_left", "window": (40, None)}),
    "scale-0": ("float64", {"dims": (1, 17)}, {"causal": True, "scale": 0.0}),
    "scores": ("float32", {"heads": (4, 2), "given": SCORES, "key_mask": True}, {"softcap": 2.0, "causal": True}),
    "blocks": ("float32", {"heads": (4, 2), "seq": (150, 200)}, {"blocks": ((48, 32),)}),
    "blocks-and-more": (
        "float32",
        {"heads": (4, 2), "seq": (100, 130), "given": SCORES},
        {"blocks": ((16, 80), "h"), "causal": True},
    ),
    "scores-64": ("float64", {"dims": (140, 7), "given": SCORES, "full": "k"}, {"softcap": 2.0, "scale": -0.3}),
    "score": ("float32", {"heads": (4, 2), "score": "relative", "given": ("alibi_slopes",)},
        {"score": relative, "causal": True}),
    "score-in-order": ("float64", {"dims": (40, 7), "score": "documents", "given": ("bias",)},
        {"score": documents, "scale": -0.3, "deterministic": True}),
    "score-of-a-grid": ("float32", {"score": "grid"}, {"score": grid}),
    # Beside rows that see nothing: sinks of which one is none, gradients of lse, and slopes that are no numbers.
    "score-nowhere": (
        "float32",
        {"heads": (4, 2), "score": "nowhere", "given": ("sinks", "alibi_slopes"), "key_mask": True, "dlse": 1.0},
        {"score": nowhere, "causal": True},
    ),
    "score-without-s": ("float32", {"score": "without_s"}, {"score": without_s, "window": (30, 9)}),
    "16-bit": ("bfloat16", {"seq": (40, 50), "dims": (300, 260), "batch": 1}, {"window": (9, 9)}),
    "dropout": (
        "float32",
        {"heads": (4, 2), "given": (*SCORES, "seed")},
        {"softcap": 2.0, "causal": True, "dropout": 0.2},
    ),
    "blocks-dropout": (
        "float32",
        {"heads": (4, 2), "seq": (100, 130), "given": (*SCORES, "seed"), "full": "hqk"},
        {"blocks": ((16, 80), "b"), "causal": True, "dropout": 0.3},
    ),
    "dropout-64": ("float64", {"seq": (100, 35), "given": ("seed",), "dlse": 1.0}, {"dropout": 0.6}),
}  # fmt: skip
FLASH1: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float32", {"seq": (67, 130), "dlse": 1.0}, {}),
    "group": ("float32", {"heads": (4, 2), "dims": (32, 59)}, {"causal": True}),
    "window": ("float32", {"seq": (200, 130), "dims": (128, 100), "batch": 1}, {"window": (17, 4), "scale": -0.3}),
    "key-mask": ("float32", {"key_mask": True, "dims": (14, 7)}, {"causal": "top_left", "window": (40, None)}),
    "scale-0": ("float32", {"dims": (1, 17)}, {"causal": True, "scale": 0.0}),
    "one-key": ("float32", {"seq": (130, 1), "dims": (59, 111)}, {}),  # dP - D is exactly 0
    "no-columns": ("float32", {"seq": (5, 7), "dims": (0, 16)}, {}),
    "16-bit": ("bfloat16", {"seq": (40, 150), "heads": (2, 1), "dims": (64, 60)}, {"window": (90, 9)}),
}


def without_a_sink(inputs: Inputs) -> Inputs:
    if "sinks" in inputs.given:
        inputs.given["sinks"][0] = -np.inf
    return inputs


@cases(SIMT, "plain", "group", "scores", "blocks-and-more", "score", "score-nowhere")
def test_simt(case: str, rng: np.random.Generator) -> None:
    check("simt", GPU, rng, *SIMT[case], unit=2, change=without_a_sink)


@cases(FLASH1, "plain", "16-bit")
def test_flash1(case: str, rng: np.random.Generator) -> None:
    check("flash1", GPU, rng, *FLASH1[case], unit=2)
