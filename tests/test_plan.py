"""The planner: which family, why not another, and plans that fit the GPU. Pure; no GPU needed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_cover import ARCHS, BIAS, FAMILY_ARCHS, FEATURES, GIVEN, moving, problem, problems

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares, sm90_backward_cost
from cupyflash.gpu.plan import FAMILIES, KernelPlan, plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD, JVP, Pass
from cupyflash.problem import AttentionProblem, Given
from cupyflash.tools import explanation

A100, H200, B200, T4, L40 = (Arch.of(f"sm_{cc}") for cc in (80, 90, 100, 75, 89))
STATIC_LIMIT = 48 << 10


def directions(family: str, asked: AttentionProblem, gpu: Arch) -> list[bool]:
    """The passes, as far as the family takes them."""
    return [backward for backward in (FORWARD, BACKWARD) if FAMILIES[family].objection(asked, gpu, backward) is None]


def constants(kernel_plan: KernelPlan) -> dict[str, int | bool | float]:
    return dict(kernel_plan.constants)


@pytest.mark.parametrize(
    ("dtype", "dims", "arch", "family"),
    [
        ("float16", (64, 64), A100, "sm80"),
        ("bfloat16", (64, 64), B200, "sm80"),
        ("bfloat16", (128, 128), A100, "sm80"),
        ("bfloat16", (256, 256), A100, "sm80"),
        ("float16", (59, 111), A100, "sm80"),
        ("float16", (64, 64), T4, "simt"),
        ("float16", (577, 64), A100, "simt"),
        ("float16", (64, 577), A100, "simt"),
        ("float32", (64, 64), H200, "sm80"),
        ("float32", (64, 64), T4, "simt"),
        ("float64", (64, 64), H200, "sm80"),
        ("float64", (192, 192), A100, "sm80"),
        ("float64", (256, 256), B200, "sm80"),
        ("float64", (256, 256), A100, "simt"),
        ("float64", (64, 64), L40, "simt"),
        ("float64", (511, 3), T4, "simt"),
    ],
)
def test_family(dtype: str, dims: tuple[int, int], arch: Arch, family: str) -> None:
    for backward in (FORWARD, BACKWARD):
        chosen = plan(problem(dtype, *dims), arch, backward)
        assert chosen.family == family
        assert plan(problem(dtype, *dims), arch, backward, family).source == chosen.source


@pytest.mark.parametrize("arch", [A100, L40, H200])
def test_wide_heads_are_for_tensor_cores(arch: Arch) -> None:
    """Of 16 bits, up to 576, forward and backward; whatever the GPU's shared memory. On Hopper the forward up to 512
    columns of V is its own."""
    for dims in ((257, 257), (512, 512), (576, 576), (64, 512), (576, 8)):
        for of in (FORWARD, BACKWARD):
            own = arch is H200 and of is FORWARD and dims[1] <= 512
            assert plan(problem("bfloat16", *dims), arch, of).family == ("sm90" if own else "sm80")
            assert plan(problem("float32", *dims), arch, of).family == "simt"
    assert plan(problem("bfloat16", 577), arch).family == "simt"
    reason = "sm80 takes head dimensions up to 256 in a jvp of float16, not 512 and 512"
    assert reason in plan(moving(problem("float16", 512)), arch, JVP).passed_over


def test_tiles_of_wide_heads_have_one_order_of_products() -> None:
    """What `tune` may try, too."""
    tiles, asked = FAMILIES["sm80"].TILES[BACKWARD], problem("float16", 512)
    assert tiles.possible(tiles.tile((64, 32, 8, 4, 1, 1)), asked)
    assert not tiles.possible(tiles.tile((32, 32, 8, 4, 2, 1)), asked)
    assert not tiles.possible(tiles.tile((32, 32, 8, 1, 1, 1)), problem("float16", 64, 257))


@pytest.mark.parametrize(("dim_v", "parts", "columns"), [(256, 1, 256), (257, 2, 192), (400, 2, 256), (512, 2, 256)])
def test_hopper_shares_out_columns_of_values(dim_v: int, parts: int, columns: int) -> None:
    """Over thread blocks, each with its part of them; a row that keys' shares leave has all."""
    told, few = (plan(problem("bfloat16", 512, dim_v, seq_q=n, seq_k=8192), H200) for n in (1000, 1))
    assert (constants(told)["V_PARTS"], constants(told)["DIM_V"]) == (parts, columns)
    one = plan(problem("bfloat16", 512, 256, seq_q=1000, seq_k=8192), replace(H200, sms=10**6))
    many = plan(problem("bfloat16", 512, dim_v, seq_q=1000, seq_k=8192), replace(H200, sms=10**6))
    assert (
        many.launches[0].grid // dict(many.scalars)["shares"]
        == parts * one.launches[0].grid // dict(one.scalars)["shares"]
    )
    assert next(x.shape for x in few.workspace if x.name == "share_out")[1] == parts * columns


