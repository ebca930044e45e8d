"""The planner: which family, why not another, and plans that fit the GPU. Pure; no GPU needed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from kernel_cover import ARCHS, BIAS, FAMILY_ARCHS, FEATURES, GIVEN, MASK, moving, problem, problems

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES, KernelPlan, plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD, JVP
from cupyflash.problem import AttentionProblem, Given

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
    columns of V is its own, and the backward from 321 to 512 columns."""
    for dims in ((257, 257), (320, 300), (321, 64), (512, 512), (576, 576), (64, 512), (576, 8)):
        for of in (FORWARD, BACKWARD):
            own = arch is H200 and (dims[1] <= 512 if of is FORWARD else 320 < max(dims) <= 512)
            assert plan(problem("bfloat16", *dims), arch, of).family == ("sm90" if own else "sm80")
            assert plan(problem("float32", *dims), arch, of).family == "simt"
    assert plan(problem("bfloat16", 577), arch).family == "simt"
    reason = "sm80 takes head dimensions up to 256 in a jvp of float16, not 512 and 512"
    assert reason in plan(moving(problem("float16", 512)), arch, JVP).passed_over


def test_a_backward_shares_out_whole_blocks_of_columns() -> None:
    """Of 64, for both blocks of a cluster: of few columns of one product and many of the other, too."""
    for few, many in itertools.product(range(1, 513, 32), (321, 512)):
        for dims in ((few, many), (many, few)):
            has = constants(plan(problem("bfloat16", *dims), H200, BACKWARD))
            assert has["DIM"] % 128 == has["DIM_V"] % 128 == 0, dims
            assert has["DIM"] >= dims[0] and has["DIM_V"] >= dims[1]


def test_tiles_of_wide_heads_have_one_order_of_products() -> None:
    """What `tune` may try, too."""
    tiles, asked = FAMILIES["sm80"].TILES[BACKWARD], problem("float16", 512)
    assert tiles.possible(tiles.tile((64, 32, 8, 4, 1, 1)), asked)
    assert not tiles.possible(tiles.tile((32, 32, 8, 4, 2, 1)), asked)
    assert not tiles.possible(tiles.tile((32, 32, 8, 1, 1, 1)), problem("float16", 64, 257))


@pytest.mark.parametrize(("dim_v", "parts", "columns"), [(256, 1, 256), (257, 2, 192), (400, 2, 256), (512, 2, 256)])
def test_hopper_shares_out_columns_of_values(dim_v: int, parts: int, columns: int) -> None:
    """Over thread blocks, each with its part of them; a row that keys' shares leave has all."""
    told, few = (plan(problem("bfloat16", 576, dim_v, seq_q=n, seq_k=8192), H200) for n in (1000, 1))
    assert (constants(told)["V_PARTS"], constants(told)["DIM_V"]) == (parts, columns)
    one = plan(problem("bfloat16", 576, 256, seq_q=1000, seq_k=8192), replace(H200, sms=10**6))
    many = plan(problem("bfloat16", 576, dim_v, seq_q=1000, seq_k=8192), replace(H200, sms=10**6))
    assert (
        many.launches[0].grid // dict(many.scalars)["shares"]
        == parts * one.launches[0].grid // dict(one.scalars)["shares"]
    )
    assert next(x.shape for x in few.workspace if x.name == "share_out")[1] == parts * columns


def test_a_cluster_shares_out_a_forward_of_wide_heads() -> None:
    """From 321 to 512 columns of Q and K and of V; what it does not take is left to blocks that each compute S."""
    wide = problem("bfloat16", 400, 450, batch=8, seq_q=3000, seq_k=3000)
    of_cluster = "sm90/wide_forward.cu"
    chosen = plan(wide, H200)
    has = constants(chosen)
    assert (chosen.source, chosen.launches[0].grid) == (of_cluster, 132)
    assert (has["CLUSTER"], has["DIM"], has["DIM_V"], has["DOT"]) == (2, 448, 512, 400)
    assert plan(replace(wide, dim_v=384), H200).launches[0].shared_memory <= H200.shared_memory
    assert constants(plan(replace(wide, dim_v=384), H200))["DIM_V"] == 384
    assert plan(replace(wide, causal="bottom_right", right=0, softcap=9.0, dropout=0.1), H200).source == of_cluster
    few = replace(wide, batch=1, seq_q=64, seq_k=8192)  # keys are dealt out
    lengths = replace(wide, rows_q=6000, rows_k=6000, given=tuple(
        Given(f"cu_seqlens_{x}", "int32", ("offset",)) for x in "qk"
    ))  # fmt: skip
    others = (
        replace(wide, dim=320), replace(wide, dim_v=320), replace(wide, dim=513), few, lengths,
        replace(wide, given=MASK), replace(wide, block_mask=("batch", "head")),
        replace(wide, add=True), replace(wide, batch_invariant=True),
    )  # fmt: skip
    for other in others:
        made = plan(other, H200)
        assert made.source != of_cluster and made.source.endswith("/forward.cu"), other
    tuned = plan(wide, H200, tiles={"sm90": (2, 64, 1, 1)})  # a tile that was timed is that of the other kernel
    assert constants(tuned)["V_PARTS"] == 2


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
    told = {"together": 1, "shares": 1, "whole_heads": 0, "cleared": 33}  # 4 key tiles to a head
    assert scalars(long) == told | {"resident": 2 + 99}  # 3 waves of 132 key tiles
    assert next(w for w in chosen.workspace if w.name == "dq_sum").nbytes == 101 * 512 * 128 * 4
    causal = dict(plan(replace(long, causal="bottom_right", right=0), H200, BACKWARD).scalars)
    assert causal["together"] > 1 and 2 * causal["together"] <= causal["resident"] < 512
    few = plan(replace(long, batch=1), H200, BACKWARD)
    assert dict(few.scalars)["resident"] == 16


def scalars(asked: AttentionProblem, arch: Arch = H200) -> dict[str, int]:
    return dict(plan(asked, arch, BACKWARD).scalars)


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
        ValueError, match=r"q has batch 1048576 and 4096 heads: 4294967296 blocks; less than 2\*\*31 fit"
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
        rows = 64 if told["OWN_Q"] else 64 * int(told["WARPGROUPS"]) // int(told["PACK"])
        keys = told["KEYS"]
        boxes = [(x.array, x.rows, x.heads) for x in chosen.maps if not x.windows]
        assert boxes == [("q", rows, told["PACK"]), ("k", keys, 1), ("v", keys, 1), ("out", 64, 1)]
    chosen = plan(problem("float16", *dims), H200, BACKWARD)
    told = constants(chosen)
    rows, keys = told["ROWS"], int(told["KEYS"])
    leaving = min(64, keys) if keys == 64 * int(told["WARPGROUPS"]) else keys
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
    assert [parts(batch=n) for n in (19, 20)] == [4, 1]


@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_the_gradient_of_a_bias_without_keys_launches_nothing(family: str) -> None:
    """Beside one of the sinks, which there is."""
    state = problem("float16", seq_k=0, given=(*BIAS, Given("sinks", "float32", ("head",))))
    found = plan(state, A100, BACKWARD, family, lengths={"bias": (2, 8, 1000, 0), "sinks": (1, 8, 1, 1)})
    assert [x.name for x in found.launches][-1] == "attention_backward_sinks"
    assert not any("bias" in x.name for x in found.launches)
