"""flex_attention and what its score function does beside computing: writes in place, contexts, looks at values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.flex_attention")

from cupyflash.torch import flex_attention

N = 9


def given(rng: np.random.Generator) -> tuple[Any, ...]:
    """q, k, v and a table of one number for each key."""
    shapes = (1, 2, N, 4), (1, 2, N, 4), (1, 2, N, 4), (N,)
    return tuple(torch.from_numpy(rng.standard_normal(shape)).requires_grad_() for shape in shapes)


def of_a_part(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = t.clone()
    u[0] = 5.0
    u[1:3].mul_(3)
    return s + u[j]


def of_zeros(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    m = torch.ones(N, dtype=torch.float64, device=t.device)
    m[:3] = 0
    m[4:6] = t[4:6]
    return s * m[j]


def of_the_whole(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = t.clone()
    w = u.view(3, 3)
    u.mul_(2)
    return s + w[j // 3, j % 3]


def between(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = t.clone()
    before = u + 1
    u.mul_(2)
    return s + u[j] + (before * 3)[j]


def of_the_diagonal(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = torch.zeros(N, N, dtype=torch.float64, device=t.device)
    u.fill_diagonal_(-2.0)
    u.diagonal().add_(t)
    return s + u[i, j]


def of_a_view_of_a_view(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = t.clone()
    u.view(3, 3).narrow(0, 0, 1).zero_()
    return s + u[j]


def of_a_number(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    c = torch.zeros(2, dtype=torch.float64, device=t.device)
    c[1] = t[3]
    total = torch.zeros((), dtype=torch.float64, device=t.device)
    total += s
    return total * c[1]


def of_one_like_it(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    x = torch.zeros_like(t)
    x[1] = 4.0
    return s * (x + t)[j] + t.new_ones(6).sum() + torch.full_like(t, 3.0)[j] * torch.ones_like(s)


def derived(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """By a transform of its own."""
    slope = torch.func.grad(lambda x: (x**2).sum())
    return slope(s) + slope(t)[j]


def part(t: Any) -> Any:
    return torch.cat((torch.full_like(t[:1], 5.0), t[1:3] * 3, t[3:]))


def ones(t: Any) -> Any:
    one = torch.ones_like(t)
    return torch.cat((0 * one[:3], one[3:4], t[4:6], one[6:]))


WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # and what it is, of all scores
    "part": (of_a_part, lambda s, t: s + part(t)),
    "zeros": (of_zeros, lambda s, t: s * ones(t)),
    "whole": (of_the_whole, lambda s, t: s + 2 * t),
    "between": (between, lambda s, t: s + 2 * t + 3 * (t + 1)),
    "diagonal": (of_the_diagonal, lambda s, t: s + torch.diag(t - 2)),
    "view of a view": (of_a_view_of_a_view, lambda s, t: s + torch.cat((0 * t[:3], t[3:]))),
    "like it": (of_one_like_it, lambda s, t: s * (t + 4 * (torch.arange(N) == 1)) + 9),
    "derived": (derived, lambda s, t: 2 * s + 2 * t),
    "number": (of_a_number, lambda s, t: s * t[3]),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_is_read(name: str, rng: np.random.Generator) -> None:
    function, of_all = WRITES[name]
    q, k, v, t = given(rng)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(s, b, h, i, j, t)

    expected = torch.softmax(of_all(q @ k.mT / 2, t), -1) @ v
    for _ in range(2):  # from one trace
        out = flex_attention(q, k, v, score_mod=score_mod)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        for x, y in zip(
            torch.autograd.grad(out.sin().sum(), (q, k, v, t)),
            torch.autograd.grad(expected.sin().sum(), (q, k, v, t), retain_graph=True),
        ):
            torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


def read_before(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = t.clone()
    x = u[j]
    u[:3] = 0
    return s + x + u[j]


def captured(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    t[0] = 1.0
    return s + t[j]


def by_the_pair(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    u = t.clone()
    u.view(3, 3)[j // 3] = 0
    return s + u[i]


def of_two_views(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    x = torch.ops.aten.alias(s)
    s += 1
    return x * s


REFUSED: dict[Callable[..., Any], tuple[type[Exception], str]] = {
    read_before: (NotImplementedError, "^score_mod writes .* of which it has read elements before; .* clone"),
    captured: (NotImplementedError, "^score_mod writes .* into a tensor that it captures; .* clone"),
    by_the_pair: (NotImplementedError, "^score_mod writes into a tensor by a number that depends on the pair"),
    of_two_views: (NotImplementedError, "^score_mod writes .* into what it has another view of"),
    lambda s, b, h, i, j, t: s + t.view(3, 3)[j // 3, :2].sum(): (
        NotImplementedError, "^score_mod reads a part of a tensor beside a number that depends on the pair",
    ),
    lambda s, b, h, i, j, t: s * sum(t[n] for n in range(i)): (
        TypeError, "^score_mod decides by a number that depends on the pair",
    ),
    lambda s, b, h, i, j, t: s + t.narrow(0, j, 1).sum(): (
        TypeError, "^score_mod hands a number of the pair to what asks for its value",
    ),
    lambda s, b, h, i, j, t: s + t[j:].sum(): (NotImplementedError, "^score_mod reads a part of a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_is_refused(function: Callable[..., Any], rng: np.random.Generator) -> None:
    kind, message = REFUSED[function]
    q, k, v, t = (x.detach() for x in given(rng))
    with pytest.raises(kind, match=message):
        flex_attention(q, k, v, score_mod=lambda *pair: function(*pair, t))


class Straight(torch.autograd.Function):
    """The floor, whose gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.floor(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


def held(x: Any) -> Any:
    with torch.no_grad():
        return torch.tanh(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, j, t: s + held(t)[j],
        lambda s, j, t: held(s),
        lambda s, j, t: s + Straight.apply(3 * t)[j],
        lambda s, j, t: Straight.apply(3 * s),
    ],
    ids=["captured, no_grad", "score, no_grad", "captured, Function", "score, Function"],
)
def test_gradients_that_would_not_be_followed_are_refused(
    function: Callable[..., Any], rng: np.random.Generator
) -> None:
    q, k, v, t = given(rng)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(s, j, t)

    for leaves in ((q, k, v), (q.detach(), k, v)):
        with pytest.raises(NotImplementedError, match="^score_mod computes without gradients"):
            flex_attention(*leaves, score_mod=score_mod)
    with torch.no_grad():
        scores = function(q @ k.mT / 2, slice(None), t)
        torch.testing.assert_close(flex_attention(q, k, v, score_mod=score_mod), torch.softmax(scores, -1) @ v)
        table = torch.linspace(0, 1, N, dtype=torch.float64)

    def without(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            far = torch.arange(N)
        return s + (t.detach() * table)[j] + far[j]

    expected = torch.softmax(q @ k.mT / 2 + t.detach() * table + torch.arange(N), -1) @ v
    torch.testing.assert_close(flex_attention(q, k, v, score_mod=without), expected)


def buckets(i: Any, j: Any) -> Any:
    with torch.no_grad():
        n = torch.abs(i - j)
        far = 2 + (torch.log(n.clamp(min=1).float()) * 2).to(torch.int32)
        table = torch.linspace(0, 1, N, dtype=torch.float64) * 2
        table[3] = 1.0
    return torch.where(n < 2, n, torch.clamp(far, max=N - 1)), table


def test_what_has_no_gradient_may_be_computed_without(rng: np.random.Generator) -> None:
    q, k, v, t = given(rng)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        bucket, table = buckets(i, j)
        with torch.no_grad():
            high = s > 1
        return torch.where(high, s, 2 * s) + t[bucket] + table[j]

    place = torch.arange(N)
    bucket, table = buckets(place[:, None], place)
    scores = q @ k.mT / 2
    scores = torch.where(scores > 1, scores, 2 * scores) + t[bucket.long()] + table
    results = flex_attention(q, k, v, score_mod=score_mod), torch.softmax(scores, -1) @ v
    torch.testing.assert_close(*results)
    for x, y in zip(*(torch.autograd.grad(out.sin().sum(), (q, k, v, t)) for out in results)):
        torch.testing.assert_close(x, y)


def test_nothing_is_left_on_tensors(rng: np.random.Generator) -> None:
    q, k, v, t = (x.detach() for x in given(rng))
    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t.type_as(s)[j])
    assert not vars(t)
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[j] * float(t[0]))
    torch.testing.assert_close(out, torch.softmax(q @ k.mT / 2 + t * t[0], -1) @ v)


def test_casts_are_those_of_where_it_computes(rng: np.random.Generator) -> None:
    q, k, v, _ = (x.detach() for x in given(rng))
    a, w = torch.from_numpy(rng.standard_normal((2, N, N), "float32"))

    def off(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            table = a @ w
        return s + table[i, j]

    expected = torch.softmax(q @ k.mT / 2 + (a @ w).double(), -1) @ v
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            out = flex_attention(q, k, v, score_mod=off)
    torch.testing.assert_close(out, expected)


def test_values_of_what_does_not_depend_on_the_pair(rng: np.random.Generator) -> None:
    q, k, v, t = (x.detach() for x in given(rng))

    def looks(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * (t * 2).sum().item() if t[0] > 0 else s + int(t[1] * 10)

    for first in (1.0, -1.0, 2.0):
        t[0] = first
        scores = q @ k.mT / 2
        scores = scores * 2 * t.sum() if first > 0 else scores + int(t[1] * 10)
        torch.testing.assert_close(flex_attention(q, k, v, score_mod=looks), torch.softmax(scores, -1) @ v)
