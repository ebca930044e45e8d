"""JAX arrays, traced: under jit, grad, vmap, scan, remat and shard_map, and jax.nn's function in our place."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import SCORES, judge, references
from semantics import draw_inputs

import cupyflash
from cupyflash.cpu import corridor

jax = pytest.importorskip("jax")

from jax import numpy as jnp

from cupyflash.interop import jax_call, jax_passes
from cupyflash.jax import attention, dot_product_attention
from cupyflash.passes import BACKWARD

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def numbers(*shape: int, seed: int = 0, dtype: str = "float64", platform: str = "cpu") -> Any:
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jax.device_put(jnp.asarray(x, dtype), jax.devices(platform)[0])


def qkv(**how: Any) -> list[Any]:
    return [numbers(2, 5, 4, 8, **how), numbers(2, 7, 2, 8, seed=1, **how), numbers(2, 7, 2, 6, seed=2, **how)]


def standard(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    seen = jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest")


def close(actual: Any, expected: Any, atol: float = 1e-10) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=atol, rtol=0)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("entry", [attention, cupyflash.attention], ids=["jax", "package"])
def test_jit(entry: Any, dtype: str, platform: str, rng: np.random.Generator) -> None:
    """Results and gradients of everything at once, judged against float64."""
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=SCORES, full="hqk", dlse=1.0)
    q, k, v, dout = (jax.device_put(x, jax.devices(platform)[0]) for x in inputs[:4])
    given = {name: jax.device_put(x, jax.devices(platform)[0]) for name, x in inputs.given.items()}
    mask = given.pop("mask")

    @jax.jit
    def everything(q: Any, k: Any, v: Any, given: Any) -> Any:
        results, pull = jax.vjp(
            lambda q, k, v, given: entry(q, k, v, mask=mask, return_lse=True, softcap=2.0, causal=True, **given),
            q, k, v, given,
        )  # fmt: skip
        return results, pull((dout, jnp.asarray(inputs.dlse)))

    (out, lse), (*grads, of_arrays) = everything(q, k, v, given)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    found |= {f"d{name}": x for name, x in of_arrays.items()}
    judge({name: np.asarray(x) for name, x in found.items()}, *references(inputs, softcap=2.0, causal=True))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_order_of_jit_and_grad(platform: str) -> None:
    q, k, v, bias = *qkv(platform=platform), numbers(4, 5, 7, platform=platform)

    def of(attend: Any) -> Any:
        return lambda q, k, v, bias: (attend(q, k, v, bias) ** 2).sum()

    ours = of(lambda q, k, v, bias: attention(q, k, v, bias=bias, causal=True))
    names = (0, 1, 2, 3)
    expected = jax.grad(of(standard), names)(q, k, v, bias)
    for gradient in (
        jax.grad(ours, names), jax.jit(jax.grad(ours, names)), jax.grad(jax.jit(ours), names),
        jax.jit(jax.grad(jax.checkpoint(ours), names)), lambda *x: jax.jit(jax.value_and_grad(ours, names))(*x)[1],
    ):  # fmt: skip
        close(gradient(q, k, v, bias), expected)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_scan(platform: str) -> None:
    q, k, v = qkv(platform=platform)
    v = numbers(2, 7, 2, 8, platform=platform)

    def run(attend: Any) -> Any:
        return jax.jit(
            jax.value_and_grad(lambda q: jax.lax.scan(lambda x, _: (attend(x, k, v), x.sum()), q, None, 4)[0].sum())
        )

    close(run(lambda *x: attention(*x, causal=True))(q), run(standard)(q))


def test_traced_once_for_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one shape share what is traced."""
    traced = []
    called = jax_call._called
    monkeypatch.setattr(jax_call, "_called", lambda *x: (traced.append(1), called(*x))[1])
    q, k, _ = qkv()

    @jax.jit
    def layers(q: Any) -> Any:
        for _ in range(6):
            q = attention(q, k, k, scale=0.123)
        return q

    layers(q)
    assert len(traced) == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("which", ["everything", "queries", "not the arrays", "sinks alone"])
