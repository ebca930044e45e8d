"""Caches that are each cut by their own length, in the sm80 forward without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cached_problems import draw
from cuda_on_cpu import cases, needs_compiler
from kernel_cover import cached
from lengths_on_cpu import Sequences, check
from test_cached_on_cpu import ARCHS, TOKEN
from test_cached_on_cpu import check as check_eight

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares, sm80
from cupyflash.gpu.families.shares import Dealt
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.passes import FORWARD

GPU = Arch("sm_80", 80, 2, 166912)
KEYS = 64  # of a tile

Case = Callable[[np.random.Generator], tuple[Sequences, dict[str, Any], dict[str, np.ndarray]]]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[KernelPlan]:
    """Those that are made; shares are two tiles of keys."""
    seen: list[KernelPlan] = []
    make = sm80.plan
    monkeypatch.setattr(sm80, "plan", lambda *args, **named: seen.append(make(*args, **named)) or seen[-1])
    for name, tiles in (("LENGTH_TILES", 2), ("LONG_TILES", 3)):
        monkeypatch.setattr(shares, name, tiles)
    return seen


CUT: dict[str, Case] = {
    "tokens on pages": lambda r: (
        Sequences(r, [1] * 4, [150, 3, 300, 0], k="paged", page=32, q="dense", heads=(4, 2), dtype="float16"), {},
        {"sinks": r.standard_normal(4).astype("f4")},
    ),
    "a few on caches": lambda r: (
        Sequences(r, [3] * 4, [150, 3, 300, 64], k="cache", q="dense", heads=(4, 2), dtype="float16"),
        {"causal": True}, {},
    ),
    "float32": lambda r: (
        Sequences(r, [3] * 3, [150, 5, 300], k="cache", q="dense", heads=(2, 2)), {"causal": True}, {},
    ),
    "a bias": lambda r: (
        Sequences(r, [3] * 4, [150, 3, 0, 300], k="cache", q="dense", heads=(4, 2), dtype="float16"), {},
        {"bias": r.standard_normal((1, 4, 3, 320)).astype(np.float16)},
    ),
}  # fmt: skip


@needs_compiler
@cases(CUT, "tokens on pages")
def test_each_as_by_itself(
    case: str, plans: list[KernelPlan], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as alone, cut in as many."""
    of, options, others = CUT[case](rng)
    tile = (64, KEYS, 4, 1, 1, 1)
    alone = {n: Dealt(max(2, -(-n // (2 * KEYS))), 0) for n in of.keys}  # (sinks are added where shares are combined)
    monkeypatch.setattr(shares, "shares", lambda x, *_: Dealt(1, 0) if x.ragged else alone[x.seq_k])
    check("sm80", GPU, of, options, others, backward=False, tiles={"forward": tile})
    constants, scalars = dict(plans[0].constants), dict(plans[0].scalars)
    assert constants["KEYS"] == KEYS and constants["SHARE_TILES"] == 2 and scalars["shares"] >= 3
    assert plans[0].launches[-2].grid == scalars["shares"] * of.count * of.heads[0]


@needs_compiler
@cases(["float8_e4m3fn", "int8"], "int8")
def test_caches_of_eight_bits(case: str, plans: list[KernelPlan], rng: np.random.Generator) -> None:
    """NaN behind the end of each, and in what shares leave that are none."""
    how = TOKEN | {"lens_k": [5, 0, 300, 130], "options": {"causal": True}}
    if case == "int8":
        how |= {"form_k": "paged", "page": 7, "lens_q": [3] * 4}
    check_eight("sm80", ARCHS["sm80"], draw(rng, case, "row", **how))
    assert dict(plans[0].constants)["SHARE_TILES"] == 2 and dict(plans[0].scalars)["shares"] >= 3


@pytest.mark.parametrize(
    ("problem", "share_tiles", "parts"),
    [
        (cached(64, 16384, cache_dtype="int8"), 32, 8),  # one may be longer than others
        (cached(64, 4096, cache_dtype="int8"), 0, 1),  # not much longer
        (cached(64, 16384, cache_dtype="int8", max_seqlen_k=2048), 0, 1),  # not likely
        (cached(4, 65536, (32, 4), cache_dtype="int8"), 16, 64),  # multiprocessors would be idle
        (cached(64, 16384, cache_dtype="int8", batch_invariant=True), 0, 1),
        (cached(64, 16384, left=4000), 0, 1),
        (cached(64, 16384), 32, 8),
        (cached(64, 16384, seq_q=300), 0, 1),
    ],
)
def test_where_each_cache_is_cut_by_its_own_length(problem: Any, share_tiles: int, parts: int) -> None:
    made = sm80.plan(problem, Arch.of("sm_90a"), FORWARD, None)
    assert (dict(made.constants)["SHARE_TILES"], dict(made.scalars)["shares"]) == (share_tiles, parts)
