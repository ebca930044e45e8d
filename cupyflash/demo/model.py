"""A byte-level transformer language model whose gradients are written out by hand.

Every layer is a function that returns its result and what its backward needs; the backward stands right below it.
The arrays are NumPy's or CuPy's: `xp` is whichever of the two modules holds them. No autograd framework is involved,
which is the point: `cupyflash.attention` and `cupyflash.attention_backward` are the attention layer.

Pre-norm blocks as in GPT-2, with rotary positions (Su et al. 2021), RMS norms without gains (Zhang and Sennrich 2019)
and squared ReLUs (So et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import attention, attention_backward

Array = Any
BYTES = 256


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `attention_dtype` is what q, k and v are rounded to; everything else is float32."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 256
    attention_dtype: str = "float32"

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name and shape of every weight matrix, in the order in which they lie in memory."""
        c = self.width
        shapes = {"embed": (BYTES, c)}
        for i in range(self.layers):
            shapes |= {f"{i}.qkv": (c, 3 * c), f"{i}.out": (c, c), f"{i}.up": (c, 4 * c), f"{i}.down": (4 * c, c)}
        return shapes | {"read": (c, BYTES)}


class Model:
    """The weights, in one vector `flat` that the optimiser updates, and their matrices by name in `weights`."""

    def __init__(self, config: Config, xp: Any = np, seed: int = 0) -> None:
        self.config, self.xp = config, xp
        self.flat = xp.zeros(sum(rows * columns for rows, columns in config.shapes().values()), dtype="float32")
        self.weights = self.named(self.flat)
        rng = np.random.default_rng(seed)
        for name, w in self.weights.items():
            if not name.endswith((".out", ".down", "read")):  # the blocks begin as the identity, the logits as zero
                scale = 1.0 if name == "embed" else w.shape[0] ** -0.5
                w[...] = xp.asarray(rng.normal(0, scale, w.shape).astype(np.float32))
        head = config.width // config.heads
        angles = np.outer(np.arange(config.context), 1e4 ** (-np.arange(0, head, 2) / head))[:, None, :]
        self.rotary = tuple(xp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))

    def named(self, flat: Array) -> dict[str, Array]:
        """Views of a vector laid out like `flat`, one for each weight matrix."""
        views, start = {}, 0
        for name, (rows, columns) in self.config.shapes().items():
            views[name] = flat[start : start + rows * columns].reshape(rows, columns)
            start += rows * columns
        return views

    def logits(self, tokens: Array) -> tuple[Array, list[Any]]:
        """Tokens (B, S) → scores of the next byte (B, S, 256), and what the backward needs, layer by layer."""
        w = self.weights
        tape: list[Any] = []
        rotary = tuple(table[: tokens.shape[1]] for table in self.rotary)
        x = w["embed"][tokens]
        for i in range(self.config.layers):
            h, norm_a = norm(x)
            y, mixed = self_attention(self.xp, h, w[f"{i}.qkv"], w[f"{i}.out"], rotary, self.config)
            x = x + y
            h, norm_b = norm(x)
            y, hidden = mlp(self.xp, h, w[f"{i}.up"], w[f"{i}.down"])
            x = x + y
            tape.append((norm_a, mixed, norm_b, hidden))
        h, norm_c = norm(x)
        tape.append((h, norm_c))
        return h @ w["read"], tape

    def loss(self, tokens: Array, targets: Array) -> float:
        """Mean cross-entropy in nats per byte."""
        return float(cross_entropy(self.xp, self.logits(tokens)[0], targets)[0]) / targets.size

    def gradient(self, tokens: Array, targets: Array) -> tuple[float, Array]:
        """The loss, and its gradient as a vector laid out like `flat`."""
        w, xp, c = self.weights, self.xp, self.config.width
        flat = xp.empty_like(self.flat)
        grads = self.named(flat)
        rotary = tuple(table[: tokens.shape[1]] for table in self.rotary)

        logits, tape = self.logits(tokens)
        # The sum over the bytes, not the mean: its gradients are of order one, so float16 attention does not underflow.
        loss, dlogits = cross_entropy(xp, logits, targets)
        h, norm_c = tape.pop()
        grads["read"][...] = weight_gradient(h, dlogits)
        dx = norm_backward(dlogits @ w["read"].T, norm_c)
        for i in reversed(range(self.config.layers)):
            norm_a, mixed, norm_b, hidden = tape.pop()
            dh, grads[f"{i}.up"][...], grads[f"{i}.down"][...] = mlp_backward(dx, hidden, w[f"{i}.up"], w[f"{i}.down"])
            dx = dx + norm_backward(dh, norm_b)
            dh, grads[f"{i}.qkv"][...], grads[f"{i}.out"][...] = self_attention_backward(
                xp, dx, mixed, w[f"{i}.qkv"], w[f"{i}.out"], rotary
            )
            dx = dx + norm_backward(dh, norm_a)
        grads["embed"][...] = one_hot(xp, tokens).reshape(-1, BYTES).T @ dx.reshape(-1, c)
        flat /= targets.size
        return float(loss) / targets.size, flat


