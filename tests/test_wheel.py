"""The wheel: built, put into an environment that has what it depends on alone, and used there; and the source
archive."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl

import cupyflash

TOP = Path(__file__).resolve().parent.parent
BUILD = "import sys; from hatchling import build; print(getattr(build, f'build_{sys.argv[1]}')(sys.argv[2]))"
BUILT = ("__pycache__", ".git", ".venv*", "build", "dist", "*.egg-info", ".*_cache")  # what is no part of a checkout
USE = """
import sys
import numpy as np
import cupyflash
import_costs = sorted(set(sys.modules) & {"torch", "jax", "cupy", "cuda", "typer", "rich", "matplotlib"})
assert not import_costs, f"importing cupyflash imports {import_costs}"
assert cupyflash.__file__.startswith(sys.prefix), cupyflash.__file__

q = np.random.default_rng(0).standard_normal((2, 50, 4, 16)).astype(np.float32)
out, lse = cupyflash.attention(q, q, q, causal=True, return_lse=True)
assert np.allclose(out[:, 0], q[:, 0], atol=1e-5) and lse.shape == (2, 4, 50)
dq, dk, dv = cupyflash.attention_backward(out, q, q, q, out, lse, causal=True)
assert np.isfinite(dq).all() and dq.any() and dk.any() and dv.any()

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.gpu.source import generate, kernels_folder, sources_digest
from cupyflash.problem import AttentionProblem
from cupyflash.passes import BACKWARD, FORWARD
assert str(kernels_folder()).startswith(sys.prefix), kernels_folder()
problem = AttentionProblem("float16", 1, 64, 64, 1, 1, 64, 64, 1.0)
for family, room in FAMILIES.items():
    for backward in (FORWARD, BACKWARD):
        if room.objection(problem, Arch.of("sm_90a"), backward) is None:
            assert "attention_" in generate(plan(problem, Arch.of("sm_90a"), backward, family))
print(sources_digest())
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Its output; nothing of this process's environment may show the checkout to it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which an earlier build has left a file that is deleted since."""
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(TOP, copy, ignore=shutil.ignore_patterns(*BUILT))
    for stale in ("build/lib/cupyflash", "cupyflash.egg-info", "cupyflash/__pycache__"):
        (copy / stale).mkdir(parents=True)
        (copy / stale / "stale.py").touch()
    (copy / "cupyflash.egg-info" / "SOURCES.txt").write_text("stale.py\n")
    return copy


def built(what: str, checkout: Path, folder: Path) -> Path:
    run(sys.executable, "-c", BUILD, what, folder, cwd=checkout)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", checkout, tmp_path_factory.mktemp("dist"))


def test_contents(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(entry_points).decode())
    kernels = {f"cupyflash/{path.relative_to(TOP).as_posix()}" for path in (TOP / "kernels_cu").rglob("*.cu*")}
    modules = {path.relative_to(TOP).as_posix() for path in (TOP / "cupyflash").rglob("*.py")}
    missing = (kernels | modules | {"cupyflash/py.typed"}) - names
    assert not missing
    assert not [name for name in names if not name.startswith(("cupyflash/", "cupyflash-")) or "stale" in name]
    assert wheel.name.startswith(f"cupyflash-{cupyflash.__version__}-")  # said in one place
    module, _, function = scripts["console_scripts"]["cupyflash"].partition(":")
    assert function and f"{module.replace('.', '/')}.py" in names


def test_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=os.name != "nt")
    python = tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for package in (np, ml_dtypes, threadpoolctl):
        file = Path(package.__file__)
        folder = file.parent if file.name == "__init__.py" else file  # threadpoolctl is one file
        for needed in (folder, folder.with_name(f"{folder.name}.libs")):
            if needed.exists():
                (site / needed.name).symlink_to(needed)
    from cupyflash.gpu.source import sources_digest

    assert run(python, "-c", USE, cwd=tmp_path).splitlines()[-1] == sources_digest()


def test_the_source_archive_runs_its_tests(checkout: Path, tmp_path: Path) -> None:
    """It has all of the checkout, so what tests import and read is there; one of them proves it."""
    archive = built("sdist", checkout, tmp_path)
    shutil.unpack_archive(archive, tmp_path)
    (top,) = (path for path in tmp_path.iterdir() if path.is_dir())
    there = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
    whole = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    assert {name for name in whole if "stale" not in name and "egg-info" not in name} <= there
    assert not [name for name in there if "stale" in name]
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_problem.py"]
    assert " passed" in run(*test, cwd=top)
