"""bench/on_gpu.sh, as far as that goes without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from backends import no_gpu

TOP = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("timeout"), reason="bash and coreutils")


def step(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [TOP / "bench" / "on_gpu.sh", *map(str, args)], capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": path, "JOBS": "2"} | environment,
    )  # fmt: skip


def test_what_is_missing_is_named() -> None:
    done = step("scores")
    assert done.returncode and "FOLDER is missing" in done.stderr


@pytest.mark.slow
def test_a_bench_step_keeps_its_rows_and_ends_with_a_table(tmp_path: Path) -> None:
    for module in ("torch", "rich"):
        pytest.importorskip(module)
    asked = ("cpu", tmp_path / "out", 300, "--quick", "--rounds", 1)
    done = step(*asked)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "out" / "cpu.json").read_text())["rows"]
    best = [max(row["peers"], key=lambda name: row["peers"][name] or 0) for row in rows]
    named = sum(done.stdout.count(f"\t{name}\t") for name in set(best))
    assert len(rows) == named == 8 and f"worst row {min(row['ratio_to_best'] for row in rows):.2f}x" in done.stdout
    assert (tmp_path / "out" / "cpu.log").read_text() == done.stdout
    again = step(*asked)
    assert "8 rows are in" in again.stdout and sum(again.stdout.count(f"\t{name}\t") for name in set(best)) == 8
    assert json.loads((tmp_path / "out" / "cpu.json").read_text())["rows"] == rows


def test_the_runbook_has_every_suite_that_needs_a_gpu() -> None:
    pytest.importorskip("rich")
    from cupyflash.bench.suites import SUITES

    page = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## An hour on a GPU")[1].split("## Style")[0]
    steps = {
        step
        for line in page.splitlines()
        if line.startswith("| `")
        for step in re.findall(r"`(\w+)", line.split("|")[1])
    }
    assert steps >= {"accuracy" if name == "precision" else name for name in SUITES if SUITES[name].needs_gpu}


@pytest.mark.parametrize(("worker", "gpus", "taken"), [("gw0", "3,5", "3"), ("gw7", "3,5", "5"), ("gw1", "", "None")])
def test_each_worker_of_a_suite_has_a_gpu_of_its_own(worker: str, gpus: str, taken: str) -> None:
    environment = {x: y for x, y in os.environ.items() if x != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", "import os, conftest; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"], check=True,
        capture_output=True, text=True, cwd=TOP / "tests",
        env=environment | {"PYTEST_XDIST_WORKER": worker, "CUPYFLASH_TEST_GPUS": gpus},
    )  # fmt: skip
    assert done.stdout.strip() == taken


def test_memcheck_runs_in_parts_and_goes_on(tmp_path: Path) -> None:
    asked = ("memcheck", tmp_path, 300, "--cpu", "--dtype", "float32", "--only", "bias of")
    for right in (3, 0):
        done = step(*asked, TOOL="none")
        assert done.returncode == 0, done.stdout
        assert done.stdout.splitlines()[-1] == f"{right} right, 0 left out, 0 wrong; 2 parts came to their end"


def test_memcheck_runs_under_the_sanitizer(tmp_path: Path) -> None:
    stub = tmp_path / "bin" / "compute-sanitizer"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/sh\n[ "$1" = --help ] && echo "--destroy-on-device-error arg" && exit\necho "========= Invalid '
        '__global__ read: $*"\n'
        'while [ "${1#*python}" = "$1" ]; do shift; done\n"$@"; exit 3\n'
    )
    stub.chmod(0o755)
    path = f"{stub.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = step("memcheck", tmp_path, 300, "--cpu", "--dtype", "float32", "--only", "nothing", PATH=path)
    assert done.returncode == 3 and "1 right, 0 left out, 0 wrong; 2 parts" in done.stdout.splitlines()[-1], done.stdout
    flags = "--tool memcheck --error-exitcode 3 --report-api-errors no --destroy-on-device-error kernel"
    assert done.stdout.count(f"Invalid __global__ read: {flags}") == 2


def test_a_step_is_cut_off(tmp_path: Path) -> None:
    done = step("memcheck", tmp_path, 3, "--cpu", TOOL="none")
    assert done.returncode == 124 and "wrong; 0 parts came to their end" in done.stdout.splitlines()[-1]


@pytest.mark.skipif(no_gpu() is None, reason="there is a GPU")
@pytest.mark.parametrize("what", ["suite", "accuracy"])
def test_steps_that_need_a_gpu_say_so(what: str, tmp_path: Path) -> None:
    done = step(what, tmp_path, 100, *(["tests/test_problem.py"] if what == "suite" else []))
    assert done.returncode and ("--gpu-report needs a GPU" in done.stdout or "needs a CUDA GPU" in done.stdout)
