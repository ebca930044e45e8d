"""What the whole suite shares: GPU tests that wait for a GPU, and the report of a run on one (--gpu-report)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Workers share a GPU, and JAX would take three quarters of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Where a suite has several GPUs (bench/on_gpu.sh) each worker takes one, before anything is on it.
if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("CUPYFLASH_TEST_GPUS"):
    _gpus = os.environ["CUPYFLASH_TEST_GPUS"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = _gpus[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(_gpus)]

# References are many small products: threads of BLAS would wait for each other three times as long as they compute.
# (Those of cupyflash.cpu are its own.)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of processes that tests start

# Tiles that somebody tuned on this machine are not what the tests are about.
os.environ["CUPYFLASH_CONFIG_DIR"] = os.devnull

import numpy as np
import pytest
from backends import gpu_count, no_gpu
from criterion import ByLuck, luck_explains
from gpu_report import GpuReport, count_as
from reference import fresh_rng


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="PATH", help="write what a run on a GPU passed, as tests/gpu_report.json")
    parser.addoption(
        "--one-in", type=int, default=1, metavar="N", help="of the slow tests one in so many: others for each --turn"
    )
    parser.addoption("--turn", default="", metavar="TEXT", help="which ones; a commit, say")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "always::criterion.ByLuck")
    config.pluginmanager.register(Luck())
    with contextlib.suppress(ImportError):
        import threadpoolctl

        threadpoolctl.threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), user_api="blas")
    path = config.getoption("--gpu-report")
    if path and not hasattr(config, "workerinput"):  # with xdist, the controller alone sees every result
        if no_gpu():
            raise pytest.UsageError(f"--gpu-report needs a GPU: {no_gpu()}")
        config.pluginmanager.register(GpuReport(path))


class Luck:
    """A pytest plugin that fails a run in which more results missed the criterion by little than luck explains."""

    def __init__(self) -> None:
        self.passed = self.missed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        self.missed += issubclass(warning_message.category, ByLuck)

    @property
    def allowed(self) -> int:
        return luck_explains(self.passed)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.missed > self.allowed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.missed > self.allowed:
            terminalreporter.write_line(
                f"{self.missed} results missed the criterion by little: luck explains {self.allowed}"
            )


def pytest_report_header() -> str:
    return f"GPU tests are skipped: {no_gpu()}" if no_gpu() else "GPU tests run"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            count_as(item)
            if no_gpu():
                item.add_marker(pytest.mark.skip(reason=f"no GPU to run on: {no_gpu()}"))
        if item.get_closest_marker("gpus") and gpu_count() < 2:
            item.add_marker(pytest.mark.skip(reason=f"two GPUs are needed, {gpu_count()} are there"))
    count, turn = config.getoption("--one-in"), config.getoption("--turn")
    left = [x for x in items if x.get_closest_marker("slow") and zlib.crc32(f"{turn} {x.nodeid}".encode()) % count]
    if left:
        config.hook.pytest_deselected(items=left)
        out = {id(x) for x in left}
        items[:] = [x for x in items if id(x) not in out]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line on some arguments: its exit code, what it printed, and what it said on stderr."""
    from cupyflash.tools import cli

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cupyflash", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return int(exit_.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def rng() -> np.random.Generator:
    """A fresh seed for every test, shown where it fails; CUPYFLASH_TEST_SEED brings one back."""
    return fresh_rng()


@pytest.fixture(name="no_gpu")
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without CuPy, whatever this one has."""
    from cupyflash.gpu import device

    if importlib.util.find_spec("torch"):  # whose import may ask for CuPy: it must not end half way
        importlib.import_module("torch")
    monkeypatch.setitem(sys.modules, "cupy", None)
    device.current.cache_clear()
    yield
    device.current.cache_clear()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compile cache of the test's own."""
    pytest.importorskip("cuda.core")
    from cupyflash.gpu import compiler

    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    compiler.compile_source.cache_clear()
    return tmp_path / "cache"
