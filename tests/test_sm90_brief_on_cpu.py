"""Tiles of short sequences in the Hopper forward, without a GPU: rows of heads that share K and V in one tile."""

from __future__ import annotations

import numpy as np
import pytest
from brief_tiles import CHOICES, KINDS, Choice, choose, name_of, taken
from cuda_on_cpu import needs_compiler
from on_cpu import check

from cupyflash.gpu.device import Arch

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)
FAST = {"d64-64x64-3-3-pack2", "d64-128x128-4-1-pack4", "d128-64x64-2-2-pack4"}


@pytest.mark.parametrize(
    "choice",
    [pytest.param(x, id=name_of(x), marks=[] if name_of(x) in FAST else pytest.mark.slow) for x in CHOICES],
)
def test_on_cpu(choice: Choice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = choose(choice, monkeypatch)
    kind = list(KINDS)[CHOICES.index(choice) % len(KINDS)]
    shapes, options = KINDS[kind]
    shapes = {"batch": 1, "heads": (3, 1), "dims": (choice[0] - 8, choice[0])} | shapes
    check("sm90", GPU, rng, "float16", shapes, options, backward=False)
    assert taken(choice, plans) or choice[0] == 192
