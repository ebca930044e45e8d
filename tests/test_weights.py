"""`attention_weights` beside softmax(score(Q Kᵀ)) in float64, and `attention_vjp` beside `attention_backward`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import fresh_rng

import cupyflash
from cupyflash import attention, attention_backward, attention_vjp, attention_weights, weights

SHAPES = ((7, 30), (30, 7), (1, 5), (0, 3), (3, 0))
WHICH: tuple[dict[str, Any], ...] = (
    {},
    {"queries": slice(1, 4), "heads": slice(0, 4, 2)},
    {"queries": -1, "keys": slice(0, None, 3)},
    {"queries": slice(None, None, 2), "keys": slice(2, 5), "heads": 1},
)


def expected(q: np.ndarray, k: np.ndarray, layout: str, causal: bool = False, **given: Any) -> np.ndarray:
    """(B, H, Sq, Sk), or without the axes that q does not have."""
    four = [x[None, :, None] if x.ndim == 2 else x[None] if x.ndim == 3 else x for x in (q, k)]
    if layout == "bhsd" and q.ndim > 2:
        four = [x.swapaxes(1, 2) for x in four]
    four[1] = four[1].repeat(four[0].shape[2] // four[1].shape[2], 2)
    s = np.einsum("bihd,bjhd->bhij", *four) / np.sqrt(q.shape[-1])
    if (c := given.get("softcap")) is not None:
        s = c * np.tanh(s / c)
    s = s + given.get("bias", 0.0)
    i, j = np.ogrid[: s.shape[2], : s.shape[3]]
    seen = np.ones(s.shape, bool) & (j <= i + s.shape[3] - s.shape[2] if causal else True)
    p = np.where(seen, np.exp(s), 0)
    total = (
        p.sum(-1, keepdims=True) + np.exp(given["sinks"])[:, None, None]
        if "sinks" in given
        else p.sum(-1, keepdims=True)
    )
    p = p / np.where(total == 0, 1, total)
    return p[0, 0] if q.ndim == 2 else p[0] if q.ndim == 3 else p


def block(p: np.ndarray, rank: int, which: dict[str, Any]) -> np.ndarray:
    asked = [which.get(name, slice(None)) for name in ("heads", "queries", "keys")]
    index = [x if isinstance(x, slice) else slice(x, x + 1 or None) for x in asked]
    return p[(..., *index[rank == 2 :])]


def drawn(rng: np.random.Generator, layout: str, rank: int, rows: int, heads: int) -> np.ndarray:
    lead = (rows, heads) if layout == "bshd" else (heads, rows)
    return rng.standard_normal({4: (2, *lead, 8), 3: (*lead, 8), 2: (rows, 8)}[rank])


@pytest.mark.parametrize("columns", [4, 1024])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [4, 3, 2])
def test_of_every_block_and_sum(layout: str, rank: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By keys and by queries, in one call of either or in many."""
    monkeypatch.setattr(weights, "COLUMNS_ON_CPU", columns)
    rng = fresh_rng()
    for (sq, sk), which in itertools.product(SHAPES, WHICH):
        if (rank == 2 and "heads" in which) or (sq < 2 and which):
            continue
        q, k = drawn(rng, layout, rank, sq, 6), drawn(rng, layout, rank, sk, 2)
        bias = rng.standard_normal((sq, sk))
        given: dict[str, Any] = {"bias": bias, "softcap": 5.0, "causal": True}
        given |= {"sinks": rng.standard_normal(6)} if rank > 2 else {}
        for some in ({}, given):
            p = block(expected(q, k, layout, **some), rank, which)
            asked = which | some | {"layout": layout}

            def same(found: Any, wanted: np.ndarray) -> None:
                assert found.shape == wanted.shape and found.dtype == np.float64
                np.testing.assert_allclose(found, wanted, atol=1e-12)

            same(attention_weights(q, k, **asked), p)
            same(attention_weights(q, k, reduce="keys", **asked), p.sum(-1))
            same(attention_weights(q, k, reduce="queries", **asked), p.sum(-2))
            if rank > 2:
                same(attention_weights(q, k, reduce="heads", **asked), p.sum(-3))
            if p.shape[-1] > 1:
                most, places = attention_weights(q, k, largest=2, **asked)
                same(most, -np.sort(-p, -1)[..., :2])
                whole = block(expected(q, k, layout, **some), rank, {x: y for x, y in which.items() if x != "keys"})
                np.testing.assert_allclose(np.take_along_axis(whole, places, -1), most, atol=1e-12)


def test_the_lse_that_is_given_is_used() -> None:
    q, k = fresh_rng().standard_normal((2, 40, 2, 8))
    _, lse = attention(q, k, k, return_lse=True)
    found = [attention_weights(q, k, reduce="queries", lse=x) for x in (None, lse, lse + np.log(2))]
    np.testing.assert_allclose(found[0], found[1], atol=1e-14)
    np.testing.assert_allclose(found[0], 2 * found[2], atol=1e-14)


