"""Results in float32, and gradients that are added to what their targets hold, by the kernels of each family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend, pairs
from reference import DTYPES
from test_guards import Arena

from cupyflash import attention, attention_backward

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(b, d, id=f"{b.name}-{d}") for b, d in pairs() if b.family in ("sm90", "sm80", "simt")]
WIDE = {"float16": "float32", "bfloat16": "float32"}
NAMES = ("dq", "dk", "dv")


def draw(backend: Backend, rng: np.random.Generator, dtype: str, dims: tuple[int, int]) -> tuple[Any, ...]:
    """q, k, v, dout."""
    shapes = (1, 200, 4, dims[0]), (1, 300, 2, dims[0]), (1, 300, 2, dims[1]), (1, 200, 4, dims[1])
    return tuple(backend.put(rng.standard_normal(shape).astype(DTYPES[dtype])) for shape in shapes)


@pytest.mark.parametrize("dims", [(64, 64), (128, 90), (44, 33)], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_gradients_are_added(backend: Backend, dtype: str, dims: tuple[int, int], rng: np.random.Generator) -> None:
    """To the bit as after the call, and rounded once; rows that see nothing keep what they hold."""
    q, k, v, dout = draw(backend, rng, dtype, dims)
    wide, own = WIDE.get(dtype, dtype), DTYPES[dtype]
    options: dict[str, Any] = {"causal": "top_left", "at": (0, 0, 0, 90), "family": backend.family}
    exact, lse = attention(q, k, v, return_lse=True, out=backend.nan(dout.shape, wide), **options)
    out = attention(q, k, v, **options)
    exact, out_ = backend.get(exact), backend.get(out)
    assert np.array_equal(exact.astype(own), out_) and (wide == dtype or not np.array_equal(exact, out_.astype(wide)))
    options["deterministic"] = True
    arrays = (dout, q, k, v, out, lse)
    found = tuple(backend.nan(x.shape, wide) for x in (q, k, v))
    attention_backward(*arrays, grads=found, **options)
    grads = [backend.get(x) for x in found]
    assert not grads[0][:, :90].any() and grads[0][:, 92:].any(-1).all()
    for x, y in zip(grads, attention_backward(*arrays, **options)):
        assert np.array_equal(x.astype(own), backend.get(y))
    arena = Arena(backend)
    for kinds in dict.fromkeys(((DTYPES[wide],) * 3, (own,) * 3, (own, DTYPES[wide], DTYPES[wide]))):
        for first, row in ((0, 128), (3, 131)):  # aligned and not
            before = [rng.standard_normal(x.shape).astype(kind) for x, kind in zip(grads, kinds)]
            targets = tuple(arena.columns(x.shape, kind, first, row) for x, kind in zip(grads, kinds))
            for target, x in zip(targets, before):
                target[...] = backend.put(x)
            attention_backward(*arrays, grads=targets, add=True, **options)
            attention_backward(*arrays, grads=targets, add=True, **options)
            for name, kind, target, x, y in zip(NAMES, kinds, targets, before, grads):
                once = (x.astype(y.dtype) + y).astype(kind)
                assert np.array_equal(backend.get(target), (once.astype(y.dtype) + y).astype(kind)), (name, kind, row)
            arena.check()


@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_in_another_order_of_axes(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Targets that no kernel writes."""
    q, k, v, dout = draw(backend, rng, dtype, (64, 64))
    out, lse = attention(q, k, v, return_lse=True)
    arrays, options = (dout, q, k, v, out, lse), {"family": backend.family, "deterministic": True}
    wide = WIDE.get(dtype, dtype)
    found = [backend.nan(x.shape, wide) for x in (q, k, v)]
    attention_backward(*arrays, grads=tuple(found), **options)
    before = [rng.standard_normal(x.shape[::-1]).astype(DTYPES[wide]) for x in found]
    held = [backend.put(x) for x in before]
    attention_backward(*arrays, grads=tuple(x.T for x in held), add=True, **options)
    for x, y, z in zip(held, before, found):
        assert np.array_equal(backend.get(x), y + backend.get(z).T)


@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_of_all_the_same_within_rounding(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Without an order of additions, and where one tile may have all keys."""
    q, k, v, dout = (x[:, :100] for x in draw(backend, rng, dtype, (64, 64)))
    out, lse = attention(q, k, v, return_lse=True)
    arrays, wide = (dout, q, k, v, out, lse), DTYPES[WIDE.get(dtype, dtype)]
    once = attention_backward(*arrays, family=backend.family)
    targets = tuple(backend.put(np.ones(x.shape, wide)) for x in (q, k, v))
    attention_backward(*arrays, grads=targets, add=True, family=backend.family)
    close = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    for x, y in zip(targets, once):
        np.testing.assert_allclose(backend.get(x) - 1, backend.get(y).astype(wide), rtol=close, atol=close)
