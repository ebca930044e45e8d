"""The report that stands for a run on a GPU: what it counts, and what is held against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_report
import pytest
from backends import pairs
from check_gpu_report import complaints

from cupyflash.gpu.source import sources_digest

DIGEST = "d" * 64


def passing() -> dict[str, Any]:
    counts = {f"{backend.name}/{dtype}": 10 for backend, dtype in pairs() if backend.family}
    return {"sources": DIGEST, "passed": 100, "failed": 0, "errors": 0, "failures": [], "counts": counts}


def test_nothing_to_complain_of() -> None:
    assert complaints(passing(), DIGEST) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sources": "e" * 64}, "it is of other kernel sources (eeeeeeeeeeee) than these (dddddddddddd)"),
        ({"failed": 2, "failures": ["a", "b"]}, "it counts 2 failed: ['a', 'b']"),
        ({"errors": 1}, "it counts 1 errors: []"),
        ({"counts": passing()["counts"] | {"simt/float64": 0}}, "it has no passed test of simt in float64"),
    ],
)
def test_complaints(change: dict[str, Any], complaint: str) -> None:
    assert complaints(passing() | change, DIGEST) == [complaint]


def test_a_failure_that_is_explained() -> None:
    report = passing() | {"failed": 1, "failures": ["a"]}
    assert complaints(report | {"judged_again": [{"test": "a", "why": "..."}]}, DIGEST) == []
    assert complaints(report | {"judged_again": [{"test": "b", "why": "..."}]}, DIGEST) != []
    assert complaints(report | {"judged_again": []}, DIGEST) != []


def test_an_empty_report() -> None:
    assert len(complaints({}, DIGEST)) == 3 + len(passing()["counts"])


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(when: str, outcome: str, *kinds: str) -> pytest.TestReport:
        properties = [(gpu_report.COUNTED, kind) for kind in kinds]
        return pytest.TestReport("t", ("t", 0, "t"), {}, outcome, None, when, user_properties=properties)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_report, "machine", lambda: {"gpu": "a GPU"})
    path = tmp_path / "report.json"
    report = gpu_report.GpuReport(str(path))
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "passed")):
        report.pytest_runtest_logreport(result(when, outcome, "simt/float32"))
    report.pytest_runtest_logreport(result("setup", "skipped", "simt/float32"))
    report.pytest_runtest_logreport(result("call", "failed", "sm80/float16"))
    report.pytest_runtest_logreport(result("teardown", "failed"))
    report.pytest_sessionfinish(int(pytest.ExitCode.TESTS_FAILED))
    written = json.loads(path.read_text())
    assert written["gpu"] == "a GPU" and written["sources"] == sources_digest()
    assert [written[x] for x in ("passed", "failed", "skipped", "errors")] == [1, 1, 1, 1]
    assert written["counts"] == {"simt/float32": 1} and written["failures"] == ["t", "t"]
    report.pytest_sessionfinish(int(pytest.ExitCode.INTERRUPTED))
    assert json.loads(path.read_text())["errors"] == 2
