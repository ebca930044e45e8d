"""attention_append in JAX, where arrays are immutable: traced, donated, differentiated."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from test_appending import FORMS, appended, assert_same

from cupyflash import attention_append

jax = pytest.importorskip("jax")

from jax import numpy as jnp

from cupyflash.interop import jax_append, jax_call


@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_jax_returns_the_caches(form_q: str, form_k: str, rng: np.random.Generator) -> None:
    one = appended(rng, form_q, form_k, 6, options={"causal": True}, integers=np.int32)
    one.run("bshd", jax.numpy.asarray, np.asarray)
    one.run("bhsd", lambda x: jax.numpy.asarray(x) if x.dtype.kind == "f" else x, np.asarray)


def test_jax_traced_and_donated(rng: np.random.Generator) -> None:
    q, k, v = jnp.asarray(rng.standard_normal((3, 2, 1, 2, 8)), jnp.float32)
    new = functools.partial(jnp.zeros, (2, 6, 2, 8))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache: Any, v_cache: Any, filled: Any) -> Any:
        return attention_append(q, k, v, k_cache, v_cache, filled)

    out, k_cache, v_cache = step(new(), new(), jnp.array([2, 5]))
    eager = attention_append(q, k, v, new(), new(), jnp.array([2, 5]))
    for x, y in zip((out, k_cache, v_cache), eager):
        np.testing.assert_array_equal(x, y)
    assert (k_cache[0, 2] == k[0, 0]).all() and (k_cache[1, 5] == k[1, 0]).all()
    filled = jnp.array([2, 3])
    step = jax.jit(lambda c, f: attention_append(None, k, v, c, c, f)[0])
    assert (step(step(new(), filled), filled + 1)[0, 3] == k[0, 0]).all()


JAX_WAYS = ("jit", "donated", "grad", "vmap", "scan", "shard_map")


@pytest.mark.parametrize("both", [False, True], ids=["on a CPU", "beside a GPU"])
@pytest.mark.parametrize("how", JAX_WAYS)
def test_jax_looks_at_traced_lengths_when_it_runs(
    how: str, both: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """On a CPU, also where another program of the same call could run on a GPU."""
    monkeypatch.setattr(jax_append, "has_gpu", lambda: both)
    k, v = jnp.asarray(rng.standard_normal((2, 2, 1, 2, 8)), "float32")
    cache, of_all = jnp.zeros((2, 6, 2, 8)), jax.sharding.PartitionSpec()

    def write(k: Any, cache: Any, filled: Any) -> Any:
        return attention_append(None, k, v, cache, cache + 1, filled)[0]

    ways: dict[str, Any] = {
        "jit": write,
        "donated": jax.jit(write, donate_argnums=1),
        "grad": jax.grad(lambda *xs: (write(*xs) ** 2).sum() / 2, 1),
        "vmap": lambda k, cache, n: jax.vmap(write, (None, None, 0))(k, cache, jnp.stack([n * 0, n]))[1],
        "scan": lambda k, cache, n: jax.lax.scan(lambda c, x: (write(x, c, n), None), cache, k[None])[0],
        "shard_map": jax.shard_map(
            write, mesh=jax.sharding.Mesh(jax.devices("cpu")[:1], "x"), in_specs=of_all, out_specs=of_all
        ),
    }
    call = jax.jit(ways[how]) if how != "donated" else ways[how]
    found = np.asarray(call(k, cache + 0, jnp.array([2, 5])))
    want = np.zeros((2, 6, 2, 8), np.float32)
    if how != "grad":  # by what is written over it is 0, and by the rest itself, which is
        want[0, 2], want[1, 5] = k[0, 0], k[1, 0]
    assert_same(found, want)
    for filled, message in (
        ([2, 6], r"seqlens_k\[1\] is 6, and 1 rows come behind these; k_cache has room for 6"),
        ([-1, 2], r"seqlens_k\[0\] is -1; it must be 0 or more"),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(k, cache + 0, jnp.array(filled)))


def test_jax_looks_at_traced_places_when_it_runs(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((2, 2, 1, 4)), "float32")
    pool, filled = jnp.zeros((4, 4, 1, 4)), jnp.array([3, 3])
    slots = lambda at, check=True: attention_append(None, x, x, pool, pool, slots=at, check=check)[0]
    table = lambda at: attention_append(x, x, x, pool, pool, filled, page_table=at, check=True)[1]
    for call, good, bad, message in (
        (slots, [[0, 1], [2, -1]], [[0, 1], [2, 0]], r"slots\[1, 1\] is 0, as another is"),
        (slots, [[0, 1], [2, -1]], [[0, 1], [99, -7]], r"slots\[1, 0\] is 99; it must be a row of k_cache, 0 to 15"),
        (table, [[0, 1], [2, 3]], [[0, 1], [2, 1]], r"page_table\[1, 1\] is 1, a page that rows of sequence 0 are"),
        (table, [[0, 1], [2, 3]], [[0, 4], [2, 1]], r"page_table\[0, 1\] is 4; it must be a page of k_cache"),
    ):
        np.testing.assert_array_equal(jax.jit(call)(jnp.array(good)), call(jnp.array(good)))
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(jax.jit(call)(jnp.array(bad)))
    for module in (jax_append, jax_call):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    with pytest.raises(ValueError, match="^check is True, .* where slots cannot be looked at; check must be False"):
        jax.jit(lambda at: slots(at, True))(jnp.array([[0, 1], [2, -1]]))
    assert (
        slots(jnp.array([[0, 1], [2, -1]])).any()
        and jax.jit(lambda at: slots(at, False))(jnp.array([[0, 1], [2, 3]])).any()
    )


@pytest.mark.parametrize("case", ["plain", "rotary", "paged", "packed", "slots", "rows of int8"])
def test_jax_promotes_no_rank(case: str, rng: np.random.Generator) -> None:
    q, k, v = jnp.asarray(rng.standard_normal((3, 2, 1, 2, 8)), "float32")
    arrays: dict[str, Any] = {"q": q, "k_new": k, "v_new": v, "seqlens_k": jnp.array([2, 5])}
    arrays |= {"k_cache": jnp.zeros((2, 6, 2, 8)), "v_cache": jnp.ones((2, 6, 2, 8))}
    angles = jnp.asarray(rng.standard_normal((6, 3)), "float32")
    if case == "rotary":
        arrays["rotary"] = jnp.cos(angles), jnp.sin(angles)
    elif case == "paged":
        arrays |= {"page_table": jnp.array([[0], [1]])}
    elif case == "packed":
        arrays |= {name: arrays[name][:, 0] for name in ("q", "k_new", "v_new")} | {"cu_seqlens_q": jnp.arange(3)}
    elif case == "slots":
        arrays |= {"q": None, "seqlens_k": None, "slots": jnp.array([[1], [7]])}
    elif case == "rows of int8":
        arrays |= {name: arrays[name].astype("bfloat16") for name in ("q", "k_new", "v_new")}
        arrays |= {f"{x}_cache": jnp.zeros((2, 6, 2, 8), "int8") for x in "kv"}
        arrays |= {f"{x}_descale": jnp.ones((2, 6, 2)) for x in "kv"}
    want = attention_append(**arrays)
    with jax.numpy_rank_promotion("raise"):
        for x, y in zip(attention_append(**arrays), want):
            np.testing.assert_array_equal(np.asarray(x, "float32"), np.asarray(y, "float32"))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("how", ["attends", "alone", "slots"])
def test_rows_that_are_rounded_have_no_gradient(how: str, dtype: str, rng: np.random.Generator) -> None:
    """Of integers JAX would find one of 0."""
    q, k, v = jnp.asarray(rng.standard_normal((3, 2, 1, 2, 8)), "bfloat16")
    cache = jnp.zeros((2, 6, 2, 8), dtype)
    given: dict[str, Any] = {"k_descale": 0.03, "v_descale": 0.03, "seqlens_k": jnp.array([2, 5])}
    if how == "slots":
        given |= {"seqlens_k": None, "slots": jnp.array([[1], [7]])}

    def loss(q: Any, k: Any, v: Any) -> Any:
        found = attention_append(q if how == "attends" else None, k, v, cache, cache, **given)
        return sum(x.astype("float32").sum() for x in found)

    for n, name in ((1, "k_new"), (2, "v_new")):
        message = rf"^{name} is written to caches of 8 bits, .* give jax.lax.stop_gradient\({name}\)"
        with pytest.raises(TypeError, match=message):
            jax.grad(loss, n)(q, k, v)
        with pytest.raises(TypeError, match=message):
            jax.jit(jax.grad(loss, n))(q, k, v)
    held = jax.grad(lambda v: loss(q, k, jax.lax.stop_gradient(v)) + v.astype("float32").sum())(v)
    np.testing.assert_array_equal(np.asarray(held, "float32"), 1)