def test_vmap(which: str, rank: int, layout: str) -> None:
    """Results and gradients, of which each entry has its own, of arrays that are mapped or not."""
    heads, n = (4, 2) if rank > 2 else (1, 1), 2

    def tensor(length: int, heads: int, dim: int) -> Any:
        x = numbers(n, 2, length, heads, dim)
        x = x.swapaxes(2, 3) if layout == "bhsd" else x
        x = x if rank == 4 else x[:, 0]
        return x if rank > 2 else x.squeeze(2 if layout == "bshd" else 1)

    def over(*axes: int) -> Any:  # of (batch, head, query, key), those that q has
        return numbers(n, *(size for axis, size in enumerate((2, heads[0], 5, 7)) if axis in axes and axis >= 4 - rank))

    arrays = [tensor(5, heads[0], 8), tensor(7, heads[1], 8), tensor(7, heads[1], 6)]
    arrays += [over(0, 1, 2, 3), over(1), over(0, 1), over(0, 3) > -0.5]
    names = ("bias", "sinks", "alibi_slopes", "key_mask")
    dims = {
        "everything": (0,) * 7, "queries": (0, *(None,) * 6), "not the arrays": (0, 0, 0, *(None,) * 4),
        "sinks alone": (*(None,) * 4, 0, None, None),
    }[which]  # fmt: skip
    given = [x if dim == 0 else x[1] for x, dim in zip(arrays, dims)]

    def results(*x: Any) -> Any:
        return attention(*x[:3], **dict(zip(names, x[3:])), layout=layout, return_lse=True, softcap=3.0)

    def total(*x: Any) -> Any:
        out, lse = results(*x)
        return (out**2).sum() + jnp.sin(jnp.maximum(lse, -10)).sum()

    for function in (results, jax.grad(total, tuple(range(6)))):
        one = [function(*(x if dim is None else x[i] for x, dim in zip(given, dims))) for i in range(n)]
        close(tuple(jax.jit(jax.vmap(function, dims))(*given)), tuple(jnp.stack(x) for x in zip(*one)))


def test_vmap_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = corridor.run
    monkeypatch.setattr(corridor, "run", lambda call: (calls.append(call.arrays["q"].shape), run(call))[1])
    q, k = numbers(3, 2, 5, 4, 8), numbers(3, 2, 7, 2, 8)
    nested = jax.vmap(jax.vmap(lambda q, k: attention(q, k, k)))
    nested(q, k).block_until_ready()
    assert calls == [(6, 5, 4, 8)]


def test_grad_of_vmap() -> None:
    q, k, v = (jnp.stack([x, x + 1]) for x in qkv())
    ours, theirs = (
        jax.grad(lambda q, f=f: jax.vmap(f)(q, k, v).sum())(q)
        for f in (lambda *x: attention(*x, causal=True), standard)
    )
    close(ours, theirs)


SHARDED = """
import numpy as np, jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from test_jax_transforms import attention, close, qkv, standard, numbers
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("b", "h"))
q, k, v, w, bias = (jnp.asarray(np.asarray(x)) for x in (*qkv(), numbers(2, 5, 4, 6), numbers(4, 5, 7)))
def both(ours, *x):
    names = tuple(range(len(x)))
    for f in (lambda *x: attention(*x[:3], causal=True, bias=x[3] if x[3:] else None), standard):
        g = shard_map(f, mesh=mesh, in_specs=ours[:len(x)], out_specs=ours[0]) if f is not standard else f
        yield jax.jit(jax.value_and_grad(lambda *x: (g(*x) * w).sum(), names))(*x)
whole = P("b", None, "h", None)
cases = ((whole,) * 3, (q, k, v)), ((P("b"),) * 3, (q, k, v)), ((whole,) * 3 + (P("h"),), (q, k, v, bias))
for specs, x in cases:
    found, expected = both(specs, *x)
    close(found, expected)

# On any one device, and, by XLA's partitioner, which runs it whole on each, on parts of several.
from jax.sharding import NamedSharding
q = numbers(4, 5, 4, 8)
def results(x, out_of=jax.jit):
    y, lse = out_of(lambda x: attention(x, x, x, causal=True, return_lse=True))(x)
    return y, lse, out_of(jax.grad(lambda x: (attention(x, x, x, causal=True) ** 2).sum()))(x)
expected = results(q)
for device in jax.devices()[1:3]:
    for out_of in (jax.jit, lambda f: f):
        found = results(jax.device_put(q, device), out_of)
        assert all(x.devices() == {device} for x in found)
        close(found, expected)
for spec in (P("b", None, "h"), P("h"), P(None, None, None, "b")):
    close(results(jax.device_put(q, NamedSharding(mesh, spec))), expected)
close(jax.pmap(results)(np.asarray(q)[:, None])[:2], tuple(x[:, None] for x in expected[:2]))
def again(x, u):  # jvp of grad, and grad of grad
    f = jax.grad(lambda x: (attention(x, x, x, causal=True) ** 2).sum())
    return jax.jvp(f, (x,), (u,))[1], jax.grad(lambda x: (f(x) * u).sum())(x)
if hasattr(mesh, "explicit_axes"):  # of which types tell: gradients are shared out as what they are of
    from jax.sharding import AxisType
    by_type = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    for spec in (P("b", None, "h"), P("h")):
        x = jax.device_put(q, NamedSharding(by_type, spec))
        found = results(x)
        assert found[2].sharding.is_equivalent_to(x.sharding, x.ndim)
        close(found, expected)
        close(jax.jit(again)(x, x), jax.jit(again)(q, q))
x, y = (jax.device_put(q, device) for device in jax.devices()[:2])
for call in (attention, jax.jit(attention)):
    try:
        call(x, y, y)
    except ValueError as error:
        assert "k" in str(error) and "device" in str(error), error
    else:
        raise AssertionError("arrays on two devices")
print("sharded")
"""


