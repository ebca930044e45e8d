"""The suite `scores` without a GPU: rows, what they count, FlexAttention's calls, the check of all results, table and
run."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import machine, peers, plots, report, runner, scores, suite, suites
from cupyflash.bench.suites import SUITES
from cupyflash.passes import BACKWARD, FORWARD, PASSES, Pass
from cupyflash.tools import timing
from cupyflash.tools.timing import Candidate


def small(name: str, direction: str, dtype: str = "float32") -> suite.Problem:
    """A row's problem, for a CPU."""
    (problem, *_) = (p for p in scores.problems(suite.Options(only=(name,))) if p["pass"] == direction)
    return {**problem, "dtype": dtype, "dim": 16, "seq": 128, "batch": 3, "heads": 2}


def rows() -> list[Any]:
    """All pairs of a row and a pass."""
    found = dict.fromkeys((p["scores"], p["pass"]) for p in scores.problems(suite.Options()))
    found = {pair: None for pair in found if not pair[0].startswith("dropout")}  # of these nobody knows what is right
    return [pytest.param(*pair, id="-".join(pair)) for pair in found]


# --- problems -----------------------------------------------------------------------------------------------------


def test_rows_are_of_16k_tokens_and_one_width():
    problems = scores.problems(suite.Options())
    assert len(problems) == 2 * (2 * 14 + 2) + 2 * 3 + 2 * 2 * 8
    assert {p["scores"] for p in problems} == set(scores.ROWS) == set(SUITES["scores"].names)
    for p in problems:
        assert p["batch"] * p["seq"] == {"evoformer": 65536}.get(
            p["scores"], 32768 if p["scores"].endswith("32k") else 16384
        )
        assert p["heads"] * p["dim"] == (128 if p["scores"] == "evoformer" else 2048)
    assert {p["dtype"] for p in problems if p["scores"] == "evoformer"} == {"float32", "bfloat16"}
    quick = scores.problems(suite.Options(quick=True, dtype="float16"))
    assert len(quick) == 2 * 15 + 3 + 2 * 8 and {p["dtype"] for p in quick} == {"float16"}


def test_only_takes_names_and_how_they_begin():
    def names(*only: str) -> set[str]:
        return {p["scores"] for p in scores.problems(suite.Options(only=only))}

    assert names("alibi") == {"alibi"}
    assert names("bias", "mask-b1ss") == {"bias-1hss", "bias-b1ss", "bias-bhss", "bias-111s", "mask-b1ss"}


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("alibi", 1),
        ("bias-1hss", 1),
        ("mask-b1ss", 0.9),
        ("padding-b11s", 0.75),
        ("evoformer", 0.75),
        ("streaming-8k", (128 * 129 / 2 - 95 * 96 / 2 + 4 * 95 - 6) / 128**2),
        ("sparse50-8k", 0.594),
    ],
)
def test_what_the_masks_leave(name, share):
    assert scores.left(scores.draw(small(name, "forward"), "cpu")) == pytest.approx(share, abs=0.01)


# --- results are checked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "direction"), rows())
def test_every_row_tells_right_from_wrong(name, direction, monkeypatch):
    """Our attention and PyTorch's agree with the float32 reference; whoever leaves out what the row is about is
    found."""
    monkeypatch.setattr(suite, "TOLERANCE", 1e-4)
    of = PASSES[direction]
    case = scores.draw(small(name, direction), "cpu")
    learned = {"relative": ("table",), "t5": ("table",), "evoformer": ("bias",)}
    assert case.wrt == (("bias",) if name.startswith("dbias") else learned.get(name, ()))
    prepares: dict[str, peers.Prepare] = {"ours": peers.ours()}
    if not {"softcap", "score", "alibi_slopes", "sinks", "block_mask"} & case.scores.keys():
        prepares["math"] = peers.load("math")
    right, notes = suite.compare(prepares, case, of, scores.exact(case, of))
    assert [*right] == [*prepares] and notes == {}

    def plain(case: peers.Case, of: Pass) -> Candidate:
        return peers.load("math")(case._replace(scores={}, wrt=()), of)

    monkeypatch.setattr(suite, "TOLERANCE", 0.05)  # wider than it is
    found, notes = suite.compare({"plain": plain}, case, of, scores.exact(case, of))
    assert name == "causal" or (found == {} and ("wrong" in notes["plain"] or "longer" in notes["plain"]))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["dropout", "dropout-causal"])
