"""Derivatives of `attention_backward` of a part of the keys, where out and lse are of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash

PARTS = (slice(0, 2), slice(2, 6))


def drawn(rng: np.random.Generator, layout: str) -> list[Any]:
    """dout, q, k, v, and dlse: six queries and keys, four heads on two."""
    shapes = [(2, 6, heads, 4) for heads in (4, 4, 2, 2)]
    if layout == "bhsd":
        shapes = [(b, h, s, d) for b, s, h, d in shapes]
    return [rng.standard_normal(shape) for shape in (*shapes, (2, 4, 6))]


def in_parts(xp: Any, layout: str, dout: Any, q: Any, k: Any, v: Any, dlse: Any, **options: Any) -> list[Any]:
    """dq, dk and dv as those do it who hold keys in several places."""
    axis, options = (1 if layout == "bshd" else 2), options | {"layout": layout}

    def part(x: Any, at: slice) -> Any:
        return x[:, at] if axis == 1 else x[:, :, at]

    own = [cupyflash.attention(q, part(k, at), part(v, at), return_lse=True, **options) for at in PARTS]
    out, lse = cupyflash.merge(*zip(*own), layout=layout)
    grads = [
        cupyflash.attention_backward(dout, q, part(k, at), part(v, at), out, lse, dlse=dlse, **options) for at in PARTS
    ]
    return [sum(x.dq for x in grads), *(xp.concatenate([x[n] for x in grads], axis) for n in (1, 2))]


def at_once(xp: Any, layout: str, dout: Any, q: Any, k: Any, v: Any, dlse: Any) -> list[Any]:
    """The gradients of standard attention, by their formulas."""
    if layout == "bhsd":
        dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    b, s, heads, d = q.shape
    q, dout = (x.reshape(b, s, 2, heads // 2, d) for x in (q, dout))
    scores = xp.einsum("bihgd,bjhd->bhgij", q, k) / 2
    p = xp.exp(scores)
    p = p / p.sum(-1)[..., None]
    dp = xp.einsum("bihgd,bjhd->bhgij", dout, v)
    ds = p * (dp - (p * dp).sum(-1)[..., None] + dlse.reshape(b, 2, heads // 2, s)[..., None])
    found = [
        xp.einsum("bhgij,bjhd->bihgd", ds, k).reshape(b, s, heads, d) / 2, xp.einsum("bhgij,bihgd->bjhd", ds, q) / 2,
        xp.einsum("bhgij,bihgd->bjhd", p, dout),
    ]  # fmt: skip
    return [x.swapaxes(1, 2) for x in found] if layout == "bhsd" else found


def loss(function: Any, xp: Any, layout: str) -> Any:
    return lambda *x: sum(xp.sin(a).sum() for a in function(xp, layout, *x))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_in_jax(layout: str, rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        x, along = ([jax.numpy.asarray(a) for a in drawn(rng, layout)] for _ in "xu")
        n, every = jax.numpy, tuple(range(5))

        def both(make: Any) -> None:
            ours, standard = (make(loss(f, n, layout)) for f in (in_parts, at_once))
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(standard)):
                np.testing.assert_allclose(a, b, atol=1e-12)

        both(lambda f: jax.value_and_grad(f, every)(*x))
        both(lambda f: jax.jit(jax.grad(f, every))(*x))
        both(lambda f: jax.jvp(f, x, along))
        two = [n.stack([a, 0.9 * a]) for a in x]
        both(lambda f: jax.vmap(jax.grad(f, every))(*two))

        def by_results(out: Any, lse: Any) -> Any:
            return sum(a.sum() for a in cupyflash.attention_backward(*x[:4], out, lse, layout=layout))

        out, lse = cupyflash.attention(*x[1:4], return_lse=True, layout=layout)
        _, dlse = jax.grad(by_results, (0, 1))(out, lse)
        step = 1e-6 * along[4]
        change = (by_results(out, lse + step) - by_results(out, lse - step)) / 2
        np.testing.assert_allclose((dlse * step).sum(), change, rtol=1e-4)
        with pytest.raises(NotImplementedError, match="^out and lse are what attention made"):
            jax.grad(lambda lse: cupyflash.attention_jvp({"q": along[1]}, *x[1:4], out, lse, layout=layout)[0].sum())(
                lse
            )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_in_pytorch(layout: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    x, along = ([torch.from_numpy(a) for a in drawn(rng, layout)] for _ in "xu")
    leaves, every = [a.clone().requires_grad_() for a in x], tuple(range(5))
    ours, standard = (loss(f, torch, layout) for f in (in_parts, at_once))
    expected = torch.func.grad(standard, every)(*x)
    change = torch.func.jvp(standard, tuple(x), tuple(along))[1]
    compiled = torch.compile(ours, backend="aot_eager")
    for found in (
        torch.func.grad(ours, every)(*x), torch.autograd.grad(ours(*leaves), leaves),
        torch.autograd.grad(compiled(*leaves), leaves),
    ):  # fmt: skip
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.func.jvp(ours, tuple(x), tuple(along))[1], change)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a, b) for a, b in zip(x, along)]
        torch.testing.assert_close(forward_ad.unpack_dual(ours(*duals)).tangent, change)
    two = [torch.stack([a, 0.9 * a]) for a in x]
    for a, b in zip(*(torch.vmap(torch.func.grad(f, every))(*two) for f in (ours, standard))):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_mapped_in_pytorch(rng: np.random.Generator) -> None:
    """Differentiated outside of vmap."""
    torch = pytest.importorskip("torch")
    x, along = ([torch.from_numpy(a) for a in drawn(rng, "bshd")] for _ in "xu")
    two, also = ([torch.stack([a, 0.9 * a]) for a in given] for given in (x, along))
    every = tuple(range(5))

    def both(make: Any) -> None:
        for a, b in zip(*(make(torch.vmap(loss(f, torch, "bshd"))) for f in (in_parts, at_once))):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)

    both(lambda f: torch.func.grad(lambda *x: f(*x).sum(), every)(*two))
    both(lambda f: torch.func.jvp(f, tuple(two), tuple(also)))
    leaves = [a.clone().requires_grad_() for a in two]
    both(lambda f: torch.autograd.grad(f(*leaves).sum(), leaves))


@pytest.mark.parametrize("options", [{"window": (1, 1)}, {"scale": 0.3}, {"causal": True}], ids=str)
def test_of_other_options_in_pytorch(options: dict[str, Any], rng: np.random.Generator) -> None:
    """out and lse of the same arrays, but of more pairs, or other scores: by a difference."""
    torch = pytest.importorskip("torch")
    dout, *x, _ = (torch.from_numpy(a) for a in drawn(rng, "bshd"))

    def total(*x: Any) -> Any:
        out, lse = cupyflash.attention(*x, return_lse=True)
        return sum(a.sin().sum() for a in cupyflash.attention_backward(dout, *x, out, lse, **options))

    leaves = [a.clone().requires_grad_() for a in x]
    slope = sum((g * g).sum() for g in torch.autograd.grad(total(*leaves), leaves))
    grads = torch.autograd.grad(total(*leaves), leaves)
    step = 1e-6
    change = total(*(a + step * g for a, g in zip(x, grads))) - total(*(a - step * g for a, g in zip(x, grads)))
    torch.testing.assert_close(change / (2 * step), slope, rtol=1e-5, atol=1e-5)


def test_rows_that_see_no_key_beside_a_sink(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(rng.standard_normal((1, n, 2, 4))) for n in (5, 3, 3))
    sinks = torch.from_numpy(rng.standard_normal(2))
    dout = torch.from_numpy(rng.standard_normal((1, 5, 2, 4)))
    dout[:, :2] = torch.nan  # of queries that see no key
    options: dict[str, Any] = {"sinks": sinks, "causal": True}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    expected = cupyflash.attention_backward(dout, q, k, v, out, lse, wrt="sinks", **options)
    leaves = [a.clone().requires_grad_() for a in (out, lse)]
    found = cupyflash.attention_backward(dout, q, k, v, *leaves, wrt="sinks", **options)
    for x, y in zip((*found, found.dsinks), (*expected, expected.dsinks)):
        assert torch.isfinite(x).all()
        torch.testing.assert_close(x.detach(), y)
    grads = torch.autograd.grad(sum(x.sin().sum() for x in (*found, found.dsinks)), leaves)
    assert all(torch.isfinite(x).all() for x in grads)


def test_what_is_attention_s_own_is_seen(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd: then nothing is computed once more."""
    torch = pytest.importorskip("torch")
    from cupyflash import parts

    made, plain = [], parts.gradients
    monkeypatch.setattr(parts, "gradients", lambda *given: made.append(None) or plain(*given))
    dout, q, k, v, dlse = (torch.from_numpy(a).requires_grad_() for a in drawn(rng, "bshd"))
    for again in (False, True):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, causal=True)
        if again:
            out, lse = out * 1, lse * 1
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
        found = torch.autograd.grad(sum(x.sin().sum() for x in grads), (dout, q, k, v, dlse))
        if not again:
            expected = found
        assert len(made) == again
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
