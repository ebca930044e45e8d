"""Layers of attention whose sequence is shared by JAX devices: shard_map, scan and grad, and the losses of one device.

    python examples/parallel_jax.py                # over all GPUs; without GPUs over two devices of the CPU

Each device holds an early and a late part of every sequence (rows in zigzag), so that under a causal mask all have as
much to do. The layers learn to repeat a text of random symbols.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"  # of the CPU

try:
    import jax
    import numpy as np
    from jax import numpy as jnp
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P
except ImportError as error:
    raise SystemExit(f"{error}; run pip install jax") from None

from cupyflash.jax import attention
from cupyflash.jax import parallel as over_devices
from cupyflash.parallel import Rows

Weights = dict[str, Any]


def drawn(length: int, width: int, layers: int, symbols: int) -> Weights:
    draw = np.random.default_rng(0)
    shapes = {"qkv": (layers, width, 3 * width), "out": (layers, width, width), "wide": (layers, width, 2 * width),
        "narrow": (layers, 2 * width, width), "symbols": (symbols, width), "places": (length, width),
        "head": (width, symbols)}  # fmt: skip
    return {name: jnp.asarray(draw.normal(0, shape[-2] ** -0.5, shape), "float32") for name, shape in shapes.items()}


def mean_loss(attend: Any, heads: int, count: int, weights: Weights, text: Any, next_: Any, positions: Any) -> Any:
    """This device's part of the mean over `count` symbols; attend(q, k, v) is causal."""

    def layer(x: Any, w: Weights) -> tuple[Any, None]:
        q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        x = x + attend(q, k, v).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["wide"]) @ w["narrow"], None

    x = weights["symbols"][text] + weights["places"][positions]
    x, _ = jax.lax.scan(layer, x, {name: weights[name] for name in ("qkv", "out", "wide", "narrow")})
    scores = jax.nn.log_softmax(x @ weights["head"])
    return -jnp.take_along_axis(scores, next_[..., None], -1).sum() / count


def main(argv: list[str] | None = None) -> tuple[list[float], list[float]]:
    """Losses over the devices, and of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 20), ("length", 256), ("width", 64), ("heads", 4), ("layers", 2), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(argv)

    mesh = Mesh(np.array(jax.devices()), ("sp",))
    size = mesh.shape["sp"]
    rows = Rows.zigzag(asked.length, size, multiple=16)
    order = np.concatenate([rows.positions(r) for r in range(size)])  # one device's rows behind the other's
    period = np.random.default_rng(1).integers(64, size=(asked.batch, 32))
    text = np.tile(period, (1, asked.length // 32 + 1))
    given = [jnp.asarray(x) for x in (text[:, : asked.length], text[:, 1 : asked.length + 1], np.arange(asked.length))]
    count = asked.batch * asked.length

    attend = partial(over_devices.attention, axis="sp", rows=rows, causal=True)
    of_device = partial(mean_loss, attend, asked.heads, count)
    shared = jax.shard_map(
        lambda *x: jax.lax.psum(of_device(*x), "sp"),
        mesh=mesh, in_specs=(P(), P(None, "sp"), P(None, "sp"), P("sp")), out_specs=P(),
    )  # fmt: skip
    one = partial(mean_loss, partial(attention, causal=True), asked.heads, count)
    curves: list[list[float]] = []
    for loss, where in ((shared, order), (one, np.arange(asked.length))):
        step = jax.jit(jax.value_and_grad(loss))
        weights, found = drawn(asked.length, asked.width, asked.layers, 64), []
        placed = [x[..., where] for x in given]
        for _ in range(asked.steps):
            value, grads = step(weights, *placed)
            weights = jax.tree.map(lambda w, g: w - 0.3 * g, weights, grads)
            found.append(float(value))
        curves.append(found)
    for n in range(0, asked.steps, 5):
        print(f"step {n:4d}  loss {curves[0][n]:.5f} over {size} devices, {curves[1][n]:.5f} on one")
    print(f"step {asked.steps - 1:4d}  loss {curves[0][-1]:.5f} over {size} devices, {curves[1][-1]:.5f} on one")
    return curves[0], curves[1]


if __name__ == "__main__":
    main()
