"""The criterion itself: what it lets pass, what it counts as luck, what it refuses."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from criterion import ByLuck, assert_as_good, assert_as_good_as_either, rounds_as_well
from semantics import Inputs, Judge, draw_inputs

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


def one_weight(inputs: Inputs) -> Judge:
    """All keys have the same one, with scale 0: 1/19 in 16 bits is off by the same for all queries."""
    return Judge(inputs, {"scale": 0.0}, True, large_scores=False)


def eight_weights(inputs: Inputs) -> Judge:
    """Of so many keys, which are there several times; queries are alike."""
    inputs.q[...], inputs.k[...] = inputs.q[:, :1], inputs.k[:, np.arange(inputs.k.shape[1]) % 8]
    return Judge(inputs, {}, True, large_scores=False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name, made, seed, seq, heads",
    [("dv", one_weight, 99, (60, 19), (3, 1)), ("out", eight_weights, 0, (20, 96), (1, 1))],
)
def test_where_few_weights_decide_the_published_algorithm_says_what_rounding_costs(
    name: str, made: Callable[[Inputs], Judge], seed: int, seq: tuple[int, int], heads: tuple[int, int]
) -> None:
    """With one column of V an error is one number, and by luck standard attention's is a fraction of it."""
    inputs = draw_inputs(np.random.default_rng(seed), "bfloat16", batch=1, seq=seq, heads=heads, dims=(16, 1))
    judge = made(inputs)
    exact, own, found = getattr(judge.exact, name), getattr(judge.own, name), judge.published[name]
    right = found.astype(inputs.q.dtype)
    with pytest.raises(AssertionError):
        assert_as_good(right, exact, own, name)
    judge(name, right)
    less = made(inputs._replace(k=inputs.k[:, 1:], v=inputs.v[:, 1:])).published[name]
    for wrong in (exact + 4 * (found - exact), np.concatenate([exact[:, :1], less], 1)[:, -exact.shape[1] :]):
        with pytest.raises(AssertionError, match=f"{name} is off by"):
            judge(name, wrong.astype(inputs.q.dtype))


@pytest.mark.filterwarnings("error")
def test_what_the_last_rounding_costs_is_no_luck_of_others() -> None:
    """6.6445 and 6.6484 are neighbours in float16, 6.6465 is between them: what is off by little less rounds down."""
    exact, published = np.array([6.644739, 0.1, 1e5]), np.array([6.646132, 0.1, 1.1e5])
    own = np.array([6.644739, 0.1, np.inf], np.float16)
    published[2] = np.inf  # of which nothing is known

    def judge(first: float, last: float = np.inf) -> None:
        actual = np.array([first, 0.1, last], np.float16)
        assert_as_good_as_either(actual, exact, own, published, "dv", lambda: 1.0)

    for right in (6.6445, 6.6484, 6.6420):
        judge(right)
    for wrong in ((6.6523,), (6.6380,), (np.nan,), (6.6445, 6e4), (6.6445, np.nan)):
        with pytest.raises(AssertionError):
            judge(*wrong)
    assert rounds_as_well(own, exact, exact, 2) and not rounds_as_well(own.astype(np.float64), exact, exact, 2)


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
