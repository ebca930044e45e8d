"""JAX arrays, traced: under jit, grad, vmap, scan, remat and shard_map, and jax.nn's function in our place."""

from __future__ import annotations

import gc
import inspect
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


# ---- jax.nn.dot_product_attention -----------------------------------------------------------------------------------


def test_signature_of_dot_product_attention() -> None:
    """Whatever the installed JAX has, of the arguments that both name, is named, ordered and left out alike."""
    ours, theirs = (
        {name: (x.kind, x.default) for name, x in inspect.signature(f).parameters.items()}
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [(name, x) for name, x in ours.items() if name in theirs] == list(theirs.items())


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


@pytest.mark.parametrize("name", ["window alone", "mask and window", "lengths of both"])
def test_where_jax_is_told_to_promote_nothing(name: str) -> None:
    """As JAX's own tests have it: neither ranks nor dtypes."""
    q, k, v = (numbers(2, n, 4, 8, dtype="float32") for n in (5, 7, 7))
    options = dict(CASES[name])
    masks = [numbers(*options.pop("mask")) > -0.8, numbers(7) > -0.8] if "mask" in options else [None]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = [dot_product_attention(q, k, v, mask=mask, **options) for mask in masks]
    close(found, [dot_product_attention(q, k, v, mask=mask, **options) for mask in masks])


def test_errors_name_the_arguments_of_jax() -> None:
    """Not those of `attention`, to which they are handed; while tracing."""
    q, k, v = qkv()
    three, two = jnp.ones(3, jnp.int32), jnp.ones(2, jnp.int32)
    for x, options, message in (
        ((q, k[..., :4], v), {}, "^key has head dimension 4"),
        ((q, k.astype("float32"), v), {}, "^key has dtype float32 but query"),
        ((q, k, v), {"key_value_seq_lengths": three},
            r"^key_value_seq_lengths has shape \(3,\) .*; it must be \(2,\) and int32"),
        ((q, k, v), {"query_seq_lengths": three},
            r"^query_seq_lengths has shape \(3,\) .*; it must be \(2,\) and int32"),
        ((q[0], k[0], v[0]), {"key_value_seq_lengths": two},
            r"^key_value_seq_lengths has shape \(2,\) .*; it must be \(1,\)"),
        *(((q, k, v), {"local_window_size": n},
            "^local_window_size is .*; it must be an integer, 0 or more, or two of them")
          for n in (-1, 2.5, "a", (1, 2, 3), (None, 2), (1, -2))),
        *(((q, k, v), {name: "no"}, f"^{name} is 'no'; it must be True or False") for name in ("is_causal",
            "return_residual")),
        ((q, None, v), {}, "^key is None; it must be an array"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            jax.jit(lambda *x, o=options: dot_product_attention(*x, **o)).trace(*x)


def test_dot_product_attention_says_more() -> None:
    q, k, v = qkv()
    out, lse = dot_product_attention(q, k, v, return_residual=True)
    expected = attention(q, k, v, return_lse=True)
    close((out, lse), (expected[0], expected[1].swapaxes(1, 2)))
    for name in ("xla", "cudnn"):  # as Keras gives it
        close(dot_product_attention(q, k, v, implementation=name), expected[0])
    hidden = dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 5, 7), bool))
    assert not hidden.any()
    for options, message in (
        ({"implementation": "triton"}, "^implementation is 'triton'; it must be None, 'xla' or 'cudnn'"),
        (
            {"query_seq_lengths": jnp.ones(2)},
            r"^query_seq_lengths has shape \(2,\) and dtype float64; it must be \(2,\) and int32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dot_product_attention(q, k, v, **options)
    with pytest.raises(ValueError, match=r"^query has shape \(5, 8\); it must be \(B, T, N, H\)"):
        dot_product_attention(q[0, :, 0], k[0, :, 0], v[0, :, 0])


# What JAX tests of its own function: dtypes, groups of heads, masks and biases of every form, alone and together.

WIDE = (3, 24, 24, 4, 16)  # B, T, S, N, H
MASKINGS: dict[str, dict[str, Any]] = {
    "none": {}, "causal": {"is_causal": True}, "padding": {"lengths": True},
    "padding and causal": {"lengths": True, "is_causal": True},
    "window": {"local_window_size": (4, 7)}, "window of one number": {"local_window_size": 6, "is_causal": True},
    "custom": {"mask": (3, 4, 24, 24)}, "custom and padding": {"mask": (1, 1, 24, 24), "lengths": True},
    "custom for each head": {"mask": (1, 4, 24, 24), "is_causal": True},
}  # fmt: skip


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


def as_good(ours: Any, theirs: Any, exact: Any, dtype: str) -> None:
    for x, y, z in zip(ours, theirs, exact):
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y, z = (np.asarray(a, np.float64) for a in (x, y, z))
        assert abs(x - z).max() <= 2 * abs(y - z).max() + {"float32": 1e-5}.get(dtype, 1e-3)


@pytest.mark.parametrize("masking", MASKINGS)
def test_as_jax_tests_its_own(masking: str) -> None:
    n = list(MASKINGS).index(masking)
    dtype = ("bfloat16", "float32")[n % 2]
    as_good(*both(dtype, (1, 2, 4)[n // 3], MASKINGS[masking]), dtype)


@pytest.mark.parametrize(
    "shape", [(3, 4, 24, 24), (1, 4, 24, 24), (3, 1, 24, 24), (1, 1, 24, 24), (3, 4, 1, 24), (1, 1, 1, 24)]
)
def test_gradients_of_biases_of_every_form(shape: tuple[int, ...]) -> None:
    """Also mapped, where every entry has a bias of its own."""
    as_good(
        *both("float32", 2, {"is_causal": True}, bias=shape, mapped=shape[0] > shape[1] or shape[2] == 1), "float32"
    )


def test_under_vmap_and_jit_together() -> None:
    """Mapped over any axis, with what is not mapped shared."""
    q, k, v = numbers(2, 3, 5, 4, 8), numbers(3, 7, 2, 2, 8), numbers(3, 7, 2, 8)
    ours, theirs = (
        jax.jit(jax.vmap(lambda q, k, v, f=f: f(q, k, v, scale=0.2), (0, 2, None), 1))(q, k, v)
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    close(ours, theirs, 1e-6)


@pytest.mark.parametrize(
    "shapes",
    [((3, 24, 4, 8), (3, 24, 3, 8), None), ((3, 24, 4, 8), (2, 24, 4, 8), None), ((3, 24, 4, 8), (3, 24, 4, 6), None),
     ((3, 24, 4, 8), (3, 24, 4, 8), (2, 4, 24, 24)), ((3, 24, 4, 8), (3, 24, 4, 8), (3, 4, 24, 20))],
)  # fmt: skip
def test_shapes_that_do_not_fit(shapes: tuple[Any, ...]) -> None:
    q, k = (numbers(*x) for x in shapes[:2])
    bias = None if shapes[2] is None else numbers(*shapes[2])
    for function in (dot_product_attention, jax.nn.dot_product_attention):
        with pytest.raises((ValueError, TypeError)):
            function(q, k, k, bias)
