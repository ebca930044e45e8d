"""The report that stands for a run on a GPU: what it counts, and what is held against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gpu_report
import pytest
from backends import to_count
from check_gpu_report import complaints
from criterion import ByLuck

from cupyflash.gpu.source import sources_digest

DIGEST = "d" * 64


def passing() -> dict[str, Any]:
    counts = dict.fromkeys(to_count(), 10)
    return {"sources": DIGEST, "passed": 100, "failed": 0, "errors": 0, "failures": [], "by_luck": 0, "counts": counts}


def test_nothing_to_complain_of() -> None:
    assert complaints(passing(), DIGEST) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sources": "e" * 64}, "it is of other kernel sources (eeeeeeeeeeee) than these (dddddddddddd)"),
        ({"failed": 2, "failures": ["a", "b"]}, "it counts 2 failed: ['a', 'b']"),
        ({"errors": 1}, "it counts 1 errors: []"),
        ({"by_luck": None}, "it does not count `by_luck`, results that missed the criterion by little"),
        ({"by_luck": 4}, "4 results missed the criterion by little, and luck explains 3"),
        ({"counts": passing()["counts"] | {"simt/float64": 0}}, "it has no passed test of simt in float64"),
    ],
)
def test_complaints(change: dict[str, Any], complaint: str) -> None:
    assert complaints(passing() | change, DIGEST) == [complaint]


def test_a_marker_says_what_is_counted(request: pytest.FixtureRequest) -> None:
    assert "sm90/float8_e4m3fn" in to_count()
    for marks, expected in (([], []), ([pytest.mark.gpu(of="a/b")], [(gpu_report.COUNTED, "a/b")])):
        item = pytest.Function.from_parent(request.node.parent, name="f", callobj=lambda: None)
        for mark in marks:
            item.add_marker(mark)
        gpu_report.count_as(item)
        assert item.user_properties == expected


def test_an_empty_report() -> None:
    assert len(complaints({}, DIGEST)) == 4 + len(passing()["counts"])


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
    for category in (ByLuck, UserWarning):
        report.pytest_warning_recorded(warnings.WarningMessage(category("off"), category, "file", 1))
    report.pytest_sessionfinish(int(pytest.ExitCode.TESTS_FAILED))
    written = json.loads(path.read_text())
    assert written["gpu"] == "a GPU" and written["sources"] == sources_digest()
    assert [written[x] for x in ("passed", "failed", "skipped", "errors")] == [1, 1, 1, 1]
    assert written["by_luck"] == 1
    assert written["counts"] == {"simt/float32": 1} and written["failures"] == ["t", "t"]
    report.pytest_sessionfinish(int(pytest.ExitCode.INTERRUPTED))
    assert json.loads(path.read_text())["errors"] == 2


@pytest.mark.slow
def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    """By SIGINT, in one process or many: what it did not reach counts as failed, and a run of that completes the
    report."""
    (tmp_path / "conftest.py").write_text(
        "import pathlib\nimport gpu_report\ngpu_report.machine = lambda: {}\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        f"        config.pluginmanager.register(gpu_report.GpuReport({str(tmp_path / 'report.json')!r}))\n"
        "        config.pluginmanager.register(Told())\n"
        "class Told:\n"
        "    def pytest_runtest_logreport(self, report):\n"
        "        if report.when == 'teardown' and 'skipped' in report.nodeid:\n"
        "            pathlib.Path('told').touch()\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, signal, time, pytest\n"
        "def test_first(): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "def test_second():\n"
        "    if not pathlib.Path('again').exists():\n"
        "        while not pathlib.Path('told').exists(): time.sleep(0.01)\n"  # what ran before has arrived
        "        os.kill(int(os.environ['CONTROLLER']), signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "def test_third(): pass\n"
    )

    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    env = os.environ | {"PYTHONPATH": path}

    def run(*names: str) -> dict[str, Any]:
        # Maybe ignored
        script = "import os, signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        script += "os.environ['CONTROLLER'] = str(os.getpid()); sys.exit(pytest.main(sys.argv[1:]))"
        options = ["-q", "-p", "no:cacheprovider", "-n", processes, "--rootdir", str(tmp_path)]
        command = [sys.executable, "-c", script, *options, *(names or ["test_it.py"])]
        subprocess.run(command, check=False, cwd=tmp_path, env=env, timeout=100, capture_output=True)
        return dict(json.loads((tmp_path / "report.json").read_text()))

    for processes in ("0", "1"):  # noqa: B007 - of `run`
        stopped = run()
        assert [stopped[x] for x in ("passed", "skipped", "failed", "errors")] == [1, 1, 0, 2]
        assert stopped["failures"] == ["test_it.py::test_second", "test_it.py::test_third"]
        (tmp_path / "again").touch()
        whole = run(*stopped["failures"])
        assert [whole[x] for x in ("passed", "skipped", "failed", "errors")] == [3, 1, 0, 0] and not whole["failures"]
        for name in ("again", "told", "report.json"):
            (tmp_path / name).unlink()


def test_failures_that_ran_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**outcomes: str) -> dict[str, Any]:
        report = gpu_report.GpuReport(str(path))
        for name, outcome in outcomes.items():
            properties = [(gpu_report.COUNTED, "simt/float32")]
            result = pytest.TestReport(name, (name, 0, name), {}, outcome, None, "call", user_properties=properties)  # type: ignore[arg-type]
            report.pytest_runtest_logreport(result)
        report.pytest_sessionfinish(int(pytest.ExitCode.OK))
        return dict(json.loads(path.read_text()))

    monkeypatch.setattr(gpu_report, "machine", lambda: {"gpu": "a GPU"})
    path = tmp_path / "report.json"
    assert run(a="failed", b="failed", c="passed")["failures"] == ["a", "b"]
    once = run(a="passed")
    assert [once[x] for x in ("passed", "failed", "errors", "failures")] == [2, 1, 0, ["b"]]
    twice = run(b="passed")
    assert [twice[x] for x in ("passed", "failed", "failures")] == [3, 0, []] and twice["counts"] == {"simt/float32": 3}
    assert [again["tests"] for again in twice["again"]] == [["a"], ["b"]]
    whole = run(a="passed", b="passed", c="passed")  # not only what failed: a report of its own
    assert whole["passed"] == 3 and "again" not in whole
    before = run(a="failed", b="failed")
    path.write_text(json.dumps({name: x for name, x in before.items() if name != "by_luck"}))
    assert run(a="passed")["by_luck"] is run(b="passed")["by_luck"] is None  # nobody counted them
    run(a="failed")
    monkeypatch.setattr(gpu_report, "sources_digest", lambda: "other kernels")
    assert run(a="passed")["passed"] == 1 and "again" not in json.loads(path.read_text())
