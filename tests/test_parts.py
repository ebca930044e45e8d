"""A call on a part of a whole: `at`, results in float32, gradients that are added."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import fresh_rng

import cupyflash
from cupyflash import attention, attention_backward, attention_jvp, merge
from cupyflash.derivatives import attention_backward_jvp
from cupyflash.passes import BACKWARD

B, S, HQ, HK, D = 2, 96, 4, 2, 8
CUTS = (0, 16, 48, 96)  # with dropout boundaries are multiples of 16


def _table(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, j - i + S - 1] * (b + 1)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (20, 9)},
    "causal window": {"causal": True, "window": (40, 0)},
    "alibi": {"alibi_slopes": "slopes"},
    "dropout": {"causal": True, "dropout": 0.3, "seed": 7},
    "score": {"score": _table, "score_arrays": "table"},
}


def drawn(name: str, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    q, dout = rng.standard_normal((2, B, S, HQ, D))
    k, v = rng.standard_normal((2, B, S, HK, D))
    options = dict(CASES[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = rng.random(HQ)
    if "score_arrays" in options:
        options["score_arrays"] = {"t": rng.standard_normal((HQ, 2 * S - 1))}
    return {"q": q, "k": k, "v": v, "dout": dout}, options


def wanted(options: dict[str, Any]) -> tuple[str, ...]:
    return tuple(x for x in ("alibi_slopes",) if x in options) + tuple(options.get("score_arrays", ()))


@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_rows_and_keys_are_the_whole(name: str) -> None:
    x, options = drawn(name, fresh_rng())
    q, k, v, dout = x.values()
    out, lse = attention(q, k, v, return_lse=True, **options)
    whole = attention_backward(dout, q, k, v, out, lse, wrt=wanted(options), **options)
    dq, dk, dv = (np.zeros_like(y) for y in (q, k, v))
    extra = dict.fromkeys(whole.of_arrays, 0.0)
    for a, b in itertools.pairwise(CUTS):
        parts = []
        for c, d in itertools.pairwise(CUTS):
            own = (q[:, a:b], k[:, c:d], v[:, c:d])
            parts.append(attention(*own, return_lse=True, at=(0, 0, a, c), **options))
            grads = (dq[:, a:b], dk[:, c:d], dv[:, c:d])
            more = {"wrt": wanted(options), "grads": grads, "add": True, "at": np.array([0, 0, a, c])}
            found = attention_backward(dout[:, a:b], *own, out[:, a:b], lse[:, :, a:b], **more, **options)
            extra = {key: extra[key] + y for key, y in found.of_arrays.items()}
        o, l = merge(*map(list, zip(*parts)))
        np.testing.assert_allclose(o, out[:, a:b], atol=1e-12)
        np.testing.assert_allclose(l, lse[:, :, a:b], atol=1e-12)
    for y, z in [*zip((dq, dk, dv), whole), *((extra[key], z) for key, z in whole.of_arrays.items())]:
        np.testing.assert_allclose(y, z, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_entry_and_some_heads_are_the_whole(name: str) -> None:
    x, options = drawn(name, fresh_rng())
    q, k, v, _ = x.values()
    out = attention(q, k, v, **options)
    some = dict(options)
    if "alibi_slopes" in some:
        some["alibi_slopes"] = some["alibi_slopes"][2:]
    found = attention(q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:], at=(1, 2, 0, 0), **some)
    np.testing.assert_array_equal(found, out[1:, :, 2:])


@pytest.mark.parametrize("name", CASES)
def test_tangents_know_where_they_stand(name: str) -> None:
    """Of rows with all keys, which need no merging."""
    x, options = drawn(name, rng := fresh_rng())
    q, k, v, dout = x.values()
    t = {name: rng.standard_normal(y.shape) for name, y in (("q", q), ("k", k), ("v", v))}
    out, lse = attention(q, k, v, return_lse=True, **options)
    tout, tlse = attention_jvp(t, q, k, v, out, lse, **options)
    second = attention_backward_jvp(t, dout, q, k, v, out, lse, **options)
    tdk = np.zeros_like(k)
    for a, b in itertools.pairwise(CUTS):
        own = {"q": q[:, a:b], "k": k, "v": v, "out": out[:, a:b], "lse": lse[:, :, a:b]}
        moved = {**t, "q": t["q"][:, a:b]}
        y, z = attention_jvp(moved, *own.values(), at=(0, 0, a, 0), **options)
        np.testing.assert_allclose(y, tout[:, a:b], atol=1e-11)
        np.testing.assert_allclose(z, tlse[:, :, a:b], atol=1e-11)
        found = attention_backward_jvp(moved, dout[:, a:b], *own.values(), at=(0, 0, a, 0), **options)
        np.testing.assert_allclose(found.dq, second.dq[:, a:b], atol=1e-10)
        tdk += found.dk
    np.testing.assert_allclose(tdk, second.dk, atol=1e-10)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_results_of_16_bits_in_float32_are_not_rounded(dtype: Any) -> None:
    rng = fresh_rng()
    q, k, v, dout = (rng.standard_normal((1, 40, 2, 8)).astype(dtype) for _ in range(4))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    out = np.full((1, 40, 2, 8), np.nan, np.float32)
    assert attention(q, k, v, out=out, causal=True) is out
    np.testing.assert_array_equal(out, attention(*wide, causal=True))
    own, lse = attention(q, k, v, return_lse=True, causal=True)
    np.testing.assert_array_equal(own, out.astype(dtype))
    arrays = (dout, q, k, v, own, lse)
    grads = tuple(np.full(x.shape, np.nan, np.float32) for x in (q, k, v))
    attention_backward(*arrays, grads=grads, causal=True)
    rounded = attention_backward(*arrays, causal=True)
    for x, y in zip(grads, rounded):
        assert (x != y.astype(np.float32)).any()
        np.testing.assert_array_equal(x.astype(dtype), y)
    twice = tuple(x.copy() for x in grads)
    attention_backward(*arrays, grads=twice, add=True, causal=True)
    for x, y in zip(twice, grads):
        np.testing.assert_array_equal(x, 2 * y)
    narrow = tuple(x.astype(dtype) for x in grads)  # rounded once, with what is there
    expected = [(x.astype(np.float32) + y).astype(dtype) for x, y in zip(narrow, grads)]
    attention_backward(*arrays, grads=narrow, add=True, causal=True)
    for x, y in zip(narrow, expected):
        np.testing.assert_array_equal(x, y)
    mixed = (np.empty_like(q), *(np.empty_like(x) for x in grads[1:]))  # dq alone is rounded
    attention_backward(*arrays, grads=mixed, causal=True)
    for x, y in zip(mixed, (rounded.dq, *grads[1:])):
        np.testing.assert_array_equal(x, y)


X = np.ones((1, 32, 2, 8), np.float32)
LSE = np.zeros((1, 2, 32), np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": (0, 0, 1)}, r"at is \(0, 0, 1\); it must be None or four integers"),
        ({"at": 3}, "at is 3; it must be None or four integers"),
        ({"at": {0, 16, 32, 48}}, "it must be None or four integers"),
        ({"at": (0, 0, 1.5, 0)}, "it must be None or four integers"),
        ({"at": (0, 0, -1, 0)}, "each 0 or more and less than"),
        ({"at": (0, 0, 2**31, 0)}, "each 0 or more and less than"),
        ({"at": (0, 0, 0, 2**31 - 31)}, r"would stand at 2147483648; it must be less than 2\*\*31$"),
        ({"at": (0, 0, 16, 8), "dropout": 0.1, "seed": 1}, "with dropout its key, 8, must be a multiple of 16"),
        ({"at": (0, 0, 4, 16), "dropout": 0.1, "seed": 1}, "with dropout its query, 4, must be a multiple of 16"),
        ({"at": np.zeros(3, np.int64)}, r"at is an array of int64 of shape \(3,\); it must have four integers"),
        ({"at": np.zeros(4, np.float32)}, "at is an array of float32"),
        ({"out": np.zeros(X.shape)}, "out has dtype float64; it must be float32"),
    ],
)
def test_what_at_must_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        attention(X, X, X, **options)


def test_of_dropout_that_drops_nothing_at_asks_nothing() -> None:
    options: dict[str, Any] = {"at": (0, 0, 4, 16), "causal": True}
    expected = attention(X, X, X, **options)
    np.testing.assert_array_equal(attention(X, X, X, dropout=1e-12, seed=1, **options), expected)


def test_what_targets_must_be() -> None:
    half, grads = X.astype(np.float16), [np.zeros(X.shape, np.float16) for _ in range(3)]
    with pytest.raises(ValueError, match="add is True, but grads is not given"):
        attention_backward(X, X, X, X, X, LSE, add=True)
    with pytest.raises(TypeError, match="add is 1; it must be True or False"):
        attention_backward(X, X, X, X, X, LSE, grads=grads, add=1)  # type: ignore[arg-type]
    mixed = (*grads[:2], grads[2].astype(np.float32))
    of_grads = "grads hold arrays of .*; all must have one dtype, or dk and dv float32 and dq float16"
    with pytest.raises(TypeError, match=of_grads):
        attention_backward(half, half, half, half, half, LSE, grads=mixed)
    mixed = (grads[0].astype(np.float32), *grads[1:])
    with pytest.raises(TypeError, match=of_grads):
        attention_backward(half, half, half, half, half, LSE, grads=mixed)
    mixed = (*grads[:2], grads[2].astype(np.float64))
    with pytest.raises(TypeError, match="grads: dv has dtype float64; it must be float16 or float32"):
        attention_backward(half, half, half, half, half, LSE, grads=mixed)
    out, lse = attention(half, half, half, return_lse=True, out=X.copy())
    with pytest.raises(TypeError, match="out has dtype float32; it must be float16, that of q: round it for a back"):
        attention_backward(half, half, half, half, out, lse)
    with pytest.raises(TypeError, match="tout has dtype float32; it must be float16"):
        attention_jvp({"q": half}, half, half, half, half, LSE, tout=X.copy())


def test_in_frameworks() -> None:
    """Also where PyTorch and JAX trace it."""
    q = X * np.arange(32, dtype=np.float32)[:, None, None]
    expected = attention(q, X, X, causal=True, at=(0, 0, 16, 0))
    torch = pytest.importorskip("torch")
    q, x = torch.tensor(q, requires_grad=True), torch.tensor(X)
    call = lambda at: cupyflash.torch.attention(q, x, x, causal=True, at=at)
    for found in (call((0, 0, 16, 0)), call(torch.tensor([0, 0, 16, 0]))):
        np.testing.assert_allclose(found.detach(), expected, atol=1e-6)
    found.sum().backward()
    assert torch.isfinite(q.grad).all()


def test_at_in_jax() -> None:
    jax = pytest.importorskip("jax")
    import cupyflash.jax

    q = np.random.default_rng(0).standard_normal(X.shape).astype(np.float32)
    expected = attention(q, q, q, causal=True, at=(0, 0, 16, 0))
    numbers = jax.jit(lambda q: cupyflash.jax.attention(q, q, q, causal=True, at=(0, 0, 16, 0)))
    traced = jax.jit(lambda q, at: cupyflash.jax.attention(q, q, q, causal=True, at=at))
    for found in (numbers(q), traced(q, jax.numpy.array([0, 0, 16, 0]))):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    for dtype in ("uint32", "uint64"):  # as where kernels read it
        with pytest.raises(TypeError, match=rf"^at is an array of {dtype} of .*; it must have four .* int32 or int64$"):
            attention(*np.ones((3, 1, 16, 1, 8), "f4"), at=np.zeros(4, dtype))
    with pytest.raises(TypeError, match=r"at is an array of float32 of shape \(4,\); it must have four integers"):
        traced(q, jax.numpy.zeros(4))


def test_families_object() -> None:
    from cupyflash.gpu.device import Arch
    from cupyflash.gpu.plan import plan
    from cupyflash.problem import View
    from cupyflash.rules import describe

    q = View((1, 32, 2, 8), (512, 16, 8, 1), "float16", "cuda:0", "cupy")
    with pytest.raises(ValueError, match="flash1 takes no `at`"):
        plan(describe(q, q, q, at=(0, 0, 16, 0)), Arch.of("sm_90a"), family="flash1")
    with pytest.raises(ValueError, match="flash1 does not add to gradients"):
        plan(replace(describe(q, q, q), add=True), Arch.of("sm_90a"), BACKWARD, "flash1")
    far = describe(q, q, q, causal=True, at=(0, 0, 0, 2**30))
    with pytest.raises(ValueError, match=r"at has query 0 and key 1073741824, 1073741824 apart; .* less than 2\*\*30"):
        plan(far, Arch.of("sm_90a"))
