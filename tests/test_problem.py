"""The problem that arrays and options state: bands, scale, FLOPs, shapes. Messages: test_messages.py."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from reference import visible

from cupyflash.counts import check_hint
from cupyflash.gradients import Gradients, check_wrt
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import (
    ARRAYS,
    FLOATS,
    OPTIONS,
    ArrayRule,
    AttentionProblem,
    View,
    check_options,
    complete,
    contiguous,
    to_bshd,
)
from cupyflash.rules import check_like, describe, lasting, lse_shape, out_shape, state, whole


def stated(sq: int = 6, sk: int = 9, **options: Any) -> AttentionProblem:
    q, k = (View((2, s, 4, 16), (), "float32", "cpu", "numpy") for s in (sq, sk))
    return describe(q, k, k._replace(shape=(2, sk, 4, 8)), **options)


@pytest.mark.parametrize(
    ("options", "band"),
    [
        ({}, (3, None, None)),
        ({"causal": True}, (3, None, 0)),
        ({"causal": "bottom_right"}, (3, None, 0)),
        ({"causal": "top_left"}, (0, None, 0)),
        ({"window": (2, 1)}, (3, 2, 1)),
        ({"window": (2, None)}, (3, 2, None)),
        ({"window": (None, 1)}, (3, None, 1)),
        ({"window": (0, 0)}, (3, 0, 0)),
        ({"causal": True, "window": (2, 5)}, (3, 2, 0)),
        ({"causal": "top_left", "window": (2, None)}, (0, 2, 0)),
        ({"window": (np.int64(2), np.int8(1))}, (3, 2, 1)),
        ({"window": [2, 1]}, (3, 2, 1)),
        ({"window": (8, 5)}, (3, None, None)),  # bounds that hide nothing are none
        ({"window": (7, 4)}, (3, 7, 4)),
        ({"causal": "top_left", "window": (5, 9)}, (0, None, 0)),
    ],
)
def test_band(options: dict[str, Any], band: tuple[int, int | None, int | None]) -> None:
    problem = stated(**options)
    assert (problem.diagonal, problem.left, problem.right) == band


@pytest.mark.parametrize("seqs", [(6, 9), (9, 6), (1, 7), (7, 1), (5, 5)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (None, 3), (3, None), (20, 20)])
def test_visible_pairs_are_counted(seqs: tuple[int, int], causal: bool | str, window: Any) -> None:
    problem = stated(*seqs, causal=causal, window=window)
    assert problem.visible == visible(problem)[0].sum()


def test_a_bound_that_is_dropped_hides_nothing() -> None:
    for left in range(12):
        for right in range(12):
            problem = stated(window=(left, right))
            i, j = np.ogrid[:6, :9]
            seen = (j >= i + 3 - left) & (j <= i + 3 + right)
            assert (visible(problem)[0, 0] == seen).all()


def test_visible_pairs_of_any_band_are_counted_exactly(rng: np.random.Generator) -> None:
    for _ in range(300):
        sq, sk = (int(n) for n in rng.integers(0, 24, 2))
        left, right = (None if rng.random() < 0.3 else int(rng.integers(30)) for _ in range(2))
        problem = AttentionProblem(
            "float32", 1, sq, sk, 1, 1, 8, 8, 1.0, diagonal=int(rng.integers(-30, 30)), left=left, right=right
        )
        assert problem.visible == visible(problem).sum(), problem


def test_live_rows_are_those_with_a_visible_pair(rng: np.random.Generator) -> None:
    for _ in range(300):
        sq, sk = (int(n) for n in rng.integers(1, 24, 2))
        left, right = (None if rng.random() < 0.3 else int(rng.integers(30)) for _ in range(2))
        problem = AttentionProblem(
            "float32", 1, sq, sk, 1, 1, 8, 8, 1.0, diagonal=int(rng.integers(-30, 30)), left=left, right=right
        )
        seen, live = visible(problem)[0, 0], problem.live
        if not seen.any():
            assert live == (range(sq), range(sk))
        else:
            assert [list(x) for x in live] == [list(np.flatnonzero(seen.any(axis))) for axis in (1, 0)], problem


def test_visible_pairs_of_long_sequences_are_not_estimated() -> None:
    n, window = 1_000_003, 4095
    assert stated(n, n, causal=True).visible == n * (n + 1) // 2
    assert stated(n, n, window=(window, 0)).visible == n * (window + 1) - window * (window + 1) // 2


def test_flops() -> None:
    pairs = 2 * 4 * 6 * 9
    assert stated().flops() == 2 * pairs * (16 + 8)
    assert stated().flops(BACKWARD) == 2 * pairs * (3 * 16 + 2 * 8)
    large = stated(16384, 16384, causal=True)
    assert large.flops() == pytest.approx(2 * 2 * 4 * (16384 * 16385 / 2) * 24, rel=1e-3)


def test_scale() -> None:
    assert stated().scale == 0.25
    assert stated(scale=np.float32(0.5)).scale == 0.5
    assert stated(scale=-2).scale == -2.0
    empty = View((1, 1, 1, 0), (), "float32", "cpu", "numpy")
    assert describe(empty, empty, empty).scale == 1.0


def test_softcap() -> None:
    assert stated().softcap is None and stated(softcap=None) == stated(softcap=0) == stated(softcap=-0.0) == stated()
    assert stated(softcap=np.float32(30)).softcap == 30.0 and stated(softcap=30) != stated()


def test_problems_are_data() -> None:
    assert stated(causal=True) == stated(causal="bottom_right") and hash(stated()) == hash(stated())
    assert stated() != stated(causal=True)
    assert stated().group == 1 and stated().lse_dtype == "float32"


@pytest.mark.parametrize(
    ("quad", "layout", "want"),
    [
        ((2, 5, 4, 8), "bshd", (2, 5, 4, 8)),
        ((2, 4, 5, 8), "bhsd", (2, 5, 4, 8)),
        ((5, 4, 8), "bshd", (1, 5, 4, 8)),
        ((4, 5, 8), "bhsd", (1, 5, 4, 8)),
        ((5, 8), "bshd", (1, 5, 1, 8)),
        ((5, 8), "bhsd", (1, 5, 1, 8)),
    ],
)
def test_layouts_and_ranks(quad: tuple[int, ...], layout: str, want: tuple[int, ...]) -> None:
    assert to_bshd(quad, layout) == want
    x = View(quad, (), "float16", "cpu", "numpy")
    problem = describe(x, x, x, layout=layout)
    assert (problem.batch, problem.seq_q, problem.heads_q, problem.dim) == want
    assert out_shape(quad, problem) == quad
    b, s, h, _ = want
    assert lse_shape(len(quad), problem) == (b, h, s)[4 - len(quad) :]


def test_what_has_no_score_is_empty() -> None:
    assert stated(0, 9).empty and stated(6, 0).empty and not stated().empty
    assert math.isclose(stated(0, 9).flops(), 0)


def test_check_like() -> None:
    q = View((2, 6, 4, 16), (), "float32", "cuda:0", "cupy")
    check_like("out", q, q.shape, "float32", q)
    with pytest.raises(TypeError, match="out has dtype float32; it must be float64"):
        check_like("out", q, q.shape, "float64", q)
    with pytest.raises(ValueError, match=r"out has shape \(2, 6, 4, 16\); it must be \(1, 2\)"):
        check_like("out", q, (1, 2), "float32", q)
    with pytest.raises(ValueError, match="out is on cuda:1 but q is on cuda:0"):
        check_like("out", q._replace(device="cuda:1"), q.shape, "float32", q)
    with pytest.raises(TypeError, match="out is a torch array but q is a cupy array"):
        check_like("out", q._replace(kind="torch"), q.shape, "float32", q)


# ---- the tables -----------------------------------------------------------------------------------------------------

BIAS = ArrayRule(
    "bias", ("batch", "head", "query", "key"), ("q", "float32"), "bias", "added to the score", gradient=True
)
SLOPES = ArrayRule("slopes", ("head",), ("float32",), "slopes", "of each head", rows=True)


def test_every_option_has_a_default_that_its_check_takes() -> None:
    for row in OPTIONS:
        row.check(row.default)
        assert row.help.endswith(".")
    assert stated(**{row.name: row.default for row in OPTIONS}) == stated()
    assert complete({"scale": 2.0}) == {**{row.name: row.default for row in OPTIONS}, "scale": 2.0}
    assert list(complete({"scale": 2.0, "causal": True})) == [row.name for row in OPTIONS]


def test_an_option_that_changes_the_gradients_alone_changes_no_forward() -> None:
    q = View((2, 6, 4, 16), (), "float32", "cpu", "numpy")
    views = {"q": q, "k": q, "v": q, "dout": q, "out": q, "lse": q._replace(shape=(2, 4, 6))}
    for row in OPTIONS:
        if row.of_gradients:
            plain = state(views, {}, {}, FORWARD)
            assert state(views, {}, {row.name: True}, FORWARD) == plain
            assert state(views, {}, {row.name: True}, BACKWARD) != state(views, {}, {}, BACKWARD)


def test_optional_arrays_are_told_by_name_and_dtype() -> None:
    mask = View((2, 9), (9, 1), "bool", "cpu", "numpy")
    problem = stated(key_mask=mask)
    assert problem.given == (("key_mask", "bool", ("batch", "key")),) and problem.has("key_mask")
    assert problem.array("key_mask").axes == ("batch", "key") and problem.array("bias") is None
    one = stated(key_mask=mask._replace(strides=(0, 1)))  # as one with a batch axis of length 1: nothing is read twice
    assert one.array("key_mask").axes == ("key",) == stated(key_mask=mask._replace(shape=(1, 9))).array("key_mask").axes
    assert not stated().has("key_mask") and stated().given == ()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'keymask'"):
        check_options("explain", ["causal", "key_mask", "keymask"])
    check_options("explain", ["causal", "key_mask", "out"], ("out",))


def test_gradients_unpack_as_those_of_q_k_and_v() -> None:
    grads = Gradients(1, 2, 3, {"sinks": 4})
    dq, dk, dv = grads
    assert (dq, dk, dv, len(grads), grads.dsinks, grads.dbias) == (1, 2, 3, 3, 4, None)
    again = pickle.loads(pickle.dumps(grads))
    assert again == grads and again.dsinks == 4 and again.dbias is None
    for row in ARRAYS:
        assert hasattr(grads, f"d{row.name}") == row.gradient


def test_gradients_are_asked_for_by_name() -> None:
    arrays = {"q": 0, "bias": 1, "alibi_slopes": 2, "sinks": 3, "key_mask": None}
    assert check_wrt((), arrays) == check_wrt([], arrays) == ()
    assert check_wrt("sinks", arrays) == ("sinks",)
    for several in (["sinks", "bias"], {"sinks": 0, "bias": 0}, (x for x in ("sinks", "bias", "sinks"))):
        assert check_wrt(several, arrays) == ("bias", "sinks")


def test_lengths_of_an_array() -> None:
    slopes = ArrayRule("slopes", ("batch", "head"), ("float32",), "slopes", "of each head")
    for shape in ((2, 1, 6, 9), (6, 1), ()):
        assert BIAS.lengths(shape) == (1,) * (4 - len(shape)) + shape
    assert slopes.lengths((2, 4)) == (2, 4, 1, 1) and slopes.lengths((4,)) == SLOPES.lengths((4,)) == (1, 4, 1, 1)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_shapes_of_optional_arrays(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes that q has not, they have not either."""
    shape = {4: (2, 6, 4, 16), 3: (6, 4, 16), 2: (6, 16)}[rank]
    q = View(shape, (), "float16", "cpu", "numpy")
    k = q._replace(shape=tuple(9 if n == 6 else n for n in shape))
    problem = describe(q, k, k)
    sizes = {"batch": 2, "head": 4, "query": 6, "key": 9}
    has = [axis for axis in sizes if axis not in ("batch", "head")[: 4 - rank]]
    for row in (*[row for row in ARRAYS if not (row.of_float8 or row.ragged or row.placed)], BIAS, SLOPES):
        want = tuple(sizes[axis] for axis in row.axes if axis in has)
        assert row.shape(problem, rank) == want
        assert whole(row, problem, q).shape == want
    assert whole(BIAS, problem, q).dtype == "float16" and whole(SLOPES, problem, q).dtype == "float32"
    for module in ("problem", "rules"):
        monkeypatch.setattr(f"cupyflash.{module}.ARRAYS", (BIAS, SLOPES))
    given = {row.name: whole(row, problem, q) for row in (BIAS, SLOPES)}
    assert [x[:2] for x in describe(q, k, k, **given).given] == [("bias", "float16"), ("slopes", "float32")]


