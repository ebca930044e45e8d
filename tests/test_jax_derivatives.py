"""Derivatives of second order in JAX: every order of forward and reverse mode, against JAX's own of standard
attention."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_jax_drop_in import as_good
from test_jax_transforms import PLATFORMS, close, double_precision, numbers

jax = pytest.importorskip("jax")

from jax import numpy as jnp

from cupyflash.jax import attention

__all__ = ["double_precision"]  # a fixture of every test

TREE = jax.tree


@pytest.fixture(autouse=True)
def quick_to_compile() -> Any:
    """XLA takes most of the time of these tests."""
    on_cpu = jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", on_cpu)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SHAPES: dict[str, Any] = {
    "q": (2, 4, 4, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 3), "bias": (4, 1, 5), "alibi_slopes": (4,), "sinks": (4,),
    "table": (4, 5),
}  # fmt: skip
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "scores": (("q", "k", "v", "bias", "alibi_slopes", "sinks"), {"causal": True, "softcap": 1.3, "window": (2, 0)}),
    "function": (("q", "k", "v", "sinks", "table"), {"masked": True}),
}


SEEN = np.array([[True, False, True, True, True], [False] * 5])  # the queries of one entry see no key


def bent(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """A score function that is linear in neither."""
    return s * table[h, j] + 0.1 * s * s + table[h, j] * table[h, j]


def drawn(names: tuple[str, ...], seed: int = 0, **how: Any) -> dict[str, Any]:
    return {name: numbers(*SHAPES[name], seed=seed + n, **how) for n, name in enumerate(names)}


def ours(x: dict[str, Any], masked: bool = False, **options: Any) -> Any:
    x = dict(x)
    options |= {"key_mask": SEEN, "score": bent, "score_arrays": {"table": x.pop("table")}} if masked else {}
    return attention(x.pop("q"), x.pop("k"), x.pop("v"), **x, **options, return_lse=True)


def standard(
    x: dict[str, Any], masked: bool = False, causal: bool = False, softcap: float = 0.0, window: Any = None
) -> Any:
    q, (k, v) = x["q"], (jnp.repeat(x[name], x["q"].shape[2] // x["k"].shape[2], 2) for name in "kv")
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / q.shape[-1] ** 0.5
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    if masked:
        table = x["table"][:, None, :]
        s = s * table + 0.1 * s * s + table * table
    if "alibi_slopes" in x:
        s = s - x["alibi_slopes"][:, None, None] * abs(distance)
    s = s + x.get("bias", 0)
    there = distance <= (0 if causal else k.shape[1])
    there &= distance >= -(window[0] if window else k.shape[1])
    there = there & (SEEN[:, None, None] if masked else True)
    s = jnp.where(there, s, -1e30)
    more = jnp.broadcast_to(x["sinks"][:, None, None] if "sinks" in x else -1e30, (*s.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate((s, more), -1), -1)
    p = jnp.where(there, jnp.exp(s - lse[..., None]), 0)
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest"), lse


def loss(attend: Any) -> Any:
    """Of both results, and no square of them."""

    def of(x: Any) -> Any:
        out, lse = attend(x)
        return (jnp.tanh(out) ** 2).sum() + jnp.sin(lse).sum()

    return of


def dot(x: Any, y: Any) -> Any:
    return sum((a * b).sum() for a, b in zip(TREE.leaves(x), TREE.leaves(y), strict=True))


Transform = Callable[[Any, Any, Any], Any]
ORDERS: dict[str, Transform] = {
    "jvp": lambda f, x, u: jax.jvp(f, (x,), (u,)),
    "jvp of grad": lambda f, x, u: jax.jvp(jax.grad(loss(f)), (x,), (u,)),
    "grad of jvp": lambda f, x, u: jax.grad(lambda x, u: jax.jvp(loss(f), (x,), (u,))[1], (0, 1))(x, u),
    "grad of grad": lambda f, x, u: jax.grad(lambda x: dot(jax.grad(loss(f))(x), u))(x),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_order(case: str, platform: str) -> None:
    names, options = CASES[case]
    x, u = drawn(names, platform=platform), drawn(names, 9, platform=platform)
    close(*(
        jax.jit(lambda x, u, f=f: {name: order(lambda x: f(x, **options), x, u) for name, order in ORDERS.items()})(x,
            u)
        for f in (ours, standard)
    ))  # fmt: skip


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_good_as_standard_attention(dtype: str, platform: str) -> None:
    """In its own precision; lse and a bias are float32 beside 16 bits."""
    x, u = (drawn(("q", "k", "v", "bias"), seed, dtype=dtype, platform=platform) for seed in (0, 9))
    x["bias"], u["bias"] = (y["bias"].astype("float32") for y in (x, u))

    def of(f: Any, dtype: str | None = None) -> Any:
        def attend(x: Any) -> Any:
            out, lse = f(x, causal=True)
            return out, lse.astype(dtype or "float32")

        given = [TREE.map(lambda y: y.astype(dtype or y.dtype), y) for y in (x, u)]
        return TREE.leaves(jax.jit(lambda x, u: ORDERS["grad of grad"](attend, x, u))(*given))

    as_good(
        of(ours),
        of(lambda x, **how: standard(x | {"bias": x["bias"].astype(dtype)}, **how)),
        of(standard, "float64"),
        dtype,
    )


def stacked(x: Any) -> Any:
    return TREE.map(lambda x: jnp.stack([x, x * x]), x)


def layers(f: Any) -> Any:
    """Two of them, which keep nothing of what they compute."""
    return lambda x: jax.lax.scan(lambda sum_, _: (sum_ + jax.checkpoint(loss(f))(x), None), 0.0, None, 2)[0]


TRANSFORMS: dict[str, Transform] = {
    "linearize": lambda f, x, u: jax.linearize(f, x)[1](u),
    "jacfwd": lambda f, x, u: jax.jacfwd(f)(x),
    "jacrev": lambda f, x, u: jax.jacrev(f)(x),
    "hessian": lambda f, x, u: jax.hessian(loss(f))(x),
    "jacrev of jacfwd": lambda f, x, u: jax.jacrev(jax.jacfwd(loss(f)))(x),
    "jacrev of jacrev": lambda f, x, u: jax.jacrev(jax.jacrev(loss(f)))(x),
    "vmap of jvp": lambda f, x, u: jax.vmap(lambda u: ORDERS["jvp"](f, x, u))(stacked(u)),
    "vmap of jvp of grad": lambda f, x, u: jax.vmap(lambda x, u: ORDERS["jvp of grad"](f, x, u), (0, None))(stacked(x),
        u),
    "vmap of grad of jvp": lambda f, x, u: jax.vmap(lambda u: ORDERS["grad of jvp"](f, x, u))(stacked(u)),
    "grad of vmap of jvp": lambda f, x, u: jax.grad(
        lambda x: jnp.sin(jax.vmap(lambda u: jax.jvp(loss(f), (x,), (u,))[1])(stacked(u))).sum()
    )(x),
    "remat and scan": lambda f, x, u: [
        jax.jvp(jax.grad(layers(f)), (x,), (u,)), jax.grad(lambda x: dot(jax.grad(layers(f))(x), u))(x),
    ],
    "by the direction": lambda f, x, u: jax.grad(lambda u: dot(jax.jvp(jax.grad(loss(f)), (x,), (u,))[1], x))(u),
    "of lse alone": lambda f, x, u: jax.grad(
        lambda x: dot(jax.grad(lambda x: jnp.sin(f(x)[1]).sum())(x), u)
    )(x),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    rows = {"q": (1, 2, 2, 3), "k": (1, 3, 1, 3), "v": (1, 3, 1, 2), "bias": (2, 3)}
    x, u = ({n: numbers(*shape, seed=seed) for n, shape in rows.items()} for seed in (0, 5))
    close(*(
        jax.jit(lambda x, u, f=f: TRANSFORMS[name](lambda x: f(x, causal=True), x, u))(x, u) for f in (ours, standard)
    ))  # fmt: skip


def test_donated_buffers() -> None:
    x = drawn(("q", "k", "v"))
    step = lambda f, x: TREE.map(lambda x, h: x - 0.01 * h, x, jax.jvp(jax.grad(loss(f)), (x,), (x,))[1])
    expected = jax.jit(lambda x: step(standard, step(standard, x)))(x)
    ours_ = jax.jit(lambda x: step(ours, x), donate_argnums=0)
    given = TREE.map(lambda x: x + 0, x)
    close(ours_(ours_(given)), expected)
    assert given["q"].is_deleted()


# ---- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0])
def test_gradients_with_sinks_mapped_and_again(axis: int | None) -> None:
    x, some = drawn(("q", "k", "v", "sinks")), jnp.array([1.0, 0.5])
    sinks = x.pop("sinks") if axis is None else jnp.stack([x["sinks"], -x.pop("sinks")])

    def of(f: Any) -> Any:
        first = jax.grad(lambda a, s: loss(f)(x | {"q": a * x["q"], "sinks": s}), (0, 1))
        again = lambda a, s: sum(jnp.sin(y).sum() for y in jax.vmap(first, (0, axis))(a, s))
        return jax.jit(jax.grad(again, (0, 1)))(some, sinks)

    close(of(ours), of(standard))


@pytest.mark.parametrize(
    ("rank", "layout", "mapped"),
    [(4, "bshd", "k bias"), (4, "bhsd", "u of bias"), (3, "bhsd", "q u of table"), (3, "bshd", "table"),
        (2, "bshd", "v u of q"),
     (2, "bhsd", "alibi_slopes u of v")],
)  # fmt: skip
def test_mapped_arrays_and_tangents(rank: int, layout: str, mapped: str) -> None:
    """An array may be mapped and its tangent not, or the other way round: as many calls, one after the other."""
    heads, n = (2, 1) if rank > 2 else (1, 1), 2

    def rows(length: int, heads: int, dim: int, seed: int) -> Any:
        x = numbers(n, 2, length, heads, dim, seed=seed)
        x = x.swapaxes(2, 3) if layout == "bhsd" else x
        x = x if rank == 4 else x[:, 0]
        return x if rank > 2 else x.squeeze(2 if layout == "bshd" else 1)

    def all_of(seed: int) -> dict[str, Any]:
        x = {"q": rows(3, heads[0], 4, seed), "k": rows(4, heads[1], 4, seed + 1), "v": rows(4, heads[1], 2, seed + 2)}
        of_heads = (heads[0],) if rank > 2 else ()
        one = (1,) if rank == 4 else ()
        x |= {"bias": numbers(n, *one, *of_heads, 3, 4, seed=seed), "alibi_slopes": numbers(n, *of_heads, seed=seed)}
        return x | {"table": numbers(n, 4, seed=seed)}

    names = all_of(0).keys()
    plain, *of_u = mapped.split("u of ")
    dims = tuple({name: 0 if name in some.split() else None for name in names} for some in (plain, " ".join(of_u)))
    given = tuple(
        {name: y if dim[name] == 0 else y[0] for name, y in all_of(seed).items()} for seed, dim in zip((0, 7), dims)
    )

    def attend(x: Any) -> Any:
        x = dict(x)
        table = {"table": x.pop("table")}
        score = lambda s, b, h, i, j, table: s * table[j]
        return attention(**x, score=score, score_arrays=table, layout=layout, return_lse=True)

    def function(x: Any, u: Any) -> Any:
        return jax.jvp(attend, (x,), (u,)), jax.jvp(jax.grad(loss(attend)), (x,), (u,))

    one = jax.jit(function)
    each = [
        one(*({name: y[i] if dim[name] == 0 else y for name, y in z.items()} for z, dim in zip(given, dims)))
        for i in range(n)
    ]
    close(jax.jit(jax.vmap(function, dims))(*given), TREE.map(lambda *x: jnp.stack(x), *each))


# ---- several devices ------------------------------------------------------------------------------------------------

SHARDED = """
import numpy as np, jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
from jax.sharding import Mesh, PartitionSpec as P
from test_jax_derivatives import ORDERS, close, numbers, ours, standard
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("b", "h"))
shapes = {"q": (4, 3, 4, 4), "k": (4, 5, 2, 4), "v": (4, 5, 2, 3), "bias": (4, 3, 5)}
x, u = ({name: numbers(*shape, seed=seed) for name, shape in shapes.items()} for seed in (0, 5))
x, u = jax.tree.map(np.asarray, (x, u))
parts = {"q": P("b", None, "h"), "k": P("b", None, "h"), "v": P("b", None, "h"), "bias": P("h")}
def whole(x):
    return standard(x, causal=True)