@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (59, 111), (128, 128), (192, 128), (256, 256)])
def test_hopper_has_its_own_kernels(dims: tuple[int, int]) -> None:
    for dtype in ("float16", "bfloat16"):
        for backward in (FORWARD, BACKWARD):
            chosen = plan(problem(dtype, *dims), H200, backward)
            assert chosen.family == "sm90" and chosen.passed_over == ()


def test_reasons_of_the_families_passed_over() -> None:
    reasons = {
        ("float16", 64, A100): "sm90 is for compute capability 9.0, this GPU has 8.0",
        ("float16", 0, H200): "sm90 takes head dimensions from 1 to 576 and 512 in a forward, not 0 and 0",
        ("float16", 64, T4): "sm80 needs compute capability 8.0, this GPU has 7.5",
        ("float16", 600, A100): "sm80 takes head dimensions up to 576 in a forward of float16, not 600 and 600",
        ("float32", 512, A100): "sm80 takes head dimensions up to 256 in a forward of float32, not 512 and 512",
        (
            "float64",
            64,
            L40,
        ): "sm80 takes float64 where double precision is fast (8.0, 9.0, 10.0), not on compute capability 8.9",
        ("float64", 256, A100): "sm80 has no float64 forward for head dimensions 256 and 256 in 166912 bytes",
    }
    for (dtype, dim, arch), reason in reasons.items():
        assert reason in plan(problem(dtype, dim), arch).passed_over
    assert plan(problem("float32"), A100, family="simt").passed_over == ()  # nobody was asked


def test_a_family_that_objects() -> None:
    with pytest.raises(
        ValueError, match="no kernel family takes this problem: sm90 takes float16, bfloat16 and float8"
    ):
        plan(problem("float32"), H200, family="sm90")
    with pytest.raises(
        ValueError, match="family is 'sm70'; it must be one of 'sm90', 'sm80', 'simt', 'flash1', or None"
    ):
        plan(problem("float32"), A100, family="sm70")


def test_flash1_is_taken_only_where_it_is_named() -> None:
    """Not even as the last that could take a problem, nor is it told of."""
    for asked in problems():
        for arch in (T4, A100, B200):
            for backward in (FORWARD, BACKWARD):
                chosen = plan(asked, arch, backward)
                assert chosen.family != "flash1" and not any("flash1" in why for why in chosen.passed_over)
    assert plan(problem("float16"), H200, family="flash1").launches[0].grid == 2 * 8  # a block for each head
    assert plan(problem("float16"), H200, BACKWARD, "flash1").launches[0].grid == 2 * 2  # of K and V
    wide = problem("float16", 136)
    for asked, why in (
        (problem("float64"), "bfloat16 and float32, not float64"), (wide, "dimensions up to 128"),
        (problem("float16", softcap=30.0), "no softcap"),
        (problem("float16", given=GIVEN, softcap=30.0),
            "no mask and no bias and no alibi_slopes and no sinks and no seed and no softcap"),
        (problem("float16", dropout=0.1), "no dropout"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"no kernel family takes this problem: flash1 takes .*{why}"):
            plan(asked, H200, family="flash1")


def test_flash1_keeps_o_l_and_m_in_memory() -> None:
    """In the output itself where that is float32; dQ likewise."""
    rows = 2 * 8 * 1024
    for dtype, sums in (("float32", 0), ("float16", rows * 64 * 4), ("bfloat16", rows * 64 * 4)):
        forward, backward = (plan(problem(dtype, seq_q=1024), H200, back, "flash1") for back in (FORWARD, BACKWARD))
        sizes = {w.name: w.nbytes for w in (*forward.workspace, *backward.workspace)}
        assert sizes == {"m": 4 * rows, "l": 4 * rows, "o_sum": sums, "dq_sum": sums}


def test_nothing_takes_it() -> None:
    with pytest.raises(ValueError, match="sm80 takes head dimensions up to 576.*; simt takes head dimensions up to"):
        plan(problem("float16", 10_000), A100)


@pytest.mark.parametrize(("family", "arch"), FAMILY_ARCHS)
def test_fits_the_gpu(family: str, arch: str) -> None:
    """Every head dimension, not only those compiled in test_kernels_compile: shared memory, threads, grid."""
    gpu = Arch.of(arch)
    for dtype in ("float16", "float32", "float64"):
        alike, others = range(1, 590, 3), [(576, 512), (8, 256), (256, 8), (192, 128), (100, 512), (512, 4)]
        for dim, dim_v in [(d, d) for d in alike] + others:
            asked = problem(dtype, dim, dim_v)
            for backward in directions(family, asked, gpu):
                for launch in plan(asked, gpu, backward, family).launches:
                    assert 0 <= launch.shared_memory <= gpu.shared_memory
                    assert 32 <= launch.threads <= 1024 and launch.threads % 32 == 0
                    assert 1 <= launch.grid < 2**31


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "flash1"])  # there a head has one block
def test_every_query_and_key_has_a_block(family: str) -> None:
    """Or, where blocks take tile after tile, every multiprocessor one."""
    tiny, large = (problem("float16", seq_q=s, seq_k=s) for s in (1, 100_001))
    for backward in directions(family, tiny, H200):
        for few, many in zip(*(plan(p, H200, backward, family).launches for p in (tiny, large))):
            assert few.name == many.name and few.grid < many.grid


