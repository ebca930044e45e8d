"""vmap in JAX and PyTorch of calls whose sinks are mapped: these have no batch axis, and no NaN may come of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference import fresh_rng

from cupyflash import attention


class Library(NamedTuple):
    """The transforms of a library, over one argument, and its arrays."""

    put: Callable[[Any], Any]
    vmap: Callable[..., Any]
    grad: Callable[..., Any]
    pull: Callable[..., Any]  # from a function, where it is taken and what it gets to the gradient


def of(name: str) -> Library:
    if name == "jax":
        jax = pytest.importorskip("jax")
        return Library(jax.numpy.asarray, jax.vmap, jax.grad, lambda f, x, dy: jax.vjp(f, x)[1](dy)[0])
    torch = pytest.importorskip("torch")
    func = torch.func
    return Library(torch.as_tensor, torch.vmap, func.grad, lambda f, x, dy: func.vjp(f, x)[1](dy)[0])


LIBRARIES = pytest.mark.parametrize("name", ["jax", "torch"])


@LIBRARIES
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sink", [0.3, -np.inf])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_what_rows_without_keys_get_reaches_no_sink(name: str, value: float, sink: float, rank: int) -> None:
    """Three keys under a causal mask: two of five queries see none."""
    lib, rng = of(name), fresh_rng()
    shape = (3, *(2, 5, 2, 4)[4 - rank :]) if rank > 2 else (3, 5, 4)
    q, k, v, dout = rng.standard_normal((4, *shape)).astype(np.float32)
    rows = (slice(None),) * (2 if rank == 4 else 1)
    k, v = (x[(*rows, slice(3))] for x in (k, v))
    dead = dout.copy()
    dout[(*rows, slice(2))], dead[(*rows, slice(2))] = 0, value
    sinks = np.full((3, 2), [0.5, sink], np.float32) if rank > 2 else np.full(3, sink, np.float32)
    given, s, clean, anything = [*map(lib.put, (q, k, v))], *map(lib.put, (sinks, dout, dead))
    heads = (2,) if rank > 2 else ()
    dlse = lib.put(np.tile(np.float32([1, 2, 3, 4, 5]), (3, *shape[1 : rank - 2], *heads, 1)))

    def f(q: Any, k: Any, v: Any, s: Any) -> Any:
        return attention(q, k, v, sinks=s, causal=True, return_lse=True)

    def one(q: Any, k: Any, v: Any, s: Any, *d: Any) -> Any:
        return lib.pull(lambda s: f(q, k, v, s), s, d)

    want = np.stack([one(*(x[n] for x in given), s[n], clean[n], dlse[n]) for n in range(3)])
    assert np.isfinite(want).all()
    for found in (
        lib.vmap(one)(*given, s, anything, dlse),
        lib.pull(lambda s: lib.vmap(f)(*given, s), s, (anything, dlse)),
    ):
        np.testing.assert_allclose(found, want, atol=1e-5)


@LIBRARIES
@pytest.mark.parametrize("sees", [True, False])
def test_a_sink_of_minus_infinity_has_no_gradient(name: str, sees: bool) -> None:
    lib, rng = of(name), fresh_rng()
    q, k, v = (lib.put(x) for x in rng.standard_normal((3, 2, 4, 2, 4)))
    s, seen = lib.put(np.array([[-np.inf, 0.3], [0.1, -np.inf]])), lib.put(np.full((2, 4), sees))

    def total(q: Any, k: Any, v: Any, s: Any, seen: Any) -> Any:
        return (attention(q, k, v, sinks=s, key_mask=seen) ** 2).sum()

    want = np.stack([lib.grad(lambda s, n=n: total(q[n], k[n], v[n], s, seen[n]))(s[n]) for n in range(2)])
    assert np.isfinite(want).all() and bool(want.any()) == sees and want[0, 0] == want[1, 1] == 0
    for argument in range(4):
        vmapped = lib.vmap(lib.grad(total, argument))(q, k, v, s, seen)
        outer = lib.grad(lambda *x: lib.vmap(total)(*x).sum(), argument)(q, k, v, s, seen)
        np.testing.assert_allclose(outer, vmapped, atol=1e-6)
    np.testing.assert_allclose(outer, want, atol=1e-6)


def test_an_axis_of_no_entries() -> None:
    lib = of("jax")
    q, s = lib.put(np.zeros((0, 3, 2, 4), np.float32)), lib.put(np.zeros((0, 2), np.float32))
    for argument, shape in ((0, q.shape), (1, s.shape)):
        grad = lib.grad(lambda q, s: attention(q, q, q, sinks=s).sum(), argument)
        assert lib.vmap(grad)(q, s).shape == shape
