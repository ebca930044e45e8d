"""A sequence that JAX devices share, inside shard_map: results and gradients are those of one device.

Each test is a process with devices of its own: as many are there only where JAX is told so before it begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

START = """
import functools
import numpy as np
import jax
jax.config.update("jax_enable_x64", True)
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from cupyflash.jax import attention, parallel
from cupyflash.parallel import Rows

shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
NUMBER = jax.device_count()
sp = Mesh(np.array(jax.devices()), ("sp",))
dp = Mesh(np.array(jax.devices()).reshape(2, -1), ("dp", "sp"))
both = Mesh(np.array(jax.devices()).reshape(2, -1), ("hosts", "inside"))
LENGTH = 16 * NUMBER


def drawn(*shape, seed=0, dtype="float64"):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def qkv(heads=8, heads_k=8, batch=1, dtype="float64"):
    shapes = (heads, 8), (heads_k, 8), (heads_k, 6)
    return [drawn(batch, LENGTH, *x, seed=n, dtype=dtype) for n, x in enumerate(shapes)]


def moved(x, rows, axis=1):
    "All ranks' rows, one rank's behind the other's: what shard_map deals out."
    return jnp.concatenate([rows.take(x, r, axis) for r in range(rows.size)], axis)


def back(x, rows, axis=1):
    return rows.join(jnp.split(x, rows.size, axis), axis)


def close(actual, expected, atol=1e-11):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape, x.dtype, y.dtype)
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=0, atol=atol)


def agree(mesh, rows, *, x=None, axis="sp", spec=P(None, "sp"), arrays={}, specs={}, own=(), atol=1e-11, how={},
          check=True, **options):
    "Results and all gradients, of arrays too, of a loss of out and lse; of a float32 beside those of float64."
    x = qkv() if x is None else x
    w = drawn(*x[0].shape[:3], 6, seed=9)
    floats = [n for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating) and n != "seed"]
    fixed = {n: a for n, a in arrays.items() if n not in floats}
    spec_of = {n: specs.get(n, P()) for n in arrays}
    named = lambda a: {n: y for n, y in a.items() if not n.startswith("read_")} | (
        {"score_arrays": r} if (r := {n: y for n, y in a.items() if n.startswith("read_")}) else {})

    def one(x, a):
        return attention(*x, return_lse=True, **options, **named(a | fixed))

    lse_spec = P(spec[0], None, *spec[1:2])
    each = shard_map(
        lambda x, a: parallel.attention(*x, axis=axis, rows=rows, return_lse=True, **how, **options, **named(a)),
        mesh=mesh, in_specs=([spec] * 3, spec_of), out_specs=(spec, lse_spec),
        **({} if check else {"check_vma": False}))

    def loss(f, w):
        def total(x, a):
            out, lse = f(x, a)
            return (out * w).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) ** 2).sum() * 0.1, (out, lse)
        return jax.jit(jax.grad(total, (0, 1), has_aux=True))

    a = {n: arrays[n] for n in floats}
    expected = loss(one, w)(x, a)
    shared = {n: moved(y, rows, -2) if n in own else y for n, y in a.items()}
    (dx, da), (out, lse) = loss(lambda x, a: each(x, a | fixed), moved(w, rows))([moved(y, rows) for y in x], shared)
    da = {n: back(y, rows, -2) if n in own else y for n, y in da.items()}
    close((([back(y, rows) for y in dx], da), (back(out, rows), back(lse, rows, 2))), expected, atol)
"""


def devices(number: int, code: str) -> None:
    """Runs what stands behind START, on so many devices."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={number}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", f"{START}\n{code}\nprint('done')"]
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, check=False, cwd=here, capture_output=True, text=True, env={**os.environ, **flags, "PYTHONPATH": path}
    )
    assert done.stdout.split()[-1:] == ["done"], done.stderr[-3000:]


def test_exchange_of_keys() -> None:
    """Zigzag, with a bias of own rows and slopes."""
    devices(
        2,
        """
slopes, bias = jnp.abs(drawn(4, seed=4)), drawn(1, 4, LENGTH, LENGTH)
agree(sp, Rows.zigzag(LENGTH, 2, multiple=8), x=qkv(4, 2), how={"exchange": "keys"}, causal=True,
      arrays={"bias": bias, "alibi_slopes": slopes}, specs={"bias": P(None, None, "sp")}, own=("bias",))
""",
    )


def test_no_keys_at_all() -> None:
    """Out is 0, and so are gradients."""
    devices(
        2,
        """
rows, none = Rows.contiguous(LENGTH, 2, multiple=1), Rows.contiguous(0, 2)
q, k, v = drawn(1, LENGTH, 2, 8), drawn(1, 0, 2, 8), drawn(1, 0, 2, 6)
for exchange in ("keys", "heads"):
    each = shard_map(
        lambda q, k, v: parallel.attention(q, k, v, axis="sp", rows=rows, key_rows=none, exchange=exchange),
        mesh=sp, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    out, of = jax.jit(jax.value_and_grad(lambda *x: each(*x).sum(), (0, 1, 2)))(q, k, v)
    assert out == 0 and not of[0].any() and [x.shape for x in of[1:]] == [k.shape, v.shape], (out, of)
for wrong in (3, [1]):
    try:
        shard_map(lambda q: parallel.attention(q, q, q, axis="sp", rows=rows, score_arrays=wrong), mesh=sp,
                  in_specs=P(None, "sp"), out_specs=P(None, "sp"))(q)
    except TypeError as error:
        assert str(error).startswith("score_arrays is a"), error
    else:
        raise AssertionError("nothing is said")
""",
    )


