"""The suites `decode`, `varlen`, `paged` and `latent` without a GPU: rows, inputs, everybody's calls, what is shown."""

from __future__ import annotations

import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import attention, attention_backward, bench
from cupyflash.bench import machine, peers, plots, report, serving, serving_peers
from cupyflash.bench.serving import CALLS, Call
from cupyflash.bench.suites import SUITES, Options
from cupyflash.gpu.device import Arch
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.tools.timing import Candidate

KEYS = (40, 1, 200, 7)
SMALL = {
    "dense": Call("dense", (1,) * 3, (64,) * 3, 4, 2, 16),
    "few": Call("dense", (3,) * 2, (64,) * 2, 4, 2, 16),
    "caches": Call("caches", (1,) * 4, KEYS, 4, 2, 16),
    "pages": Call("pages", (1,) * 4, KEYS, 4, 2, 16, page=16),
    "even pages": Call("pages", (1,) * 3, (50,) * 3, 4, 2, 16, page=16),
    "packed": Call("packed", KEYS, KEYS, 4, 2, 16),
    "even": Call("packed", (24,) * 3, (24,) * 3, 2, 2, 16),
    "chunk": Call("packed", (24, 1, 1), (60, 9, 30), 4, 2, 16),
    "latent": Call("caches", (1,) * 4, KEYS, 4, 1, 24, latent=16),
    "latent, few": Call("caches", (3,) * 2, (70,) * 2, 4, 1, 24, latent=16),
    "latent pages": Call("pages", (2,) * 3, (50,) * 3, 4, 1, 24, page=16, latent=16),
}


def cache(dtype: str = "float32") -> dict[str, peers.Case]:
    return {name: serving.draw(call, dtype, 1, "cpu") for name, call in SMALL.items()}


# --- rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_those_that_serving_and_packed_training_ask() -> None:
    assert [len(calls) for calls in CALLS.values()] == [47, 17, 9, 10]
    assert len({name for calls in CALLS.values() for name in calls}) == 83  # a row is found by its name alone
    assert {name for calls in CALLS.values() for name in calls} == {
        x for names in serving.KINDS.values() for x in names
    }
    assert all(SUITES[name].names == (*CALLS[name],) for name in CALLS)
    assert str(CALLS["decode"]["16x4096-32/8-d128"]) == "16 x 1 on 4096, 32/8 x 128"
    assert str(CALLS["varlen"]["long-d64"]) == "65 x 128 to 8192, 32/32 x 64, causal"
    assert str(CALLS["paged"]["16x4096-p16"]) == "16 x 1 on 4096, 32/8 x 128, pages of 16"
    assert str(CALLS["latent"]["64x2on4096-h128"]) == "64 x 2 on 4096, 128/1 x 576/512, causal"
    assert sum(CALLS["latent"]["ragged-h128"].keys) == pytest.approx(128 * 2048, rel=1e-3)
    packed = serving.problems("varlen", Options())
    assert [x["row"] for x in packed if x["pass"] == "backward"] == [
        name for name in CALLS["varlen"] if not name.startswith("chunk")
    ]
    assert {x["pass"] for x in serving.problems("decode", Options())} == {"forward"}
    assert [x["row"] for x in serving.problems("paged", Options(only=("ragged-p6", "16x4096-p2")))] == [
        "16x4096-p256", "ragged-p64",
    ]  # fmt: skip
    assert all(serving.problems(name, Options(quick=True)) for name in CALLS)


def test_pairs_and_bytes_are_those_of_the_sequences() -> None:
    call = SMALL["chunk"]
    seen = sum(int(np.tri(n, m, m - n).sum()) for n, m in zip(call.queries, call.keys))
    assert call.pairs == seen
    assert SMALL["caches"].pairs == sum(KEYS) and SMALL["caches"].cache_bytes == 2 * 2 * sum(KEYS) * 2 * 16
    assert SMALL["latent"].cache_bytes == 2 * sum(KEYS) * 24  # V is in K
    assert SMALL["caches"].work == 4 * 4 * sum(KEYS) * 16 and SMALL["latent"].work == 2 * 4 * sum(KEYS) * (24 + 16)


