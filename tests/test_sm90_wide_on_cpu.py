"""Head dimensions from 256 to 576 in the Hopper forward, without a GPU: columns of V in parts. Where a cluster shares
out keys and columns: test_sm90_wide_forward_on_cpu.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from lengths_on_cpu import Sequences
from lengths_on_cpu import check as check_lengths
from on_cpu import check
from score_functions import relative

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_forward, sm90_forward_cost
from cupyflash.gpu.families.shares import Dealt
from cupyflash.gpu.kernel_plan import KernelPlan

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)  # two blocks take tile after tile, and part after part
SCORES = ("mask", "bias", "alibi_slopes", "sinks")
ONE: dict[str, Any] = {"batch": 1, "heads": (1, 1)}
GROUP: dict[str, Any] = {"batch": 1, "heads": (2, 1)}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "512": ("bfloat16", {"seq": (200, 150), "dims": (512, 300), **GROUP}, {"causal": True}),  # unseen queries
    "576": ("float16", {"seq": (90, 130), "dims": (576, 512), "key_mask": True, **GROUP}, {"rows_aligned": False}),
    "320": ("bfloat16", {"seq": (150, 250), "dims": (320, 288), **ONE}, {"window": (50, 9)}),
    "448": ("float16", {"seq": (150, 250), "dims": (448, 320), **ONE}, {"causal": True}),
    "everything": ("float16", {"seq": (70, 90), "dims": (512, 512), "given": (*SCORES, "seed"), **GROUP},
        {"causal": True, "dropout": 0.2, "softcap": 2.0}),
    # The last part has fewer columns; it leaves through shared memory, or as its rows are not aligned one by one.
    "narrow-scores": ("bfloat16", {"seq": (150, 150), "dims": (64, 333), "batch": 1, "heads": (8, 1)},
        {"causal": True, "rows_aligned": False}),
    "narrow-scores-aligned": ("float16", {"seq": (150, 250), "dims": (40, 512), **GROUP}, {"window": (100, None)}),
    "narrow-values": ("float16", {"seq": (150, 250), "dims": (512, 40), **GROUP}, {"causal": "top_left"}),
    "packed-heads": ("bfloat16", {"seq": (5, 150), "dims": (512, 480), "batch": 2, "heads": (8, 1)}, {"causal": True}),
    "blocks": ("bfloat16", {"seq": (150, 260), "dims": (320, 320), **GROUP}, {"blocks": ((64, 64),), "causal": True}),
    "score": ("float16", {"seq": (70, 130), "dims": (316, 512), "score": "relative", **GROUP},
        {"score": relative, "causal": True}),
}  # fmt: skip


@cases(CASES, "512", "narrow-scores")
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    check("sm90", GPU, rng, *CASES[case], backward=False)


SHARED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "long": ("float16", {"seq": (100, 250), "dims": (512, 480), "given": ("sinks",), **GROUP}, {"causal": True}),
    "a-token": ("bfloat16", {"seq": (1, 300), "dims": (576, 512), "batch": 2, "heads": (8, 1)}, {}),
}


@cases(SHARED)
def test_thread_blocks_share_keys(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[KernelPlan] = []
    make = sm90_forward.plan
    monkeypatch.setattr(sm90_forward, "plan", lambda *args: seen.append(make(*args)) or seen[-1])
    monkeypatch.setattr(sm90_forward_cost, "dealt", lambda *_: Dealt(3, 0))
    check("sm90", GPU, rng, *SHARED[case], backward=False)
    told = dict(seen[0].constants)
    assert (told["SHARES"], told["V_PARTS"]) == (True, 2)


LENGTHS: dict[str, dict[str, Any]] = {
    "packed": {"queries": [70, 0, 1, 130], "keys": [80, 3, 0, 140], "dims": (512, 320)},
    "tokens on pages": {"queries": [1] * 4, "keys": [80, 3, 200, 140], "q": "dense", "k": "paged", "page": 16,
        "heads": (8, 1), "dims": (576, 512)},
}  # fmt: skip


@cases(LENGTHS)
def test_lengths_in_memory(case: str, rng: np.random.Generator) -> None:
    how = {"dtype": "float16", "heads": (2, 1)} | LENGTHS[case]
    check_lengths("sm90", GPU, Sequences(rng, **how), {"causal": True}, {}, backward=False)
