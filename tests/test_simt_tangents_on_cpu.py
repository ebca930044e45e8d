"""Plain CUDA kernels of the passes that take tangents, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda_on_cpu import cases, needs_compiler
from on_cpu_tangents import check
from score_functions import documents
from test_simt_on_cpu import GPU, SCORES, SIMT

pytestmark = needs_compiler


@cases(SIMT, "group", "scores", "score-in-order", "blocks-dropout")
def test_simt(case: str, rng: np.random.Generator) -> None:
    check("simt", GPU, rng, *SIMT[case])


# What is not given is not computed: each by itself, and some together.
SMALL: dict[str, Any] = {"seq": (40, 70), "dims": (20, 12), "heads": (4, 2), "dlse": 1.0}
OF_SCORES = ("float64", SMALL | {"given": SCORES}, {"softcap": 2.0, "causal": True, "scale": -0.3})
OF_FUNCTION = ("float64", SMALL | {"score": "documents"}, {"score": documents, "deterministic": True})
ALONE: dict[str, tuple[Any, tuple[str, ...]]] = {
    **{name: (OF_SCORES, (name,)) for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks", "dout", "dlse")},
    "q-and-dout": (OF_SCORES, ("q", "dout")),
    "cap": (OF_FUNCTION, ("score_arrays['cap']",)),
    "function-v": (OF_FUNCTION, ("v",)),
    "no-columns": (("float64", SMALL | {"dims": (3, 0), "given": ("sinks",)}, {}), ()),
    "no-product": (("float64", SMALL | {"dims": (0, 3), "given": ("bias",)}, {}), ()),
    "one-key": (("float32", SMALL | {"seq": (40, 1)}, {}), ()),
}  # fmt: skip


@cases(ALONE, "sinks", "q-and-dout")
def test_what_is_given_alone(case: str, rng: np.random.Generator) -> None:
    asked, moves = ALONE[case]
    check("simt", GPU, rng, *asked, moves)