@pytest.mark.parametrize("platform", PLATFORMS)
def test_gradients_of_sinks_beside_those_of_a_score_function(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of their own: each writes to the memory of the result that is its own."""
    asked: list[tuple[str, ...]] = []
    make = jax_passes.made
    monkeypatch.setattr(jax_passes, "made", lambda how: (how.of is BACKWARD and asked.append(how.wrt), make(how))[1])
    q, k, v = qkv(platform=platform)
    sinks, table = numbers(4, seed=3, platform=platform), numbers(7, seed=4, platform=platform)

    def ours(sinks: Any, table: Any) -> Any:
        out = attention(
            q, k, v, sinks=sinks, score=lambda s, b, h, i, j, table: s + table[j], score_arrays={"table": table}
        )
        return (out * v[:, :5, :1]).sum()

    def theirs(sinks: Any, table: Any) -> Any:
        k2, v2 = (jnp.repeat(x, 2, 2) for x in (k, v))
        scores = jnp.einsum("bihd,bjhd->bhij", q, k2, precision="highest") / q.shape[-1] ** 0.5 + table
        more = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        p = jax.nn.softmax(jnp.concatenate((scores, more), -1), -1)[..., :-1]
        return (jnp.einsum("bhij,bjhd->bihd", p, v2, precision="highest") * v[:, :5, :1]).sum()

    close(jax.grad(ours, (0, 1))(sinks, table), jax.grad(theirs, (0, 1))(sinks, table))
    assert asked[-1] == ("sinks", "score_arrays['table']")  # as the kernels are run


def test_block_masks_are_not_kept_for_ever() -> None:
    q, kept = numbers(1, 16, 1, 16), []
    for _ in range(40):
        mask = cupyflash.block_mask(np.eye(16, dtype=bool), block=16, like=q)
        attention(q, q, q, block_mask=mask)
        kept.append(weakref.ref(mask))
    del mask
    gc.collect()
    assert sum(x() is not None for x in kept) <= 32


def test_several_devices() -> None:
    """shard_map over batch and heads (a gradient of what is the same on several devices is summed over them), other
    devices than the first, arrays in parts without shard_map, and pmap."""
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["sharded"], done.stderr[-3000:]


def test_donated_buffers() -> None:
    q, k, _ = qkv()
    step = jax.jit(lambda q: attention(q, k, k, causal=True), donate_argnums=0)
    expected = attention(attention(q, k, k, causal=True), k, k, causal=True)
    given = q + 0
    close(step(step(given)), expected)
    assert given.is_deleted()
    with pytest.raises(ValueError, match="^q is deleted; it must be an array that was not donated"):
        attention(given, k, k)


def test_one_buffer_for_all_and_gradients_in_its_place() -> None:
    """q, k and v that are one array, which is donated to the step that makes another of it."""

    def step(x: Any, attend: Any) -> Any:
        for _ in range(2):
            x = x - 0.1 * jax.grad(lambda x: (attend(x, x, x) ** 2).sum())(x)
        return x

    x = numbers(2, 5, 4, 8)
    expected = step(x, standard)
    jitted = jax.jit(lambda x: step(x, lambda *x: attention(*x, causal=True)), donate_argnums=0)
    close(jitted(x), expected)
    assert x.is_deleted()


@pytest.mark.parametrize("platforms", [None, ["cuda"], ["cpu", "cuda"]])
def test_export_says_that_it_is_a_callback(platforms: Any) -> None:
    """No callback can be written into a file; what is compiled for this process is no matter."""
    export = pytest.importorskip("jax.export")  # old ones want absl
    q, k, v = qkv()
    jitted = jax.jit(lambda *x: attention(*x, causal=True))
    for function in (jitted, jax.jit(jax.grad(lambda *x: jitted(*x).sum()))):
        with pytest.raises(
            NotImplementedError, match="^attention is a callback into this process, and jax.export cannot"
        ):
            export.export(function, platforms=platforms)(q, k, v)
    close(jitted.lower(q, k, v).compile()(q, k, v), jitted(q, k, v))


def test_what_is_wrong_is_said_while_tracing() -> None:
    q, k, v = qkv()
    for bad, error, message in (
        (lambda q: attention(q, k[..., :4], v), ValueError, "^k has head dimension 4"),
        (lambda q: attention(q, k, v, key_mask=q), TypeError, "^key_mask has dtype float64; it must be bool"),
        (lambda q: attention(q, k, v, causal="left"), ValueError, "^causal is 'left'"),
        (
            lambda q: attention(q, k, v, family="simt"),
            ValueError,
            "^family is 'simt', a family of GPU kernels, but q is",
        ),
        (lambda q: attention(q, np.asarray(k), v), TypeError, "^k is a ndarray; it must be a jax.Array"),
        (
            lambda q: cupyflash.attention(q, k, v, out=q),
            TypeError,
            "^out is given to be written, but JAX arrays are imm",
        ),
    ):
        with pytest.raises(error, match=message):
            jax.jit(bad).trace(q)


# What JAX tests of its own function: dtypes, groups of heads, masks and biases of every form, alone and together.

WIDE = (3, 24, 24, 4, 16)  # B, T, S, N, H


def both(
    dtype: str, groups: int, options: dict[str, Any], bias: tuple[int, ...] | None = None, mapped: bool = False
) -> tuple[Any, Any, Any]:
    """Values and gradients: ours, those of jax.nn, and those of jax.nn in float64."""
    b, t, s, n, h = WIDE
    shapes = ((b, t, n, h), (b, s, n // groups, h), (b, s, n // groups, h))
    lead = (2,) if mapped else ()
    inputs = [numbers(*lead, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    options = dict(options)
    if options.pop("lengths", False):
        lengths = {
            "query_seq_lengths": jnp.asarray([24, 9, 1], jnp.int32),
            "key_value_seq_lengths": jnp.asarray([5, 24, 1], jnp.int32),
        }
        options |= lengths
    if "mask" in options:
        options["mask"] = (numbers(*options["mask"]) > -0.5).at[..., 0].set(True)
    inputs += [numbers(*lead, *bias, seed=7, dtype=dtype)] if bias else []

    # Rows that are not there are 0; those of which every key is hidden would be the mean of the values in jax.nn.
    w = numbers(b, t, n, h, seed=9)
    if "query_seq_lengths" in options:
        w *= (jnp.arange(t) < options["query_seq_lengths"][:, None])[..., None, None]

    def of(function: Any, dtype: str) -> Any:
        def total(*x: Any) -> Any:
            call = jax.vmap(lambda *x: function(*x, **options)) if mapped else lambda *x: function(*x, **options)
            values = call(*x) * w.astype(dtype)
            return values.sum(dtype="float64"), values

        (_, values), grads = jax.jit(jax.value_and_grad(total, tuple(range(len(inputs))), has_aux=True))(
            *(x.astype(dtype) for x in inputs)
        )
        return [values, *grads]

    exact = of(jax.nn.dot_product_attention, "float64")
    return of(dot_product_attention, dtype), of(jax.nn.dot_product_attention, dtype), exact