@pytest.mark.parametrize("suite", CALLS)
def test_every_row_has_programs_on_hopper(suite: str) -> None:
    for problem in serving.problems(suite, Options()):
        jobs = [*serving.jobs_of(problem, Arch.of("sm_90a"), None)]
        assert any(job.problem.ragged and str(job.of) == problem["pass"] for job in jobs), problem["row"]
    assert not any(job.problem.ragged for job in serving.jobs_of(problem, Arch.of("sm_90a"), "flash1"))  # it objects


def test_a_row_of_8_bits_is_that_of_16_with_half_the_bytes() -> None:
    call = SMALL["pages"]._replace(eight="float8_e4m3fn")
    assert 2 * call.cache_bytes == SMALL["pages"].cache_bytes and str(call).endswith("pages of 16, float8_e4m3fn")
    case = serving.draw(call, "bfloat16", 1, "cpu")
    assert case.k.dtype is torch.float8_e4m3fn and case.q.dtype is torch.bfloat16
    ((form, wide),) = serving.in_other_form(case, call).values()
    assert not form.eight and wide.k.dtype is torch.bfloat16
    (exact,) = serving.exact(case, call, FORWARD)
    prepare = peers.ours(None)
    for x in (case, wide, case):
        torch.testing.assert_close(prepare(x, FORWARD).call()[0].double(), exact, atol=2e-2, rtol=2e-2)
        (appended,) = serving.appending(None)(x, FORWARD).call()
        torch.testing.assert_close(appended.double(), exact, atol=2e-2, rtol=2e-2)
    problem = {"pass": "forward", "row": "64x4096-p16-fp8", "dtype": "bfloat16"}
    kinds = {(job.problem.cache_dtype, job.plan.family) for job in serving.jobs_of(problem, Arch.of("sm_90a"), None)}
    assert {("float8_e4m3fn", "sm80"), (None, "sm90")} <= kinds


