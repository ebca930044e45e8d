"""JAX arrays, traced: under jit, grad, vmap, scan, remat and shard_map, and jax.nn's function in our place."""

from __future__ import annotations

import inspect
import subprocess
import sys
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

from cupyflash.jax import attention, dot_product_attention

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
    from cupyflash.interop import jax_ops

    traced = []
    called = jax_ops._called
    monkeypatch.setattr(jax_ops, "_called", lambda *x: (traced.append(1), called(*x))[1])
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
    forward = corridor.forward
    monkeypatch.setattr(corridor, "forward", lambda *x: (calls.append(x[1]["q"].shape), forward(*x))[1])
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
for specs, x in (((whole,) * 3, (q, k, v)), ((P("b"), P("b"), P("b")), (q, k, v)), ((whole,) * 3 + (P("h"),), (q, k, v, bias))):
    found, expected = both(specs, *x)
    close(found, expected)
print("sharded")
"""


def test_shard_map() -> None:
    """Over batch and heads; a gradient of what is the same on several devices is summed over them."""
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["sharded"], done.stderr[-3000:]


def test_donated_buffers() -> None:
    q, k, _ = qkv()
    step = jax.jit(lambda q: attention(q, k, k, causal=True), donate_argnums=0)
    expected = attention(attention(q, k, k, causal=True), k, k, causal=True)
    close(step(step(q + 0)), expected)


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


def test_what_has_no_derivative() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="gradients of attention cannot be differentiated again"):
        jax.grad(lambda q: jax.grad(lambda q: attention(q, k, v).sum())(q).sum())(q)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))


# ---- jax.nn.dot_product_attention -----------------------------------------------------------------------------------


def test_signature_of_dot_product_attention() -> None:
    """Whatever the installed JAX has, of the arguments that both name, is named and ordered alike."""
    ours, theirs = (
        list(inspect.signature(f).parameters) for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [x for x in ours if x in theirs] == theirs


LENGTHS: dict[str, Any] = {"key_value_seq_lengths": jnp.asarray([7, 3], jnp.int32)}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3},
    "window": {"local_window_size": 3, "is_causal": True}, "window alone": {"local_window_size": (3, 2)},
    "bias": {"bias": (1, 4, 5, 7)}, "bias of one row": {"bias": (2, 1, 1, 7)}, "mask": {"mask": (2, 1, 5, 7)},
    "mask and window": {"mask": (1, 4, 5, 7), "local_window_size": (4, 1)}, "lengths": LENGTHS,
    "lengths of both": LENGTHS | {"query_seq_lengths": jnp.asarray([5, 2], jnp.int32), "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_dot_product_attention(name: str, batched: bool) -> None:
    """Values and gradients are those of jax.nn, in float32 and with fewer queries than keys."""
    options = dict(CASES[name])
    if not batched and ("bias of one row" in name or "lengths" in name):
        options = {n: x[:1] if n != "is_causal" and not isinstance(x, tuple) else x for n, x in options.items()}
        options = {n: (1, *x[1:]) if isinstance(x, tuple) else x for n, x in options.items()}
    if not batched and name == "mask":
        options["mask"] = (1, 1, 5, 7)
    q, k, v = numbers(2, 5, 4, 8, dtype="float32"), *(numbers(2, 7, 2, 8, seed=i, dtype="float32") for i in (1, 2))
    q, k, v = (q, k, v) if batched else (q[0], k[0], v[0])
    if "mask" in options:
        options["mask"] = (numbers(*options["mask"]) > -0.8).at[..., 0].set(True)
    bias = numbers(*options.pop("bias"), dtype="float32") if "bias" in options else None
    with_bias = () if bias is None else (bias,)

    def total(function: Any) -> Any:
        return jax.value_and_grad(lambda *x: jnp.sin(function(*x, **options)).sum(), tuple(range(3 + len(with_bias))))

    close(
        total(dot_product_attention)(q, k, v, *with_bias),
        total(jax.nn.dot_product_attention)(q, k, v, *with_bias),
        2e-5,
    )


def test_dot_product_attention_says_more() -> None:
    q, k, v = qkv()
    out, lse = dot_product_attention(q, k, v, return_residual=True)
    expected = attention(q, k, v, return_lse=True)
    close((out, lse), (expected[0], expected[1].swapaxes(1, 2)))
    hidden = dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 5, 7), bool))
    assert not hidden.any()
    for options, message in (
        ({"implementation": "cudnn"}, "^implementation is 'cudnn'; it must be None"),
        (
            {"query_seq_lengths": jnp.ones(2)},
            r"^query_seq_lengths has shape \(2,\) and dtype float64; it must be \(B,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dot_product_attention(q, k, v, **options)
    with pytest.raises(ValueError, match=r"^query has shape \(5, 8\); it must be \(B, T, N, H\)"):
        dot_product_attention(q[0, :, 0], k[0, :, 0], v[0, :, 0])
