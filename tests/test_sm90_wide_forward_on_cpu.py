"""The Hopper forward from 321 to 512 columns, which the two blocks of a cluster share out, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cuda_on_cpu import as_cpp, cases, compile_all, needs_compiler
from on_cpu import Guarded, check, run
from reference import state
from score_functions import relative

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate

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


LAST_ROUND = """
extern "C" __global__ void attention_last_round(const Params p) {
    TileSchedule schedule(p);
    p.lse[0] = schedule.total() - schedule.rounds * schedule.together * schedule.tiles;
}
"""


def test_the_last_round_has_two_tiles_for_each_cluster() -> None:
    """Not for each of its blocks."""
    arrays = {name: np.empty((1, 2048, heads, 384), "f2") for name, heads in zip("qkv", (56, 7, 7))}
    problem = state(**arrays, causal=True)
    made = plan(problem, Arch.of("sm_90a"), family="sm90")
    [library] = compile_all(as_cpp(generate(made) + LAST_ROUND, ["attention_last_round"]))
    clusters = made.launches[0].grid // 2
    made = replace(made, launches=(replace(made.launches[0], name="attention_last_round", threads=32),))
    given = {name: Guarded(x.shape, x.dtype, x, rows_aligned=True) for name, x in arrays.items()}
    given |= {"out": Guarded(arrays["q"].shape, "f2"), "lse": Guarded((1, 56, 2048), "f4")}
    run(library, made, problem, given, False, 2)
    assert 2 * clusters <= given["lse"].array.ravel()[0] < 4 * clusters
