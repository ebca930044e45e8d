"""The problem that arrays and options state: bands, scale, FLOPs, shapes. Messages: test_messages.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from reference import visible

from cupyflash.problem import AttentionProblem, View, check_like, describe, lse_shape, out_shape, to_bshd


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


def test_flops() -> None:
    pairs = 2 * 4 * 6 * 9
    assert stated().flops() == 2 * pairs * (16 + 8)
    assert stated().flops(backward=True) == 2 * pairs * (3 * 16 + 2 * 8)
    large = stated(16384, 16384, causal=True)
    assert large.flops() == pytest.approx(2 * 2 * 4 * (16384 * 16385 / 2) * 24, rel=1e-3)


def test_scale() -> None:
    assert stated().scale == 0.25
    assert stated(scale=np.float32(0.5)).scale == 0.5
    assert stated(scale=-2).scale == -2.0
    empty = View((1, 1, 1, 0), (), "float32", "cpu", "numpy")
    assert describe(empty, empty, empty).scale == 1.0


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
