"""Which kernels and tiles the passes take that take tangents. No GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cover import moving, problem

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import simt, sm90_backward_jvp
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
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
        assert sum(x.nbytes for x in made.workspace) < 2.25 * of_q


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