def test_axes_of_length_1_stand_for_all() -> None:
    problem = stated()
    full = View((2, 4, 6, 9), contiguous((2, 4, 6, 9)), "float32", "cpu", "numpy")
    assert BIAS.strides(full, problem) == (216, 54, 9, 1)
    one = full._replace(shape=(1, 4, 1, 9), strides=contiguous((1, 4, 1, 9)))
    assert BIAS.strides(one, problem) == (0, 9, 0, 1)
    assert BIAS.strides(full._replace(shape=(4, 6, 9), strides=(54, 9, 1)), problem, 3) == (0, 54, 9, 1)
    assert SLOPES.strides(full._replace(shape=(4,), strides=(1,)), problem) == (0, 1, 0, 0)
    mask = View((1, 9), (9, 1), "bool", "cpu", "numpy")
    assert stated(key_mask=mask).has("key_mask")
    assert stated(key_mask=mask._replace(shape=(9,), strides=(1,))).has("key_mask")
    for wrong in ((2, 8), (3, 9), (2,), (1, 2, 9)):
        with pytest.raises(
            ValueError, match=r"key_mask has shape .*; it must be \(2, 9\), \(batch, key\), where a length of 1"
        ):
            stated(key_mask=mask._replace(shape=wrong))


def test_leading_axes_may_be_left_out() -> None:
    problem = stated()
    base = View((), (), "float32", "cpu", "numpy")
    for shape, strides in (
        ((4, 6, 9), (0, 54, 9, 1)), ((6, 9), (0, 0, 9, 1)), ((4, 1, 1), (0, 1, 0, 0)), ((9,), (0, 0, 0, 1)),
        ((), (0, 0, 0, 0)),
    ):  # fmt: skip
        x = base._replace(shape=shape, strides=contiguous(shape))
        assert BIAS.strides(x, problem) == strides
        assert stated(bias=x).given[0][:2] == ("bias", "float32")
    (slopes,) = (row for row in ARRAYS if row.name == "alibi_slopes")
    assert slopes.strides(base._replace(shape=(4,), strides=(3,)), problem) == (0, 3, 0, 0)
    assert slopes.strides(base._replace(shape=(2, 1), strides=(7, 1)), problem) == (7, 0, 0, 0)
    assert slopes.strides(base._replace(shape=(4,), strides=(3,)), problem, 3) == (0, 3, 0, 0)
    transposed = base._replace(shape=(6, 9), strides=(1, 6))
    (bias,) = (row for row in ARRAYS if row.name == "bias")
    assert bias.strides(transposed, problem) == (0, 0, 1, 6) and bias.to_copy(transposed, problem) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_of_optional_arrays(dtype: str) -> None:
    """That of q or float32; a mask is booleans."""
    q = View((2, 6, 4, 16), (), dtype, "cpu", "numpy")
    for name in ("bias", "alibi_slopes", "sinks"):
        for other in (*FLOATS, "bool"):
            x = View((4, 1, 1) if name == "bias" else (4,), (1,) * (3 if name == "bias" else 1), other, "cpu", "numpy")
            if other in (dtype, "float32"):
                assert describe(q, q, q, **{name: x}).given[0][:2] == (name, other)
            else:
                with pytest.raises(TypeError, match=f"{name} has dtype {other}; it must be .*{dtype}"):
                    describe(q, q, q, **{name: x})