@pytest.mark.slow
def test_exchange_of_heads() -> None:
    devices(
        2,
        """
slopes = jnp.abs(drawn(4, seed=4))
agree(sp, Rows.zigzag(LENGTH, 2, multiple=8), x=qkv(4, 2), how={"exchange": "heads"}, arrays={"alibi_slopes": slopes},
      causal=True)
""",
    )


@pytest.mark.slow
def test_heads_in_a_host_and_keys_between() -> None:
    """With h, i and j of the whole: a table, and dropout."""
    devices(
        4,
        """
score = lambda s, b, h, i, j, read_t: s + read_t[h, i - j + LENGTH]
agree(both, Rows.zigzag(LENGTH, 4, multiple=8), x=qkv(4, 2), axis=("inside", "hosts"), causal=True,
      spec=P(None, ("hosts", "inside")), score=score, arrays={"read_t": drawn(4, 2 * LENGTH)}, atol=1e-10)
""",
    )


def test_one_program_for_all_ranks() -> None:
    """With dropout, by the numbers of the whole. No rank has a branch of its own."""
    devices(
        2,
        """
rows, x = Rows.zigzag(LENGTH, 2, multiple=16), qkv(4, 2)
options = {"causal": True, "dropout": 0.2, "seed": 3}
agree(sp, rows, x=x, how={"exchange": "keys"}, **options)
part = functools.partial(parallel.attention, axis="sp", rows=rows, exchange="keys", **options)
each = shard_map(part, mesh=sp, in_specs=(P(None, "sp"),) * 3, out_specs=P(None, "sp"))
text = str(jax.make_jaxpr(jax.grad(lambda *x: each(*x).sum(), (0, 1, 2)))(*x))
assert "axis_index" in text and "cond[" not in text and "branches" not in text
""",
    )


def test_parts_of_16_bits_are_added_before_they_are_rounded() -> None:
    """Errors of gradients are at most 1.05 of those of one call. (dk and dv of two parts for each rank.)"""
    devices(
        4,
        """
rows = Rows.zigzag(LENGTH, 4, multiple=8)
ratios = []
for seed in range(8):
    x = [drawn(1, LENGTH, 4, 16, seed=10 * seed + n, dtype="bfloat16") for n in range(3)]
    w = drawn(*x[0].shape, seed=10 * seed + 9, dtype="bfloat16")
    part = functools.partial(parallel.attention, axis="sp", rows=rows, exchange="keys", causal=True)
    each = shard_map(part, mesh=sp, in_specs=(P(None, "sp"),) * 3, out_specs=P(None, "sp"))
    gradients = lambda f, w, x: jax.jit(jax.grad(lambda *x: (f(*x) * w).astype("float32").sum(), (0, 1, 2)))(*x)
    one = functools.partial(attention, causal=True)
    exact = gradients(one, jnp.float64(w), [jnp.float64(y) for y in x])
    own = gradients(one, w, x)
    found = gradients(each, moved(w, rows), [moved(y, rows) for y in x])
    error = lambda x, y: np.square(np.float64(x) - np.float64(y)).mean()
    ratios.append([error(back(y, rows), z) / error(u, z) for y, z, u in zip(found, exact, own)])
ratios = np.sqrt(np.mean(ratios, 0))
assert (ratios < 1.05).all(), ratios
""",
    )


def test_layers_by_scan_and_remat() -> None:
    devices(
        2,
        """
rows, (q, k, v) = Rows.zigzag(LENGTH, 2, multiple=8), qkv(2, 2)
v = drawn(1, LENGTH, 2, 8, seed=5)
w, weights = drawn(*q.shape, seed=9), drawn(3, 8, 8, seed=6)


def layers(attend, q, k, v, weights):
    layer = jax.checkpoint(lambda x, w: (x + attend(x @ w, k, v), None))
    return jax.lax.scan(layer, q, weights)[0]


one = lambda q, k, v: attention(q, k, v, causal=True)
part = functools.partial(parallel.attention, axis="sp", rows=rows, causal=True, exchange="keys")
each = shard_map(functools.partial(layers, part), mesh=sp, in_specs=(P(None, "sp"),) * 3 + (P(),),
                 out_specs=P(None, "sp"))
loss = lambda f, w: jax.jit(jax.grad(lambda *x: (f(*x) * w).sum(), (0, 1, 2, 3)))
expected = loss(functools.partial(layers, one), w)(q, k, v, weights)
*found, of_weights = loss(each, moved(w, rows))(*(moved(x, rows) for x in (q, k, v)), weights)
close((*(back(x, rows) for x in found), of_weights), expected, 1e-10)
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["keys", "window", "heads", "both"])
def test_eight_devices(what: str) -> None:
    devices(8, """
rows = Rows.zigzag(LENGTH, 8, multiple=8)
""" + {
        "keys": """agree(sp, rows, how={"exchange": "keys"}, causal=True)""",
        "window": """agree(dp, Rows.zigzag(LENGTH, 4, multiple=16), x=qkv(batch=2), spec=P("dp", "sp"),
                          how={"exchange": "keys"}, window=(20, 3))""",
        "heads": """agree(sp, rows, how={"exchange": "heads"}, causal=True)""",
        "both": """agree(both, rows, x=qkv(8, 4), axis=("inside", "hosts"), spec=P(None, ("hosts", "inside")),
                         causal=True)""",
    }[what])  # fmt: skip
