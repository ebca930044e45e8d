"""The criterion: how far a result may be from exact attention, beside standard attention in its own precision.

`reference.py` has both. What says how much more is allowed where a single rounding decides is here, too: units, and
luck.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
from reference import distance
from rounding import rounded_to, widened

from cupyflash.problem import AttentionProblem

FEW_NUMBERS = 4096  # fewer do not have a mean error that is no luck
PIECE = 2**15  # numbers at once, which caches hold


def assert_as_good(
    actual: np.ndarray,
    exact: np.ndarray,
    own_precision: np.ndarray,
    name: str = "result",
    unit: float = 1.0,
    luck: bool = True,
) -> None:
    """The largest error is at most 2x that of own-precision standard attention, plus 1e-5; NaN and inf as in `exact`.

    `actual` keeps the dtype it was computed in: for float64, where `exact` is no more precise than `own_precision`, the
    bound is 1e-11 of the largest value (scores of 1e4 already carry 1e-12).

    `unit` multiplies the 1e-5, for scores that are so large that luck decides how well own precision does: see
    `large_score_units`.

    Both are the largest of many random errors, and a run of the tests judges tens of thousands of results: a few miss
    by luck. One that is off by at most 3x, and 4e-5, warns with `ByLuck`. A run that has more of these than
    `luck_explains` fails:
    of tests (conftest.py), on a GPU (check_gpu_report.py), of the fuzzer. Without `luck` one that is off so fails, too.
    """
    actual_dtype = np.asarray(actual).dtype
    actual, exact, own = (widened(np.asarray(x), np.dtype(np.float64)) for x in (actual, exact, own_precision))
    assert actual.shape == exact.shape, f"{name} has shape {actual.shape}, not {exact.shape}"
    if not (np.isfinite(actual).all() and np.isfinite(exact).all()):
        with np.errstate(over="ignore"):  # what is too large for the dtype is rightly infinite
            over = np.isinf(actual) & (exact.astype(actual_dtype).astype(np.float64) == actual)
        exact = np.where(over, actual, exact)
        for what, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
            wrong = test(actual) != test(exact)
            assert not wrong.any(), (
                f"{name} has {what} in the wrong places, {wrong.sum()} of them; first {_first(wrong)}"
            )
        actual, exact, own = _finite(actual), _finite(exact), np.where(np.isfinite(exact), own, 0)
    error = np.abs(actual - exact)
    if actual_dtype == np.float64:
        allowed = by_luck = 1e-11 * max(unit, np.abs(exact).max(initial=0.0))
    else:
        # Where own precision overflows it sets no standard, and luck may not make it stricter than rounding `exact`
        # once.
        with np.errstate(all="ignore"):
            errors = [np.abs(x - exact) for x in (own, rounded_to(exact, actual_dtype))]
        of_own = max(e.max(initial=0.0, where=np.isfinite(e)) for e in errors)
        allowed, by_luck = 2 * of_own + 1e-5 * unit, 3 * of_own + 4e-5 * unit
    worst = error.max(initial=0.0)
    if not worst <= allowed:
        text = f"{name} is off by {worst:.3e} at {_first(error == worst)}; at most {allowed:.3e} is allowed"
        assert luck and worst <= by_luck, text
        warnings.warn(text, ByLuck, stacklevel=2)


def assert_as_good_as_either(
    actual: np.ndarray,
    exact: np.ndarray,
    own: np.ndarray,
    published: np.ndarray | None,
    name: str,
    unit: Callable[[], float],
) -> None:
    """For what is not `assert_as_good` without luck: it may be as good as `published`, the published algorithm in this
    precision before its last rounding, if there is one; else it is judged with `unit` and luck, and up to three times
    as far off as the published algorithm counts as luck, too."""
    if published is not None and rounds_as_well(actual, exact, published, 2):
        return
    try:
        assert_as_good(actual, exact, own, name, unit())
    except AssertionError:
        if published is None or not rounds_as_well(actual, exact, published, 3):  # luck's factor, as above
            raise
        error, of_published = (np.abs(x.astype(np.float64) - exact).max() for x in (actual, published))
        text = f"{name} is off by {error:.4e}, FlashAttention-2's before its last rounding by {of_published:.4e}"
        warnings.warn(text, ByLuck, stacklevel=2)


def rounds_as_well(actual: np.ndarray, exact: np.ndarray, published: np.ndarray, times: float) -> bool:
    """Whether each number is what one is rounded to that is off by at most so many `times` the largest error of
    `published`, which is not rounded to the dtype of `actual` yet, plus 1e-5. (Of float64 nothing is said.)

    That last rounding, by up to half a unit of the number itself, no algorithm is without. Where few numbers are large
    it is by luck that standard attention's, or the published algorithm's, costs less: its error says nothing of it.
    """
    if actual.dtype == np.float64:
        return False
    with np.errstate(all="ignore"):
        errors = np.abs(published - exact)
        off = times * errors.max(initial=0.0, where=np.isfinite(errors)) + 1e-5
        low, high = ((exact + x).astype(actual.dtype).astype(np.float64) for x in (-off, off))
    found = actual.astype(np.float64)
    return bool((((low <= found) & (found <= high)) | (np.isnan(found) & np.isnan(exact))).all())


def assert_mean_errors(actual: np.ndarray, exact: np.ndarray, own: np.ndarray, name: str, unit: float = 1.0) -> None:
    """The root mean square error of each head, (B, S, H, D), beside that of own precision: what is off by little
    everywhere, or where all numbers are small beside the largest of another head. unit: as of `assert_as_good`.

    Of heads with few numbers but 0 nothing is known (of many queries, the last ones alone may see a key), nor where one
    is not finite.
    """
    if actual.shape[1] * actual.shape[3] < FEW_NUMBERS:
        return
    axes = (1, 3)
    with np.errstate(all="ignore"):
        size = np.sqrt(np.mean(exact**2, axes))
        given = widened(actual, exact.dtype), own, rounded_to(exact, actual.dtype)
        errors = [np.sqrt(np.mean((x - exact) ** 2, axes)) for x in given]
    allowed = 2 * errors[1] + 2 * errors[2] + 1e-5 * unit + 1e-6 * size
    many = np.maximum(np.count_nonzero(exact, axes), np.count_nonzero(actual, axes)) >= FEW_NUMBERS
    wrong = many & np.isfinite(allowed) & ~(errors[0] <= allowed)
    if wrong.any():
        at = _first(wrong)
        said = f"{name} is off by {errors[0][at]:.3e} in the mean of entry and head {at}"
        raise AssertionError(f"{said}; at most {allowed[at]:.3e} is allowed")


def as_good_as_rounding(actual: np.ndarray, exact: np.ndarray) -> bool:
    """Whether `assert_as_good` lets this pass whatever own precision does: by what it costs to round `exact` once."""
    if actual.shape != exact.shape:
        return False
    actual, exact = np.atleast_1d(actual, exact)
    with np.errstate(all="ignore"):
        worst, some = np.float64(0), max(1, PIECE * len(actual) // max(1, actual.size))
        for n in range(0, len(actual), some):
            error = widened(actual[n : n + some], exact.dtype) - exact[n : n + some]
            worst = np.maximum(worst, np.maximum(error.max(initial=0.0), -error.min(initial=0.0)))  # NaN where one is
        if not np.isfinite(worst):
            finite = np.isfinite(exact)
            same = np.array_equal(actual[~finite].astype(np.float64), exact[~finite], equal_nan=True)
            return same and not finite.all() and as_good_as_rounding(actual[finite], exact[finite])
        if actual.dtype == np.float64:
            return bool(worst <= 1e-11 * np.abs(exact).max(initial=1.0))
        if worst <= 1e-5:
            return True
        flat = exact.ravel(order="K")
        for n, some in enumerate((flat[:1000], flat[1000:20000], flat[20000:])):  # most often the first are enough
            of_rounding = np.abs(rounded_to(some, actual.dtype) - some)
            if worst <= 1e-5 + 2 * of_rounding.max(initial=0.0, where=np.isfinite(of_rounding)):
                return True
            if n == 0:
                eps, tiny = (float(getattr(ml_dtypes.finfo(actual.dtype), name)) for name in ("eps", "tiny"))
                if worst > 1e-5 + 2 * eps * (max(exact.max(), -exact.min()) + tiny):  # more than any rounding
                    return False
    return False


class ByLuck(UserWarning):
    """A result that misses the criterion by so little that it may be luck."""


def luck_explains(count: int) -> int:
    """How many results of so many tests, or problems of the fuzzer, may miss by luck."""
    return 3 + count // 200


def largest_product(q: np.ndarray, k: np.ndarray) -> float:
    """Of a query and a key."""
    rows, keys = (_finite(x.astype(np.float32)).swapaxes(1, 2) for x in (q, k))
    heads = range(rows.shape[1])
    products = (rows[:, h] @ keys[:, h * keys.shape[1] // len(heads)].swapaxes(1, 2) for h in heads)
    return max((float(np.abs(x).max()) for x in products if x.size), default=0.0)


def large_score_units(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    bias: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
) -> dict[str, float]:
    """`unit` of each result where scores are far from 0, one key takes all or D is tiny, for v and dout of size 1.

    A score s carries a rounding error of about eps · |s|, which moves a probability by as much, but only in the few
    rows where two keys compete: with two or three such rows the error of own precision is luck. And where P is close to
    one-hot standard attention's dP - rowsum(P · dP) is the difference of equal roundings, but dP - rowsum(dO · O) is
    not: the rounding of O to its dtype stays, times scale · |K|.
    """
    q_max, k_max = (float(np.abs(x.astype(np.float64)).max()) for x in (q, k))
    score = abs(problem.scale) * q_max * k_max * problem.dim**0.5
    # Tensor cores cut off what lies behind a sum, 16 products at a time: where these have one sign, that adds up.
    score = max(score, abs(problem.scale) * largest_product(q, k) * (1 + problem.dim / 64))
    if bias is not None:
        score += float(np.abs(bias.astype(np.float64)).max())
    if slopes is not None and problem.seq_q and problem.seq_k:
        score += float(np.abs(slopes.astype(np.float64)).max() * distance(problem).max())
    moved = max(1.0, 4 * float(np.finfo(np.float32).eps) * score / 1e-5)
    rounded_out = 4 * float(ml_dtypes.finfo(q.dtype).eps) / 1e-5
    ds = abs(problem.scale) * (moved + rounded_out)
    return {
        "out": moved, "lse": moved, "dv": moved, "dq": ds * k_max, "dk": ds * q_max, "dbias": moved + rounded_out
    }  # fmt: skip


def far_units(problem: AttentionProblem, given: dict[str, np.ndarray]) -> dict[str, float]:
    """`unit` of results where ALiBi is asked of queries that stand beyond all keys: every score of theirs is far from
    0, and carries a rounding error as in `large_score_units`."""
    slopes = given.get("alibi_slopes")
    if slopes is None or 0 in (problem.seq_q, problem.seq_k):
        return {}
    nearest = float(distance(problem).min(1).max()) * float(np.abs(slopes.astype(np.float64)).max(initial=0.0))
    moved = max(1.0, 4 * float(np.finfo(np.float32).eps) * nearest / 1e-5)
    return dict.fromkeys(("out", "lse", "dv"), moved)


def one_key_units(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray
) -> dict[str, float]:
    """`unit` of dq, dk and what pairs of their own get where queries see one key only.

    There dP = rowsum(dO · O), and standard attention gives exactly 0. Two float32 sums over the columns of V differ in
    their rounding, in the row where the sum is largest by the most; for dk that adds up over the queries.
    """
    if 0 in (q.size, k.size):
        return {}
    q_size, v_size, dout_size = (
        float(np.sqrt(np.mean(np.square(x.astype(np.float64))))) if x.size else 0.0 for x in (q, v, dout)
    )
    k_most, q_most = (float(np.abs(_finite(x)).max()) for x in (k, q))
    rows = max(2, dout.size // max(1, dout.shape[-1]))
    largest = (2 * np.log(rows)) ** 0.5 * problem.dim_v**0.5 * v_size * dout_size  # of so many random dP
    left = 4 * float(np.finfo(np.float32).eps) * largest / 1e-5
    scale, queries = abs(problem.scale), max(1, problem.group * problem.seq_q)
    found = {"dq": left * scale * k_most, "dk": left * scale * max(q_most, q_size * queries**0.5), "dbias": left}
    found |= {f"d{x.key}": left for x in problem.score.arrays} if problem.score else {}
    return {name: max(1.0, unit) for name, unit in found.items()}


def group_units(problem: AttentionProblem) -> dict[str, float]:
    """`unit` of dk and dv in float32 where query heads share keys: one sum over the queries of all these heads, where
    standard attention has one for each head and then adds few numbers."""
    return dict.fromkeys(("dk", "dv"), problem.group**0.5) if problem.dtype == "float32" else {}


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])
