"""A sequence that JAX devices share, inside shard_map: results and gradients are those of one device.

Each test is a process with 8 devices: as many are there only where JAX is told so before it begins.
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
assert jax.device_count() == 8, jax.devices()
sp = Mesh(np.array(jax.devices()), ("sp",))
dp = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "sp"))
both = Mesh(np.array(jax.devices()).reshape(2, 4), ("hosts", "inside"))
LENGTH = 128


def drawn(*shape, seed=0, dtype="float64"):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def qkv(heads=8, heads_k=8, batch=2, dtype="float64"):
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


def devices(code: str) -> None:
    """Runs what stands behind START, on 8 devices."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", f"{START}\n{code}\nprint('done')"]
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, check=False, cwd=here, capture_output=True, text=True, env={**os.environ, **flags, "PYTHONPATH": path}
    )
    assert done.stdout.split()[-1:] == ["done"], done.stderr[-3000:]


def test_exchange_of_keys() -> None:
    devices("""
how = {"exchange": "keys"}
agree(sp, Rows.zigzag(LENGTH, 8, multiple=8), how=how, causal=True)
agree(dp, Rows.zigzag(LENGTH, 4, multiple=16), spec=P("dp", "sp"), how=how, window=(20, 3))
bias, slopes = drawn(1, 8, LENGTH, LENGTH), jnp.abs(drawn(8, seed=4))
agree(sp, Rows.zigzag(LENGTH, 8, multiple=8), arrays={"bias": bias, "alibi_slopes": slopes},
      specs={"bias": P(None, None, "sp")}, own=("bias",), causal=True)
""")


def test_exchange_of_heads() -> None:
    devices("""
slopes = jnp.abs(drawn(8, seed=4))
agree(sp, Rows.zigzag(LENGTH, 8, multiple=8), how={"exchange": "heads"}, arrays={"alibi_slopes": slopes}, causal=True)
rows = Rows.zigzag(LENGTH, 8, multiple=8)
agree(both, rows, x=qkv(8, 4), axis=("inside", "hosts"), spec=P(None, ("hosts", "inside")), causal=True)
""")


def test_a_table() -> None:
    """With h, i and j of the whole."""
    devices("""
score = lambda s, b, h, i, j, read_t: s + read_t[h, i - j + LENGTH]
for exchange in ("keys", "heads"):
    agree(sp, Rows.zigzag(LENGTH, 8, multiple=8), how={"exchange": exchange},
          arrays={"read_t": drawn(8, 2 * LENGTH, dtype="float32")}, score=score, causal=True, atol=1e-5)
""")
