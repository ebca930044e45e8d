"""Which kernels and tiles the passes take that take tangents. No GPU needed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from kernel_cover import moving, problem

from cupyflash.gpu import compiler
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import simt, sm90_backward_jvp
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.programs import generate
from cupyflash.passes import BACKWARD_JVP, JVP
from cupyflash.problem import Given

H200 = Arch.of("sm_90a")
QKV = ("q", "k", "v")
ONCE, TWICE = "sm90/backward_jvp_once.cu", "sm90/backward_jvp.cu"  # products of scores of two tiles
BIAS = Given("bias", "bfloat16", ("batch", "head", "query", "key"))
MASK = Given("mask", "bool", ("query", "key"))


def of_h(dim: int, names: tuple[str, ...] = QKV, **fields: Any) -> KernelPlan:
    return plan(moving(problem("bfloat16", dim, **fields), names), H200, BACKWARD_JVP)


@pytest.mark.parametrize("dim", [32, 64, 72, 128, 200, 256])
def test_one_kernel_has_each_product_once(dim: int) -> None:
    for fields in ({}, {"right": 0}, {"left": 90, "right": 20}, {"dropout": 0.1}, {"block_mask": ("head",)}):
        assert of_h(dim, **fields).source == ONCE
    assert of_h(dim, ("k", "dlse") if dim < 64 else ("v",)).source == ONCE


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"softcap": 9.0}, {"given": (BIAS,)}, {"given": (MASK,)}])
def test_what_one_kernel_does_not_take(fields: dict[str, Any]) -> None:
    assert of_h(64, **fields).source == of_h(128, **fields).source == TWICE
    assert of_h(256, **fields).family == "sm80"


def test_columns_and_tangents_without_room() -> None:
    everything = (*QKV, "dout")
    assert of_h(64, everything).source == ONCE and of_h(128, everything).source == TWICE
    assert of_h(256, everything).family == "sm80"
    assert [of_h(dim).family for dim in (160, 192, 193)] == ["sm80", "sm80", "sm90"]
    sides = {(256, 128): "sm90", (192, 256): "sm90", (128, 256): "sm80", (64, 256): "sm80", (200, 16): "sm80"}
    assert {dims: of_h(dims[0], dim_v=dims[1]).family for dims in sides} == sides  # 256 of each are computed


@pytest.mark.parametrize(
    "dim, names, fields, why",
    [
        (256, (*QKV, "dout"), {}, "takes no tangent of dout in a"),
        (256, QKV, {"given": (MASK,), "deterministic": True}, "takes no mask and deterministic=True in a"),
        (200, QKV, {"softcap": 9.0}, "takes no softcap in a"),
        (160, (*QKV, "dout"), {"softcap": 9.0}, "has no"),
    ],
)
def test_what_wide_heads_lack_is_said(dim: int, names: tuple[str, ...], fields: dict[str, Any], why: str) -> None:
    made = of_h(dim, names, **fields)
    assert made.passed_over == (f"sm90 {why} backward_jvp of head dimensions {dim} and {dim}",)


def test_a_tile_that_was_timed_is_of_two_kernels() -> None:
    tile = sm90_backward_jvp.TILES.listed()[4]
    found = {dim: plan(moving(problem("bfloat16", dim), QKV), H200, BACKWARD_JVP, "sm90", {"sm90": tile})
             for dim in (64, 256)}  # fmt: skip
    assert {dim: x.source for dim, x in found.items()} == {64: TWICE, 256: ONCE}  # it has no room for 256 columns


@pytest.mark.parametrize("seq, fields", [(4096, {}), (2048, {"right": 0}), (16384, {}), (1024, {})])
def test_sums_in_memory_are_of_heads_under_work(seq: int, fields: dict[str, Any]) -> None:
    shape = {"batch": 4, "seq_q": seq, "seq_k": seq, "heads_q": 16, "heads_k": 16, "diagonal": 0}
    for dim in (64, 128, 256):
        made = of_h(dim, **shape, **fields)
        of_q = 2 * 4 * 16 * seq * dim
        assert taken(made) < 2.25 * of_q


def taken(made: KernelPlan) -> int:
    return sum(x.nbytes for x in made.workspace)


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_memory_of_any_length_is_three_times_q(right: int | None) -> None:
    """Of whole tiles of queries, and beside counters. What else a call takes is tout, as large as out: the floor is 4.
    Sums of few heads of narrow rows, 32 or 64 columns of them, would take up to 9 times q."""
    rows = range(8, 257, 8)
    sides = [(16, 64), (64, 16), (33, 33), (65, 65), (64, 256), (256, 64), (16, 200), (200, 16), (168, 256), (193, 193)]
    sources: dict[tuple[int, int], set[str]] = {}
    for dims in [*zip(rows, rows), *sides]:
        for seq, heads, batch in itertools.product((1024, 4096, 16384, 131072), (1, 2, 4, 8, 16, 32), (1, 4)):
            shape = {"batch": batch, "seq_q": seq, "seq_k": seq, "heads_q": heads, "heads_k": heads, "right": right}
            made = of_h(dims[0], dim_v=dims[1], **shape)
            sources.setdefault(dims, set()).add(made.source)
            counters = next((x.nbytes for x in made.workspace if x.name == "counters"), 0)
            most = 3 if made.family == "sm90" else 4.5
            assert taken(made) - counters <= most * 2 * batch * heads * seq * dims[0], (dims, shape, made.source)
    assert all(sources[n, n] == {ONCE} for n in rows if n == 32 or 48 <= n <= 128 or n > 192)
    assert sources[8, 8] == sources[16, 16] == sources[33, 33] == {ONCE, TWICE}


def test_sums_of_fewer_heads_where_those_keep_multiprocessors_busy() -> None:
    """At 8 columns there is room for a quarter of the heads. Between two whose sums lie in one place are two tiles of
    keys, or more, for each of 132 multiprocessors; of short or few heads that many are not left."""

    def found(heads: int, seq: int = 16384, **fields: Any) -> tuple[int, int] | None:
        shape = {"batch": 1, "heads_q": heads, "heads_k": heads, "seq_q": seq, "seq_k": seq, "diagonal": 0}
        made = of_h(8, **shape, **fields)
        told = dict(made.scalars)
        return (told["together"], told["resident"]) if made.source == ONCE else None

    assert found(64) == (1, 6) and found(64, right=0) == (8, 16)  # 128 tiles of keys; (32, 64) without a bound
    assert found(32, right=0) == (4, 8) and found(16, right=0) == (1, 4)
    assert found(8, right=0) is found(16, 2048, right=0) is found(64, block_mask=("head",)) is None


@pytest.mark.parametrize("family, dim, fields", [
    ("sm90", 64, {}), ("sm90", 256, {}), ("sm90", 64, {"softcap": 9.0}), ("simt", 64, {}),
])  # fmt: skip
def test_without_probabilities_that_move_nobody_computes_dp(family: str, dim: int, fields: dict[str, Any]) -> None:
    """k: S, tS, dP, tdK, tdQ (2), tdV; v: S, tdP, tdK, tdQ; dlse: S, tdK, tdQ. All of one size, or of two."""
    pytest.importorskip("cuda.core")
    counts = []
    for name in ("k", "v", "dlse"):
        made = plan(moving(problem("bfloat16", dim, **fields), (name,)), H200, BACKWARD_JVP, family)
        of_products = "wgmma.mma_async" if family == "sm90" else "bar.sync"
        counts.append(compiler.ptx(generate(made), made.arch).count(of_products))
    assert counts[0] == counts[1] + counts[2] and counts[1] > counts[2]


@pytest.mark.parametrize(
    "dim, tiles", [(64, {24: (64, 3), 32: (32, 4), 96: (64, 3)}), (128, {24: (32, 3), 32: (64, 2)})]
)
def test_simt_tiles_by_waves(dim: int, tiles: dict[int, tuple[int, int]]) -> None:
    """Heads of 1024 queries on 132 multiprocessors: of 24 (64 columns) all blocks of 64 rows are at work at once."""
    for heads, (owned, blocks) in tiles.items():
        shape = {"batch": 1, "seq_q": 1024, "seq_k": 1024, "heads_q": heads, "heads_k": heads, "diagonal": 0}
        for fields in ({}, {"right": 0}):
            asked = moving(problem("float32", dim, **shape, **fields), QKV)
            constants = dict(plan(asked, H200, JVP, "simt").constants)
            first = next(t for t in simt.JVP_TILES if t.dim == dim and t.sums == 4)
            assert (constants["OWNED"], constants["BLOCKS"]) == (
                (first.owned, first.blocks) if fields else (owned, blocks)
            )
