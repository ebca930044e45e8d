"""docs/papers.md from made-up results, the papers' numbers and formulas, and the training that Table 1 measures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import gpt, papers, report, runner
from cupyflash.bench.suites import GROUPS, SUITES, Options
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.tools import timing

SPEEDS = {"ours": 600.0, "fa3": 550.0, "cudnn": 500.0, "fa2": 350.0, "sm80": 400.0, "flash1": 4.0, "math": 40.0}


def results(suite: str, speeds: dict[str, float] = SPEEDS) -> dict[str, Any]:
    """Results as a run would write them: everybody's speed is always the same; "math" has no room above 4k."""
    rows = []
    for problem in SUITES[suite].problems(Options()):
        values = {name: x for name, x in speeds.items() if name != "math" or problem["seq"] <= 4096}
        notes = {} if "math" in values else {"math": "OutOfMemoryError: CUDA out of memory"}
        if suite == "training":
            notes = {name: "12345 tokens/s" for name in values} | notes
        rows.append(report.make_row(problem, SUITES[suite].unit, values, notes, SUITES[suite].peers))
    return {
        "suite": suite, "gpu": "NVIDIA H200", "driver": "1", "date": "2026-01-01T00:00:00+00:00", "sources": "0",
        "family": None, "machine": "NVIDIA H200", "versions": {"torch": "2"}, "absent": {}, "file": f"h200/{suite}",
        "ceilings": {"gemm_bf16_tflops": 800.0, "copy_gbps": 4000.0}, "rows": rows,
    }  # fmt: skip


# --- what is measured ---------------------------------------------------------------------------------------------


def test_paper_is_three_suites_that_can_be_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert GROUPS["paper"] == ("figures", "memory", "training") and "cpu" not in GROUPS["all"]
    ran: list[str] = []
    monkeypatch.setattr(runner, "_check", lambda *given: None)
    monkeypatch.setattr(runner.machine, "name", lambda gpu: "NVIDIA H200")
    monkeypatch.setattr(runner, "_run_suite", lambda console, name, *rest: ran.append(name) or [])
    assert bench.run(["paper", "memory", "cpu"], out=tmp_path) == 0
    assert ran == ["figures", "memory", "training", "cpu"]  # none of them twice


def test_the_figures_are_the_papers() -> None:
    problems = SUITES["figures"].problems(Options())
    assert len(problems) == 2 * 2 * 2 * 6
    assert {p["dim"] for p in problems} == {64, 128} and {p["seq"] for p in problems} == set(papers.FIGURE_4C)
    assert all(p["batch"] * p["seq"] == 16384 and p["heads"] * p["dim"] == 2048 for p in problems)
    assert len(SUITES["figures"].problems(Options(quick=True))) == 16


def test_the_trained_models_are_the_papers() -> None:
    problems = SUITES["training"].problems(Options())
    assert {(p["model"], p["seq"]) for p in problems} == set(papers.TABLE_1)
    assert all(p["batch"] * p["seq"] == 8192 for p in problems)
    assert len(problems) == 6 and len(SUITES["training"].problems(Options(quick=True))) == 1
    for name, millions in (("125M", 125), ("1.3B", 1313), ("2.7B", 2649)):
        with torch.device("meta"):
            model = gpt.Gpt(gpt.SIZES[name], 2048, gpt.WAYS["ours"])
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_model_flops_are_the_formula_of_the_paper() -> None:
    """6 · seqlen · parameters + 12 · layers · hidden · seqlen²: with 1.3 billion, the second term is 12 % at 2k."""
    assert gpt.model_flops(1_300_000_000, 24, 2048, 2048) == 6 * 2048 * 1_300_000_000 + 12 * 24 * 2048 * 2048**2
    # A model of matrices alone: 2 FLOPs a weight and token, attention 4 S W a token, and twice both for the gradients.
    layers, width, seq = 3, 64, 32
    weights = layers * 12 * width**2
    assert gpt.model_flops(weights, layers, width, seq) == 3 * seq * (2 * weights + layers * 4 * seq * width)


def test_training_reports_each_way_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = SUITES["training"].problems(Options(quick=True))

    def train(size: gpt.Size, context: int, batch: int, way: str, steps: int, checkpoint: bool) -> gpt.Trained:
        assert (size, context, batch, steps, checkpoint) == (gpt.SIZES["1.3B"], 2048, 4, 12, False)
        if way == "math":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return gpt.Trained([10.8], {"ours": 0.2, "fa2": 0.25}[way], 1_313_000_000)

    monkeypatch.setattr(gpt, "train", train)
    values, notes = SUITES["training"].measure(problem, Options(quick=True, rounds=5))
    assert set(values) == {"ours", "fa2"} and values["ours"] == pytest.approx(1.25 * values["fa2"])
    assert values["ours"] == pytest.approx(4 * gpt.model_flops(1_313_000_000, 24, 2048, 2048) / 0.2 / 1e12)
    assert notes["ours"] == "40960 tokens/s" and notes["math"].startswith("OutOfMemoryError: CUDA out of memory")