# --- inputs and results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_ours_is_what_is_expected_in_every_form(name: str) -> None:
    call, case = SMALL[name], cache()[name]
    given = {x: y.shape for x, y in case.scores.items() if torch.is_tensor(y)}
    assert serving.shapes(call) == {"q": case.q.shape, "k": case.k.shape, **given}
    want = serving.exact(case, call, FORWARD)
    forms = serving.in_other_form(case, call)
    assert [*forms] == {"dense": ["lengths"], "few": ["lengths"], "even": ["dense"], "even pages": ["dense"],
        "latent pages": ["dense"]}.get(name, [])  # fmt: skip
    for each in (case, *(other for _, other in forms.values())):
        (out,) = peers.ours()(each, FORWARD).call()
        torch.testing.assert_close(out.view(want[0].shape).double(), want[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["packed", "even"])
def test_gradients_that_are_expected_are_right(name: str) -> None:
    call, case = SMALL[name], cache()[name]
    want = serving.exact(case, call, BACKWARD)
    for each in (case, *(other for _, other in serving.in_other_form(case, call).values())):
        q, k, v, dout = (x.numpy() for x in each[:4])
        given: dict[str, Any] = {
            "causal": True,
            **{x: y if isinstance(y, int) else y.numpy() for x, y in each.scores.items()},
        }
        out, lse = attention(q, k, v, return_lse=True, **given)
        found = attention_backward(dout, q, k, v, out, lse, **given)
        for x, y in zip(found, want):
            np.testing.assert_allclose(x.reshape(y.shape), y.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dense", "few", "caches", "pages"])
def test_appending_attends_to_the_same(name: str) -> None:
    """The rows are written anew; without them the result would be another."""
    call, case = SMALL[name], cache()[name]
    (want,) = serving.exact(case, call, FORWARD)
    for _, other in serving.in_other_form(case, call).values():
        case = other
    candidate = serving.appending(None)(case, FORWARD)
    k, v = case.k.clone(), case.v.clone()
    case.k.zero_()
    assert not torch.allclose(candidate.call()[0].double(), want, atol=1e-4)
    case.k.copy_(k)
    torch.testing.assert_close(candidate.call()[0].double(), want, rtol=0, atol=1e-5)
    assert torch.equal(case.k, k) and torch.equal(case.v, v)


def test_a_result_of_other_lengths_is_not_what_is_expected() -> None:
    call, case = SMALL["caches"], cache()["caches"]
    (want,) = serving.exact(case, call, FORWARD)
    lengths = case.scores["seqlens_k"].clone()
    lengths[2] -= 1
    (out,) = peers.ours()(case._replace(scores={"seqlens_k": lengths}), FORWARD).call()
    assert (out[2] - want[2]).abs().max() > 1e-4


def test_flashinfer_is_told_the_pages_of_every_sequence() -> None:
    """What it reads by them is what the sequences are."""
    for name in ("pages", "caches", "dense"):
        call, case = SMALL[name], cache()[name]
        k, _, ends, which, last = serving_peers._in_pages(case)
        assert {x.dtype for x in (ends, which, last)} == {torch.int32}
        for n, keys in enumerate(call.keys):
            rows = k[which[ends[n] : ends[n + 1]].long()].flatten(0, 1)
            assert len(rows) - k.shape[1] + last[n] == keys
            if call.held == "pages":
                own = case.k[case.scores["page_table"][n].long()].flatten(0, 1)
            else:
                own = case.k[n]
            assert torch.equal(rows[:keys], own[:keys])


class FlashAttention3:
    """Stands for its operators: what they are given must be what they have, and ours computes it."""

    def fwd(self, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, ...]:
        scale = given.pop("softmax_scale", None)
        if "q_v" in given:
            q, k = torch.cat([given.pop("q_v"), q], -1), torch.cat([v, k], -1)
        names = {"seqused_k": "seqlens_k", "page_table": "page_table"}
        names |= {x: x for x in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
        if "seqused_k" in given:
            assert given.pop("scheduler_metadata") == (
                "schedule",
                k.shape[1] if given["page_table"] is not None else None,
            )
        self.splits = given.pop("num_splits")
        taken = {names[x]: y for x, y in given.items() if x in names}
        assert {*given} <= {*names, "is_causal"}
        return attention(q, k, v, causal=given["is_causal"], scale=scale, return_lse=True, **taken)

    def get_scheduler_metadata(self, *sizes: Any, page_size: int | None, is_causal: bool, num_splits: int) -> Any:
        assert len(sizes) == 9 and sizes[3:7] in ((4, 2, 16, 16), (4, 1, 8, 16))
        return "schedule", page_size


@pytest.mark.parametrize("name", SMALL)
def test_flash_attention_3_is_asked_for_the_same(name: str) -> None:
    call, case, operators = SMALL[name], cache()[name], FlashAttention3()
    (out,) = serving_peers.fa3(operators, case, FORWARD).call()
    torch.testing.assert_close(out.double(), serving.exact(case, call, FORWARD)[0], rtol=0, atol=1e-5)
    assert operators.splits == (name == "even")  # keys may be split where queries are few


class FlashInfer:
    """Stands for its latent attention: from the pages that it is told ours computes the same."""

    BatchMLAPagedAttentionWrapper: Any = None  # where it is looked for
    plans = 0

    def __init__(self, workspace: Any) -> None:
        self.mla = self

    def plan(self, firsts: Any, ends: Any, which: Any, lengths: Any, heads: int, n: int, rest: int, page: int,
        causal: bool, scale: float, *dtypes: Any) -> None:  # fmt: skip
        assert {x.dtype for x in (firsts, ends, which, lengths)} == {torch.int32} and len({*dtypes}) == 1
        assert (heads, n, rest) == (4, 16, 8)
        self.firsts, self.ends, self.which, self.lengths, self.page = firsts, ends, which.long(), lengths, page
        self.how: dict[str, Any] = {"causal": causal, "scale": scale}
        FlashInfer.plans += 1

    def run(self, q_n: Any, q_r: Any, k_n: Any, k_r: Any) -> Any:
        assert k_n.shape[1:] == (self.page, 16) and k_r.shape[1:] == (self.page, 8)
        q, k = torch.cat([q_n, q_r], -1), torch.cat([k_n, k_r], -1)
        found = []
        for n, keys in enumerate(self.lengths.tolist()):
            rows = k[self.which[self.ends[n] : self.ends[n + 1]]].flatten(0, 1)[None, :keys, None]
            found.append(attention(q[None, self.firsts[n] : self.firsts[n + 1]], rows, latent=16, **self.how)[0])
        return torch.cat(found)


FlashInfer.BatchMLAPagedAttentionWrapper = FlashInfer


def flash_mla(q: Any, pool: Any, n: int, lengths: Any, table: Any, scale: float, causal: bool, *schedule: Any) -> Any:
    """Stands for FlashMLA's operator, which makes its schedule in the first call."""
    assert schedule in ((None, None), ("schedule", "splits")) and table.dtype == torch.int32
    given: dict[str, Any] = {"seqlens_k": lengths, "page_table": table, "scale": scale, "causal": causal}
    out, lse = attention(q, pool, latent=n, return_lse=True, **given)
    return out * (float("nan") if schedule[0] is None else 1), lse, "schedule", "splits"


@pytest.mark.parametrize("name", [x for x in SMALL if x.startswith("latent")])
def test_latent_peers_are_asked_for_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, case = SMALL[name], cache()[name]
    (want,) = serving.exact(case, call, FORWARD)
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfer(None))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    package = types.SimpleNamespace(dense_decode_fwd=flash_mla)
    monkeypatch.setitem(sys.modules, "flash_mla.cuda", package)  # type: ignore[arg-type]
    monkeypatch.setattr(serving_peers, "_workspace", lambda device: None)
    before = FlashInfer.plans
    for prepare in (serving_peers.flashinfer(), serving_peers.flashmla()):
        candidate = prepare(case, FORWARD)
        for _ in range(2):
            (out,) = candidate.call()
            torch.testing.assert_close(out.view(want.shape).double(), want, rtol=0, atol=1e-5)
    assert FlashInfer.plans == before + 1
    with pytest.raises(NotImplementedError, match="forwards of latent attention alone"):
        serving_peers.flashmla()(cache()["caches"], FORWARD)


def test_the_operator_library_of_flash_mla_takes_a_place_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setenv("CUPYFLASH_PEER_FLASHMLA", "/somewhere/flashmla.so")
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)

    def operator(*given: Any) -> Any:
        assert len(given) == 10 and given[-1] is None
        return flash_mla(*given[:-1])

    monkeypatch.setattr(torch.ops, "_flashmla_C", types.SimpleNamespace(dense_decode_fwd=operator), raising=False)
    call, case = SMALL["latent"], cache()["latent"]
    (out,) = serving_peers.flashmla()(case, FORWARD).call()
    torch.testing.assert_close(out.double(), serving.exact(case, call, FORWARD)[0], rtol=0, atol=1e-5)
    assert loaded == ["/somewhere/flashmla.so"]


def test_notes_of_latent_attention_tell_both_limits(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        serving, "importable", lambda names: {"flashmla": functools.partial(serving_peers._flashmla, flash_mla)}
    )
    problem = {"pass": "forward", "row": "latent", "call": "", "dtype": "float32"}
    monkeypatch.setattr(serving, "CALLS", {"latent": {"latent": SMALL["latent"]._replace(heads=400)}})
    values, notes = serving.measure("latent", problem, Options())
    calls = 3e-3 / (1e-6 * values["ours"])
    tflops = 2 * 400 * sum(KEYS) * 40 * calls / 3e-3 / 1e12
    assert {*values} == {"ours", "flashmla", "read"} and {*notes} == {"ours", "flashmla"}
    assert notes["ours"] == f"{tflops:.0f} TFLOP/s, 200% of reading K" and notes["flashmla"].endswith(
        " 100% of reading K"
    )
    row = report.make_row(problem, "us", values, notes, serving.PEERS["latent"])
    assert f"({notes['ours']})" in plots.table([row, row], with_notes=True)


# --- a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows on the CPU; every graph is said to take 6 ms, ours half of it."""
    drawn = serving.draw
    names = {
        "decode": ("dense", "few", "caches"),
        "varlen": ("packed", "even", "chunk"),
        "paged": ("pages", "even pages"),
        "latent": ("latent", "latent, few", "latent pages"),
    }
    monkeypatch.setattr(serving, "CALLS", {suite: {x: SMALL[x] for x in names[suite]} for suite in names})
    monkeypatch.setattr(serving, "KINDS", {x: (x,) for x in SMALL})
    monkeypatch.setattr(serving, "draw", lambda call, dtype, seed: drawn(call, dtype, seed, "cpu"))
    monkeypatch.setattr(serving, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(serving, "_replayed", lambda prepare, cases, case, of: prepare(cases[-1], of))
    monkeypatch.setattr(serving, "COLD", 1 << 16)
    monkeypatch.setattr(serving, "LARGE", 0)

    def turns(candidates: dict[str, Candidate], *others: Any) -> Any:
        return {name: 3e-3 if name == "ours" else 6e-3 for name in candidates}, {}

    monkeypatch.setattr(serving, "take_turns", turns)


@pytest.mark.parametrize("suite", CALLS)
def test_a_run_writes_rows_and_a_picture(
    suite: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "require_gpu", lambda name: None)
    monkeypatch.setattr(machine, "ceilings", lambda *_: {"copy_gbps": 1.0})
    monkeypatch.setattr(machine, "name", lambda gpu: "NVIDIA H100")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    peers.load.cache_clear()
    monkeypatch.setattr(peers, "fa3_operators", FlashAttention3)
    forward = [x for x in serving.problems(suite, Options(dtype="float32")) if x["pass"] == "forward"]
    # Of tensors on a CPU gradients are autograd's.
    monkeypatch.setitem(SUITES, suite, SUITES[suite]._replace(problems=lambda options: forward))
    assert bench.run([suite], out=tmp_path / "h100") == 0, capsys.readouterr().out
    peers.load.cache_clear()
    data = json.loads((tmp_path / "h100" / f"{suite}.json").read_text())
    assert [row["problem"]["row"] for row in data["rows"]] == [*serving.CALLS[suite]]
    for row in data["rows"]:
        assert row["ratio_to_best"] == pytest.approx(2, 0.01) and row["peers"]["fa3"], (
            row
        )  # ours in another form is no peer
    told = capsys.readouterr().out
    assert "the best peer 2.00x, worst 2.00x" in told
    assert ("ours 0 TFLOP/s, 200% of reading K, fa3" in told) == (suite == "latent")
    if suite == "decode":
        assert "lengths on the device, against without 0.50x" in told and "reading K and V 2.00x" in told
    else:
        assert "our dense call 2.00x" in told
    written = bench.plot(tmp_path, tmp_path)
    assert f"### {plots.TITLES[suite]}" in (tmp_path / "benchmarks.md").read_text()
    assert any(path.endswith(f"h100_{suite}.png") for path in written)


def test_without_peers_ours_is_measured_all_the_same(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "importable", lambda names: {})
    for suite, name in (
        ("decode", "dense"),
        ("varlen", "even"),
        ("paged", "even pages"),
    ):  # of latent attention there are notes
        problem = {"pass": "forward", "row": name, "call": str(SMALL[name]), "dtype": "float32"}
        values, notes = serving.measure(suite, problem, Options())
        assert notes == {} and values["ours"] and {*values} <= {"ours", *serving.OWN}
        row = report.make_row(problem, SUITES[suite].unit, values, notes, serving.PEERS[suite])
        assert row["ratio_to_best"] is None
        assert plots.figure({"suite": suite, "rows": [row], "machine": "H100", "family": None, "ceilings": {}})


def test_who_is_wrong_is_not_timed(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: peers.Case, of: Any) -> Candidate:
        return Candidate(lambda: (torch.zeros_like(case.q),))

    monkeypatch.setattr(serving, "importable", lambda names: {"flashinfer": wrong})
    problem = {"pass": "forward", "row": "caches", "call": "", "dtype": "float32"}
    values, notes = serving.measure("decode", problem, Options())
    assert "flashinfer" not in values and "wrong: relative error 1 against float64" in notes["flashinfer"]


def test_flashinfer_is_looked_for_in_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "flashinfer.py").write_text("here = True\n")
    monkeypatch.setenv("CUPYFLASH_PEER_FLASHINFER", str(tmp_path))
    prepare = serving_peers.flashinfer()
    assert isinstance(sys.modules.pop("flashinfer"), types.ModuleType)
    with pytest.raises(NotImplementedError, match="one query"):
        prepare(cache()["few"], FORWARD)
    with pytest.raises(NotImplementedError, match="forward alone"):
        prepare(cache()["packed"], BACKWARD)