def test_dropout_is_as_far_from_none_as_it_must_be(name, direction, monkeypatch):
    """Everyone's own random numbers; whoever drops nothing, or twice as much, is found."""
    monkeypatch.setattr(suite, "TOLERANCE", 0.08)  # few heads: a row's first keys decide
    problem, of = {**small(name, direction), "batch": 16, "heads": 8}, PASSES[direction]
    case = scores.draw(problem, "cpu")
    right, noise = scores.expected(case, of)
    assert noise[0] == pytest.approx((0.1 / 0.9) ** 0.5, rel=0.1) or of is BACKWARD
    prepares = {"ours": peers.ours(), "math": peers.load("math")}
    for share, much in ((0.0, "none"), (0.2, "twice")):
        other = case._replace(scores={"dropout": share, "seed": 2})
        prepares[much] = lambda _, of, other=other: peers.ours()(other, of)
    found, notes = suite.compare(prepares, case, of, right, noise)
    assert {*found} == {"ours", "math"} and all("wrong" in notes[much] for much in ("none", "twice"))


def test_buckets_of_distances_are_t5s():
    """Those of the tables in the paper's code: exact up to 8, then by the logarithm, all alike from 128 on."""
    at = torch.tensor([0, -1, -7, -8, -12, -50, -127, -128, -2000, 1, 7, 8, 2000])
    assert scores.t5_bucket(at).tolist() == [0, 1, 7, 8, 9, 13, 15, 15, 15, 17, 23, 24, 31]


def test_the_reference_takes_some_batch_entries_at_a_time(monkeypatch):
    case = scores.draw(small("evoformer", "backward"), "cpu")
    whole = scores.exact(case, BACKWARD)
    split = torch.Tensor.split
    sizes = []
    monkeypatch.setattr(torch.Tensor, "split", lambda x, n: sizes.append(n) or split(x, 2))
    parts = scores.exact(case, BACKWARD)
    assert sizes == [2**28 // (2 * 128 * 128)]
    assert len(whole) == 4 and all(torch.allclose(x, y, atol=1e-5) for x, y in zip(whole, parts))


def test_gradients_of_arrays_are_asked_for_by_name(monkeypatch):
    case = scores.draw(small("dbias-1hss", "backward"), "cpu")
    expected = scores.exact(case, BACKWARD)

    class Found(NamedTuple):
        dq: Any
        dk: Any
        dv: Any
        dbias: Any

    def attention_backward(dout, q, k, v, out, lse, *, bias, causal, family, wrt):
        assert wrt == ("bias",) and bias is case.scores["bias"] and dout is case.dout and not causal
        return Found(*expected)

    monkeypatch.setattr(peers, "attention_backward", attention_backward)
    assert all(x is y for x, y in zip(peers.ours()(case, BACKWARD).call(), expected))


# --- FlexAttention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name, row in scores.ROWS.items() if "flex" in row.peers and f"d{name}" not in scores.ROWS]
)
def test_flex_attention_computes_every_row(name, monkeypatch):
    """Traced and differentiated as on a GPU, but for the kernels; and again with the graph that is kept."""
    import torch.nn.attention.flex_attention as module

    if not torch._dynamo.is_dynamo_supported():
        pytest.skip("torch.compile does not support this Python")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, **{"backend": "aot_eager", **how}))
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)  # refuses gradients on a CPU
    monkeypatch.setattr(suite, "TOLERANCE", 1e-4)
    for of in (FORWARD, BACKWARD):
        case = scores.draw(small(name, "backward"), "cpu")
        expected = scores.exact(case, of)
        found, notes = suite.compare({"flex": peers.flex()}, case, of, expected)
        assert notes == {}
        again = found["flex"].call()
        assert all(suite.relative_error(x, y) < 1e-4 for x, y in zip(again, expected))


# --- measuring ----------------------------------------------------------------------------------------------------


