"""Memory beyond inputs and results, of any pass, dtype and length: 4 times q's bytes, where that is much, or little
beside 2 times. No GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from kernel_cover import moving, problem

from cupyflash.gpu import portions
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_backward_cost
from cupyflash.gpu.kernel_plan import LITTLE, KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.passes import BACKWARD, PASSES, Pass
from cupyflash.problem import ITEMSIZE

H200, A100, L40 = (Arch.of(x) for x in ("sm_90a", "sm_80", "sm_89"))
SIZES = ((1, 1, 1), (1, 2, 2), (1, 12, 12), (2, 16, 16), (64, 8, 8), (1, 8, 1), (2, 32, 4))  # batch, heads of q and k
MOST, FEW = 4.2, 2.2  # times q's bytes: of all, and beside what may be LITTLE; sums of dQ and numbers of queries


def made(
    of: Pass, dtype: str, dim: int, shape: tuple[int, int, int], seq: int, arch: Arch, **fields: Any
) -> KernelPlan:
    batch, heads_q, heads_k = shape
    sizes = {"batch": batch, "heads_q": heads_q, "heads_k": heads_k, "seq_q": seq, "seq_k": seq, "diagonal": 0}
    asked = problem(dtype, dim, **sizes, **fields)
    return plan(moving(asked, ("q", "k", "v")) if of.moved else asked, arch, of)


def taken(plan: KernelPlan) -> int:
    return sum(x.nbytes for x in plan.workspace)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("of", PASSES.values(), ids=str)
@pytest.mark.parametrize("arch", [H200, A100, L40], ids=lambda x: x.name)
def test_memory_of_any_length(of: Pass, dtype: str, arch: Arch) -> None:
    """Float32 more where portions would lose time, and of one head of k, which cannot be divided, 8 times at most."""
    for dim, shape, seq in itertools.product((32, 64, 96, 128, 192, 256), SIZES, (128, 1024, 3000, 4096, 16384)):
        for fields in ({}, {"right": 0}):
            here = taken(made(of, dtype, dim, shape, seq, arch, **fields))
            q = shape[0] * shape[1] * seq * dim * ITEMSIZE[dtype]
            times, more = MOST, 0
            if dtype == "float32":
                times, more = MOST + 4 * (shape[0] * shape[2] == 1), portions.MUCH
            little = LITTLE + sm90_backward_cost.MORE_ROOM * (of == BACKWARD and arch == H200)
            assert here <= max(times * q + more, FEW * q + little), (dim, shape, seq, fields, here / q)


def test_sums_of_shares_take_twice_what_q_does_or_little() -> None:
    """Few heads whose queries are dealt out, or the last of them; a little more where that gains much."""

    def found(dim: int, shape: tuple[int, int, int], seq: int, **fields: Any) -> tuple[int, int]:
        chosen = made(BACKWARD, "bfloat16", dim, shape, seq, H200, **fields)
        sums = next(x.nbytes for x in chosen.workspace if x.name == "share_sums")
        return dict(chosen.scalars)["shares"], sums >> 20

    assert found(64, (1, 1, 1), 4096) == (4, 8) and found(128, (1, 1, 1), 2048) == (4, 8)
    assert found(128, (1, 32, 4), 3000, right=0) == (5, 60) and found(192, (2, 2, 2), 32768) == (2, 96)
    assert found(128, (1, 15, 3), 4416) == (5, 65)  # 4 waves of 105 key tiles in place of 5 times 105 on 132


def test_sums_of_the_last_heads_alone() -> None:
    """Their queries are dealt out where the last wave, of 288 key tiles on 132 multiprocessors, would be short."""
    chosen = made(BACKWARD, "bfloat16", 176, (4, 2, 2), 3392, H200)
    told, spaces = dict(chosen.scalars), {w.name: w for w in chosen.workspace}
    shares, last = told["shares"], 8 - told["whole_heads"]
    assert shares > 1 and 0 < last < 4
    assert spaces["share_sums"].shape == (36 * 3 * last * shares, 128 * 96)
    assert spaces["counters"].shape == (2 + 8 - last + last * shares + 8 * 53 + 36 * 3 * last,)
    assert spaces["dq_sum"].shape == (told["resident"] * 53, 64 * 192) and told["resident"] <= 8
    assert dict(made(BACKWARD, "bfloat16", 176, (11, 2, 2), 3392, H200).scalars)["shares"] == 1  # six full waves


def test_without_room_there_are_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_backward_cost, "allowed", lambda *_: -sm90_backward_cost.MORE_ROOM)
    assert dict(made(BACKWARD, "bfloat16", 64, (1, 1, 1), 4096, H200).scalars)["shares"] == 1


def test_sums_of_the_heads_that_come_first_are_cleared_by_the_launch_before() -> None:
    """Those whose key tiles are the first on all multiprocessors, where there is room for them at once."""
    fields = {"heads_q": 16, "heads_k": 16, "seq_q": 2048, "seq_k": 2048}
    for more, cleared in (
        ({"batch": 8}, 9),  # of 16 key tiles each, on 132 multiprocessors
        ({"batch": 1, "heads_q": 3, "heads_k": 3, "seq_q": 700}, 6),  # two shares of each
        ({"batch": 8, "causal": "bottom_right", "right": 0}, 16),  # dealt out together
        ({"batch": 8, "seq_k": 100}, 0),  # the only key tile leaves rows
        ({"batch": 8, "left": 100, "right": 0}, 0),  # the first key tile stores
    ):
        told = dict(plan(problem("bfloat16", 128, **fields | more), H200, BACKWARD).scalars)
        assert told["cleared"] == cleared <= told["resident"]
        assert cleared == 0 or cleared >= told["together"]
