"""Score functions of one's own: what is computed, on every backend that takes it; tracing; messages.

On a GPU each function is a kernel to compile: there are few, and tests share them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from backends import CPU, Backend, in_turn, on_pairs_with_scores
from score_functions import WRITTEN, relative
from semantics import LAYS, check, draw_inputs

from cupyflash import attention, attention_backward
from cupyflash.score import clip, exp, floor, log, sigmoid, sqrt, trace, where


@pytest.mark.parametrize("name", WRITTEN)
@on_pairs_with_scores
def test_functions(backend: Backend, dtype: str, name: str, rng: np.random.Generator) -> None:
    function = WRITTEN[name].function
    for seq in ((67, 93), (193, 65), (300, 310)):
        inputs = draw_inputs(rng, dtype, seq=seq, heads=(4, 2), score=name)
        check(backend, inputs, thousands=True, score=function)