def test_a_row_is_measured_in_turn_and_the_slow_come_last(monkeypatch):
    problem = small("padding-b11s", "forward")
    taken: list[str] = []
    speeds = {"ours": 1.0, "flex": 2.0, "efficient": 8.0, "ours_causal": 0.25}

    def sampler(candidates, min_ms, patience):
        def sample(name):
            taken.append(name)
            assert candidates[name].call()[0].shape == (3, 128, 2, 16)
            return speeds[name]

        return sample

    def refuses(case, of):
        raise RuntimeError("No available kernel")

    right = peers.load("math")
    everyone = {"cudnn": refuses, "flex": right, "efficient": right}
    monkeypatch.setattr(scores, "importable", lambda names: {name: everyone[name] for name in names})
    monkeypatch.setattr(scores, "draw", functools.partial(scores.draw, device="cpu"))
    monkeypatch.setattr(scores, "gpu_sampler", sampler)
    values, notes = scores.measure(problem, suite.Options(rounds=3, slow=True))
    assert notes == {"cudnn": "RuntimeError: No available kernel"}
    assert taken[9:] == 3 * ["efficient"]
    rounds = [taken[i : i + 3] for i in (0, 3, 6)]
    assert all(sorted(each) == ["flex", "ours", "ours_causal"] for each in rounds) and rounds[0] != rounds[1]
    whole = timing.flops(batch=3, seq=128, heads=2, dim=16, causal=False, of=FORWARD) / 1e12
    assert values["ours"] == pytest.approx(0.75 * whole, rel=0.01) and values["flex"] == values["ours"] / 2
    assert values["ours_causal"] == pytest.approx(whole / 2 / 0.25)
    row = report.make_row(problem, "TFLOP/s", values, notes, scores.PEERS)
    assert row["ratio_to_best"] == 2 and row["ratio_to_causal"] == pytest.approx(0.375, rel=0.01)
    assert row["peers"].keys() == {"cudnn", "flex", "efficient"} and row["peers"]["cudnn"] is None

    taken.clear()
    values, _ = scores.measure(problem, suite.Options(rounds=1))
    assert "efficient" not in taken and "efficient" not in values


def test_the_causal_row_is_not_compared_with_itself(monkeypatch):
    monkeypatch.setattr(scores, "importable", lambda names: {"fa2": peers.load("math")})
    monkeypatch.setattr(scores, "draw", functools.partial(scores.draw, device="cpu"))
    monkeypatch.setattr(scores, "gpu_sampler", lambda candidates, min_ms, patience: lambda name: 1.0)
    values, _ = scores.measure(small("causal", "backward"), suite.Options(rounds=1))
    assert values.keys() == {"fa2", "ours"}
    row = report.make_row(small("causal", "backward"), "TFLOP/s", values, {}, scores.PEERS)
    assert "ratio_to_causal" not in row


def test_fp32_measures_a_bias_with_its_gradient_beside_pytorch(monkeypatch):
    (problem,) = (p for p in SUITES["fp32"].problems(suite.Options()) if p["bias"] and p["pass"] == "backward")
    assert (problem["dtype"], problem["batch"], problem["seq"], problem["heads"], problem["dim"]) == (
        "float32", 256, 256, 4, 32,
    )  # fmt: skip
    problem |= {"batch": 2, "seq": 40, "dim": 16}
    monkeypatch.setattr(scores, "draw", functools.partial(scores.draw, device="cpu"))
    monkeypatch.setattr(suites, "importable", lambda names: {name: peers.load("math") for name in names})

    def take_turns(candidates, options):
        assert {*candidates} == {"math", "efficient", "ours"}
        assert all(len(x.call()) == 4 for x in candidates.values())  # dq, dk, dv, and the bias' too
        return dict.fromkeys(candidates, 1e-12), {}

    monkeypatch.setattr(suites, "take_turns", take_turns)
    values, notes = SUITES["fp32"].measure(problem, suite.Options())
    left = float(scores.draw({**problem, "scores": "evoformer"}).scores["key_mask"].float().mean())
    assert notes == {} and values["ours"] == pytest.approx(10 * 2 * 4 * 40 * 40 * 16 * left, rel=1e-6)


# --- table, summary, run ------------------------------------------------------------------------------------------


def synthetic() -> list[report.Row]:
    """Ours twice as fast as FlexAttention, and at 0.9 of its own causal speed."""
    values = {"ours": 300.0, "flex": 150.0, "ours_causal": 300 / 0.9}
    problems = scores.problems(suite.Options(only=("alibi", "sinks")))
    return [report.make_row(problem, "TFLOP/s", values, {}, scores.PEERS) for problem in problems]


