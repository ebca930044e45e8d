"""Tiles of short sequences in the Hopper forward, without a GPU: rows of heads that share K and V in one tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brief_tiles import CHOICES, KINDS, Choice, choose, name_of, taken
from cuda_on_cpu import needs_compiler
from kernel_cover import problem
from on_cpu import check

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.passes import FORWARD
from cupyflash.problem import AttentionProblem, Given

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


@pytest.mark.parametrize("length", [40, 100, 256, 500, 1000])
@pytest.mark.parametrize(("dim", "causal"), [(64, "bottom_right"), (64, None), (128, "bottom_right")])
def test_packed_sequences_of_one_length_take_tiles_of_dense_ones(length: int, dim: int, causal: str | None) -> None:
    """By their rows, or by a hint; where lengths are likely to differ other rules choose."""
    batch, arch = 16000 // length, Arch.of("sm_90a")
    shape = {"dim": dim, "dim_v": dim, "heads_q": 16, "heads_k": 16, "causal": causal, "right": 0 if causal else None}
    dense = problem("bfloat16", **shape, batch=batch, seq_q=length, seq_k=length)
    offsets = tuple(Given(name, "int32", ("offset",)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    rows = batch * length
    even = replace(dense, seq_q=rows, seq_k=rows, rows_q=rows, rows_k=rows, given=offsets)
    hinted = replace(even, seq_q=rows - 1, rows_q=rows - 1, max_seqlen_q=length, max_seqlen_k=length)

    def tile(asked: AttentionProblem) -> tuple[object, ...]:
        constants = dict(plan(asked, arch, FORWARD, "sm90").constants)
        return tuple(constants[name] for name in ("WARPGROUPS", "KEYS", "BLOCKS", "PACK"))

    assert tile(even) == tile(hinted) == tile(dense)


@pytest.mark.parametrize("hint", [None, 33])
def test_keys_of_many_packed_sequences_are_not_dealt_out_for_the_longest_one(hint: int | None) -> None:
    """A short prompt beside 125 tokens: the hint says how long the one is, not that there are few."""
    offsets = tuple(Given(name, "int32", ("offset",)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    asked = problem("bfloat16", batch=126, seq_q=158, seq_k=300000, heads_q=32, heads_k=8, dim=128, rows_q=158,
        rows_k=300000, causal="bottom_right", right=0, given=offsets, max_seqlen_q=hint)  # fmt: skip
    constants = dict(plan(asked, Arch.of("sm_90a"), FORWARD, "sm90").constants)
    assert (constants["SHARES"], constants["ORDERED"]) == (False, True)
