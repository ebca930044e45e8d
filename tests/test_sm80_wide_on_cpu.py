"""Head dimensions from 256 to 576 on Ampere's tensor cores, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from on_cpu import check
from score_functions import relative

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares

pytestmark = needs_compiler

# By the shared memory that their tiles differ by.
A100, A10, H200 = Arch("sm_80", 80, 3, 166912), Arch("sm_86", 86, 3, 101376), Arch("sm_90a", 90, 3, 232448)
SCORES = ("mask", "bias", "alibi_slopes", "sinks")
ONE: dict[str, Any] = {"batch": 1, "heads": (1, 1)}
GROUP: dict[str, Any] = {"batch": 1, "heads": (2, 1)}

CASES: dict[str, tuple[Arch, str, dict[str, Any], dict[str, Any]]] = {
    # Four warps share rows of O, and in the backward 16 keys.
    "512": (H200, "bfloat16", {"seq": (100, 150), "dims": (512, 512), "dlse": 1.0, **GROUP}, {"causal": True}),
    "576": (H200, "float16", {"seq": (90, 130), "dims": (576, 512), "key_mask": True, **GROUP},
        {"rows_aligned": False}),
    # In the forward two warps share rows; in the backward some compute the same scores.
    "512-a100": (A100, "float16", {"seq": (70, 150), "dims": (512, 512), **GROUP}, {"causal": True}),
    "576-a100": (A100, "bfloat16", {"seq": (70, 90), "dims": (576, 576), **ONE}, {"window": (17, 4), "scale": -0.3}),
    # In the forward some compute the same scores, in the backward all.
    "512-a10": (A10, "float16", {"seq": (70, 90), "dims": (512, 512), "given": (*SCORES, "seed"), **GROUP},
        {"causal": True, "dropout": 0.2, "softcap": 2.0}),
    "576-a10": (A10, "bfloat16", {"seq": (50, 70), "dims": (576, 576), **ONE}, {}),
    "384-a10": (A10, "float16", {"seq": (70, 50), "dims": (384, 384), **ONE}, {"causal": True}),  # unseen queries
    # The largest tiles
    "320": (H200, "bfloat16", {"seq": (150, 150), "dims": (320, 288), **ONE}, {"window": (50, 9)}),
    "288-group": (A100, "float16", {"seq": (70, 130), "dims": (288, 288), "batch": 1, "heads": (4, 2)},
        {"causal": True, "deterministic": True}),
    "odd": (H200, "bfloat16", {"seq": (70, 150), "dims": (500, 333), "given": (*SCORES, "seed"), **GROUP},
        {"window": (50, 9), "dropout": 0.3, "deterministic": True, "rows_aligned": False}),
    # One of the two is narrow: exponentials stand before the product for dP, or O has another width than Q.
    "narrow-scores": (H200, "float16", {"seq": (70, 100), "dims": (64, 512), "key_mask": True, **GROUP},
        {"causal": "top_left"}),
    "narrow-values": (A100, "bfloat16", {"seq": (70, 100), "dims": (512, 40), **GROUP}, {"window": (30, None)}),
    "blocks": (A100, "bfloat16", {"seq": (150, 130), "dims": (320, 320), "given": (*SCORES, "seed"), **GROUP},
        {"blocks": ((16, 48), "b"), "window": (50, 9), "dropout": 0.6, "deterministic": True}),
    "score": (H200, "float16", {"seq": (70, 130), "dims": (512, 512), "score": "relative", **GROUP},
        {"score": relative, "causal": True}),
}  # fmt: skip


@cases(CASES, "512", "576-a10")
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    arch, *rest = CASES[case]
    check("sm80", arch, rng, *rest)


@cases(["a100", "a10"])
def test_thread_blocks_share_keys(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "shares", lambda *_: shares.Dealt(3, 0))
    arch = {"a100": A100, "a10": A10}[case]
    shapes = {"seq": (40, 150), "dims": (512, 480), "given": ("sinks",), **GROUP}
    check("sm80", arch, rng, "float16", shapes, {"causal": True, "softcap": 2.0}, backward=False)
