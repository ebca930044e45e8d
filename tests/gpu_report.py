"""tests/gpu_report.json: which kernel sources passed which tests on which GPU. `--gpu-report PATH` writes it.

What a run that was stopped (Ctrl-C, or SIGINT at a time limit) did not reach counts as failed. A run of nothing but
tests that the report at PATH counts as failed, on the same kernel sources, amends that report (after a test was put
right, or to go on where a run was stopped), and stays listed in it.
"""

from __future__ import annotations

import datetime
import json
import platform
import time
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from criterion import ByLuck

from cupyflash.bench.machine import driver
from cupyflash.gpu.compiler import nvrtc_version
from cupyflash.gpu.source import sources_digest

COUNTED = "counted as"


def count_as(item: pytest.Item) -> None:
    """Let the item's result carry the kernel family and dtype that it tests, to the process that counts: as its
    parameters or its marker have them."""
    marker = item.get_closest_marker("gpu")
    if marker and "of" in marker.kwargs:
        item.user_properties.append((COUNTED, marker.kwargs["of"]))
        return
    params = getattr(item, "callspec", None) and item.callspec.params
    if params and "backend" in params and "dtype" in params:
        item.user_properties.append((COUNTED, f"{params['backend'].name}/{params['dtype']}"))


class GpuReport:
    """A pytest plugin that counts every result and writes the report when the run ends."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.sources = sources_digest()
        self.started = time.monotonic()
        self.outcomes = Counter(passed=0, failed=0, skipped=0, errors=0)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.passes: list[str] = []
        self.skips: list[str] = []
        self.collected: tuple[str, ...] = ()
        self.by_luck = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = self.collected or tuple(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = tuple(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes["failed" if report.when == "call" else "errors"] += 1
            self.failures.append(report.nodeid)
        elif report.skipped:
            self.outcomes["skipped"] += 1
            self.skips.append(report.nodeid)
        elif report.when == "call":
            self.outcomes["passed"] += 1
            self.passes.append(report.nodeid)
            self.counts.update(str(what) for name, what in report.user_properties if name == COUNTED)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        self.by_luck += issubclass(warning_message.category, ByLuck)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["errors"] += 1
            self.failures.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)  # before workers are waited for: a time limit may come meanwhile
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            done = {*self.passes, *self.failures, *self.skips}
            missed = [name for name in self.collected if name not in done]
            self.outcomes["errors"] += len(missed) or 1
            self.failures += missed or [f"the run ended early, with exit status {int(exitstatus)}"]
        facts = {
            **machine(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "sources": self.sources,
            **self.outcomes,
            "by_luck": self.by_luck,
            "failures": self.failures,
            "seconds": round(time.monotonic() - self.started, 1),
            "counts": dict(sorted(self.counts.items())),
        }
        self.path.write_text(json.dumps(self._amended(facts) or facts, indent=1) + "\n", encoding="utf-8")

    def _amended(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """The report that stands, with these results instead of the failures it counts; None where that does
        not apply."""
        if not self.path.is_file():
            return None
        before: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        ran = {*self.passes, *self.failures, *self.skips}
        if before["sources"] != self.sources or not ran or not ran <= {*before["failures"]}:
            return None
        failures = [name for name in before["failures"] if name not in {*self.passes, *self.skips}]
        return before | {
            "passed": before["passed"] + len(self.passes),
            "skipped": before["skipped"] + len(self.skips),
            "failed": len(failures),
            "errors": self.outcomes["errors"] if failures else 0,
            "by_luck": None if before.get("by_luck") is None else before["by_luck"] + self.by_luck,
            "failures": failures,
            "counts": dict(sorted((Counter(before["counts"]) + self.counts).items())),
            "again": [*before.get("again", ()), {"date": facts["date"], "tests": sorted(ran)}],
        }


def machine() -> dict[str, str | None]:
    """The GPU and what ran on it."""
    import cupy

    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": driver(),
        "cuda": nvrtc_version(),
        "python": platform.python_version(),
        "cupy": cupy.__version__,
        **{library: _version(library) for library in ("numpy", "torch", "jax")},
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
