"""Files of results, their tables and pictures, and the ladder of the tutorial."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("rich")

from cupyflash import bench
from cupyflash.bench import plots, report, suites
from cupyflash.bench.suites import SUITES, Options


def test_make_row():
    problem = {"seq": 512, "dim": 64, "causal": True}
    row = report.make_row(
        problem,
        "TFLOP/s",
        {"ours": 300.04, "fa2": 200.0, "fa3": 400.0},
        {"cudnn": "no"},
        ["fa2", "cudnn", "fa3", "fa4"],
    )
    assert row == {
        "problem": problem,
        "unit": "TFLOP/s",
        "ours": 300.0,
        "peers": {"fa2": 200.0, "cudnn": None, "fa3": 400.0},
        "ratio_to_best": 0.75,
        "notes": {"cudnn": "no"},
    }
    failed = report.make_row(problem, "us", {"torch": 10.0}, {"ours": "wrong"}, ["torch"])
    assert failed["ours"] is None and failed["ratio_to_best"] is None
    assert "notes" not in report.make_row(problem, "us", {"ours": 5.0, "torch": 10.0}, {}, ["torch"])


def test_save_replaces_the_whole_file(tmp_path):
    path = tmp_path / "h200" / "forward.json"
    report.save(path, {"rows": [1]})
    report.save(path, {"rows": [1, 2]})
    assert json.loads(path.read_text()) == {"rows": [1, 2]}
    assert [p.name for p in path.parent.iterdir()] == ["forward.json"]


def synthetic(suite, family=None):
    """Results as a run would write them; ours is always half as fast as fa3 and twice as fast as the others."""
    rows = []
    definition = SUITES[suite]
    for problem in definition.problems(Options()):
        better = 100.0 + problem.get("seq", 1024) / 100
        worse = better / 4
        notes = {"math": "left out"} if problem.get("seq", 0) > 4096 else {}
        values = {
            "ours": better / 2,
            **{p: better if p == "fa3" else worse for p in definition.peers if p not in notes},
        }
        rows.append(report.make_row(problem, definition.unit, values, notes, definition.peers))
    return {
        "suite": suite, "gpu": "NVIDIA H200", "driver": "1", "date": "2026-01-01T00:00:00+00:00", "sources": "0",
        "family": family, "machine": "NVIDIA H200", "versions": {"torch": "2"}, "absent": {},
        "ceilings": {"gemm_bf16_tflops": 700.0, "copy_gbps": 4000.0}, "rows": rows,
    }  # fmt: skip


def test_summary():
    rows = synthetic("forward")["rows"]
    rows[7]["ratio_to_best"] = 0.25
    lines = "\n".join(report.summary(rows))
    assert "FlashAttention-2 (PyTorch) 2.00x" in lines and "FlashAttention-3 0.50x" in lines
    assert "worst row 0.25x (dim 64, causal yes, seq 1024)" in lines
    assert "dim 256: best peer 0.50x, FlashAttention-2 (PyTorch) 2.00x" in lines
    assert "sequences up to 1k: best peer 0.47x" in lines
    rows[0].update(ours=None, ratio_to_best=None, notes={"ours": "wrong: relative error 1"})
    assert "NO RESULT of ours in 1 rows; the first: wrong" in report.summary(rows)[-1]


def test_the_summary_of_dtypes_is_by_pass():
    rows = synthetic("fp32")["rows"]
    rows[3]["ratio_to_best"] = 0.25
    lines = report.summary(rows)[-6:]
    assert [line.split(":")[0] for line in lines] == [
        "float32, forward", "float32, backward", "float64, forward", "float64, backward",
        "with a bias, forward", "with a bias, backward",
    ]  # fmt: skip
    assert lines[0].endswith("worst 0.25x (dim 64, causal yes, bias no, seq 512)")


def test_table_marks_the_best_and_shows_gaps():
    lines = plots.table(synthetic("forward")["rows"]).splitlines()
    assert len(lines) == 38
    assert lines[0].startswith("| dim | causal | seq | cupyflash | FlashAttention-2 (PyTorch) |")
    assert "| **105** |" in lines[2] and lines[2].endswith("| 0.50x |")
    assert "–" in lines[7] and "–" not in lines[2]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.slow
def test_plot_draws_every_suite_and_writes_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    stems = []
    shown = [name for name in SUITES if name not in ("figures", "training", "precision")]  # those have other pages
    for suite, family in [(name, None) for name in shown] + [("forward", "sm80")]:
        stems.append(f"{family}_{suite}" if family else suite)
        report.save(tmp_path / "results" / "h200" / f"{stems[-1]}.json", synthetic(suite, family))
    written = bench.plot(tmp_path / "results", tmp_path / "docs")
    pictures = sorted((tmp_path / "docs" / "plots").iterdir())
    assert [p.stem for p in pictures] == sorted(f"h200_{stem}" for stem in stems)
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in pictures)
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert sorted(written) == sorted([*(str(p) for p in pictures), str(tmp_path / "docs" / "benchmarks.md")])
    assert all(f"(plots/h200_{stem}.png)" in page for stem in stems)
    assert page.index("### Attention forward\n") < page.index("### Attention forward, family sm80 forced")
    assert "gemm_bf16_tflops 700" in page


def test_plot_without_results_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(FileNotFoundError, match="cupyflash bench"):
        bench.plot(tmp_path, tmp_path)


# --- the ladder ---------------------------------------------------------------------------------------------------


def test_rung_bytes_are_what_the_references_count():
    from cupyflash import reference

    n, d, tile = 48, 8, 8
    q, k, v = np.ones((3, n, d))
    batch = [x[None, :, None] for x in (q, k, v)]
    *_, standard = reference.standard_attention(*batch, trace=True)
    assert suites.rung_bytes("standard", 2, n, 3, d) == 6 * 2 * standard.moved
    *_, second = reference.flash2_forward(*batch, rows=tile, keys=4, trace=True)
    assert suites.rung_bytes("simt", 2, n, 3, d, tile) == 6 * 2 * (second.moved - n)  # without lse
    *_, first = reference.flash1_forward(q, k, v, 4 * d * tile, trace=True)
    inputs = 2 * n * d + n // tile * n * d  # float16; O, l and m are float32
    assert suites.rung_bytes("flash1", 2, n, 3, d, tile) == 6 * (2 * inputs + 4 * (first.moved - inputs))


def test_the_ladder_counts_the_bytes_of_every_family(monkeypatch):
    from cupyflash.gpu import device
    from cupyflash.gpu.plan import FAMILIES

    monkeypatch.setattr(device, "current", lambda ordinal: device.Arch.of("sm_90a"))
    (problem,) = (p for p in SUITES["ladder"].problems(Options()) if p["unit"] == "GB")
    values, notes = SUITES["ladder"].measure(problem, Options())
    assert set(values) == {"standard", "ours"} | (set(suites.LADDER) & set(FAMILIES)) and notes["ours"] == "sm90"
    assert values["ours"] < values["simt"] < values["standard"] == pytest.approx(8.724, abs=1e-3)
    monkeypatch.setattr(device, "current", lambda ordinal: device.Arch.of("sm_75"))
    values, notes = SUITES["ladder"].measure(problem, Options())
    assert notes["ours"] == "simt" and values["ours"] == values["simt"]
    assert "sm80" not in values and "needs compute capability 8.0" in notes["sm80"]


def test_the_ladder_fills_the_tutorial(tmp_path):
    pytest.importorskip("matplotlib")
    problems = SUITES["ladder"].problems(Options())
    rows = []
    for problem, best in zip(problems, (0.5, 1.5, 2.0)):
        values = {"standard": 10 * best, "simt": 4 * best, "sm80": 2 * best, "ours": best}
        notes = {"flash1": "ValueError: no such family", "ours": "sm90"}
        rows.append(report.make_row(problem, problem["unit"], values, notes, suites.LADDER))
    assert [row["unit"] for row in rows] == ["ms", "ms", "GB"]
    report.save(tmp_path / "results" / "h200" / "ladder.json", {**synthetic("ladder"), "rows": rows})
    page = tmp_path / "docs" / "tutorial.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- ladder:begin -->\nold\n<!-- ladder:end -->\nafter\n")
    for _ in range(2):  # again: the same page
        assert str(page) in bench.plot(tmp_path / "results", tmp_path / "docs")
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert "| standard (CuPy, cuBLAS) | 5 ms | 15 ms | 20 GB |" in text
        assert "| Hopper, `sm90` | 0.5 ms | 1.5 ms | 2 GB |" in text
        assert "FlashAttention-1" not in text and text.count("NVIDIA H200, 2026-01-01: float16, batch 4, 16 heads") == 1
