"""The criterion itself: what it lets pass, what it counts as luck, what it refuses."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from criterion import ByLuck, assert_as_good

HERE = Path(__file__).parent
EXACT = np.linspace(-1, 1, 100)
OWN = (EXACT + 1e-3).astype(np.float32)


def off_by(error: float) -> np.ndarray:
    return (EXACT + error).astype(np.float32)


@pytest.mark.filterwarnings("error")
def test_twice_the_error_of_own_precision_is_right():
    assert_as_good(off_by(1.9e-3), EXACT, OWN)


def test_three_times_may_be_luck():
    with pytest.warns(ByLuck, match=r"off by 2\.9.*at most 2\.0"):
        assert_as_good(off_by(2.9e-3), EXACT, OWN)


@pytest.mark.parametrize("wrong", [off_by(3.1e-3), np.where(EXACT > 0.9, np.nan, EXACT).astype(np.float32)])
def test_more_is_wrong(wrong: np.ndarray):
    with pytest.raises(AssertionError):
        assert_as_good(wrong, EXACT, OWN)


def test_float64_knows_no_luck():
    assert_as_good(EXACT + 9e-12, EXACT, EXACT)
    with pytest.raises(AssertionError):
        assert_as_good(EXACT + 1.1e-11, EXACT, EXACT)


@pytest.mark.parametrize("value, right", [(1e5, True), (-1e5, False), (6e4, False)])
def test_infinity_is_right_where_the_dtype_has_no_such_number(value: float, right: bool):
    exact, actual = np.array([1.0, value]), np.array([1.0, np.inf], np.float16)
    with contextlib.nullcontext() if right else pytest.raises(AssertionError):
        assert_as_good(actual, exact, exact)


@pytest.mark.parametrize("missed, status", [(3, pytest.ExitCode.OK), (4, pytest.ExitCode.TESTS_FAILED)])
def test_more_than_a_few_fail_the_run(missed: int, status: pytest.ExitCode, tmp_path: Path):
    (tmp_path / "test_luck.py").write_text(
        "import warnings, pytest, criterion\n"
        f"@pytest.mark.parametrize('n', range({missed}))\n"
        "def test_one(n): warnings.warn('off', criterion.ByLuck)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_luck.py"]
    run = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE)}
    )
    assert run.returncode == status, run.stdout + run.stderr
