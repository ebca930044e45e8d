"""Score functions, block masks and dropout in JAX: gradients, jit, vmap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash

torch = pytest.importorskip("torch")


from test_scores_in_frameworks import (
    DLSE,
    DOUT,
    MAPPED,
    OPTIONS,
    SHARED,
    SQ,
    A,
    K,
    Q,
    V,
    close,
    converted,
    differentiable,
    expected,
    given_options,
    of_the_batch,
)


@pytest.fixture
def jax() -> Any:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        yield jax


@pytest.mark.parametrize("traced", [False, True])
@given_options
def test_jax(jax: Any, name: str, traced: bool) -> None:
    from cupyflash.jax import attention

    given, put = differentiable(converted(jax.numpy.asarray, OPTIONS[name]))

    def run(*x: Any) -> Any:
        results, pull = jax.vjp(lambda *x: attention(*x[:3], return_lse=True, **put(*x[3:])), *x)
        return *results, *pull((jax.numpy.asarray(DOUT), jax.numpy.asarray(DLSE)))

    found = (jax.jit(run) if traced else run)(*map(jax.numpy.asarray, (Q, K, V)), *given)
    close(found, name)


@given_options
def test_jax_by_explicit_gradients(jax: Any, name: str) -> None:
    options = converted(jax.numpy.asarray, OPTIONS[name])
    given = [jax.numpy.asarray(x) for x in (Q, K, V)]
    out, lse = cupyflash.attention(*given, return_lse=True, **options)
    grads = cupyflash.attention_backward(
        jax.numpy.asarray(DOUT), *given, out, lse, dlse=jax.numpy.asarray(DLSE), **options
    )
    close([out, lse, *grads, *expected(name)[5:]], name)


def test_jax_is_not_compiled_for_each_seed(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.interop import jax_call

    traced, called = [], jax_call._called
    monkeypatch.setattr(jax_call, "_called", lambda *x: (traced.append(1), called(*x))[1])
    q = jax.numpy.asarray(Q)
    found = {seed: np.asarray(cupyflash.attention(q, q, q, dropout=0.25, seed=seed)) for seed in (1, 2)}
    before = len(traced)
    found |= {seed: np.asarray(cupyflash.attention(q, q, q, dropout=0.25, seed=seed)) for seed in (3, 2**32 - 1)}
    assert before <= 1 and len(traced) == before
    for seed, out in found.items():
        np.testing.assert_allclose(out, cupyflash.attention(Q, Q, Q, dropout=0.25, seed=seed), rtol=1e-9, atol=1e-9)


def test_jax_traced_seed(jax: Any) -> None:
    """Another in each step of a scan."""
    q, seeds = jax.numpy.asarray(Q), jax.numpy.arange(3, dtype=np.uint32)
    step = lambda carry, seed: (carry, cupyflash.attention(q, q, q, dropout=0.25, seed=seed))
    _, found = jax.lax.scan(step, 0, seeds)
    for seed, out in enumerate(found):
        np.testing.assert_allclose(out, cupyflash.attention(Q, Q, Q, dropout=0.25, seed=seed), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dropout", "block mask of each head"])
def test_jax_vmap_refuses_what_goes_by_the_batch(jax: Any, name: str) -> None:
    options = converted(jax.numpy.asarray, OPTIONS[name])
    q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))
    what = {"block mask of each head": "block_mask with a batch axis"}.get(name, name)
    with pytest.raises(
        NotImplementedError, match=f"^{what} is given under vmap, which makes its axis a part of the batch"
    ):
        jax.vmap(lambda q: cupyflash.attention(q, k, v, **options))(q[None])


@pytest.mark.parametrize("which", MAPPED)
def test_jax_vmap_with_a_score_function(jax: Any, which: str) -> None:
    rng = np.random.default_rng(3)
    q, a, ids = (
        jax.numpy.asarray(x)
        for x in (rng.standard_normal((3, 2, 5, 4, 8)), rng.standard_normal((3, 4, 3)), rng.integers(0, 3, (3, 5)))
    )

    def total(q: Any, a: Any, ids: Any) -> Any:
        out = cupyflash.attention(q, q, q, score=of_the_batch, score_arrays={"a": a, "ids": ids})
        return (out * out).sum()

    dims = MAPPED[which]
    given = [x if dim == 0 else x[1] for x, dim in zip((q, a, ids), dims)]
    values, grads = jax.vmap(jax.value_and_grad(total, (0, 1)), dims)(*given)
    for m in range(3):
        value, one = jax.value_and_grad(total, (0, 1))(*(x if dim is None else x[m] for x, dim in zip(given, dims)))
        for x, y in zip((*grads, values), (*one, value), strict=True):
            np.testing.assert_allclose(x[m], y, rtol=1e-9, atol=1e-9)


def test_jax_vmap_with_a_block_mask_of_all(jax: Any) -> None:
    q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))
    found = jax.vmap(lambda q: cupyflash.attention(q, k, v, block_mask=SHARED))(jax.numpy.stack([q, q]))
    for x in found:
        np.testing.assert_allclose(x, expected("block mask")[0], rtol=1e-9, atol=1e-9)


def test_jax_mask_elsewhere(jax: Any) -> None:
    q = jax.numpy.asarray(Q)
    mask = cupyflash.block_mask(cupyflash.masks.causal(), shape=(1, 1, SQ, SQ))
    mask.kind = mask.kind._replace(device="cuda:3")
    with pytest.raises(ValueError, match="^block_mask is on cuda:3 but q is on cpu; make it with like=q"):
        cupyflash.attention(q, q, q, block_mask=mask)


def test_jax_arrays_alone(jax: Any) -> None:
    from cupyflash.jax import attention

    q = jax.numpy.asarray(Q)
    with pytest.raises(TypeError, match=r"^score_arrays\['a'\] is a list; it must be a jax.Array or a numpy"):
        attention(q, q, q, score="s + a[h, 0]", score_arrays={"a": A.tolist()})
