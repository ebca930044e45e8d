"""Tiles that the Hopper backward chooses, and rounds of heads. Pure; no GPU needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernel_cover import measured, problem
from test_plan import H200, constants
from test_workspace import made

from cupyflash.gpu.families import sm90_backward_cost
from cupyflash.gpu.plan import plan
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.tools.timing import geomean


def test_rounds_of_heads_are_even() -> None:
    """With a causal mask the last round is about as full as the others, and none is far from what the cache holds."""
    for heads in range(1, 150):
        for together in range(1, 40):
            n = sm90_backward_cost.even_rounds(heads, together)
            assert 1 <= n <= heads and (3 * together <= 4 * n <= 5 * together or n == heads)
            last, before = (heads - 1) % n + 1, (heads - 1) % min(together, heads) + 1
            assert last / n >= before / min(together, heads)
    chosen = made(BACKWARD, "bfloat16", 160, (4, 16, 16), 4096, H200, right=0)
    assert dict(chosen.scalars)["together"] == 8  # of 64; 7 would leave one


def test_rounds_have_all_heads_that_are_under_work_at_once() -> None:
    """Else the longest tiles of the last round take as long as all others do; not where the cache holds as many, where
    nobody would stand idle, or where what is under work would be in no cache: then shares of these heads are."""
    for shape, seq, shares, together in (
        ((8, 32, 8), 1024, 1, 16),  # 132 // 8, even
        ((4, 32, 8), 4096, 1, 4),
        ((1, 32, 8), 8192, 1, 2),  # 128 key tiles, on 132 multiprocessors
        ((64, 8, 8), 1024, 1, 16),  # no heads share keys, and the cache holds as many
        ((4, 32, 4), 2048, 2, 8),
    ):
        told = dict(made(BACKWARD, "bfloat16", 128, shape, seq, H200, right=0).scalars)
        assert (told["shares"], told["together"]) == (shares, together)


def test_the_way_that_key_tiles_are_dealt_out_is_nearly_the_fastest() -> None:
    """Random calls, each with the microseconds of ways that were timed on an H200 (bench/shapes.py --dealt times such):
    shares of a head's queries, first heads that are whole, heads together."""
    regrets = []
    for row in json.loads((Path(__file__).parent / "measured_shares.json").read_text()):
        told = dict(plan(measured(row["call"]), H200, BACKWARD).scalars)
        chosen = row["us"].get(" ".join(str(told[name]) for name in ("shares", "whole_heads", "together")))
        if chosen is not None:  # (others were not timed)
            regrets.append(chosen / min(row["us"].values()))
    assert len(regrets) > 100
    assert geomean(regrets) < 1.01
    assert max(regrets) < 1.2


def test_shares_fill_waves() -> None:
    sizes = {"batch": 1, "heads_q": 24, "heads_k": 3, "seq_q": 17461, "seq_k": 1218}
    shares = dict(plan(problem("bfloat16", 72, **sizes), H200, BACKWARD).scalars)["shares"]
    assert shares == 13  # of 30 key tiles: 390 on three times 132


def test_few_visits_of_many_queries_are_shared() -> None:
    """30.7 us where one thread block for each of 48 key tiles took 39.0 (H200)."""
    told = dict(
        plan(problem("bfloat16", 64, batch=2, heads_q=2, heads_k=2, seq_q=1459, seq_k=1459), H200, BACKWARD).scalars
    )
    assert (told["shares"], told["whole_heads"]) == (2, 0)


def test_tiles_whose_dq_is_no_sum_come_first() -> None:
    for keys, tile in ((84, (64, 96, True)), (100, (64, 64, True))):  # by two blocks of a cluster
        for fields in ({}, {"softcap": 2.0}):
            told = constants(made(BACKWARD, "bfloat16", 160, (195, 2, 2), keys, H200, **fields))
            assert (told["ROWS"], told["KEYS"], told["WHOLE_DQ"]) == tile


def test_backward_tiles_of_129_to_192_columns() -> None:
    """Warpgroups own their keys where registers hold the sums, and key tiles of 128 keep multiprocessors at work."""

    def tile(dim: int, dim_v: int, shape: tuple[int, int, int], seq: int, **fields: Any) -> tuple[int, ...]:
        told = constants(made(BACKWARD, "bfloat16", dim, shape, seq, H200, dim_v=dim_v, **fields))
        return tuple(told[name] for name in ("ROWS", "KEYS", "WARPGROUPS", "DO_STAGES"))

    many = (4, 16, 16)
    assert tile(160, 160, many, 4096) == tile(136, 144, many, 4096) == tile(192, 128, many, 4096) == (48, 128, 2, 2)
    assert tile(192, 192, many, 4096) == tile(168, 160, many, 4096) == (64, 96, 3, 1)
    assert tile(160, 160, many, 4096, softcap=2.0) == (64, 96, 3, 1)  # what else is done with scores takes registers
    assert tile(160, 160, (2, 8, 8), 1024, right=0) == (64, 96, 3, 1)  # 128 tiles, the first of twice as many visits
    assert tile(160, 160, (60, 4, 4), 200) == (48, 128, 2, 1)  # dQ is soon to be finished
    assert tile(192, 192, (11, 6, 6), 372) == (64, 96, 3, 1) and tile(160, 160, (3, 4, 4), 600) == (64, 64, 2, 1)


def test_sums_of_shares_are_as_many_as_a_thread_holds() -> None:
    for dims, sums in (
        ((32, 32), 32),
        ((64, 64), 64),
        ((96, 64), 80),
        ((128, 128), 128),
        ((160, 150), 160),
        ((192, 128), 96),
        ((192, 192), 96),
        ((256, 256), 128),
    ):
        asked = problem("bfloat16", *dims, batch=1, seq_q=4096, seq_k=900, heads_q=32, heads_k=1)
        chosen = plan(asked, H200, BACKWARD)
        told = constants(chosen)
        shape = next(w.shape for w in chosen.workspace if w.name == "share_sums")
        assert told["SHARES"] and told["SHARE_SUMS"] == 128 * sums == shape[1]
        tiles = -(-900 // (told["KEYS"] * told["CLUSTER"]))
        assert shape[0] == tiles * told["CLUSTER"] * told["WARPGROUPS"] * dict(chosen.scalars)["shares"]


@pytest.mark.parametrize(
    ("dims", "own", "rounded"),
    [
        ((72, 80), (96, 80), (80, 80)),  # (the forward's sums of Q and K run along DOT)
        ((128, 100), (128, 112), (128, 112)),
        ((64, 40), (64, 64), (64, 64)),
        ((130, 144), (192, 144), (144, 144)),
        ((176, 170), (192, 176), (192, 192)),  # warpgroups that share out columns have blocks of 64
        ((200, 230), (256, 240), (256, 256)),
        ((512, 300), (512, 192), None),  # in two parts, padded
    ],
)
def test_sums_have_columns_in_sixteens(
    dims: tuple[int, int], own: tuple[int, int], rounded: tuple[int, int] | None
) -> None:
    for of, expected in ((FORWARD, own), (BACKWARD, rounded)):
        sizes = {"batch": 4, "heads_q": 8, "heads_k": 8, "seq_q": 2048, "seq_k": 2048}
        told = constants(plan(problem("float16", dims[0], dims[1], **sizes), H200, of, "sm90"))
        assert expected in (None, (told["DIM"], told["DIM_V"]))
