"""Heads in portions: when, how many, what memory they take, and what is launched for them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_cover import SCORE, problem

from cupyflash.gpu import portions
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.plans import plans
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, PASSES, Pass
from cupyflash.problem import AXES, AttentionProblem, Given, View

H200, A100 = Arch.of("sm_90a"), Arch.of("sm_80")
CAUSAL: dict[str, Any] = {"causal": "bottom_right", "right": 0}
LONG = (4096, 8192, 16384)
ROOM = portions.ROOM


@pytest.fixture(autouse=True)
def many_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "ROOM", 1.0)


def asked(of: Pass, seq: int, dim: int = 64, **fields: Any) -> AttentionProblem:
    moved = tuple(Given(name, "float32", ()) for name in "qkv") if of.moved else ()
    sizes = {"heads_q": 16, "heads_k": 16, "seq_q": seq, "seq_k": seq, "tangents": moved}
    return problem(**{"dtype": "float32", "dim": dim, **sizes, **fields})


def at_once(state: AttentionProblem, of: Pass, monkeypatch: pytest.MonkeyPatch, arch: Arch = H200) -> KernelPlan:
    with monkeypatch.context() as patch:
        patch.setattr(portions, "sizes", lambda *_: ())
        return plan(state, arch, of)


def taken(made: KernelPlan, state: AttentionProblem) -> float:
    """Workspace, in times q."""
    q = 4 * state.batch * state.heads_q * state.seq_q * state.dim
    return sum(x.nbytes for x in made.workspace) / q


@pytest.mark.parametrize("of", PASSES.values(), ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_workspace_of_float32_beside_q(
    of: Pass, dim: int, mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long sequences; all heads at once take 3 to 8 times what q does."""
    for seq in LONG:
        state = asked(of, seq, dim, **mask)
        monkeypatch.setattr(portions, "ROOM", 1.0)
        many = plan(state, H200, of)
        assert taken(many, state) < {4096: 2.05, 8192: 1.05, 16384: 1.0}[seq], seq
        monkeypatch.setattr(portions, "ROOM", ROOM)
        made = plan(state, H200, of)
        assert taken(made, state) <= ROOM and 1 < len(made.portions) <= len(many.portions), seq


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_a_backward_of_long_sequences_is_halved(
    dim: int, mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 5.02 to 5.06 times what q does: no more portions than bring that to a half."""
    monkeypatch.setattr(portions, "ROOM", ROOM)
    for seq in LONG:
        assert plan(asked(BACKWARD, seq, dim, **mask), H200, BACKWARD).portions == (16, 16), seq
    assert plan(asked(BACKWARD_JVP, 16384, dim, heads_k=4, **mask), H200, BACKWARD_JVP).portions == (4, 4)


@pytest.mark.parametrize("of", PASSES.values(), ids=str)
@pytest.mark.parametrize("fields", [
    {}, {"heads_k": 4}, {"batch": 3, "heads_q": 12, "heads_k": 6, "deterministic": True},
    {"given": (Given("cu_seqlens_q", "int32", ()), Given("cu_seqlens_k", "int32", ())), "batch": 5, "rows_q": 20000,
     "rows_k": 20000},
])  # fmt: skip
def test_portions_have_each_head_once(of: Pass, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches together are those of all heads at once, in as many blocks; memory is that of the largest."""
    state = asked(of, 8192, **fields)
    whole, made = at_once(state, of, monkeypatch), plan(state, H200, of)
    parts = portions.one_by_one(made)
    assert len(parts) == len(made.portions) > 1 and not whole.portions
    assert (made.constants, made.spills, made.lists) == (whole.constants, whole.spills, whole.lists)
    told = [dict(x.scalars) for x in parts]
    total = state.heads_k * (1 if state.rows_q else state.batch)
    ends = [x["first_head"] + x["portion_heads"] for x in told]
    assert [x["first_head"] for x in told] == [0, *ends[:-1]] and ends[-1] == total
    for n, launch in enumerate(whole.launches):
        assert {x.launches[n].name for x in parts} == {launch.name}
        assert sum(x.launches[n].grid for x in parts) == launch.grid
    of_whole = {x.name: x for x in whole.workspace}
    for x in made.workspace:
        more = 4 if x.name == "counters" and x.nbytes else 0  # the ticket
        assert (x.nbytes - more) * total == (of_whole[x.name].nbytes - more) * made.portions[0]


UNDIVIDED: dict[str, tuple[Pass, dict[str, Any]]] = {
    "short": (JVP, {"seq_q": 1024, "seq_k": 1024}),
    "atoms": (BACKWARD_JVP, {"batch": 64, "seq_q": 64, "seq_k": 64, "dim": 16, "heads_q": 8, "heads_k": 8}),
    "few heads": (BACKWARD, {"batch": 1, "heads_q": 1, "heads_k": 1}),
    "one head of k": (JVP, {"batch": 1, "heads_k": 1}),
    "few queries": (FORWARD, {"seq_q": 16}),
    "bfloat16": (BACKWARD, {"dtype": "bfloat16"}),
    "float64": (BACKWARD_JVP, {"dtype": "float64"}),
    "heads numbered in two ways": (BACKWARD, {"given": (Given("cu_seqlens_k", "int32", ()),), "rows_k": 9000}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNDIVIDED)
def test_what_runs_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, fields = UNDIVIDED[case]
    state = asked(of, 8192, **fields)
    if fields.get("dtype"):
        state = replace(state, tangents=tuple(x._replace(dtype=state.dtype) for x in state.tangents))
    made = plan(state, H200, of)
    assert not made.portions and made == at_once(state, of, monkeypatch)
    assert portions.one_by_one(made) == [made]


def test_multiprocessors_are_filled_as_by_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice at least, and the last time nearly, whatever number of heads and multiprocessors there is, where memory
    does not ask for more."""
    monkeypatch.setattr(portions, "LIMIT", 9.0)
    divided = 0
    for sms in (60, 108, 114, 132, 144):
        for heads in (6, 7, 16, 25, 40):
            for of in PASSES.values():
                made = plan(asked(of, 5000, batch=3, heads_q=heads, heads_k=heads), replace(H200, sms=sms), of)
                blocks = int(dict(made.constants)["MIN_BLOCKS"])
                grids = [x.launches[[y.name for y in x.launches].index(f"attention_{of}")].grid
                         for x in portions.one_by_one(made)]  # fmt: skip
                tiles = [math.ceil(n / sms) for n in grids]  # of the busiest
                divided += len(tiles) > 1
                assert len(tiles) == 1 or min(tiles) >= 2 * blocks
                assert sum(tiles) <= portions.LOSS * math.ceil(sum(grids) / sms)
    assert divided > 50


def test_more_than_four_times_q_asks_for_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 4 times q's bytes: the number that takes least time, if little is lost; more where much is saved. Not
    where what is split is found by gradients of arrays, and one head cannot be divided."""
    monkeypatch.setattr(portions, "ROOM", ROOM)
    found = {heads: plan(asked(BACKWARD_JVP, 4096, batch=1, heads_q=heads, heads_k=heads), H200, BACKWARD_JVP).portions
             for heads in (1, 5, 6, 11, 12, 14)}  # fmt: skip
    assert found == {1: (), 5: (), 6: (3, 3), 11: (4, 4, 3), 12: (4, 4, 4), 14: (7, 7)}
    few = asked(BACKWARD, 4096, batch=1, heads_q=12, heads_k=12)  # 60 MB, and 1.4 ms: no multiprocessor stands idle
    assert plan(few, H200, BACKWARD).portions == (4, 4, 4)
    for given, found in ((("bias", "float32"), ()), (("mask", "bool"), (4, 4, 4))):
        assert plan(replace(few, given=(Given(*given, AXES),)), H200, BACKWARD).portions == found
    # Of 16 and 32 heads 129 and 258 MB would be saved, of 4 of 3000 queries 48, of 2.9 tiles each multiprocessor has.
    many = {(64, 16, 128): (), (64, 32, 128): (1024, 1024), (4, 4, 3000): ()}
    for (batch, heads, seq), found in many.items():
        sizes = {"batch": batch, "heads_q": heads, "heads_k": heads}
        assert plan(asked(BACKWARD_JVP, seq, **sizes), H200, BACKWARD_JVP).portions == found


def test_keys_are_dealt_out_for_all_heads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of fewer heads would make other sums, and rows of shares are numbered over all heads."""
    state = asked(FORWARD, 8192)
    assert plan(state, H200).portions
    few: list[int] = []

    def dealt(problem: AttentionProblem, *_: Any) -> shares.Dealt:
        return shares.Dealt(few[0] if problem.heads_k * problem.batch < 32 else few[1], 0.0)

    monkeypatch.setattr(shares, "shares", dealt)
    for few[:] in ([2, 1], [1, 2], [2, 2], [3, 2]):
        made = plan(state, H200)
        assert not made.portions and made == at_once(state, FORWARD, monkeypatch)
        assert dict(made.scalars)["shares"] == few[1]


def test_blocks_of_each_launch_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In portions there may be more than one launch can have; tables of a score are of all heads."""
    state = asked(FORWARD, 2**20, batch=2**11, heads_q=32, heads_k=32)
    monkeypatch.setattr(portions, "ROOM", ROOM)
    made = plan(state, H200)
    assert max(x.grid for x in made.launches) < 2**31 <= max(x.grid for x in made.launches) * len(made.portions)
    with pytest.raises(ValueError, match=r"q has batch 2048 and 32 heads: \d+ blocks; less than 2\*\*31 fit"):
        at_once(state, FORWARD, monkeypatch)
    heads = {"heads_q": 31 * 2**20, "heads_k": 31 * 2**20, "batch": 1, "dtype": "float16"}
    assert plan(asked(FORWARD, 4096, **heads), H200)
    with pytest.raises(ValueError, match=r"and 32505856 heads: 2210398208 blocks; less than 2\*\*31 fit"):
        plan(asked(FORWARD, 4096, **heads, score=SCORE), H200)


def test_heads_that_share_one_of_k_are_portions_as_they_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As queries: there are no more heads of q than of k then."""
    state = asked(FORWARD, 8192, dtype="bfloat16", cache_dtype="int8", seq_q=1, heads_k=4)
    real, seen = portions.divided, []

    def divided(made: KernelPlan, problem: AttentionProblem, arch: Arch, make: Any) -> KernelPlan:
        seen.append(problem)
        return real(made, problem, arch, make)

    monkeypatch.setattr(portions, "divided", divided)
    assert plan(state, H200).grouped
    assert [(x.heads_q, x.heads_k, x.seq_q, x.group) for x in seen] == [(4, 4, 4, 1)]


def test_a_backward_of_caches_without_rows_is_no_portions() -> None:
    """It has no tiles of keys, but sinks, whose gradient is asked for."""
    given = (Given("seqlens_k", "int32", ("sequence",)), Given("sinks", "float32", ("head",)))
    made = plan(asked(BACKWARD, 3, seq_k=0, cache=0, diagonal=0, given=given), A100, BACKWARD)
    assert not made.portions and "attention_backward" not in {x.name for x in made.launches}


def test_a_score_is_tabled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables are of all heads."""
    state = asked(BACKWARD, 8192, score=SCORE)
    made, whole = plan(state, H200, BACKWARD), at_once(state, BACKWARD, monkeypatch)
    first, *others = portions.one_by_one(made)
    assert others and first.launches[0] == whole.launches[0] and first.launches[0].name == "attention_score_tables"
    assert all(x.launches[0].name == "attention_split" for x in others)
    tables = [next(x for x in y.workspace if x.name == "score_tables") for y in (made, whole)]
    assert tables[0] == tables[1]


def test_gradients_of_arrays_find_nothing_of_a_portion() -> None:
    """What is left there is of the last heads."""
    state = asked(BACKWARD, 1000, 32, given=(Given("bias", "float32", AXES),))
    view = View((1, 16, 1000, 1000), (0,) * 4, "float32", "cuda:0", "cupy")
    first, of_bias = plans(state, A100, BACKWARD, wrt=("bias",), views={"bias": view})
    assert first is not None and of_bias is not None and "q_halves" in of_bias.found
    alone = replace(of_bias, launches=(*first.launches[:1], *of_bias.launches), found=())
    assert alone.after(first).found and alone.after(replace(first, portions=(20, 12))) == alone
    long = asked(BACKWARD, 8192, 32, given=state.given)
    view = view._replace(shape=(1, 16, 8192, 8192))
    first, of_bias = plans(long, H200, BACKWARD, wrt=("bias",), views={"bias": view})
    assert first is not None and of_bias is not None and first.portions and not of_bias.portions and not of_bias.found


def test_explain_tells_of_portions() -> None:
    import cupyflash

    told = cupyflash.explain((2, 8192, 16, 64), dtype="float32", arch="sm_90a", of="backward")
    assert any("heads run in 8 portions of up to 4 of k" in x for x in told.notes)
    assert sum(told.workspace.values()) < 4 * 2 * 8192 * 16 * 64
    told = cupyflash.explain((2, 512, 16, 64), dtype="float32", arch="sm_90a", of="backward")
    assert not any("portions" in x for x in told.notes)


def test_all_portions_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, with the same pointers and memory, each with its heads."""
    pytest.importorskip("cupy")
    from stand_in_cuda import Cuda

    from cupyflash.gpu import launch, params

    cuda = Cuda(monkeypatch)
    state = asked(BACKWARD, 8192)
    made = plan(state, H200, BACKWARD)
    functions = [SimpleNamespace(ptr=1000 + n) for n, _ in enumerate(made.launches)]
    launcher = launch.Launcher(made, functions, state, {}, 0)
    assert sum(x.nbytes for x in made.workspace) <= launcher.workspace < 4 * 2 * 8192 * 16 * 64
    for _ in range(2):
        launcher([256] * len(launcher.slots), 77, 1 << 40)
    assert [x.function for x in cuda.launches] == [1000, 1001, 1002, 1003] * len(made.portions) * 2
    layout = params.layout(made)
    records = [np.frombuffer(x.parameter(0, layout.itemsize), layout)[0] for x in cuda.launches]
    told = [(x["first_head"], x["portion_heads"]) for x in records[: len(records) // 2 : 4]]
    assert told == [(4 * n, 4) for n in range(8)]
    assert len({int(x["q_halves"]) for x in records}) == 1 and {int(x["dq"]) for x in records} == {256}


@pytest.mark.parametrize(("arch", "of", "dim"), [
    pytest.param(arch, of, dim, marks=() if (arch, of, dim) == ("sm_90a", JVP, 64) else pytest.mark.slow)
    for arch in ("sm_80", "sm_90a") for of in PASSES.values() for dim in (64, 128)
])  # fmt: skip
def test_kernels_in_portions_compile_without_undeclared_spills(arch: str, of: Pass, dim: int) -> None:
    pytest.importorskip("cuda.core")
    from test_kernels_compile import compile_all

    from cupyflash.gpu.source import generate

    made = plan(asked(of, 16384, dim, **CAUSAL), Arch.of(arch), of)
    assert made.portions and "constexpr bool PORTIONS = true;" in generate(made)
    compile_all({generate(made): made})
