"""What is known of a score function without running it: whether it is the one that was traced before."""

from __future__ import annotations

import builtins
import collections
import functools
import math
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupyflash import attention
from cupyflash.score import tanh, trace, where

tracing = sys.modules["cupyflash.score.trace"]  # as an attribute it is the function


def test_a_function_is_traced_anew_when_what_it_looks_up_has_changed(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 5, 1, 2))
    bound, calls = 1.0, []

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        calls.append(1)
        return bound * s

    def plain(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return bound * s + FACTOR[0]

    for bound in (1.0, 2.0, -0.0, 0.0):
        assert np.array_equal(
            attention(x, x, x, score=plain), attention(x, x, x, score=lambda s, b, h, i, j, x=bound: x * s)
        )
        attention(x, x, x, score=score)
    assert len(calls) == 4  # a list is looked up, so that nothing is known
    FACTOR[0] = 5.0
    try:
        changed = attention(x, x, x, score=lambda s, b, h, i, j: where(i == j, plain(s, b, h, i, j), s))
    finally:
        FACTOR[0] = 0.0
    assert not np.array_equal(
        changed, attention(x, x, x, score=lambda s, b, h, i, j: where(i == j, plain(s, b, h, i, j), s))
    )


FACTOR = [0.0]


def test_what_functions_and_classes_have_is_looked_up_too(rng: np.random.Generator) -> None:
    """Configurations, for example."""
    x, sizes = rng.standard_normal((1, 5, 1, 2)), {"cap": 1.0}
    size = sizes.get

    class Config:
        cap = 1.0

    def helper(s: Any) -> Any:
        return s * helper.cap  # type: ignore[attr-defined]

    def change(cap: float) -> None:
        Config.cap = sizes["cap"] = helper.cap = cap  # type: ignore[attr-defined]

    for score in (
        lambda s, b, h, i, j: s * Config.cap,
        lambda s, b, h, i, j: helper(s),
        lambda s, b, h, i, j: s * size("cap"),
    ):
        for cap in (1.0, 2.0):
            change(cap)
            assert np.array_equal(
                attention(x, x, x, score=score), attention(x, x, x, score=lambda s, b, h, i, j, cap=cap: s * cap)
            )


def test_what_code_finds_elsewhere_and_types_count_too(rng: np.random.Generator) -> None:
    """What is imported inside, found by name, or held by a tuple with names."""
    x = rng.standard_normal((1, 5, 1, 2))
    First = collections.namedtuple("First", "cap other")
    Second = collections.namedtuple("Second", "other cap")

    def imported(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        import test_score_tracing as here

        return s * here.FACTOR[0]

    def by_name(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * globals()["FACTOR"][0]

    def held(pair: Any) -> Any:
        return lambda s, b, h, i, j: s * pair.cap

    for cap in (1.0, 2.0):
        sys.modules["test_score_tracing"].FACTOR[0] = FACTOR[0] = cap
        expected = attention(x, x, x, score=lambda s, b, h, i, j, cap=cap: s * cap)
        for score in (imported, by_name, held((First if cap == 1 else Second)(1.0, 2.0))):
            assert np.array_equal(attention(x, x, x, score=score), expected)


def by_hasattr(module: Any) -> Any:
    return lambda s, b, h, i, j: s * (2.0 if hasattr(module, "cap") else 1.0)


def by_pattern(module: Any) -> Any:
    kind = types.ModuleType

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        match module:
            case kind(cap=_):
                return s * 2.0
        return s * 1.0

    return score


def by_format(module: Any) -> Any:
    text = "{.cap}"
    return lambda s, b, h, i, j: s * (1.0 if "<" in text.format(module) else 2.0)


@pytest.mark.parametrize("make", [by_hasattr, by_pattern, by_format])
def test_attributes_that_no_code_names(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "cap", "<", raising=False)
    if make is not by_format:
        monkeypatch.delattr(math, "cap")
    score = make(math)
    assert of_one(score) == 1.0
    monkeypatch.setattr(math, "cap", 2, raising=False)
    assert of_one(score) == 2.0


def of_one(score: Any) -> float:
    """What a score function makes of 1."""
    x = np.ones((1, 1))
    return float(attention(x, x, x, score=score, return_lse=True)[1][0])


def test_functions_that_call_each_other() -> None:
    def first(s: Any, b: Any, h: Any, i: Any, j: Any, n: int = 2) -> Any:
        return second(s, b, h, i, j, n - 1) * 2

    def second(s: Any, b: Any, h: Any, i: Any, j: Any, n: int) -> Any:
        return s * 1.0 if n <= 0 else following(s, b, h, i, j, n - 1)

    following: Any = first
    assert of_one(first) == 4
    following = second
    assert of_one(first) == 2


def test_what_equal_dtypes_have_beside() -> None:
    for n in (2.0, 3.0):
        plain = np.dtype("f8", metadata={"n": n})
        fields, pair = np.dtype([("x", plain)]), np.dtype((plain, 2))
        for score in (
            lambda s, b, h, i, j, dtype=plain: s * dtype.metadata["n"],
            lambda s, b, h, i, j, dtype=fields: s * dtype["x"].metadata["n"],
            lambda s, b, h, i, j, dtype=pair: s * dtype.base.metadata["n"],
        ):
            assert of_one(score) == n


def test_what_a_library_was_told() -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * np.get_printoptions()["precision"]

    for n in (5, 3):
        with np.printoptions(precision=n):
            assert of_one(score) == n


def test_classes_made_of_numbers_and_tuples(rng: np.random.Generator) -> None:
    """Their attributes are looked up too."""
    x = rng.standard_normal((1, 5, 1, 2))

    class Whole(int):
        cap = 1.0

    class Pair(collections.namedtuple("Pair", "one other")):
        cap = 1.0

    for held in (Whole(1), Pair(1, 2)):
        for cap in (1.0, 2.0):
            type(held).cap = cap
            found = attention(x, x, x, score=lambda s, b, h, i, j, held=held: s * held.cap)
            assert np.array_equal(found, attention(x, x, x, score=lambda s, b, h, i, j, cap=cap: s * cap))


def test_what_is_drawn_is_drawn_in_each_call(rng: np.random.Generator) -> None:
    x, draws = rng.standard_normal((1, 5, 1, 2)), np.random
    for score in (lambda s, b, h, i, j: s * np.random.rand(), lambda s, b, h, i, j: s * draws.rand()):
        assert not np.array_equal(attention(x, x, x, score=score), attention(x, x, x, score=score))


def _set(x: float) -> None:
    FACTOR[0] = x


class Settings(NamedTuple):
    one: float = 1.0
    factor = 1.0  # of the class: no element

    @property
    def cap(self) -> float:
        return FACTOR[0]


def _by_a_named_tuple(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    held = Settings()
    return lambda s, b, h, i, j: s * held.factor, lambda x: monkeypatch.setattr(Settings, "factor", x)


def _by_a_property(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    held = Settings()
    return lambda s, b, h, i, j: s * held.cap, _set


def _by_a_field_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    held = collections.namedtuple("Held", "cap")(5.0)
    monkeypatch.setattr(type(held), "cap", property(lambda self: FACTOR[0]))
    return lambda s, b, h, i, j: s * held.cap, _set


def _by_a_function_that_looks_like_another(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    @functools.wraps(math.exp)
    def helper(s: Any) -> Any:
        return s * FACTOR[0]

    return lambda s, b, h, i, j: helper(s), _set


def _by_a_library_that_calls_back(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """As `and_masks` of PyTorch, whose functions hold those of its callers."""
    namespace: dict[str, Any] = {"__name__": "numpy"}
    exec("def of(inner):\n    def helper(s):\n        return inner(s)\n    return helper", namespace)  # noqa: S102
    helper = namespace["of"](lambda s: s * FACTOR[0])
    helper.__module__ = "numpy"
    return lambda s, b, h, i, j: helper(s), _set


def _by_a_builtin(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    def change(x: float) -> None:
        monkeypatch.setattr(builtins, "of_everybody", x, raising=False)

    return lambda s, b, h, i, j: s * of_everybody, change  # type: ignore[name-defined]  # noqa: F821


def _by_a_name_on_math(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    return lambda s, b, h, i, j: s * math.cap, lambda x: monkeypatch.setattr(math, "cap", x, raising=False)  # type: ignore[attr-defined]


def _by_a_name_on_math_that_another_function_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    module = math

    def helper(of: Any) -> Any:
        return of.cap

    return lambda s, b, h, i, j: s * helper(module), lambda x: monkeypatch.setattr(math, "cap", x, raising=False)


def _by_a_function_on_math(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(math, "capped", lambda s: s * FACTOR[0], raising=False)
    return lambda s, b, h, i, j: math.capped(s), _set  # type: ignore[attr-defined]


def _by_a_module_of_a_known_name(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    module = types.ModuleType("numpy.mine")
    monkeypatch.setitem(sys.modules, "numpy.mine", module)
    module.held = FACTOR  # type: ignore[attr-defined]
    return lambda s, b, h, i, j: s * module.held[0], _set


@pytest.mark.parametrize("of", [
    _by_a_named_tuple, _by_a_property, _by_a_field_that_was_replaced, _by_a_function_that_looks_like_another,
    _by_a_library_that_calls_back, _by_a_builtin, _by_a_name_on_math, _by_a_name_on_math_that_another_function_reads,
    _by_a_function_on_math, _by_a_module_of_a_known_name,
])  # fmt: skip
def test_things_are_not_known_by_their_names(
    of: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rng.standard_normal((1, 5, 1, 2))
    score, change = of(monkeypatch)
    try:
        for cap in (1.0, 2.0):
            change(cap)
            expected = attention(x, x, x, score=lambda s, b, h, i, j, cap=cap: s * cap)
            assert np.array_equal(attention(x, x, x, score=score), expected)
    finally:
        FACTOR[0] = 0.0


def test_a_variable_that_is_not_set_yet(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 5, 1, 2))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * cap

    with pytest.raises(NameError, match="'cap'"):
        attention(x, x, x, score=score)
    cap = 2.0
    assert np.array_equal(attention(x, x, x, score=score), attention(x, x, x, score=lambda s, b, h, i, j: s * 2.0))


def test_what_is_known() -> None:
    """Numbers, also of NumPy, tuples with and without names, functions and modules that nobody changes."""
    sizes, number, low = collections.namedtuple("Sizes", "cap")(1.0), np.float32(2), (1, "a", None, True)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return where(i >= j, tanh(s) * sizes.cap * number * math.pi, np.exp(s) * len(low))

    assert tracing.fingerprint(score) is not None


def test_one_is_known_while_another_thread_imports_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))

    def half(s: Any) -> Any:
        return s * 0.5

    assert tracing.fingerprint(lambda s, b, h, i, j: half(s)) is not None


def test_a_function_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = [], tracing._run
    monkeypatch.setattr(tracing, "_run", lambda *x: made.append(1) or run(*x))

    def of(factor: float) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return helper(s) * factor

        def helper(s: Any) -> Any:
            return tanh(s) + np.float32(1) * math.pi

        return score

    first = trace(of(1.23), {})
    assert len(made) == 1 and trace(of(1.23), {}) is first and len(made) == 1
    assert trace(of(4.56), {}) is not first and len(made) == 2
    assert trace(lambda s, b, h, i, j: 1.23 * (tanh(s) + 1 * math.pi), {}) is not None and len(made) == 3