def test_rows_that_kernels_cannot_read_are_copied() -> None:
    problem = stated()
    (row,) = (rule for rule in ARRAYS if rule.rows and not (rule.ragged or rule.placed))
    mask = View((2, 9), (9, 1), "bool", "cpu", "numpy")
    assert row.to_copy(mask, problem) is None and row.to_copy(mask._replace(strides=(0, 1)), problem) is None
    assert row.to_copy(mask._replace(strides=(18, 2)), problem) == mask._replace(strides=(18, 2))
    assert row.to_copy(mask._replace(shape=(2, 1)), problem) == mask._replace(strides=(9, 0))
    assert row.to_copy(mask._replace(shape=(1, 1)), stated(sk=1)) is None
    slopes = View((4,), (3,), "float32", "cpu", "numpy")
    assert SLOPES.to_copy(slopes, problem) == slopes and SLOPES.to_copy(slopes._replace(strides=(1,)), problem) is None
    assert SLOPES.to_copy(slopes._replace(shape=(), strides=()), problem, 2) is None


def test_what_is_asked_for_by_position() -> None:
    """diagonal is data: a part of a sequence may stand anywhere."""
    problem = AttentionProblem("float32", 1, 4, 20, 1, 1, 8, 8, 1.0, diagonal=7, right=0)
    assert problem.visible == 8 + 9 + 10 + 11 == visible(problem)[0, 0].sum()


