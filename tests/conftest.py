"""What the whole suite shares: GPU tests that wait for a GPU, and the report of a run on one (--gpu-report)."""

from __future__ import annotations

import os

# Workers share one GPU, and JAX would take three quarters of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Tiles that somebody tuned on this machine are not what the tests are about.
os.environ["CUPYFLASH_CONFIG_DIR"] = os.devnull

import numpy as np
import pytest
from backends import no_gpu
from gpu_report import GpuReport, count_as
from reference import fresh_rng


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="PATH", help="write what a run on a GPU passed, as tests/gpu_report.json")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-report")
    if path and not hasattr(config, "workerinput"):  # with xdist, the controller alone sees every result
        if no_gpu():
            raise pytest.UsageError(f"--gpu-report needs a GPU: {no_gpu()}")
        config.pluginmanager.register(GpuReport(path))


def pytest_report_header() -> str:
    return f"GPU tests are skipped: {no_gpu()}" if no_gpu() else "GPU tests run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            count_as(item)
            if no_gpu():
                item.add_marker(pytest.mark.skip(reason=f"no GPU to run on: {no_gpu()}"))


@pytest.fixture
def rng() -> np.random.Generator:
    """A fresh seed for every test, shown where it fails; CUPYFLASH_TEST_SEED brings one back."""
    return fresh_rng()
