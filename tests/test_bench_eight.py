"""The suite `fp8` without a GPU: what is drawn, how it is judged, and the table of its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import attention, bench
from cupyflash.bench import eight, machine, report
from cupyflash.bench.peers import Case
from cupyflash.bench.suites import SUITES, Options
from cupyflash.passes import Pass
from cupyflash.tools.timing import Candidate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "float8.md"


def test_all_compute_the_same_and_what_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours in all its forms on the CPU; a peer that is off by more than 8 bits explain, and one that is not there."""
    seen: list[Any] = []

    def ours(family: str | None = None) -> Any:
        def prepare(case: Case, of: Pass) -> Candidate:
            seen.append((case.q.dtype, case.scores))
            return Candidate(lambda: (attention(*case[:3], causal=case.causal, **case.scores),))

        return prepare

    def case_of(problem: Any) -> Case:
        shape = problem["batch"], problem["seq"], problem["heads"], problem["dim"]
        return Case(*torch.randn((4, *shape)).bfloat16().unbind(), problem["causal"])

    def load(name: str) -> Any:
        if name == "fa3":
            return "not installed"
        return lambda case, of: Candidate(lambda: (case.v.float() * 0,))

    monkeypatch.setattr(eight.peers, "ours", ours)
    monkeypatch.setattr(eight.peers, "load", load)
    monkeypatch.setattr(eight, "case_of", case_of)
    monkeypatch.setattr(eight, "take_turns", lambda candidates, options: (dict.fromkeys(candidates, 1e-3), {}))
    problem = {"batch": 1, "seq": 300, "heads": 2, "dim": 64, "causal": True}
    values, notes = eight.measure(problem, Options())
    assert values == dict.fromkeys(("ours", "eight", "bf16"), pytest.approx(4 * 2 * 300**2 * 64 / 2 / 1e12 / 1e-3))
    assert (
        notes["fa3"] == "RuntimeError: not installed" and notes["cudnn8"] == "wrong: relative error 1 against float32"
    )
    half, small = torch.bfloat16, torch.float8_e4m3fn
    assert seen == [(small, {}), (small, {"out_dtype": small}), (half, {})]


def test_problems() -> None:
    asked = eight.problems(Options())
    assert len(asked) == 24 and {x["batch"] * x["seq"] for x in asked} == {16384}
    assert {x["dim"] * x["heads"] for x in asked} == {2048} and len(eight.problems(Options(quick=True))) == 6


def test_the_page_gets_its_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suite, rows = SUITES["fp8"], []
    for problem in suite.problems(Options()):
        values = {"ours": 900.0, "cudnn8": 450.0, "bf16": 720.0}
        rows.append(report.make_row(problem, suite.unit, values, {"fa3": "not installed"}, suite.peers))
    assert {row["ratio_to_best"] for row in rows} == {2}  # cuDNN's: what is ours in another form is no peer
    data = {
        "suite": "fp8", "gpu": "NVIDIA H200", "machine": "NVIDIA H200", "date": "2026-01-01T00", "family": None,
        "rows": rows,
        "driver": "1", "sources": "0", "versions": {}, "absent": {}, "ceilings": {},
    }  # fmt: skip
    report.save(tmp_path / "results" / "h200" / "fp8.json", data)
    page = tmp_path / "docs" / "float8.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- fp8:begin -->\n<!-- fp8:end -->\nafter\n")
    assert str(page) in bench.plot(tmp_path / "results", tmp_path / "docs")
    lines = page.read_text().splitlines()
    peers = "cuDNN, float8, results too | cupyflash, bfloat16"
    assert f"| dim | causal | seq | cupyflash | {peers} | over cuDNN | over our bfloat16 |" in lines
    assert "| 128 | yes | 8192 | 900 | 450 | 720 | 2.00x | 1.25x |" in lines
    assert "Geometric means: 2.00x cuDNN, 1.25x our bfloat16." in lines
    assert sum(line.startswith("| ") for line in lines) == 2 + 24 and lines[0] == "before" and lines[-1] == "after"
    text = PAGE.read_text(encoding="utf-8")
    assert text.index("<!-- fp8:begin -->") < text.index("<!-- fp8:end -->")


def test_the_ceilings_of_this_machine_leave_out_what_torch_does_not_multiply() -> None:
    found = machine.ceilings(False, ["float8_e4m3fn", "float32"], 0.1)
    assert set(found) == {"gemm_fp32_gflops", "copy_gbps"}