def test_tiles_that_the_sm90_kernels_can_count() -> None:
    asked = problem("float16", batch=100_000, heads_q=16384, heads_k=16384, seq_q=128, seq_k=128)
    for backward, name, tiles in ((FORWARD, "q", 3276800000), (BACKWARD, "k", 1638400000)):
        told = rf"{name} has batch 100000 and 16384 heads: {tiles} tiles; less than 2\*\*30"
        with pytest.raises(ValueError, match=told):
            plan(asked, H200, backward)


@pytest.mark.parametrize(
    "dtype, fields, family, left",
    [
        ("float32", {"dim": 32, "dim_v": 32}, "sm80", ()),
        ("float32", {"dim": 64, "dim_v": 64}, "sm80", ()),
        ("float32", {"dim": 40, "dim_v": 33}, "sm80", ()),  # columns padded as the backward's
        ("float32", {"dim": 80, "dim_v": 80}, "sm80", ()),
        (
            "float32",
            {"dim": 32, "dim_v": 32, "seq_q": 2048, "seq_k": 2048},
            "sm80",
            ("split", "prepare"),
        ),  # other tiles
        ("float32", {"dim": 256, "dim_v": 256}, "sm80", ("split", "prepare")),
        ("float16", {}, "sm80", ("prepare",)),
        ("float16", {"seq_q": 4096, "seq_k": 4096}, "sm80", ()),
        ("float32", {}, "simt", ()),
        ("float16", {"given": (Given("sinks", "float32", ("head",)),)}, "sm90", ()),
        ("float16", {}, "sm90", ("prepare",)),  # tiles of a bias are large
    ],
)
def test_gradients_of_arrays_find_what_the_backward_has_filled(
    dtype: str, fields: dict[str, Any], family: str, left: tuple[str, ...]
) -> None:
    """Where tiles are the same, nothing is split, nor any delta computed, again; the source is the same in any case."""
    asked = problem(dtype, **{"seq_q": 256, "seq_k": 256, "given": BIAS} | fields)
    first = plan(asked, H200, BACKWARD, family)
    pairs = (asked.seq_q, asked.seq_k) if asked.has("bias") else (1, 1)
    lengths = {asked.given[0].name: (1, asked.heads_q, *pairs)}
    alone = plan(asked, H200, BACKWARD, family, lengths=lengths)
    second = alone.after(first)
    again = [x.name for x in second.launches if x.fills]
    assert [name.rsplit("_", 1)[-1] for name in again] == list(left)
    assert [x for x in second.launches if not x.fills] == [x for x in alone.launches if not x.fills]
    filled = {name for x in alone.launches if x not in second.launches for name in x.fills}
    assert set(second.found) == filled and (filled == set()) == (second == alone)
    assert filled <= {x.name for x in set(first.workspace) & set(second.workspace)}
    assert generate(second) == generate(alone)


