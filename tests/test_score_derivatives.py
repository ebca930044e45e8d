"""What a score, its slope and the derivatives by what it reads change by (score/derivative.py), against finite
differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_score_functions import UNARY

from cupyflash import attention, attention_backward_jvp, attention_jvp
from cupyflash.cpu.score import compute
from cupyflash.score import Score, absolute, maximum, tanh, trace, where
from cupyflash.score.derivative import moved, reads, slope
from cupyflash.score.graph import Node

EVERY = ("s", "score_arrays['x']", "score_arrays['y']")
SCORES: dict[str, Callable[..., Any]] = {
    "capped": lambda s, b, h, i, j, x, y: y[h] * tanh(s / y[h]) + x[h, j - i] * s,
    "read twice": lambda s, b, h, i, j, x, y: x[h, j] * x[h, i] * s * s + y[j],
    "chosen": lambda s, b, h, i, j, x, y: where(i < 2, s * y[j], s * s * x[b, i]),
    **{name: lambda s, b, h, i, j, x, y, f=f: f(s * x[h, j] + y[i]) for name, (f, _) in UNARY.items()},
}
FORM = {"x": ("float64", 2, False), "y": ("float64", 1, False)}


class Drawn:
    """Everything that a score of 3 by 4 pairs depends on, and a direction in which it moves."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.s, self.ts = rng.standard_normal((2, 1, 2, 3, 4))
        self.arrays = [rng.standard_normal((2, 5)), rng.uniform(1, 2, 5)]
        self.tangents = [rng.standard_normal(x.shape) for x in self.arrays]

    def value(
        self, nodes: tuple[Node, ...], root: int | None, step: float = 0.0, moves: tuple[str, ...] = EVERY
    ) -> Any:
        """Of a node, where those that move are a step away."""
        on = [float(name in moves) * step for name in EVERY]
        place = zip("bhij", np.ogrid[:1, :2, :3, :4])
        variables = {"s": self.s + on[0] * self.ts, "ts": self.ts} | {n: x.astype(np.int32) for n, x in place}
        arrays = [x + far * t for x, far, t in zip(self.arrays, on[1:], self.tangents)]
        return 0.0 if root is None else compute(nodes, (root,), variables, [*arrays, *self.tangents], np.float64)[0]

    def agree(self, found: Any, nodes: tuple[Node, ...], root: int, moves: tuple[str, ...]) -> None:
        h = 1e-6
        expected = (self.value(nodes, root, h, moves) - self.value(nodes, root, -h, moves)) / (2 * h)
        np.testing.assert_allclose(np.broadcast_to(found, np.shape(expected)), expected, atol=1e-7)


@pytest.mark.parametrize("moves", [EVERY, *[(name,) for name in EVERY]])
@pytest.mark.parametrize("name", SCORES)
def test_what_moves(name: str, moves: tuple[str, ...], rng: np.random.Generator) -> None:
    score, drawn = trace(SCORES[name], FORM), Drawn(rng)
    assert isinstance(score, Score)
    nodes, tangent, bend = moved(score, moves)
    drawn.agree(drawn.value(nodes, tangent), score.nodes, score.root, moves)
    by_s = slope(score)
    assert by_s is not None
    drawn.agree(drawn.value(nodes, bend), *by_s, moves)
    for array in (0, 1):
        assert reads(score, array)
        for read in reads(score, array, moves):
            drawn.agree(drawn.value(read.nodes, read.bend), read.nodes, read.change, moves)


def test_what_does_not_move_is_not_computed() -> None:
    score = trace(lambda s, b, h, i, j, x, y: s + x[h, j], FORM)
    nodes, tangent, bend = moved(score, ("s",))
    assert [node.op for node in nodes] == ["ts"] and tangent == 0 and bend is None
    assert moved(score, ("score_arrays['y']",)) == ((), None, None)


def test_at_corners_second_derivatives_are_those_of_the_branch(rng: np.random.Generator) -> None:
    """0 of maxima and absolute values, and what `where` chooses: as a smooth function with the same slope."""
    q, k, v, tq, dout = rng.standard_normal((5, 1, 5, 2, 4))
    q[:, ::2] = 0  # every other query's products are 0

    def bent(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return maximum(s, 0) + absolute(s) + where(s < 0, 5 * s * s - s, s * s + s)

    def smooth(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # the same where s is 0, but for corners
        return 1.5 * s + s * s

    found = []
    for score in (bent, smooth):
        out, lse = attention(q, k, v, score=score, return_lse=True)
        given = (q, k, v, out, lse)
        jvp = attention_jvp({"q": tq}, *given, score=score)
        found.append([x[:, ::2] for x in (jvp[0], attention_backward_jvp({"q": tq}, dout, *given, score=score).dq)])
    for x, y in zip(*found):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)