def self_attention(
    xp: Any, x: Array, w_qkv: Array, w_out: Array, rotary: tuple[Array, Array], config: Config
) -> tuple[Array, Any]:
    """Causal multi-head attention of x (B, S, C) over itself."""
    b, s, c = x.shape
    qkv = (x @ w_qkv).reshape(b, s, 3, config.heads, c // config.heads)
    q, k, v = rotate(xp, qkv[:, :, 0], *rotary), rotate(xp, qkv[:, :, 1], *rotary), qkv[:, :, 2]
    q, k, v = (t.astype(config.attention_dtype, copy=False) for t in (q, k, v))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    return o.reshape(x.shape).astype(x.dtype, copy=False) @ w_out, (x, q, k, v, o, lse)


def self_attention_backward(
    xp: Any, dy: Array, saved: Any, w_qkv: Array, w_out: Array, rotary: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    x, q, k, v, o, lse = saved
    cos, sin = rotary
    do = (dy @ w_out.T).reshape(o.shape).astype(o.dtype, copy=False)
    dq, dk, dv = (g.astype(x.dtype, copy=False) for g in attention_backward(do, q, k, v, o, lse, causal=True))
    # A rotation's transpose is the rotation back.
    dqkv = xp.stack([rotate(xp, dq, cos, -sin), rotate(xp, dk, cos, -sin), dv], axis=2).reshape(*x.shape[:2], -1)
    mixed = o.reshape(x.shape).astype(x.dtype, copy=False)
    return dqkv @ w_qkv.T, weight_gradient(x, dqkv), weight_gradient(mixed, dy)


def rotate(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (x[i], x[i + D/2]) of x (B, S, H, D) by their position's angles."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def mlp(xp: Any, x: Array, w_up: Array, w_down: Array) -> tuple[Array, Any]:
    """relu(x W_up)² W_down."""
    h = xp.maximum(x @ w_up, 0)
    return (h * h) @ w_down, (x, h)


def mlp_backward(dy: Array, saved: Any, w_up: Array, w_down: Array) -> tuple[Array, Array, Array]:
    x, h = saved
    dh = (dy @ w_down.T) * h * 2
    return dh @ w_up.T, weight_gradient(x, dh), weight_gradient(h * h, dy)


def norm(x: Array) -> tuple[Array, Any]:
    """x divided by its root mean square over the last axis."""
    r = ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** -0.5
    y = x * r
    return y, (y, r)


def norm_backward(dy: Array, saved: Any) -> Array:
    y, r = saved
    return (dy - y * (dy * y).mean(axis=-1, keepdims=True)) * r


def cross_entropy(xp: Any, logits: Array, targets: Array) -> tuple[Array, Array]:
    """-log softmax(logits)[target], summed over all positions, and its gradient with respect to the logits."""
    z = logits - logits.max(axis=-1, keepdims=True)
    e = xp.exp(z)
    total = e.sum(axis=-1, keepdims=True)
    hot = one_hot(xp, targets)
    return (xp.log(total[..., 0]) - (z * hot).sum(axis=-1)).sum(), e / total - hot


def one_hot(xp: Any, tokens: Array) -> Array:
    return xp.eye(BYTES, dtype="float32")[tokens]


def weight_gradient(x: Array, dy: Array) -> Array:
    """Gradient of W in y = x W, summed over batch and sequence."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