def test_workspace() -> None:
    """The forward needs none. The backward has a row vector; sm80 one float32 dQ as well, and sm90 that of some heads;
    both a copy of lse, in tiles of 128 queries (64 in a short sm80), and counters."""
    rows, pairs = 2 * 8 * 1024, 2 * 8
    expected = {
        "simt": {"delta": ("float32", (pairs, 1024))},
        "sm80": {
            "delta": ("float32", (pairs, 16, 2, 64)), "dq_sum": ("float32", (pairs, 16, 64 * 64)),
            "counters": ("uint32", (0,)),
        },
        "sm90": {
            "delta": ("float32", (pairs, 8, 2, 128)), "dq_sum": ("float32", (rows // 128, 128 * 64)),
            "counters": ("uint32", (2 + 16 + rows // 128,)), "share_sums": ("float32", (0, 128 * 64)),
        },
    }  # fmt: skip
    asked = problem("float16", seq_q=1024, heads_k=8)
    for family, spaces in expected.items():
        assert sum(w.nbytes for w in plan(asked, H200, family=family).workspace) == 0
        assert {w.name: (w.dtype, w.shape) for w in plan(asked, H200, BACKWARD, family).workspace} == spaces
    same = plan(problem("float16", seq_q=1024, deterministic=True), H200, BACKWARD, "sm80")
    assert same.workspace[2].shape == (pairs * 16 + 1,)  # how far each tile of dQ is, and the ticket
    (delta,) = plan(problem("float64", seq_q=1024), L40, BACKWARD).workspace
    assert delta.nbytes == 8 * rows
    delta, dq_sum, _ = plan(problem("float64", seq_q=1024), H200, BACKWARD).workspace
    assert (delta.nbytes, dq_sum.nbytes) == (2 * 8 * rows, 8 * rows * 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_has_the_same_workspace_always(family: str) -> None:
    """What a plan does not need has no elements: it is a field of Params, which is part of the source."""
    for backward in (FORWARD, BACKWARD):
        names = set()  # of a dtype
        plain = [fields for fields in FEATURES.values() if "score" not in fields]
        for fields in (*plain, {"seq_q": 4097, "right": 0}, {"seq_q": 1}):
            for dtype in ("float16", "float32"):
                asked = problem(dtype, **fields)
                if FAMILIES[family].objection(asked, H200, backward) is None:
                    names.add((dtype, *[w.name for w in plan(asked, H200, backward, family).workspace]))
        assert len(names) == len({dtype for dtype, *_ in names})


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_kernels_are_told_what_they_may_lay_out(family: str) -> None:
    for dim in (64, 128, 256):
        for backward in (FORWARD, BACKWARD):
            chosen = plan(problem("float16", dim), H200, backward, family)
            assert constants(chosen)["SHARED_MEMORY"] == max(x.shared_memory for x in chosen.launches) > 0


def test_sums_of_dq_for_heads_under_work_alone() -> None:
    """The sm90 backward keeps float32 dQ of as many heads as the thread blocks are at, not of all."""
    long = problem("bfloat16", 128, batch=32, heads_q=16, heads_k=16, seq_q=512, seq_k=512)
    chosen = plan(long, H200, BACKWARD)
    assert scalars(long) == {
        "together": 1,
        "resident": 2 + 99,
        "shares": 1,
    }  # 3 waves of 132 key tiles, 4 of them to a head
    assert next(w for w in chosen.workspace if w.name == "dq_sum").nbytes == 101 * 512 * 128 * 4
    causal = dict(plan(replace(long, causal="bottom_right", right=0), H200, BACKWARD).scalars)
    assert causal["together"] > 1 and 2 * causal["together"] <= causal["resident"] < 512
    few = plan(replace(long, batch=1), H200, BACKWARD)
    assert dict(few.scalars)["resident"] == 16


def scalars(asked: AttentionProblem, arch: Arch = H200) -> dict[str, int]:
    return dict(plan(asked, arch, BACKWARD).scalars)


def test_thread_blocks_share_key_tiles_that_are_few_or_uneven() -> None:
    """Else multiprocessors would be idle. All ways to share are one kernel."""
    fields = {"seq_q": 4096, "seq_k": 4096, "heads_q": 32, "heads_k": 1, "dim": 128}
    few = problem("bfloat16", batch=1, **fields)  # 32 key tiles
    shared, alone = plan(few, H200, BACKWARD), plan(replace(few, batch=64), H200, BACKWARD)
    assert (constants(shared)["SHARES"], constants(alone)["SHARES"]) == (True, False)
    told = dict(shared.scalars)
    shares = told["shares"]
    assert 1 < shares <= 32  # of 32 heads with 64 query tiles each
    assert shared.launches[-1].grid == min(132, 32 * shares) > 32
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
    assert (constants(told)["PACK"], told.launches[0].grid, dict(told.scalars)["shares"]) == (64, 128, 16)
    assert not constants(plan(replace(token, batch=32), H200))["SHARES"]


@pytest.mark.parametrize("of", [FORWARD, BACKWARD], ids=str)
def test_of_short_sequences_the_tile_that_is_chosen_is_nearly_the_fastest(of: Pass) -> None:
    """Random calls, each with the microseconds of every tile that was timed on an H100 (bench/shapes.py draws such)."""
    regrets = []
    for row in json.loads((Path(__file__).parent / "measured_tiles.json").read_text())[of.name]:
        batch, seq_q, seq_k, heads_q, heads_k, dim, causal, left = row["call"]
        masked: dict[str, Any] = {"causal": "bottom_right", "right": 0, "left": left} if causal else {}
        asked = problem("bfloat16", dim, batch=batch, seq_q=seq_q, seq_k=seq_k, heads_q=heads_q, heads_k=heads_k,
                        diagonal=seq_k - seq_q, **masked)  # fmt: skip
        told = constants(plan(asked, H200, of))
        names = ("GROUPS", "KEYS", "STAGES", "BLOCKS", "PACK") if of is FORWARD else ("ROWS", "KEYS", "GROUPS")
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
    assert note.startswith("the queries of a head of keys are dealt out in 8 shares")
    (note,) = explanation.explain((1, 1, 32, 128), k, k, dtype="bfloat16", arch="sm_90a").notes
    assert note == "the keys of a query tile are dealt out in 16 shares: query tiles are few"
    one, cache = (np.empty(x, "f2") for x in ((2, 1, 32, 128), (2, 8192, 8, 128)))
    told = explanation.explain(one, cache, cache, arch="sm_90a", seqlens_k=np.array([8192, 5]))
    (note,) = told.notes
    assert note == "the keys of each sequence are dealt out by its own length, in shares of 1024 keys at most"
    assert explanation.explain(q, q, q, dtype="bfloat16", arch="sm_90a", of="backward").notes == ()


def test_sums_of_shares_are_as_many_as_a_thread_holds() -> None:
    for dims, sums in (
        ((32, 32), 32),
        ((64, 64), 64),
        ((96, 64), 80),
        ((128, 128), 128),
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
        assert shape[0] == tiles * told["CLUSTER"] * told["GROUPS"] * dict(chosen.scalars)["shares"]


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
    ):
        asked = problem("bfloat16", **{"batch": 64, "seq_q": 1000, "seq_k": keys} | fields)
        whole, longer = plan(asked, H200, BACKWARD), plan(replace(asked, seq_k=129), H200, BACKWARD)
        assert [constants(x)["WHOLE_DQ"] for x in (whole, longer)] == [True, False]
        sums = [{w.name: w.nbytes for w in x.workspace}["dq_sum"] for x in (whole, longer)]
        assert sums[0] == 0 < sums[1]
        assert [box.array for box in whole.maps if box.array.startswith("d")] == ["dout", "dk", "dv", "dq"]
        assert "dq" not in {box.array for box in longer.maps}
        assert constants(plan(replace(asked, deterministic=True), H200, BACKWARD)) == constants(whole)
    for fields in ({"dim": 256}, {"block_mask": ("batch",)}):
        asked = problem("bfloat16", **{"batch": 64, "seq_q": 1000, "seq_k": 64} | fields)
        assert not constants(plan(asked, H200, BACKWARD))["WHOLE_DQ"]


def test_few_queries_have_tiles_of_one_warpgroup() -> None:
    """Three thread blocks of a multiprocessor, two beside scores, where there is work for more than one."""
    for given, blocks in (((), 3), (BIAS, 2)):
        short = problem("float16", 32, batch=50, seq_q=49, seq_k=49, heads_q=4, heads_k=4, given=given)
        chosen = plan(short, H200)
        told = constants(chosen)
        assert (told["GROUPS"], told["PACK"], chosen.launches[0].grid, chosen.launches[0].threads) == (1, 1, 200, 256)
        assert blocks * (told["SHARED_MEMORY"] + 1024) <= H200.shared_memory + 1024
        assert plan(replace(short, batch=500), H200).launches[0].grid == blocks * 132


def test_tiles_up_to_64_are_such_that_no_multiprocessor_has_more_to_do_than_it_needs() -> None:
    for length, batch, groups, blocks in (
        (49, 50, 1, 3),
        (2049, 1, 3, 1),
        (2049, 8, 3, 1),
        (4096, 1, 3, 1),
        (8192, 2, 3, 1),
    ):
        asked = problem("bfloat16", batch=batch, heads_q=12, heads_k=12, seq_q=length, seq_k=length)
        told = constants(plan(asked, H200))
        assert (length, told["GROUPS"], told["BLOCKS"], told["Q_STAGES"]) == (length, groups, blocks, 2)
    mask = (Given("mask", "bool", ("batch", "head", "query", "key")),)
    for fields in ({"softcap": 30.0}, {"given": mask}, {"given": BIAS}):
        asked = problem("bfloat16", batch=64, heads_q=12, heads_k=12, seq_q=256, seq_k=256, **fields)
        assert constants(plan(asked, H200))["GROUPS"] in (2, 3)


def test_up_to_96_columns_three_warpgroups_where_they_have_less_to_do() -> None:
    for batch, heads, length, dim, fields, groups in (
        (1, 20, 16384, 96, {}, 3), (16, 16, 729, 72, {"softcap": 9.0}, 2), (16, 16, 729, 100, {}, 2),
        (1, 20, 16384, 96, {"right": 0}, 2),
    ):  # fmt: skip
        asked = problem(
            "bfloat16", dim, batch=batch, heads_q=heads, heads_k=heads, seq_q=length, seq_k=length, **fields
        )
        assert constants(plan(asked, H200))["GROUPS"] == groups


def test_few_keys_have_tiles_of_no_more() -> None:
    for length in (48, 50, 64, 77, 80, 90, 96, 134, 154, 186):
        for dim in (40, 64, 96, 128):
            asked = problem("bfloat16", dim, batch=8, heads_q=10, heads_k=10, seq_q=4096, seq_k=length)
            keys = int(constants(plan(asked, H200))["KEYS"])
            assert -(-length // keys) * keys - length < 40, (length, dim)  # so many are computed in vain
            assert constants(plan(replace(asked, softcap=9.0), H200))["KEYS"] > 64


def test_up_to_32_tiles_are_such_that_no_multiprocessor_has_much_more_to_do_than_it_need() -> None:
    for length, groups, blocks, keys, given in (
        (1, 2, 2, 64, ()), (128, 2, 2, 64, ()), (129, 3, 1, 128, ()), (192, 3, 1, 128, ()), (193, 4, 1, 64, ()),
        (256, 4, 1, 64, ()), (257, 3, 1, 128, ()), (512, 3, 1, 128, ()), (577, 3, 1, 128, ()), (2000, 3, 1, 128, ()),
        (256, 4, 1, 64, BIAS), (300, 2, 2, 64, BIAS), (2000, 4, 1, 64, BIAS),
    ):  # fmt: skip
        asked = problem("float16", 32, batch=50, heads_k=8, seq_q=length, given=given)
        chosen = plan(asked, H200)
        told = constants(chosen)
        assert [told[x] for x in ("DIM", "DIM_V", "GROUPS", "BLOCKS", "KEYS")] == [32, 32, groups, blocks, keys]
        assert chosen.launches[0].grid == min(-(-length // (64 * groups)) * 400, blocks * 132)
        assert blocks * (chosen.launches[0].shared_memory + 1024) <= H200.shared_memory + 1024
        assert told["Q_STAGES"] == 2  # the next tile's comes early
        assert constants(plan(asked, H200, BACKWARD))["DIM"] == 32
    for batch, groups in ((8, 2), (9, 4)):  # heads enough for all multiprocessors, or not
        asked = problem("float16", 32, batch=batch, heads_k=8, seq_q=256)
        assert constants(plan(asked, H200))["GROUPS"] == groups
    for dims in ((32, 33), (33, 32), (8, 64)):
        told = constants(plan(problem("float16", *dims, seq_q=256), H200))
        assert (told["DIM"], told["DIM_V"]) == (64, 64)


def test_short_sequences_have_backward_tiles_of_one_warpgroup() -> None:
    """Where queries and keys are one tile of 64 each, two thread blocks of a multiprocessor, and heads for both."""
    short = problem("float16", 32, batch=50, seq_q=49, seq_k=49, heads_q=4, heads_k=4)
    chosen = plan(short, H200, BACKWARD)
    told = constants(chosen)
    assert [told[name] for name in ("GROUPS", "ROWS", "KEYS", "SHARES")] == [1, 64, 64, False]
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
        assert constants(plan(replace(short, **fields), H200, BACKWARD))["GROUPS"] == 1
    for other in ({"seq_q": 65}, {"seq_k": 65}, {"dim": 65}, {"dim_v": 65}):
        assert constants(plan(replace(short, **other), H200, BACKWARD))["GROUPS"] == 2


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
        assert constants(plan(replace(asked, **fields), H200))["GROUPS"] == 3
    left, right = {"given": slopes, "left": 9, **causal}, {"given": slopes, "right": 9}
    for fields in ({"dropout": 0.1}, {"dropout": 0.1, **causal}, left, right):
        assert constants(plan(replace(asked, **fields), H200))["GROUPS"] == 2


def test_blocks_that_share_dq_come_in_pairs() -> None:
    """Above a head dimension of 192, two thread blocks of a cluster have 64 keys each, also where multiprocessors are
    odd."""
    for sms, seq_k, grid in ((132, 4000, 132), (131, 4000, 130), (132, 128, 32), (132, 129, 64), (132, 1, 32)):
        asked = problem("bfloat16", 256, batch=2, heads_q=8, heads_k=8, seq_q=1000, seq_k=seq_k)
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
            rows, told = 64 * int(constants(chosen)["GROUPS"]), constants(chosen)
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
        assert pack > 1 and (q.heads, q.rows * pack) == (pack, 64 * int(told["GROUPS"]))
        tiles = 40 * heads_k * -(-heads_q // heads_k // pack) * -(-seq_q // q.rows)
        assert chosen.launches[0].grid == min(tiles, int(told["BLOCKS"]) * H200.sms)
    one = plan(problem("bfloat16", batch=1, seq_q=1, heads_q=8, heads_k=1), H200)
    assert constants(one)["PACK"] == 1 and one.launches[0].grid == 8  # there is a multiprocessor for each head
    backward = plan(problem("bfloat16", seq_q=1, heads_q=8, heads_k=1), H200, BACKWARD)
    assert "PACK" not in constants(backward) and {box.heads for box in backward.maps} == {1}


def test_a_tuned_tile_packs_too() -> None:
    asked = problem("bfloat16", batch=10, seq_q=3, heads_q=8, heads_k=1)
    told = constants(plan(asked, H200, tiles={"sm90": (3, 128, 2, 1, 0), "sm80": (64, 64, 4, 1, 2, 2)}))
    assert (told["GROUPS"], told["PACK"]) == (3, 64)  # 3 rows each


def test_determinism_costs_counters_alone() -> None:
    plain, same = (plan(problem("float16", deterministic=d), A100, BACKWARD) for d in (False, True))
    extra = [w for w in same.workspace if w not in plain.workspace]
    assert sum(w.nbytes for w in extra) < 0.01 * sum(w.nbytes for w in plain.workspace)
    assert plan(problem("float16", deterministic=True), A100) == plan(problem("float16"), A100)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_asked_is_not_compiled(family: str) -> None:
    """Features are booleans among the constants: every set of features has kernels of its own, sizes have not."""
    taken = [fields for fields in FEATURES.values() if directions(family, problem("float16", **fields), H200)]
    assert len(taken) == (4 if family == "flash1" else len(FEATURES))
    seen = {plan(problem("float16", **fields), H200, family=family).constants for fields in taken}
    assert len(seen) == len(taken)
    for backward in directions(family, problem("float16"), H200):
        small, large = (
            plan(problem("float16", seq_q=s, batch=b), H200, backward, family) for s, b in ((1000, 90), (999, 700))
        )
        assert small.constants == large.constants


def test_what_is_computed_before_a_score_function_has_room() -> None:
    """A line for each head, with all differences of positions that a tile may ask for."""
    for backward in (FORWARD, BACKWARD):
        made = plan(problem("float16", **FEATURES["score"]), H200, backward)
        (space,) = [x for x in made.workspace if x.name == "score_tables"]
        span = 1000 + 1000 + 2 * 256
        assert space.shape == (1, 8, span) and made.launches[0].name == "attention_score_tables"
        assert made.launches[0].grid == 8 * -(-span // 128)
        scores = {"score_span": span, "score_origin": 1000 + 256, "score_plane": 8 * span}
        assert scores.items() <= dict(made.scalars).items()


def test_sequences_that_the_kernels_cannot_count() -> None:
    for family in ("sm90", "sm80", "simt"):
        for backward in (FORWARD, BACKWARD):
            with pytest.raises(ValueError, match=r"k has a sequence of 1073741824; the kernels take less than 2\*\*30"):
                plan(problem("float16", seq_k=2**30), H200, backward, family)
    many = problem("float64", batch=2**20, heads_q=2**12, heads_k=1, seq_q=1, seq_k=1)
    with pytest.raises(
        ValueError, match=r"q has batch 1048576 and 4096 heads: 4294967296 tiles; less than 2\*\*31 fit"
    ):
        plan(many, H200)


def test_a_bound_of_0_is_a_bound() -> None:
    for bound, name in (("left", "LEFT"), ("right", "RIGHT")):
        told = constants(plan(problem("float32", **{bound: 0}), H200))
        assert told[name] is True and constants(plan(problem("float32"), H200))[name] is False


@pytest.mark.parametrize("dims", [(64, 64), (96, 64), (128, 128), (192, 128), (256, 256), (64, 256)])
def test_boxes_are_tiles(dims: tuple[int, int]) -> None:
    """What TMA moves at once is what the kernels wait for."""
    for seq_q in (5, 1000):
        chosen = plan(problem("float16", *dims, batch=10, seq_q=seq_q), H200)
        told = constants(chosen)
        rows = 64 if told["OWN_Q"] else 64 * int(told["GROUPS"]) // int(told["PACK"])
        assert chosen.maps == (
            ("q", rows, told["PACK"]),
            ("k", told["KEYS"], 1),
            ("v", told["KEYS"], 1),
            ("out", 64, 1),
        )
    chosen = plan(problem("float16", *dims), H200, BACKWARD)
    told = constants(chosen)
    rows, keys = told["ROWS"], int(told["KEYS"])
    leaving = min(64, keys) if keys == 64 * int(told["GROUPS"]) else keys
    assert {box.array: box.rows for box in chosen.maps} == {
        "q": rows, "dout": rows, "k": keys, "v": keys, "dk": leaving, "dv": leaving,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("full", "splits", "parts"),
    [("bhqk", 1, 0), ("hqk", 1, 0), ("qk", 2, 2), ("bk", 8, 8 * 8), ("hk", 2, 2 * 8), ("k", 16, 16 * 8)],
)
def test_who_sums_the_gradient_of_a_bias_on_hopper(full: str, splits: int, parts: int) -> None:
    """A block on each multiprocessor, as far as there are tiles; where a tile is summed by several, or broadcast along
    queries so that each of 8 warps has a sum, parts to be added."""
    asked = problem("float16", batch=2, given=BIAS)
    lengths = (*(n if axis in full else 1 for axis, n in zip("bhqk", (2, 8, 1000, 1000))),)
    chosen = plan(asked, H200, BACKWARD, lengths={"bias": lengths})
    assert (chosen.family, chosen.source, chosen.wrt) == ("sm90", "sm90/array_gradient.cu", ("bias",))
    launches = {x.name.removeprefix("attention_backward_"): x for x in chosen.launches}
    tiles = math.prod(n if n < 100 else 8 for n in lengths if n > 1)
    assert launches["bias"].grid == min(132, splits * tiles)
    assert launches["bias"].shared_memory == constants(chosen)["SHARED_MEMORY"] <= H200.shared_memory
    assert ("bias_add" in launches) == (parts > 0)
    spaces = {w.name: w.shape for w in chosen.workspace}
    assert spaces["dbias_parts"] == (parts, math.prod(lengths)) and spaces["dalibi_slopes_parts"][0] == 0
    assert dict(chosen.scalars)["dbias_splits"] == splits
    assert {box.array: box.rows for box in chosen.maps} == dict.fromkeys(("bias", "q", "k", "v", "dout"), 128)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_room_for_tiles_of_mask_and_bias_beside_the_pieces_of_a_gradient(dtype: str) -> None:
    for others, stages in (((), (5, 2)), (("mask",), (4, 2))):
        given = (*(x for x in GIVEN if x.name in others), BIAS[0]._replace(dtype=dtype))
        told = constants(plan(problem("float16", given=given), H200, BACKWARD, lengths={"bias": (2, 8, 1000, 1000)}))
        assert (told["STAGES"], told["PAIR_STAGES"]) == (stages if dtype == "float16" else (stages[0], 1))


def test_tiles_of_simt_that_scores_want() -> None:
    for given, owned in (((), 64), (BIAS, 32)):
        assert constants(plan(problem("float32", 32, given=given), H200, BACKWARD, "simt"))["OWNED"] == owned


def test_plans_are_data() -> None:
    for asked in list(problems())[:10]:
        one, two = (plan(asked, H200, BACKWARD) for _ in range(2))
        assert one == two and hash(one) == hash(two)


def test_alignment_is_that_of_an_element_or_16_bytes() -> None:
    assert plan(problem("float16"), A100).alignment == 16
    assert plan(problem("float64"), A100).alignment in (8, 16)
    assert plan(problem("float32"), A100).alignment in (4, 8, 16)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_dtype_has_a_family_everywhere(arch: str) -> None:
    for asked in problems():
        for backward in (FORWARD, BACKWARD):
            chosen = plan(asked, Arch.of(arch), backward)
            assert chosen.arch == arch and math.prod(launch.grid for launch in chosen.launches) > 0


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_without_keys_gradients_need_no_map(name: str) -> None:
    """The driver makes none of an array without rows. What depends on lse alone is left."""
    given = Given(name, "float32", ("head",))
    problem = AttentionProblem("bfloat16", 2, 100, 0, 4, 4, 64, 64, 0.1, given=(given,))
    found = plan(problem, Arch.of("sm_90a"), BACKWARD, lengths={name: (1, 4, 1, 1)})
    assert not found.maps and len(found.launches) > 1 and all(0 < x.grid < 100 for x in found.launches)


def test_few_tiles_of_dq_are_turned_to_rows_in_parts() -> None:
    """By 264 warps of an H200; a part is as many times 32 columns, or those of half of the rows."""

    def parts(**fields: Any) -> int:
        asked = problem("bfloat16", **{"batch": 1, "seq_q": 600, "seq_k": 600, "heads_q": 8, "heads_k": 8} | fields)
        return constants(plan(asked, H200, BACKWARD))["FINISH_PARTS"]

    assert [parts(dim=dim) for dim in (64, 96, 128, 192, 256)] == [4, 3, 4, 3, 4]
    assert [parts(batch=n) for n in (6, 7)] == [4, 1]


@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_the_gradient_of_a_bias_without_keys_launches_nothing(family: str) -> None:
    """Beside one of the sinks, which there is."""
    state = problem("float16", seq_k=0, given=(*BIAS, Given("sinks", "float32", ("head",))))
    found = plan(state, A100, BACKWARD, family, lengths={"bias": (2, 8, 1000, 0), "sinks": (1, 8, 1, 1)})
    assert [x.name for x in found.launches][-1] == "attention_backward_sinks"
    assert not any("bias" in x.name for x in found.launches)
