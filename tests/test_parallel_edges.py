"""Several ranks where PyTorch's modes meet the call, and where one rank is given what another is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import attention, parallel

torch = pytest.importorskip("torch")

EIGHT = parallel.Rows.contiguous(8, 2, multiple=1)


def said_by(work: Callable[[Any], Any], size: int = 2) -> dict[int, str]:
    """What each rank raises."""
    said = {}

    def run(group: Any) -> None:
        try:
            work(group)
        except Exception as error:
            said[group.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(Exception):  # noqa: B017 - of whichever rank
        parallel.simulated(size).run(run)
    return said


def test_there_is_no_second_derivative() -> None:
    """Not one that is silently nothing: a penalty on the gradient is refused; the gradient itself is what it was."""
    whole = torch.randn(1, 8, 2, 8, dtype=torch.float64)

    def work(group: Any) -> Any:
        x = EIGHT.take(whole, group.rank).clone().requires_grad_()
        (once,) = torch.autograd.grad(parallel.attention(x, x, x, group, rows=EIGHT).sum(), x)
        out = parallel.attention(x, x, x, group, rows=EIGHT)
        (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        assert torch.equal(found, once)
        with pytest.raises(NotImplementedError, match=r"^a gradient of parallel.attention is differentiated"):
            (out.sum() + found.square().sum()).backward()
        return found.detach()

    x = whole.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(attention(x, x, x).sum(), x)
    torch.testing.assert_close(EIGHT.join(parallel.simulated(2).run(work)), wanted)


@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_autocast_casts_as_for_one_device(exchange: str) -> None:
    """The call, once, before anything is sent; gradients come back in the dtype of what was given."""
    given = [torch.randn(1, 64, 4, 16) for _ in "qkv"]
    rows = parallel.Rows.contiguous(64, 2, multiple=1)

    def one(f: Callable[..., Any], *xs: Any) -> list[Any]:
        xs = [x.clone().requires_grad_() for x in xs]  # type: ignore[assignment]
        with torch.autocast("cpu", torch.bfloat16):
            out = f(*xs)
        return [out, *torch.autograd.grad(out.float().square().sum(), xs)]

    def work(group: Any) -> Any:
        own = [rows.take(x, group.rank) for x in given]
        return one(lambda *x: parallel.attention(*x, group, rows=rows, exchange=exchange), *own)

    found = [rows.join(x) for x in zip(*parallel.simulated(2).run(work))]
    for x, y in zip(found, one(attention, *given)):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32


def test_what_a_score_reads_is_compared() -> None:
    def work(group: Any, shape: tuple[int, int]) -> Any:
        x = np.random.default_rng(group.rank).standard_normal((1, 4, 4, 8))
        table = {"t": np.ones(shape)}
        return parallel.attention(
            x, x, x, group, rows=EIGHT, score=lambda s, b, h, i, j, t: s + t[h, 0], score_arrays=table
        )

    for shapes in ([(4, 3), (6, 2)], [(4, 3), (5, 3)]):
        with pytest.raises(
            ValueError, match=r"^score_arrays\['t'\] is of float64, shape .* on rank 0 and of float64, "
        ):
            parallel.simulated(2).run(work, shapes)


X = torch.randn(1, 4, 4, 8)


def _merge(group: Any) -> Any:
    group.meet = lambda: pytest.fail("merge does not meet, so none of its ranks may: it is a collective")
    return parallel.merge(X.clone().requires_grad_(group.rank == 1), torch.zeros(1, 4, 4), group)


def _backward(group: Any) -> Any:
    out, lse = parallel.attention(X, X, X, group, rows=EIGHT, return_lse=True)
    own = out.clone().requires_grad_(group.rank == 1)
    return parallel.attention_backward(own, X, X, X, out, lse, group, rows=EIGHT)


def _pair(group: Any) -> Any:
    both = group.part([group.rank]), group
    return parallel.attention(X, X, X, both, rows=EIGHT, exchange="keys" if group.rank else None)


def _autograd(group: Any) -> Any:
    return parallel.attention(X.clone().requires_grad_(group.rank == 1), X, X, group, rows=EIGHT)


def _masks(group: Any) -> Any:
    chunks = [[(32 * i + 16 * r, 32 * i + 16 * r + 16) for i in range(200)] for r in (0, 1)]
    rows = parallel.Rows(32 * 200, tuple(map(tuple, chunks)))
    keys = parallel.Rows.contiguous(16 + group.rank, 2)
    return parallel.block_mask(lambda b, h, i, j: i >= j, rows, group, block=16, key_rows=keys)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (_merge, "out requires grad, but parallel.merge has no derivative"),
        (_backward, "dout requires grad, but parallel.attention_backward has no derivative"),
        (_pair, "exchange is 'keys', and group holds two"),
        (_autograd, "requires_grad of some input is "),
        (_masks, "key_rows is "),
    ],
)
def test_all_ranks_are_told(work: Callable[[Any], Any], text: str) -> None:
    said = said_by(work)
    assert sorted(said) == [0, 1]
    assert all(text in x and len(x) < 400 for x in said.values()), said


def test_one_number_with_a_stride() -> None:
    def work(group: Any) -> Any:
        return parallel.merge(torch.full((1, 1, 1, 8), group.rank), torch.zeros(1, 1, 2)[..., ::2], group)[0]

    with pytest.raises(TypeError):  # integers
        parallel.simulated(2).run(work)

    def halves(group: Any) -> Any:
        return parallel.merge(torch.full((1, 1, 1, 8), float(group.rank)), torch.zeros(1, 1, 2)[..., ::2], group)[0]

    for out in parallel.simulated(2).run(halves):
        assert (out == 0.5).all()


def test_numbers_that_say_nothing() -> None:
    with pytest.raises(ValueError, match="^mask says inf of a row; it must say how many keys it sees"):
        parallel.Rows.balanced(8, 2, np.full(8, np.inf), multiple=1)
    with pytest.raises(TypeError, match="^rank is 0.5; it must be an integer"):
        EIGHT.take(np.zeros((1, 8)), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^length is '8'; it must be"):
        parallel.Rows.zigzag("8", 2)  # type: ignore[arg-type]


def test_results_are_rounded_under_errstate() -> None:
    x = (np.random.default_rng(0).standard_normal((1, 4, 2, 8)) * 1e-3).astype(np.float16)
    with np.errstate(all="raise"):
        found = parallel.simulated(2).run(lambda g: parallel.attention(x, x, x, g, rows=EIGHT, exchange="keys"))
    assert all(y.dtype == np.float16 for y in found)