def test_in_pytorch_and_jax() -> None:
    """With gradients, and traced."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = fresh_rng()
    a, b = rng.standard_normal((2, 30, 4, 8)), rng.standard_normal((2, 9, 2, 8))
    q, k = (torch.tensor(x, requires_grad=True) for x in (a, b))
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5, -1)
    cases: tuple[tuple[dict[str, Any], Any], ...] = (
        ({}, p), ({"queries": slice(3, 5)}, p[:, :, 3:5]), ({"reduce": "queries"}, p.sum(-2)),
        ({"reduce": "heads"}, p.sum(1)),
    )  # fmt: skip
    for given, wanted in cases:
        found, u = attention_weights(q, k, **given), torch.randn_like(wanted)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad((x * u).sum(), (q, k), retain_graph=True) for x in (found, wanted)]
        torch.testing.assert_close(*gradients)
        traced = jax.jit(lambda q, k, given=given: attention_weights(q, k, **given))(*map(jax.numpy.float32, (a, b)))
        np.testing.assert_allclose(traced, wanted.detach(), atol=1e-5)
    most, places = attention_weights(q, k, largest=3)
    torch.testing.assert_close(most, p.sort(-1, descending=True)[0][..., :3])
    torch.testing.assert_close(p.gather(-1, places), most)
    found = attention_weights(*map(jax.numpy.float32, (a, b)), largest=3)
    np.testing.assert_array_equal(found[1], places)


@pytest.mark.parametrize("columns", [2, 128])
def test_where_jax_promotes_no_rank_and_pytorch_makes_one_graph(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for name in ("COLUMNS", "COLUMNS_ON_CPU"):
        monkeypatch.setattr(weights, name, columns)
    a = fresh_rng().standard_normal((2, 2, 9, 4, 8)).astype("f4")
    q, k = torch.tensor(a[0], requires_grad=True), torch.tensor(a[1])
    options: tuple[dict[str, Any], ...] = ({"queries": -1}, *({"reduce": x} for x in weights.REDUCE), {"largest": 3})
    for given in (*WHICH, *options):

        def f(q: Any, k: Any, given: dict[str, Any] = given) -> Any:
            return attention_weights(q, k, causal=True, **given)

        wanted = f(*a)
        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        with jax.numpy_rank_promotion("raise"):
            of_jax = f(*map(jax.numpy.asarray, a))
        for found in (compiled(q.detach(), k), of_jax):
            for x, y in zip(*((x,) if "largest" not in given else x for x in (found, wanted))):
                np.testing.assert_allclose(x, y, atol=1e-6)
        first = lambda x: x[0] if isinstance(x, tuple) else x
        torch.testing.assert_close(*(torch.autograd.grad(first(g(q, k)).square().sum(), q) for g in (compiled, f)))


X = np.ones((2, 16, 4, 8), np.float32)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: attention_weights(X, X, dropout=0.1), "'dropout'; weights are those before dropout; leave it out"),  # type: ignore[call-arg]
    (lambda: attention_weights(X, X, cu_seqlens_q=X), "'cu_seqlens_q'; ask for the weights of one sequence at a time"),  # type: ignore[call-arg]
    (lambda: attention_weights(X, X, is_causal=True), "'is_causal'; here it is causal=True"),  # type: ignore[call-arg]
    (lambda: attention_weights(X, X[0]), "k has shape (16, 4, 8); it must have as many as q, 4"),
    (lambda: attention_weights(X[0, 0, 0], X), "q has shape (8,); it must have 4, 3 (without batch) or 2"),
    (lambda: attention_weights(X, X[..., :3]), "k has head dimension 3, shape (2, 16, 4, 3); it must be that of q, 8"),
    (lambda: attention_weights(X.astype(int), X), "q has dtype int64; it must be one of float16, bfloat16, float32"),
    (lambda: attention_weights(X, X, queries=16), "queries is 16; there are 16, so it must be from -16 to 15"),
    (lambda: attention_weights(X, X, keys=[1]), "keys is [1]; it must be None, a slice or an integer"),  # type: ignore[arg-type]
    (lambda: attention_weights(X, X, heads=slice(9, 0, -1)), "heads is slice(9, 0, -1); its step must be 1 or more"),
    (lambda: attention_weights(X, X, reduce="mean"), "reduce is 'mean'; it must be None, 'queries', 'keys' or 'heads'"),
    (lambda: attention_weights(X, X, largest=17), "largest is 17; it must be an integer from 1 to 16, the keys that"),
    (lambda: attention_weights(X, X, largest=1, reduce="keys"), "and reduce is 'keys'; one of them must be None"),
    (lambda: attention_weights(X, X, reduce="queries", lse=X), "lse has shape (2, 16, 4, 8); it must be (2, 4, 16)"),
    (lambda: attention_vjp(X, X, X, return_lse=True), "'return_lse'; what it returns has lse, as backward.lse"),  # type: ignore[call-arg]
    (lambda: attention_vjp(X, X, X, sm_scale=1), "'sm_scale'; here it is scale"),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


def test_a_forward_keeps_what_its_backward_needs() -> None:
    rng = fresh_rng()
    q, k, v, dout = rng.standard_normal((4, 2, 20, 4, 8))
    bias, scale, dlse = rng.standard_normal((20, 20)), np.array(0.3), rng.standard_normal((2, 4, 20))
    options: dict[str, Any] = {"causal": True, "bias": bias, "dropout": 0.3, "seed": 5, "window": (3, 0)}
    out, backward = attention_vjp(q, k, v, scale=scale, **options)  # type: ignore[arg-type]
    scale[...] = 9  # the forward's numbers are those of its call
    wanted, lse = attention(q, k, v, scale=0.3, return_lse=True, **options)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(backward.lse, lse)
    found = backward(dout, dlse=dlse, wrt="bias")
    grads = attention_backward(dout, q, k, v, wanted, lse, scale=0.3, dlse=dlse, wrt="bias", **options)
    for x, y in zip((*found, found.dbias), (*grads, grads.dbias)):
        np.testing.assert_array_equal(x, y)
    assert repr(backward).startswith("<backward of an attention with scale, causal")
    assert cupyflash.attention_vjp is attention_vjp