def in_parts(x):
    outs = P("b", None, "h"), P("b", "h")
    return shard_map(lambda x: ours(x, causal=True), mesh=mesh, in_specs=(parts,), out_specs=outs)(x)
def all_of(f):
    names = "jvp of grad", "grad of jvp", "grad of grad"
    return jax.jit(lambda x, u: {name: ORDERS[name](f, x, u) for name in names})(x, u)
close(all_of(in_parts), all_of(whole))
# Each device differentiates for itself: the bias is that of all entries, so that its gradients are summed over them.
def hvp(f):
    return lambda x, u: ORDERS["jvp of grad"](f, x, u)[1]
specs = dict.fromkeys(shapes, P("b")) | {"bias": P()}
four = Mesh(np.array(jax.devices()[:4]), "b")
each = shard_map(hvp(lambda x: ours(x, causal=True)), mesh=four, in_specs=(specs, specs), out_specs=specs)
close(jax.jit(each)(x, u), jax.jit(hvp(whole))(x, u))
print("sharded")
"""


def test_several_devices() -> None:
    """Derivatives of a shard_map, and inside it."""
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["sharded"], done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("family", [None, "simt"])
def test_run_again_with_other_arrays(family: str | None) -> None:
    """XLA replays what was launched, in other memory; at once and eager it is the same."""
    order = ORDERS["jvp of grad"]
    f = lambda x: attention(**x, family=family, causal=True, return_lse=True)
    jitted, expected = (jax.jit(lambda x, u, f=f: order(f, x, u)) for f in (f, lambda x: standard(x, causal=True)))
    for seed in range(4):
        x, u = (drawn(("q", "k", "v", "bias"), n, platform="gpu") for n in (seed, seed + 20))
        close(jitted(x, u), expected(x, u))
    close(order(f, x, u), expected(x, u))
