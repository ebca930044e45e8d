"""Score functions, block masks and dropout where PyTorch or JAX differentiates, compiles, maps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from cupyflash.torch import attention

B, SQ, SK, HQ, HK, D = 2, 21, 26, 4, 2, 8
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape) for shape in ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, D)))
DOUT, DLSE = RNG.standard_normal((B, SQ, HQ, D)), RNG.standard_normal((B, HQ, SQ))
A, IDS = RNG.standard_normal((HQ, 7)), np.arange(SK, dtype=np.int32) % 7
SHARED = cupyflash.block_mask(cupyflash.masks.causal(3), shape=(1, 1, SQ, SK), block=16)
OF_EACH = cupyflash.block_mask(RNG.random((B, HQ, SQ, SK)) > 0.3, block=16)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any, ids: Any) -> Any:
    return s * (1 + 0.1 * b) + a[h, ids[j]]


OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3, "seed": 5},
    "dropout, a large seed": {"dropout": 0.3, "seed": -3},
    "dropout, a seed in an array": {"dropout": 0.3, "seed": np.array([5], np.uint32)},
    "score": {"score": score, "score_arrays": {"a": A, "ids": IDS}},
    "block mask": {"block_mask": SHARED},
    "block mask of each head": {"block_mask": OF_EACH},
    "all": {
        "dropout": 0.3, "seed": 5, "score": score, "score_arrays": {"a": A, "ids": IDS}, "block_mask": OF_EACH,
        "sinks": RNG.standard_normal(HQ), "bias": RNG.standard_normal((HQ, SQ, SK)),
    },
}  # fmt: skip
given_options = pytest.mark.parametrize("name", OPTIONS)


def converted(convert: Callable[[np.ndarray], Any], options: dict[str, Any]) -> dict[str, Any]:
    def one(x: Any) -> Any:
        return (
            {name: one(y) for name, y in x.items()}
            if isinstance(x, dict)
            else convert(x)
            if isinstance(x, np.ndarray)
            else x
        )

    return {name: one(x) for name, x in options.items()}


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """out, lse and the gradients of q, k, v, then of what else has one, by explicit calls on NumPy arrays."""
    options = OPTIONS[name]
    out, lse = cupyflash.attention(Q, K, V, return_lse=True, **options)
    wrt = [x for x in ("bias", "sinks") if x in options] + ["a"] * ("score" in options)
    grads = cupyflash.attention_backward(DOUT, Q, K, V, out, lse, dlse=DLSE, wrt=wrt, **options)
    return [out, lse, *grads, *(grads.dscore_arrays["a"] if x == "a" else getattr(grads, f"d{x}") for x in wrt)]


def differentiable(options: dict[str, Any]) -> tuple[list[Any], Callable[..., dict[str, Any]]]:
    """The arrays of options that have a gradient, in the order of `expected`, and the options with others in their place."""
    names = [x for x in ("bias", "sinks") if x in options]
    read = options.get("score_arrays")

    def put(*x: Any) -> dict[str, Any]:
        more = {"score_arrays": {**read, "a": x[-1]}} if read else {}
        return options | dict(zip(names, x)) | more

    return [options[x] for x in names] + ([read["a"]] if read else []), put


def close(found: Any, name: str) -> None:
    for x, y in zip(found, expected(name), strict=True):
        np.testing.assert_allclose(np.asarray(x.detach() if hasattr(x, "detach") else x), y, rtol=1e-9, atol=1e-9)


# ---- PyTorch --------------------------------------------------------------------------------------------------------


def tensors(name: str) -> tuple[list[Any], Callable[..., dict[str, Any]]]:
    more, put = differentiable(converted(torch.tensor, OPTIONS[name]))
    return [*map(torch.tensor, (Q, K, V)), *more], put


@given_options
def test_torch(name: str) -> None:
    """At once: without a gradient, by autograd, and by torch.func."""
    given, put = tensors(name)
    douts = torch.tensor(DOUT), torch.tensor(DLSE)

    def run(*x: Any) -> Any:
        return attention(*x[:3], return_lse=True, **put(*x[3:]))

    results, pull = torch.func.vjp(run, *given)
    close([*results, *pull(douts)], name)
    close([*run(*given), *expected(name)[2:]], name)
    leaves = [x.requires_grad_() for x in given]
    results = run(*leaves)
    close([*results, *torch.autograd.grad(results, leaves, douts)], name)


@pytest.mark.parametrize("name", [x for x in OPTIONS if x.startswith("dropout")])
def test_torch_compiled(name: str) -> None:
    torch._dynamo.reset()
    given, put = tensors(name)
    leaves = [x.requires_grad_() for x in given]
    run = torch.compile(lambda *x: attention(*x[:3], return_lse=True, **put()), fullgraph=True, backend="aot_eager")
    results = run(*leaves)
    close([*results, *torch.autograd.grad(results, leaves, (torch.tensor(DOUT), torch.tensor(DLSE)))], name)


def test_torch_compiled_for_other_seeds() -> None:
    """A seed that is a number is an argument of the operator: the same program serves others, which drop others."""
    torch._dynamo.reset()
    q = torch.tensor(Q)

    def run(seed: Any) -> Any:
        return attention(q, q, q, dropout=0.3, seed=seed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed in (3, 4, -4, 2**63 + 5, torch.tensor([6])):
        torch.testing.assert_close(compiled(seed), run(seed))


@pytest.mark.parametrize("name", ["score", "block mask"])
def test_torch_does_not_trace(name: str) -> None:
    """What an operator cannot be given is refused by name."""
    torch._dynamo.reset()
    given, put = tensors(name)
    message = f"^{name.replace(' ', '_')} is given, but a call that is traced .* cannot take it"
    with pytest.raises(NotImplementedError, match=message):
        torch.compile(lambda *x: attention(*x[:3], **put(*x[3:])), backend="aot_eager")(*given)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(NotImplementedError, match=message):
        attention(*(torch.empty(x.shape, dtype=x.dtype) for x in given[:3]), **put(*given[3:]))


@pytest.mark.parametrize("name", ["dropout", "score", "block mask of each head"])
def test_torch_vmap_refuses_what_goes_by_the_batch(name: str) -> None:
    given, put = tensors(name)
    what = {"block mask of each head": "block_mask with a batch axis"}.get(name, name)
    with pytest.raises(
        NotImplementedError, match=f"^{what} is given under vmap, which makes its axis a part of the batch"
    ):
        torch.vmap(lambda q: attention(q, *given[1:3], **put(*given[3:])))(given[0][None])
    if name == "dropout":  # whose backward must drop the same
        with pytest.raises(NotImplementedError, match="^dropout is given under vmap"):
            torch.func.jacrev(lambda q: attention(q, *given[1:3], **put())[0, 0])(given[0])


def test_torch_vmap_with_a_block_mask_of_all() -> None:
    given, _ = tensors("block mask")
    found = torch.vmap(lambda q: attention(q, *given[1:], block_mask=SHARED))(torch.stack([given[0], given[0]]))
    for x in found:
        np.testing.assert_allclose(x, expected("block mask")[0], rtol=1e-9, atol=1e-9)


def test_torch_autocast_with_a_score_function() -> None:
    """q, k and v are cast; what the function reads stays as it is, and gets its gradient so."""
    q, a = torch.tensor(Q, dtype=torch.float32), torch.tensor(A, dtype=torch.float32, requires_grad=True)
    options = {"score": "s + a[h, j % 7]", "score_arrays": {"a": a}}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, q, q, **options)
    half = q.bfloat16()
    expected = attention(half, half, half, **options)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
    dout = torch.randn_like(out)
    (found,), (wanted,) = (torch.autograd.grad(x, a, dout) for x in (out, expected))
    assert found.dtype is torch.float32 and torch.equal(found, wanted)


# ---- JAX ------------------------------------------------------------------------------------------------------------


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


def test_jax_is_not_compiled_for_each_seed(jax: Any) -> None:
    from cupyflash.interop import jax_ops

    q = jax.numpy.asarray(Q)
    found = {seed: np.asarray(cupyflash.attention(q, q, q, dropout=0.25, seed=seed)) for seed in (1, 2)}
    before = jax_ops._forward_of.cache_info().currsize
    found |= {seed: np.asarray(cupyflash.attention(q, q, q, dropout=0.25, seed=seed)) for seed in (3, 2**32 - 1)}
    assert jax_ops._forward_of.cache_info().currsize == before
    for seed, out in found.items():
        np.testing.assert_allclose(out, cupyflash.attention(Q, Q, Q, dropout=0.25, seed=seed), rtol=1e-9, atol=1e-9)


def test_jax_traced_seed(jax: Any) -> None:
    """Another in each step of a scan."""
    q, seeds = jax.numpy.asarray(Q), jax.numpy.arange(3, dtype=np.uint32)
    step = lambda carry, seed: (carry, cupyflash.attention(q, q, q, dropout=0.25, seed=seed))
    _, found = jax.lax.scan(step, 0, seeds)
    for seed, out in enumerate(found):
        np.testing.assert_allclose(out, cupyflash.attention(Q, Q, Q, dropout=0.25, seed=seed), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dropout", "score", "block mask of each head"])
def test_jax_vmap_refuses_what_goes_by_the_batch(jax: Any, name: str) -> None:
    options = converted(jax.numpy.asarray, OPTIONS[name])
    q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))
    what = {"block mask of each head": "block_mask with a batch axis"}.get(name, name)
    with pytest.raises(
        NotImplementedError, match=f"^{what} is given under vmap, which makes its axis a part of the batch"
    ):
        jax.vmap(lambda q: cupyflash.attention(q, k, v, **options))(q[None])


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
    with pytest.raises(TypeError, match=r"^score_arrays\['a'\] is a ndarray; it must be a jax.Array"):
        attention(q, q, q, score="s + a[h, 0]", score_arrays={"a": A})
