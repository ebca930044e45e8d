"""Tiles that plans choose, and in how many shares, packs and groups their work goes out. Pure; no GPU needed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_cover import BIAS, GIVEN, measured, problem
from test_plan import A100, B200, H200, L40, constants, scalars

from cupyflash.gpu.families import shares, sm90_backward_cost
from cupyflash.gpu.kernel_plan import room
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.passes import BACKWARD, FORWARD, Pass
from cupyflash.problem import Given
from cupyflash.tools import explanation


def test_thread_blocks_share_key_tiles_that_are_few_or_uneven() -> None:
    """Else multiprocessors would be idle. All ways to share are one kernel."""
    fields = {"seq_q": 4096, "seq_k": 4096, "heads_q": 32, "heads_k": 1, "dim": 128}
    few = problem("bfloat16", batch=1, **fields)  # 32 key tiles
    shared, alone = plan(few, H200, BACKWARD), plan(replace(few, batch=64), H200, BACKWARD)
    assert (constants(shared)["SHARES"], constants(alone)["SHARES"]) == (True, False)
    told = dict(shared.scalars)
    shares = told["shares"]
    assert 1 < shares <= 32  # of 32 heads with 64 query tiles each
    assert shared.launches[-1].grid == 132 and 32 * shares > 66  # those without keys finish dQ
    spaces = {w.name: w for w in shared.workspace}
    assert spaces["share_sums"].shape == (32 * 2 * shares, 128 * 128)  # two warpgroups of 64 keys, K and V
    assert spaces["counters"].shape == (2 + shares + 32 * 64 + 32 * 2,)
    assert spaces["dq_sum"].shape == (min(shares, told["resident"]) * -(-32 * 64 // shares), 64 * 128)
    assert {w.name: w for w in alone.workspace}["share_sums"].nbytes == 0
    assert dict(alone.scalars)["shares"] == 1
    uneven = replace(few, causal="bottom_right", right=0, heads_q=64, heads_k=8)  # 256 key tiles of 16 to 512 visits
    assert constants(plan(uneven, H200, BACKWARD))["SHARES"]
    others = (
        plan(replace(few, **x), H200, BACKWARD) for x in ({"heads_q": 24}, {"batch": 2}, {"heads_q": 4, "seq_k": 500})
    )
    told = constants(shared) | {"FINISH_PARTS": 0}
    assert all(constants(x) | {"FINISH_PARTS": 0} == told for x in others)


def test_thread_blocks_share_keys_where_queries_are_few() -> None:
    """Else multiprocessors would be idle. All ways to share are one kernel."""
    fields = {"seq_q": 512, "seq_k": 50176, "heads_q": 8, "heads_k": 8, "dim": 128}  # a Perceiver's 32 query tiles
    few = problem("bfloat16", batch=1, **fields)
    shared, alone = plan(few, H200), plan(replace(few, batch=64), H200)
    assert (constants(shared)["SHARES"], constants(alone)["SHARES"]) == (True, False)
    assert (dict(shared.scalars)["shares"], dict(alone.scalars)["shares"]) == (4, 1)
    assert [x.name for x in shared.launches] == ["attention_forward", "attention_combine"]
    assert shared.launches[0].grid == 128 and shared.launches[1].grid * 4 == 8 * 512
    assert {w.name: w.nbytes for w in shared.workspace if w.nbytes} == {
        "share_out": 4 * 4 * 8 * 512 * 128, "share_lse": 4 * 4 * 8 * 512,
    }  # fmt: skip
    assert sum(w.nbytes for w in alone.workspace) == 0
    for fields in ({"heads_q": 4, "heads_k": 4}, {"batch": 2}, {"seq_k": 9000}):
        assert constants(plan(replace(few, **fields), H200)) == constants(shared)
    # Not where they would not gain: keys are few, or a window leaves few.
    for fields in ({"seq_k": 600}, {"left": 300, "right": 0}):
        assert not constants(plan(replace(few, **fields), H200))["SHARES"]
    # One query of each of 32 heads, which share 8 heads of keys.
    token = replace(few, seq_q=1, seq_k=8192, heads_q=32)
    told = plan(token, H200)
    assert (constants(told)["PACK"], told.launches[0].grid, dict(told.scalars)["shares"]) == (64, 256, 32)
    assert not constants(plan(replace(token, batch=32), H200))["SHARES"]


@pytest.mark.parametrize(
    ("fields", "lanes", "blocks", "spread"),
    [
        ({"heads_k": 1, "heads_q": 32, "seq_q": 1}, 4, 64, True),  # 8 warps for each row
        ({"heads_k": 8, "heads_q": 8, "seq_q": 256}, 32, 512, False),  # one
        ({"heads_k": 1, "heads_q": 16, "seq_q": 1, "dim": 64, "dim_v": 64}, 4, 16, True),
    ],
)
def test_who_combines_shares(fields: dict[str, Any], lanes: int, blocks: int, spread: bool) -> None:
    """The fewer rows and the more shares, the more warps for each; where blocks are few they do not go to the few
    multiprocessors that are free already."""
    made = plan(problem("bfloat16", **{"dim": 128, "batch": 1, "seq_k": 65536} | fields), H200)
    combine = made.launches[-1]
    assert (dict(made.scalars)["combine_lanes"], combine.grid, combine.threads) == (lanes, blocks, 128)
    assert combine.shared_memory == spread * room(H200, 2)
    older = plan(problem("bfloat16", **{"dim": 128, "batch": 1, "seq_k": 65536} | fields), A100)
    assert older.launches[-1].name == "attention_combine" and not older.launches[-1].shared_memory


def test_tiles_of_which_a_multiprocessor_has_two_where_few_rows_wait_for_keys() -> None:
    token = problem("bfloat16", 128, batch=16, seq_q=1, seq_k=4096, heads_q=32, heads_k=8)

    def tile(asked: Any) -> tuple[int, ...]:
        return tuple(constants(plan(asked, H200))[name] for name in ("WARPGROUPS", "KEYS", "BLOCKS"))

    assert tile(token) == (2, 128, 1)  # 128 tiles, each as long as the others
    assert tile(replace(token, batch=64)) == (2, 128, 1)
    assert tile(replace(token, batch=2)) == tile(replace(token, heads_k=1)) == (1, 64, 2)  # keys are dealt out
    lengths = (Given("seqlens_k", "int32", ("sequence",)),)
    assert tile(replace(token, batch=128, given=lengths)) == (1, 64, 2)  # lengths differ
    assert tile(replace(token, given=lengths)) == (2, 128, 1)
    assert tile(replace(token, batch=2, seq_q=17)) == (2, 128, 1)  # no room for all rows
    assert tile(replace(token, batch=2, dim=256, dim_v=256)) == (2, 80, 1)


@pytest.mark.parametrize(
    ("fields", "pack"),
    [
        ({}, 4),  # a prompt beside 31 tokens
        ({"max_seqlen_q": 2048}, 4),
        ({"max_seqlen_q": 5}, 8),  # all have few
        ({"heads_k": 2}, 16),
        ({"heads_q": 48}, 2),  # that six are made of
        ({"heads_k": 32}, 1),
        ({"batch": 33}, 2),  # 63 each, most likely
        ({"batch": 33, "max_seqlen_q": 64}, 2),
        ({"batch": 33, "max_seqlen_q": 2048}, 4),  # but one has more than 1024
        ({"batch": 16, "rows_q": 16000, "seq_q": 16000, "max_seqlen_q": 1024}, 4),  # 1000 each: as dense ones
        ({"batch": 2, "heads_q": 8, "heads_k": 2}, 1),  # multiprocessors would be idle
        ({"batch": 2}, 1),  # ends of tiles are few
        ({"batch": 3}, 2),  # 693 each, most likely: as dense ones
        ({"dropout": 0.1}, 1),
        ({"dim": 64, "dim_v": 64}, 4),
        ({"dim": 64, "dim_v": 64, "batch": 4}, 1),
        ({"dim": 64, "dim_v": 64, "batch": 4, "softcap": 30.0}, 4),  # tiles have more rows
        ({"dim": 256, "dim_v": 256}, 4),
    ],
)
def test_heads_share_tiles_where_sequences_differ(fields: dict[str, Any], pack: int) -> None:
    """Ends of sequences leave tiles empty in part."""
    packed = tuple(Given(name, "int32", ("offset",)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    asked = problem("bfloat16", **{"dim": 128, "batch": 32, "seq_q": 2079, "seq_k": 143360, "heads_q": 32, "heads_k": 8,
        "rows_q": 2079, "rows_k": 143360, "causal": "bottom_right", "right": 0, "given": packed} | fields)  # fmt: skip
    assert constants(plan(asked, H200))["PACK"] == pack


@pytest.mark.parametrize("of", [FORWARD, BACKWARD], ids=str)
def test_of_short_sequences_the_tile_that_is_chosen_is_nearly_the_fastest(of: Pass) -> None:
    """Random calls, each with the microseconds of every tile that was timed on an H100 (bench/shapes.py draws such)."""
    regrets = []
    for row in json.loads((Path(__file__).parent / "measured_tiles.json").read_text())[of.name]:
        told = constants(plan(measured(row["call"]), H200, of))
        names = ("WARPGROUPS", "KEYS", "STAGES", "BLOCKS", "PACK") if of is FORWARD else ("ROWS", "KEYS", "WARPGROUPS")
        times = row["us"]
        chosen = times.get(" ".join(str(told[name]) for name in names))
        if chosen is not None:  # (a few were not timed)
            regrets.append(chosen / min(times.values()))
    assert len(regrets) > 40
    assert math.exp(np.mean(np.log(regrets))) < 1.03
    assert max(regrets) < 1.25


def test_shares_take_no_more_memory_than_they_are_worth() -> None:
    for heads, seq_q, seq_k, dim in ((133, 128, 10**6, 256), (20, 1280, 10**6, 256), (265, 128, 10**7, 256)):
        asked = problem("bfloat16", dim, batch=1, seq_q=seq_q, seq_k=seq_k, heads_q=heads, heads_k=heads)
        assert sum(w.nbytes for w in plan(asked, H200).workspace) < 2**28 * 1.01
    # Keys that no query sees are not shared out.
    seen = problem(
        "bfloat16", 128, batch=1, seq_q=512, seq_k=10**6, heads_q=8, heads_k=8, causal="top_left", right=0, diagonal=0
    )
    assert dict(plan(seen, H200).scalars)["shares"] == 1


def test_heads_are_packed_where_that_shares_keys() -> None:
    few = problem("bfloat16", 64, batch=1, seq_q=16, seq_k=1024, heads_q=32, heads_k=8)
    for fields, packed in (
        ({"seq_k": 512}, False),
        ({"seq_k": 8192}, True),
        ({"batch": 4}, True),
        ({"left": 255, "right": 0, "seq_k": 10**5}, False),
    ):
        told = constants(plan(replace(few, **fields), H200))
        assert (told["PACK"] > 1) == packed, fields
    # A tile that has no room for two heads with all their queries is passed over.
    told = plan(replace(few, seq_q=40, seq_k=8192), H200, tiles={"sm90": (1, 64, 3, 3, 0)})
    assert constants(told)["PACK"] == 2


@pytest.mark.parametrize("seq_q", [1, 33, 500, 3000])
@pytest.mark.parametrize("seq_k", [1024, 7000, 10**6])
def test_each_share_has_keys(seq_q: int, seq_k: int) -> None:
    for heads, dim in ((1, 256), (6, 64), (50, 128)):
        made = plan(problem("float16", dim, batch=1, seq_q=seq_q, seq_k=seq_k, heads_q=heads, heads_k=1), H200)
        shares, visits = dict(made.scalars)["shares"], -(-seq_k // constants(made)["KEYS"])
        each = -(-visits // shares)
        assert 1 <= shares <= 128 and (shares - 1) * each < visits <= shares * each


def test_explain_tells_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "_compiled", lambda chosen: ({}, ()))
    q, k = (1, 4096, 32, 128), (1, 4096, 1, 128)
    (note,) = explanation.explain(q, k, k, dtype="bfloat16", arch="sm_90a", of="backward").notes
    assert note.startswith("the queries of a head of keys are dealt out in 4 shares")
    (note,) = explanation.explain((1, 1, 32, 128), k, k, dtype="bfloat16", arch="sm_90a").notes
    assert note == "the keys of a query tile are dealt out in 16 shares: query tiles are few"
    one, cache = (np.empty(x, "f2") for x in ((2, 1, 32, 128), (2, 8192, 8, 128)))
    told = explanation.explain(one, cache, cache, arch="sm_90a", seqlens_k=np.array([8192, 5]))
    (note,) = told.notes
    assert note == "the keys of each sequence are dealt out by its own length, in shares of 512 keys at most"
    one, cache = (np.empty(x, "f2") for x in ((2, 1, 32, 576), (2, 8192, 1, 576)))
    told = explanation.explain(one, cache, latent=512, arch="sm_90a", seqlens_k=np.array([8192, 5]))
    assert told.notes == ("the keys of all sequences are dealt out in equal parts, whatever their lengths",)
    assert explanation.explain(q, q, q, dtype="bfloat16", arch="sm_90a", of="backward").notes == ()


@pytest.mark.parametrize("window", [(None, None), (None, 0), (200, 0), (30, 77), (0, None)])
@pytest.mark.parametrize("diagonal", [0, 300, -200])
def test_visits_of_key_tiles_are_those_of_the_band(window: tuple[int | None, int | None], diagonal: int) -> None:
    left, right = window
    asked = problem("float16", seq_q=500, seq_k=700, diagonal=diagonal, left=left, right=right)
    i, j = np.arange(500)[:, None] + diagonal, np.arange(700)
    seen = (j - i <= (10**6 if right is None else right)) & (i - j <= (10**6 if left is None else left))
    seen = np.pad(seen, ((0, 12), (0, 68)))
    by_tile = seen.reshape(8, 64, 6, 128).any((1, 3)).sum(0)
    # (A row may be cut off at both ends of the sequence: then tiles between are visited all the same.)
    assert [len(x) for x in sm90_backward_cost.walks_of(asked, 64, 128)] == [*by_tile]


@pytest.mark.parametrize("window", [(None, 0), (200, 0), (30, 77), (0, None)])
@pytest.mark.parametrize("diagonal", [0, 200, -200])
def test_visits_of_query_tiles_are_those_of_the_band(window: tuple[int | None, int | None], diagonal: int) -> None:
    left, right = window
    asked = problem("float16", seq_q=512, seq_k=768, diagonal=diagonal, left=left, right=right)
    i, j = np.arange(512)[:, None] + diagonal, np.arange(768)
    seen = (j - i <= (10**6 if right is None else right)) & (i - j <= (10**6 if left is None else left))
    by_tile = [np.maximum(1, seen.reshape(512 // n, n, 12, 64).any((1, 3)).sum(1)) for n in (128, shares.STRIP)]
    found = shares._visits(asked, 128, 64)
    assert (found.most, found.least) == (by_tile[0].max(), by_tile[0].min())
    assert found.mean == min(found.most, by_tile[1].mean())


def test_products_stand_between_exponentials_where_a_lone_tile_is_long() -> None:
    """In a forward of 128 columns with a block for each tile: shorter tiles are slower for it."""
    for keys, dropout, tiles, lone in (
        (8192, 0.0, 132, True), (6144, 0.0, 132, False), (8192, 0.2, 132, False), (8192, 0.0, 264, False),
    ):  # fmt: skip
        asked = problem("bfloat16", dim=128, batch=1, heads_q=1, heads_k=1, seq_q=128 * tiles, seq_k=keys)
        asked = replace(asked, dropout=dropout, given=tuple(x for x in GIVEN if x.name == "seed") if dropout else ())
        assert constants(plan(asked, H200))["LONE"] is lone


@pytest.mark.parametrize("more", [{}, {"deterministic": True}, {"block_mask": ()}, {"left": None}, {"right": None}])
def test_the_first_key_tile_stores_dq_where_few_add_in_no_order(more: dict[str, Any]) -> None:
    asked = problem("bfloat16", dim=64, seq_q=8192, seq_k=8192, left=100, right=100)
    assert constants(plan(replace(asked, **more), H200, BACKWARD))["FIRST_STORES"] is (not more)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_that_are_made_for_several_blocks_leave_them_room(dtype: str) -> None:
    """On each GPU: else its registers are shared out for blocks that are not there."""
    several = set()
    for arch in (A100, H200, B200, L40):
        for dim in range(16, 257, 16):
            for of in (FORWARD, BACKWARD):
                asked = problem(dtype, dim, dim)
                if FAMILIES["sm80"].objection(asked, arch, of):
                    continue
                chosen = plan(asked, arch, of, "sm80")
                blocks = constants(chosen)["MIN_BLOCKS"]
                assert blocks * (max(x.shared_memory for x in chosen.launches) + 1024) <= arch.shared_memory + 1024
                several.add(blocks)
    assert len(several) > 1


def test_a_sequence_of_many_keys_is_planned_at_once() -> None:
    assert scalars(problem("float16", seq_q=1, seq_k=2**29, diagonal=2**29 - 1))["shares"] == 1


def test_dq_is_not_summed_where_a_key_tile_has_all_keys() -> None:
    for fields, keys in (
        ({}, 128),
        ({"dim": 128}, 128),
        ({"seq_q": 49}, 64),
        ({"causal": "bottom_right", "right": 0}, 128),
        ({"dim": 256}, 128),  # of the two blocks of a cluster
        ({"dim": 512}, 64),  # which have half of the columns each
    ):
        asked = problem("bfloat16", **{"batch": 64, "seq_q": 1000, "seq_k": keys} | fields)
        whole, longer = plan(asked, H200, BACKWARD), plan(replace(asked, seq_k=129), H200, BACKWARD)
        assert [constants(x)["WHOLE_DQ"] for x in (whole, longer)] == [True, False]
        sums = [{w.name: w.nbytes for w in x.workspace}["dq_sum"] for x in (whole, longer)]
        assert sums[0] == 0 < sums[1]
        rows = ["dq"] * (constants(whole)["CLUSTER"] == 1)  # else they leave from registers
        assert [box.array for box in whole.maps if box.array.startswith("d")] == ["dout", "dk", "dv", *rows]
        assert "dq" not in {box.array for box in longer.maps}
        assert constants(plan(replace(asked, deterministic=True), H200, BACKWARD)) == constants(whole)
    asked = problem("bfloat16", batch=64, seq_q=1000, seq_k=64, block_mask=("batch",))
    assert not constants(plan(asked, H200, BACKWARD))["WHOLE_DQ"]


def test_few_queries_have_tiles_of_one_warpgroup() -> None:
    """Three thread blocks of a multiprocessor, two beside scores, where there is work for more than one."""
    for given, blocks in (((), 3), (BIAS, 2)):
        short = problem("float16", 32, batch=50, seq_q=49, seq_k=49, heads_q=4, heads_k=4, given=given)
        chosen = plan(short, H200)
        told = constants(chosen)
        assert (told["WARPGROUPS"], told["PACK"], chosen.launches[0].grid, chosen.launches[0].threads) == (
            1,
            1,
            200,
            256,
        )
        assert blocks * (told["SHARED_MEMORY"] + 1024) <= H200.shared_memory + 1024
        assert plan(replace(short, batch=500), H200).launches[0].grid == blocks * 132


def test_tiles_up_to_64_are_such_that_no_multiprocessor_has_more_to_do_than_it_needs() -> None:
    for length, batch, warpgroups, blocks in (
        (49, 50, 1, 3),
        (2049, 1, 3, 1),
        (2049, 8, 3, 1),
        (4096, 1, 3, 1),
        (8192, 2, 3, 1),
    ):
        asked = problem("bfloat16", batch=batch, heads_q=12, heads_k=12, seq_q=length, seq_k=length)
        told = constants(plan(asked, H200))
        assert (length, told["WARPGROUPS"], told["BLOCKS"], told["Q_STAGES"]) == (length, warpgroups, blocks, 2)
    mask = (Given("mask", "bool", ("batch", "head", "query", "key")),)
    for fields in ({"softcap": 30.0}, {"given": mask}, {"given": BIAS}):
        asked = problem("bfloat16", batch=64, heads_q=12, heads_k=12, seq_q=256, seq_k=256, **fields)
        assert constants(plan(asked, H200))["WARPGROUPS"] in (2, 3)


def test_up_to_96_columns_three_warpgroups_where_they_have_less_to_do() -> None:
    for batch, heads, length, dim, fields, warpgroups in (
        (1, 20, 16384, 96, {}, 3), (16, 16, 729, 72, {"softcap": 9.0}, 2), (16, 16, 729, 100, {}, 2),
        (1, 20, 16384, 96, {"right": 0}, 2),
    ):  # fmt: skip
        asked = problem(
            "bfloat16", dim, batch=batch, heads_q=heads, heads_k=heads, seq_q=length, seq_k=length, **fields
        )
        assert constants(plan(asked, H200))["WARPGROUPS"] == warpgroups


def test_few_keys_have_tiles_of_no_more() -> None:
    for length in (48, 50, 64, 77, 80, 90, 96, 134, 154, 186):
        for dim in (40, 64, 96, 128):
            asked = problem("bfloat16", dim, batch=8, heads_q=10, heads_k=10, seq_q=4096, seq_k=length)
            keys = int(constants(plan(asked, H200))["KEYS"])
            assert -(-length // keys) * keys - length < 40, (length, dim)  # so many are computed in vain
            assert constants(plan(replace(asked, softcap=9.0), H200))["KEYS"] > 64


def test_up_to_32_tiles_are_such_that_no_multiprocessor_has_much_more_to_do_than_it_need() -> None:
    for length, warpgroups, blocks, keys, given in (
        (1, 2, 2, 64, ()), (128, 2, 2, 64, ()), (129, 3, 1, 128, ()), (192, 3, 1, 128, ()), (193, 4, 1, 64, ()),
        (256, 4, 1, 64, ()), (257, 3, 1, 128, ()), (512, 3, 1, 128, ()), (577, 3, 1, 128, ()), (2000, 3, 1, 128, ()),
        (256, 4, 1, 64, BIAS), (300, 2, 2, 64, BIAS), (2000, 4, 1, 64, BIAS),
    ):  # fmt: skip
        asked = problem("float16", 32, batch=50, heads_k=8, seq_q=length, given=given)
        chosen = plan(asked, H200)
        told = constants(chosen)
        assert [told[x] for x in ("DIM", "DIM_V", "WARPGROUPS", "BLOCKS", "KEYS")] == [32, 32, warpgroups, blocks, keys]
        assert chosen.launches[0].grid == min(-(-length // (64 * warpgroups)) * 400, blocks * 132)
        assert blocks * (chosen.launches[0].shared_memory + 1024) <= H200.shared_memory + 1024
        assert told["Q_STAGES"] == 2  # the next tile's comes early
        assert constants(plan(asked, H200, BACKWARD))["DIM"] == 32
    for batch, warpgroups in ((8, 2), (9, 4)):  # heads enough for all multiprocessors, or not
        asked = problem("float16", 32, batch=batch, heads_k=8, seq_q=256)
        assert constants(plan(asked, H200))["WARPGROUPS"] == warpgroups
    for dims in ((32, 33), (33, 32), (8, 64)):
        told = constants(plan(problem("float16", *dims, seq_q=256), H200))
        assert (told["DIM"], told["DIM_V"]) == (64, 64)


def test_short_sequences_have_backward_tiles_of_one_warpgroup() -> None:
    """Where queries and keys are one tile of 64 each, two thread blocks of a multiprocessor, and heads for both."""
    short = problem("float16", 32, batch=50, seq_q=49, seq_k=49, heads_q=4, heads_k=4)
    chosen = plan(short, H200, BACKWARD)
    told = constants(chosen)
    assert [told[name] for name in ("WARPGROUPS", "ROWS", "KEYS", "SHARES")] == [1, 64, 64, False]
    assert (chosen.launches[-1].grid, chosen.launches[-1].threads) == (200, 256)
    assert 2 * (told["SHARED_MEMORY"] + 1024) <= H200.shared_memory + 1024
    many = plan(replace(short, batch=5000), H200, BACKWARD)
    assert many.launches[-1].grid == 2 * 132
    assert dict(many.scalars)["resident"] == 2 + 3 * 2 * 132  # three tiles, of one head each, for every thread block
    for fields in (
        {"batch": 1},
        {"seq_q": 64, "seq_k": 64, "dim": 64, "heads_q": 8},
        {"seq_q": 1},
        {"causal": "top_left", "right": 0},
    ):
        assert constants(plan(replace(short, **fields), H200, BACKWARD))["WARPGROUPS"] == 1
    for other in ({"seq_q": 65}, {"seq_k": 65}, {"dim": 65}, {"dim_v": 65}):
        assert constants(plan(replace(short, **other), H200, BACKWARD))["WARPGROUPS"] == 2


def test_at_head_dimension_64_what_asks_for_most_registers_has_two_warpgroups() -> None:
    slopes = (Given("alibi_slopes", "float32", ("batch", "head")),)
    causal = {"causal": "bottom_right", "right": 0}
    asked = problem("float16", batch=100, seq_q=4000, seq_k=4000)
    for fields in (
        {},
        causal,
        {"softcap": 30.0, **causal},
        {"given": slopes},
        {"given": slopes, **causal},
        {"right": 9},
    ):
        assert constants(plan(replace(asked, **fields), H200))["WARPGROUPS"] == 3
    left, right = {"given": slopes, "left": 9, **causal}, {"given": slopes, "right": 9}
    for fields in ({"dropout": 0.1}, {"dropout": 0.1, **causal}, left, right):
        assert constants(plan(replace(asked, **fields), H200))["WARPGROUPS"] == 2


def test_blocks_that_share_dq_come_in_pairs() -> None:
    """Above a head dimension of 192, two thread blocks of a cluster have 64 keys each, also where multiprocessors are
    odd. Those for which there are no keys finish dQ, where there are sums of it."""
    for sms, seq_k, grid in ((132, 4000, 132), (131, 4000, 130), (132, 200, 132), (131, 1, 32)):
        asked = problem("bfloat16", 256, batch=2, heads_q=8, heads_k=8, seq_q=300, seq_k=seq_k)
        chosen = plan(asked, replace(H200, sms=sms), BACKWARD)
        told = constants(chosen)
        assert (told["CLUSTER"], told["KEYS"], chosen.launches[-1].grid) == (2, 64, grid)
    for dim in (64, 96, 128, 192):
        assert constants(plan(problem("bfloat16", dim), H200, BACKWARD))["CLUSTER"] == 1


def test_tiles_that_the_paired_blocks_cannot_take_are_passed_over() -> None:
    """A tile tuned with other kernels: 80 keys cannot be sent 32 at a time, and 96 leave no place for 256 columns of
    dQ."""
    asked = problem("bfloat16", 256)
    for tile in ((64, 80, 2, 2, 1, 0), (64, 96, 3, 2, 1, 0), (80, 64, 2, 2, 1, 0)):
        assert plan(asked, H200, BACKWARD, tiles={"sm90": tile}).constants == plan(asked, H200, BACKWARD).constants


def test_three_words_to_deal_out_tiles() -> None:
    """Where tiles differ in length, and are more than the multiprocessors. Those of heads with one tile each do not."""
    for fields, size in (
        ({"right": 0, "seq_q": 128, "batch": 40}, 0), ({"right": 0, "seq_q": 129, "batch": 40}, 12),
        ({"right": 0}, 12), ({"left": 9}, 12), ({}, 0), ({"seq_q": 4000}, 12), ({"right": 0, "seq_q": 128}, 0),
    ):  # fmt: skip
        asked = problem("float16", 128, 128, **{"batch": 2, "heads_q": 8, "seq_q": 4096, "seq_k": 4096} | fields)
        assert {w.name: w.nbytes for w in plan(asked, H200, family="sm90").workspace}["counters"] == size


def test_heads_that_share_keys_share_tiles_where_queries_are_few() -> None:
    """Tiles and the heads of each: all of a head's queries are in one tile, and a group is in as few as hold it."""
    for (seq_q, heads_q, heads_k), pack, tiles in (
        ((1, 8, 1), 64, 1), ((2, 8, 2), 64, 2), ((3, 32, 8), 16, 8), ((8, 14, 2), 16, 2), ((9, 64, 2), 8, 8),
        ((16, 14, 2), 8, 2), ((1, 8, 8), 1, 8), ((1, 256, 1), 64, 4),
    ):  # fmt: skip
        for dim in (64, 96, 128, 192, 256):
            asked = problem("bfloat16", dim, batch=12, seq_q=seq_q, heads_q=heads_q, heads_k=heads_k)
            chosen = plan(asked, H200)
            rows, told = 64 * int(constants(chosen)["WARPGROUPS"]), constants(chosen)
            if pack == 1:
                tiles = heads_q * -(-seq_q // rows)
            assert (chosen.family, told["PACK"]) == ("sm90", pack)
            assert chosen.launches[0].grid == min(12 * tiles, int(told["BLOCKS"]) * H200.sms)
            q = chosen.maps[0]
            at_once = 64 if told["OWN_Q"] else rows  # a warpgroup's, where each has its own
            assert (q.array, q.heads, q.rows * q.heads) == ("q", pack, at_once) and (q.rows >= seq_q or pack == 1)
            assert max(q.rows, q.heads) <= 256  # what TMA takes
            assert {box.heads for box in chosen.maps[1:]} == {1}
            assert chosen.workspace[0].nbytes == 0  # tiles are alike: nothing to deal out
            if pack > 1:
                assert not told["O_STAGED"]  # a box of the output has one head
    for seq_q, seq_k, heads_q, heads_k, dim in ((30, 30, 10, 2, 64), (33, 33, 6, 2, 64), (200, 200, 32, 8, 128)):
        chosen = plan(
            problem("bfloat16", dim, batch=40, seq_q=seq_q, seq_k=seq_k, heads_q=heads_q, heads_k=heads_k), H200
        )
        told, q = constants(chosen), chosen.maps[0]
        pack = int(told["PACK"])
        assert pack > 1 and (q.heads, q.rows * pack) == (pack, 64 * int(told["WARPGROUPS"]))
        tiles = 40 * heads_k * -(-heads_q // heads_k // pack) * -(-seq_q // q.rows)
        assert chosen.launches[0].grid == min(tiles, int(told["BLOCKS"]) * H200.sms)
    one = plan(problem("bfloat16", batch=1, seq_q=1, heads_q=8, heads_k=1), H200)
    assert constants(one)["PACK"] == 1 and one.launches[0].grid == 8  # there is a multiprocessor for each head
    backward = plan(problem("bfloat16", seq_q=1, heads_q=8, heads_k=1), H200, BACKWARD)
    assert "PACK" not in constants(backward) and {box.heads for box in backward.maps} == {1}


def test_a_tuned_tile_packs_too() -> None:
    asked = problem("bfloat16", batch=10, seq_q=3, heads_q=8, heads_k=1)
    told = constants(plan(asked, H200, tiles={"sm90": (3, 128, 2, 1, 0), "sm80": (64, 64, 4, 1, 2, 2)}))
    assert (told["WARPGROUPS"], told["PACK"]) == (3, 64)  # 3 rows each