# --- training, on the CPU -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_every_way_trains_the_same(checkpoint: bool) -> None:
    runs = {
        way: gpt.train(gpt.SIZES["tiny"], 40, 4, way, 8, checkpoint=checkpoint, warm_up=2, device="cpu")
        for way in ("ours", "fa2", "math")
    }
    assert runs["ours"].losses[0] == pytest.approx(4.564, abs=0.1)  # ln 96
    for run in runs.values():
        assert run.losses == pytest.approx(runs["math"].losses, abs=2e-4)
        assert run.seconds > 0 and run.parameters == runs["math"].parameters


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [False, True])
def test_every_way_trains_the_same_on_a_gpu(checkpoint: bool) -> None:
    """In bfloat16, with head dimension 80 as in the model of 2.7B."""
    size, ways = gpt.Size(2, 160, 2, 512), [way for way in gpt.WAYS if way != "fa3"]
    losses = {way: gpt.train(size, 300, 4, way, 10, checkpoint=checkpoint).losses for way in ways}
    assert losses["ours"][-1] < losses["ours"][0]
    for found in losses.values():
        assert found == pytest.approx(losses["math"], abs=0.02)


@pytest.mark.slow
def test_it_learns() -> None:
    losses = gpt.train(gpt.SIZES["tiny"], 64, 16, "fa2", 60, device="cpu").losses
    assert losses[-1] < losses[0] - 0.5


def test_steps_must_outnumber_those_that_warm_up() -> None:
    with pytest.raises(ValueError, match="warm_up is 3; it must be 0 or more and less than steps, 3"):
        gpt.train(gpt.SIZES["tiny"], 16, 1, "ours", 3, device="cpu")


def test_train_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    told = ["--model", "tiny", "--context", "32", "--batch", "2", "--steps", "5", "--device", "cpu", "--checkpoint"]
    assert len(example.main(told).losses) == 5
    printed = capsys.readouterr().out
    assert "tiny, 32 tokens, ours" in printed and "tokens/s" in printed and "model TFLOP/s" in printed
    assert "0.1 million parameters" in printed
    assert len(example.main([*told, "--steps", "1"]).losses) == 1
    capsys.readouterr()
    example.main(["--device", "cpu", "--batch", "1", "--steps", "1"])  # by default what a CPU computes in seconds
    assert "tiny, 64 tokens, ours" in capsys.readouterr().out


# --- the page -----------------------------------------------------------------------------------------------------


def test_both_passes_are_all_the_work_over_all_the_time() -> None:
    data = results("figures")
    for row in data["rows"]:
        if row["problem"]["pass"] == "backward":
            row["ours"] = 300.0
    rows = papers.rows_of(data, "both")
    assert len(rows) == 24
    for row in rows:
        sizes = {key: row["problem"][key] for key in ("batch", "seq", "heads", "dim", "causal")}
        work = [timing.flops(**sizes, of=of) for of in (FORWARD, BACKWARD)]
        assert row["ours"] == pytest.approx(sum(work) / (work[0] / 600 + work[1] / 300), rel=1e-3)
        assert row["peers"]["sm80"] == pytest.approx(400.0)
        assert (row["peers"].get("math") is None) == (row["problem"]["seq"] > 4096)


def test_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suite in GROUPS["paper"]:
        report.save(tmp_path / "results" / "h200" / f"{suite}.json", results(suite))
    written = bench.plot(tmp_path / "results", tmp_path / "docs")
    page = (tmp_path / "docs" / "papers.md").read_text()
    assert str(tmp_path / "docs" / "papers.md") in written
    for name in papers.PASSES:
        assert (tmp_path / "docs" / "plots" / f"h200_figures_{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(plots/h200_figures_{name}.png)" in page
    assert "figures" not in (tmp_path / "docs" / "benchmarks.md").read_text()
    # claims: 400 / 4, 400 / 40 and 350 / 40, the best of each and its share of 800
    assert "| times as fast as FlashAttention-1 | 1.7 to 3.0 | 100.0 to 100.0 | 87.5 to 87.5 |" in page
    assert "| times as fast as standard attention | 3 to 10 | 10.0 to 10.0 | 8.8 to 8.8 |" in page
    assert "| 400 (50%) | 350 (44%) |" in page and "reaches 600 (75%) TFLOP/s at most" in page
    # the panel with the paper's bars, and a row of the large tables
    assert (
        "| 2048 | 17 | 40 | 77 | 4 | 140 | 400 | 600 |" in page
        and "| 16384 | – | – | 97 | 4 | 171 | 400 | 600 |" in page
    )
    assert "| 64 | no | 512 | 40 (5%) | 4 (0.5%) | 400 (50%) | 350 (44%) | 500 (62%) | 550 (69%) | 600 (75%) |" in page
    # training: the paper's three columns around ours
    assert (
        "| 1.3B | 2048 |  | 142 | 40 (12345 tokens/s) | 189 | 196 | 350 (12345 tokens/s) | 600 (12345 tokens/s) |"
        in page
    )
    assert "| 2.7B | 8192 | recomputed | 80 | out of memory | 175 | 225 |" in page


def test_memory_is_compared_in_all() -> None:
    """One megabyte aside beside 4 arrays of 2k x 16 x 128 in 16 bits, 33.6 MB; standard's is 302.4 more."""
    data = results("memory", {"ours": 1.0, "math": 313.0})
    table = papers.memory(data["rows"])
    assert "| forward | 2048 | 313 | 1 | 347 | 34.6 | 10.0 |" in table
    assert "| forward | 32768 | – | 1 | – | 538 | – |" in table


def test_a_page_of_one_suite(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.save(tmp_path / "results" / "h200" / "training.json", results("training"))
    assert bench.plot(tmp_path / "results", tmp_path / "docs") == [str(tmp_path / "docs" / "papers.md")]
    assert "Figure 4c" not in (tmp_path / "docs" / "papers.md").read_text()
