"""Tiles of short sequences in the Hopper forward, where there is a GPU: every one that may be chosen."""

from __future__ import annotations

import numpy as np
import pytest
from backends import Backend
from brief_tiles import CHOICES, KINDS, Choice, choose, name_of, taken
from semantics import check, draw_inputs

pytestmark = pytest.mark.gpu

SM90 = Backend("sm90", "sm90")


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_brief_tiles(choice: Choice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if not SM90.takes("bfloat16", 64, 64):
        pytest.skip("no sm90 kernels on this GPU")
    from cupyflash.gpu import corridor  # needs CuPy

    plans = choose(choice, monkeypatch)
    corridor.forget()
    try:
        for shapes, options in KINDS.values():
            shapes = {
                "batch": 3,
                "heads": (7, 1) if choice[2] > 1 else (4, 2),
                "dims": (choice[0] - 8, choice[0]),
            } | shapes
            check(SM90, draw_inputs(rng, "bfloat16", **shapes), backward=False, **options)
    finally:
        corridor.forget()
    assert taken(choice, plans) or choice[0] == 192