@pytest.mark.parametrize(
    "dtype, largest", [("float16", 1e30), ("bfloat16", 1e30), ("float32", 1e30), ("float64", 1e290)]
)
def test_range_of_the_scale(dtype: str, largest: float) -> None:
    q = View((2, 6, 4, 16), (), dtype, "cpu", "numpy")
    for scale in (0, -0.0, largest, -largest, 1 / largest, 1):
        assert describe(q, q, q, scale=scale).scale == scale
    for scale in (10 * largest, -2 * largest, 0.5 / largest):
        with pytest.raises(
            ValueError, match=f"scale is .*; for {dtype} inputs its size must be from 1e-.* to 1e.*, or 0"
        ):
            describe(q, q, q, scale=scale)


@pytest.mark.parametrize("number", [np.float64(0.3), np.float32(0.3), np.array(0.3), np.int8(2)])
def test_numbers_of_others_become_pythons(number: Any) -> None:
    """Before anything is kept of them: an array may hold another one later."""
    for name in ("scale", "softcap"):
        assert type(lasting({name: number})[name]) in (int, float)


@pytest.mark.parametrize(
    ("longest", "plan"), [(0, 1), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (np.int64(128), 128)]
)
def test_a_longest_length_is_the_next_power_of_two(longest: int, plan: int) -> None:
    """A power of two is one already: twice as many would give tiles of other shapes, and more shares."""
    assert check_hint("max_seqlen_q", longest) == plan