def test_the_table_has_both_ratios():
    lines = plots.table(synthetic()).splitlines()
    assert lines[0] == ("| pass | scores | dim | cupyflash | FlexAttention (torch.compile) | vs best | vs causal |")
    assert lines[2] == "| forward | alibi | 64 | **300** | 150 | 2.00x | 0.90x |"
    assert len({line.count("|") for line in lines}) == 1


def test_the_summary_is_by_name():
    lines = report.summary(synthetic())
    assert lines[-2:] == [
        "alibi: best peer 2.00x, our own causal 0.90x",
        "sinks: best peer 2.00x, our own causal 0.90x",
    ]
    alone = [row for row in synthetic() if row["problem"]["scores"] == "alibi"]
    assert report.summary(alone)[-1] == lines[-2]


@pytest.mark.parametrize(
    ("suites", "only", "message"),
    [
        (
            ["scores"],
            ["alibbi"],
            "only is 'alibbi'; for bench suite 'scores' it must be, or begin, one of causal, alibi,",
        ),
        (["scores", "cpu"], ["alibi"], "only is 'alibi'; for bench suite 'cpu' it must be left out"),
    ],
)
def test_rows_that_are_not_there_are_refused(suites, only, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "require_gpu", lambda name: None)
    assert bench.run(suites, out=tmp_path, only=only) == 2
    assert message in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_rows_and_tells_why_peers_are_missing(monkeypatch, tmp_path, capsys):
    def measure(problem, options):
        assert options.only == ("alibi",) and options.slow
        return {"ours": 90.0, "ours_causal": 100.0}, {"flex": "RuntimeError: no Triton"}

    monkeypatch.setattr(runner, "SUITES", {"scores": SUITES["scores"]._replace(measure=measure)})
    for name, value in {"require_gpu": None, "name": "NVIDIA H200", "ceilings": {}, "driver": "1"}.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    monkeypatch.chdir(tmp_path)
    assert bench.run(["scores"], only=["alibi"], slow=True) == 0
    (row, *more) = json.loads((tmp_path / "bench" / "quick" / "h200" / "scores.json").read_text())["rows"]
    assert row["ratio_to_causal"] == 0.9 and row["notes"] == {"flex": "RuntimeError: no Triton"} and len(more) == 3
    printed = capsys.readouterr().out
    assert "vs causal" in printed and printed.count("flex: RuntimeError: no Triton") == 1 and "0.90x" in printed


def test_a_run_goes_on_where_it_was_stopped(monkeypatch, tmp_path, capsys):
    """What is there is kept, in the order of the suite; rows without a result, and those of other kernels, are
    measured."""
    taken, stop = [], [3]

    def measure(problem, options):
        if len(taken) == stop[0]:
            raise KeyboardInterrupt
        taken.append(problem)
        return ({} if len(taken) == 2 else {"ours": float(len(taken))}), {}

    monkeypatch.setattr(runner, "SUITES", {"scores": SUITES["scores"]._replace(measure=measure)})
    for name, value in {"require_gpu": None, "name": "NVIDIA H200", "ceilings": {}, "driver": "1"}.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    every = scores.problems(suite.Options(only=("alibi", "sinks", "t5")))

    def rows() -> list[report.Row]:
        return json.loads((tmp_path / "scores.json").read_text())["rows"]

    with pytest.raises(KeyboardInterrupt):
        bench.run(["scores"], out=tmp_path, only=["sinks", "t5"])
    assert [row["ours"] for row in rows()] == [1.0, None, 3.0]
    stop[0] = 99
    assert bench.run(["scores"], out=tmp_path, only=["alibi", "sinks", "t5"], resume=True) == 0
    assert [row["problem"] for row in rows()] == every and all(row["ours"] for row in rows())
    assert len(taken) == 3 + len(every) - 2 and "2 rows are in" in capsys.readouterr().out
    assert bench.run(["scores"], out=tmp_path, only=["alibi"], resume=True) == 0
    assert len(taken) == 3 + len(every) - 2 and len(rows()) == len(every)
    other = json.loads((tmp_path / "scores.json").read_text()) | {"sources": "others"}
    report.save(tmp_path / "scores.json", other)
    assert bench.run(["scores"], out=tmp_path, only=["alibi"], resume=True) == 0
    assert [row["problem"]["scores"] for row in rows()] == ["alibi"] * 4
