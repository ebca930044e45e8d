"""Both passes of tangents by each kernel family, where there is a GPU.

On a CPU each test of semantics asks for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from score_functions import documents, relative
from semantics import check, draw_blocks, draw_inputs

INPUTS = ("q", "k", "v", "dout", "dlse")
SCORES = ("bias", "alibi_slopes", "sinks")
# What is drawn, what is asked, and what moves.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "plain": ({"seq": (150, 200), "dims": (64, 40)}, {}, INPUTS),
    "group": ({"seq": (200, 262), "heads": (4, 2), "dims": (128, 128)}, {"causal": True}, ("q", "k", "v")),
    "window": ({"seq": (130, 190), "dims": (72, 96)}, {"window": (30, 20), "scale": -0.3}, INPUTS),
    "key-mask": ({"seq": (100, 210), "key_mask": True, "heads": (4, 2)}, {}, INPUTS),
    "softcap": ({"seq": (90, 150), "dims": (128, 64)}, {"softcap": 2.0, "causal": True}, INPUTS),
    "bias": ({"seq": (70, 150), "given": ("bias",), "dims": (32, 32)}, {}, ("q", "k", "v")),
    "dropout": ({"seq": (130, 162), "heads": (4, 2), "given": ("seed", "sinks")}, {"dropout": 0.2}, INPUTS),
    "blocks": ({"seq": (200, 300), "heads": (4, 2)}, {"blocks": ((64, 64),), "causal": True}, INPUTS),
    "score": ({"seq": (100, 130), "score": "relative"}, {"score": relative, "causal": True}, ("q", "k", "v")),
    "v-and-dout": ({"seq": (90, 130), "dims": (96, 128)}, {"causal": True}, ("v", "dout")),
    "q": ({"seq": (300, 100)}, {"causal": True}, ("q",)),
    "wide": ({"seq": (70, 100), "dims": (256, 192)}, {"causal": True}, ("q", "k", "v")),
}  # fmt: skip
# And tangents of arrays, which the families hand on to one another.
OF_ARRAYS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "scores": (
        {"seq": (60, 90), "given": SCORES, "heads": (4, 2)}, {"softcap": 2.0, "causal": True}, (*INPUTS, *SCORES),
    ),
    "score-arrays": ({"seq": (60, 90), "score": "documents"}, {"score": documents}, ("q", "k", "score_arrays['cap']")),
}  # fmt: skip


def in_turn() -> list[Any]:
    """Of each family every case, in the formats that are computed alike in turn."""
    found = []
    for family in ("sm90", "sm80", "simt"):
        for alike in (("float16", "bfloat16", "float32"), ("float64",)):
            dtypes = [dtype for dtype in alike if Backend(family, family).takes(dtype, 64, 64)]
            # Of wide heads sm90 has J u alone, and of doubles sm80 has H u alone.
            narrow = family == "sm90" or (family == "sm80" and alike == ("float64",))
            cases = [case for case in CASES if dtypes and not (narrow and case == "wide")]
            found += [(family, dtypes[n % len(dtypes)], case) for n, case in enumerate(cases)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "dtype", "case"), in_turn(), ids=lambda x: x)
def test_tangents(family: str, dtype: str, case: str, rng: np.random.Generator) -> None:
    drawn, asked, moving = CASES[case]
    options = dict(asked)
    if "dlse" in moving:
        drawn = {"dlse": 1.0} | drawn
    inputs, blocks = draw_inputs(rng, dtype, **drawn), None
    if "blocks" in options:
        (sq, sk), (hq, _) = drawn["seq"], drawn["heads"]
        blocks = draw_blocks(rng, (inputs.q.shape[0], hq, sq, sk), *options.pop("blocks"))
    check(Backend(family, family), inputs, moving=moving, blocks=blocks, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", OF_ARRAYS)
def test_tangents_of_arrays(dtype: str, case: str, rng: np.random.Generator) -> None:
    drawn, options, moving = OF_ARRAYS[case]
    check(Backend("simt", "simt"), draw_inputs(rng, dtype, dlse=1.0, **drawn), moving=moving, **options)
