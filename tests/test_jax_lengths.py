"""Lengths that are data, in JAX: traced, differentiated, mapped, beside NumPy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ragged import arguments, check_case, draw_case

import cupyflash

jax = pytest.importorskip("jax")

from jax import numpy as jnp
from jax.test_util import check_grads

from cupyflash.jax import attention

FORMS = [("packed", "packed"), ("packed", "filled"), ("dense", "packed"), ("dense", "filled"), ("packed", "dense")]
HOW: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": True}},
    "bias": {"given": ("bias", "alibi_slopes", "sinks", "key_mask"), "options": {"causal": "top_left"}},
    "by line": {"given": ("bias", "mask"), "lines": ("bias", "mask")},
    "score": {"score": "relative"},
    "dropout": {"given": ("seed",), "options": {"dropout": 0.3, "window": (4, 2)}},
}
GRADIENTS = ("bias", "alibi_slopes", "sinks")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table")


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    with jax.enable_x64(True):
        yield


def drawn(name: str, form_q: str = "packed", form_k: str = "packed", layout: str = "bshd") -> Any:
    """A case in float64; what has a gradient, the arrays of lengths, and the rest."""
    lens_q, lens_k = ([2] * 4 if form_q == "dense" else [0, 1, 4, 3]), ([5] * 4 if form_k == "dense" else [3, 1, 0, 9])
    case = draw_case(np.random.default_rng(0), lens_q, lens_k, form_q=form_q, form_k=form_k, dtype="float64",
                     dims=(8, 6), page=4, **HOW[name])  # fmt: skip
    arrays, given = arguments(case, layout, jnp.asarray)
    leaves = {x: arrays[x] for x in "qkv"} | {x: given.pop(x) for x in GRADIENTS if x in given}
    held = {x: given.pop(x) for x in LENGTHS if x in given}
    return case, leaves, held, given, (jnp.nan_to_num(arrays["dout"]), arrays["dlse"])


def loss(leaves: dict[str, Any], held: dict[str, Any], given: dict[str, Any], by: Any) -> Any:
    out, lse = attention(**leaves, **held, **given, return_lse=True)
    return (out * by[0]).sum() + (jnp.where(lse > -1e30, lse, 0.0) * by[1]).sum()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_gradients_under_jit(form_q: str, form_k: str, name: str, layout: str) -> None:
    """By everything that has one, of traced lengths; rows that belong to nobody hold NaN."""
    if name == "by line" and form_q == "dense":
        pytest.skip("of packed queries")
    case, leaves, held, given, by = drawn(name, form_q, form_k, layout)
    wanted = check_case(case, layout=layout)
    swap = lambda x: x.swapaxes(-3, -2) if layout == "bhsd" else x
    call = jax.jit(lambda leaves, held: attention(**leaves, **held, **given))
    for found in (call(leaves, held), attention(**leaves, **held, **given)):
        np.testing.assert_array_equal(swap(np.asarray(found)), wanted["out"])
    grads = jax.jit(jax.grad(jax.checkpoint(lambda leaves, held: loss(leaves, held, given, by))))(leaves, held)
    for x, grad in grads.items():
        grad = swap(np.asarray(grad)) if x in "qkv" else grad
        np.testing.assert_allclose(grad, wanted[f"d{x}"], rtol=1e-12, atol=1e-12, err_msg=x)


def test_derivatives() -> None:
    """Forward mode and twice, beside differences."""
    for name in ("causal", "bias"):
        _, leaves, held, given, by = drawn(name)
        leaves = {x: jnp.nan_to_num(y) for x, y in leaves.items()}
        function = jax.jit(lambda leaves, held=held, given=given, by=by: loss(leaves, held, given, by))
        check_grads(function, (leaves,), 2, modes=["rev"], atol=1e-4, rtol=1e-4)
        check_grads(function, (leaves,), 1, modes=["fwd"], atol=1e-4, rtol=1e-4)


def test_one_program_for_all_lengths() -> None:
    """In a scan too, with pages; hints are no reason to trace anew, nor ever read."""
    traced = []

    @jax.jit
    def decode(q: Any, pool: Any, table: Any, lens: Any, most: Any) -> Any:
        traced.append(1)

        def step(lens: Any, q: Any) -> Any:
            found = attention(q, pool, pool, seqlens_k=lens, page_table=table, max_seqlen_k=most)
            return lens + 1, found

        return jax.lax.scan(step, lens, q)

    rng = np.random.default_rng(0)
    q, pool = rng.standard_normal((3, 2, 1, 4, 8)), rng.standard_normal((6, 4, 2, 8))
    table = np.array([[3, 1, 0], [5, 2, -1]], np.int32)
    for lens in ([4, 0], [9, 5]):
        after, found = decode(*map(jnp.asarray, (q, pool, table, np.array(lens, np.int32))), max(lens))
        for n in range(3):
            wanted = cupyflash.attention(q[n], pool, pool, seqlens_k=np.array(lens) + n, page_table=table)
            np.testing.assert_allclose(found[n], wanted, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(after, np.array(lens) + 3)
    assert len(traced) == 1


def test_vmap_of_caches() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(x)) for x in ((3, 2, 1, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 6)))
    lens, bias = jnp.array([[4, 9], [0, 2], [7, 7]]), jnp.asarray(rng.standard_normal((2, 4, 1, 9)))
    one = lambda q, k, v, lens: attention(q, k, v, seqlens_k=lens, bias=bias, causal=True)
    of = lambda f: lambda *xs: jax.grad(lambda k: (f(xs[0], k, *xs[2:]) ** 2).sum())(xs[1])
    for function in (one, of(one)):
        alone = jnp.stack([function(*xs) for xs in zip(q, k, v, lens)])
        np.testing.assert_allclose(jax.vmap(function)(q, k, v, lens), alone, rtol=1e-12, atol=1e-12)
        shared = jnp.stack([function(x, k[0], v[0], n) for x, n in zip(q, lens)])
        found = jax.jit(jax.vmap(function, (0, None, None, 0)))(q, k[0], v[0], lens)
        np.testing.assert_allclose(found, shared, rtol=1e-12, atol=1e-12)


def test_vmap_of_what_is_packed_is_refused() -> None:
    q, cu = jnp.zeros((2, 6, 2, 8)), jnp.array([0, 2, 6])
    with pytest.raises(NotImplementedError, match="^cu_seqlens_q is given under vmap, .*; pack .* jax.lax.map"):
        jax.vmap(lambda q: attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu))(q)
    pools = jnp.zeros((2, 3, 4, 2, 8))
    with pytest.raises(NotImplementedError, match="^page_table is given under vmap, .* a pool of pages, .*; put the"):
        jax.vmap(lambda k: attention(q[:, :1], k, k, seqlens_k=cu[1:], page_table=cu[:2, None]))(pools)


def test_what_is_wrong() -> None:
    """Shapes while it is traced; values at once, or when it runs."""
    q, cu = jnp.zeros((6, 2, 8)), jnp.array([0, 2, 6])
    bad = jnp.array([0, 4, 2])
    message = r"cu_seqlens_q\[2\] is 2; it must be cu_seqlens_q\[1\], 4, or more"
    call = lambda cu, **how: attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, **how)
    with pytest.raises(ValueError, match=f"^{message}"):
        call(bad)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(call)(bad))
    for wrong, error, said in (
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; it must be None or how many"),
        ({"max_seqlen_q": cu}, TypeError, r"max_seqlen_q is an array of int64 of shape \(3,\); it must be one integer"),
        ({"seqlens_k": cu}, ValueError, "seqlens_k is given with cu_seqlens_k, which says that k and v are packed"),
        ({"at": cu[:1].repeat(4)}, ValueError, "at is .*, and cu_seqlens_q is given; it must be None there"),
        ({"check": 1}, TypeError, "check is 1; it must be True or False"),
    ):
        for how in (call, jax.jit(call, static_argnames=("max_seqlen_q", "check") if said[0] != "m" else ())):
            if how is call or "max_seqlen_q" not in wrong or wrong["max_seqlen_q"] is cu:
                with pytest.raises(error, match=said):
                    how(cu, **wrong)
    with pytest.raises(TypeError, match="cu_seqlens_q has dtype float64; it must be int32 or int64"):
        jax.jit(call)(cu.astype(float))
    lens, pool = jnp.array([3, 3]), jnp.zeros((2, 4, 2, 8))
    with pytest.raises(TypeError, match="page_table is given to attention_jvp; k and v in pages have a forward alone"):
        jax.grad(lambda q: attention(q, pool, pool, seqlens_k=lens, page_table=lens[:, None] // 4).sum())(pool)


@pytest.mark.parametrize("how", [{}, {"score": lambda s, b, h, i, j: s + 0.01 * b * i - 0.02 * h * j}, {"seed": 5}])
def test_traced_places(how: dict[str, Any]) -> None:
    """at as an array: one program for all places, with its gradients."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(x)) for x in ((2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 6)))
    how = {"causal": True, **how, **({"dropout": 0.3} if "seed" in how else {})}
    function = lambda q, at: (attention(q, k, v, at=at, **how) ** 2).sum()
    traced = jax.jit(jax.value_and_grad(function))
    for at in ((0, 0, 16, 0), (1, 2, 32, 16), (0, 0, 0, 16)):
        for x, y in zip(traced(q, jnp.array(at)), jax.value_and_grad(function)(q, at)):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    assert traced._cache_size() == 1
    with pytest.raises(Exception, match=r"at is \(0, 0, -1, 0\); it must be None or four integers"):
        jax.block_until_ready(traced(q, jnp.array((0, 0, -1, 0))))
    with pytest.raises(NotImplementedError, match="^at is given, but vmap cannot make it a part of the batch"):
        jax.vmap(lambda at: attention(q, k, v, at=at))(jnp.zeros((2, 4), int))
    if "score" in how:
        with pytest.raises(NotImplementedError, match="^at with a score function is given under vmap"):
            jax.vmap(lambda q: attention(q, k, v, at=(1, 0, 0, 0), **how))(jnp.stack([q, q]))
