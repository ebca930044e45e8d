"""The same in Flax (nnx), with AdamW from optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.nnx import List  # of 0.12

from .gpt import BETAS, DECAY, RATE, Size
from .gpt_jax import EPSILON, Attend, cross_entropy


class Block(nnx.Module):
    def __init__(self, size: Size, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        width = size.width
        self.heads, self.attend = size.heads, attend
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs) for _ in range(2))
        self.qkv, self.out = (nnx.Linear(width, n * width, dtype=dtype, rngs=rngs) for n in (3, 1))
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        qkv = self.qkv(self.norm_1(x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        x = x + self.out(self.attend(q, k, v).reshape(*x.shape[:2], -1))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x)), approximate=True))


class Gpt(nnx.Module):
    """Token numbers (B, S) to logits (B, S, vocabulary)."""

    def __init__(self, size: Size, context: int, attend: Attend, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        self.positions = nnx.Embed(context, size.width, rngs=rngs)
        self.blocks = List([Block(size, attend, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, epsilon=EPSILON, rngs=rngs)
        self.dtype = dtype

    def __call__(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x).astype(self.dtype) @ self.embedding.embedding.astype(self.dtype).T


def load(model: Gpt, weights: dict[str, np.ndarray]) -> None:
    """Take weights by PyTorch's names."""
    for name, x in weights.items():
        *path, last = name.split(".")
        place: Any = model
        for part in path:
            place = place[int(part)] if part.isdigit() else getattr(place, part)
        if isinstance(place, nnx.Embed):
            place.embedding[...] = jnp.array(x)
        elif last == "bias":
            place.bias[...] = jnp.array(x)
        elif isinstance(place, nnx.Linear):
            place.kernel[...] = jnp.array(x.T)
        else:
            place.scale[...] = jnp.array(x)


@nnx.jit
def _step(model: Gpt, optimizer: nnx.Optimizer, tokens: Any) -> Any:
    loss, slopes = nnx.value_and_grad(lambda model: cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))(model)
    optimizer.update(model, slopes)
    return loss


def stepper(weights: dict[str, np.ndarray], size: Size, attend: Attend, dtype: Any) -> Callable[[Any], Any]:
    """As gpt_jax has it."""
    model = Gpt(size, len(weights["positions.weight"]), attend, dtype)
    load(model, weights)
    rule = optax.adamw(RATE, *BETAS, weight_decay=DECAY)
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
    return lambda tokens: _step(model, optimizer, tokens)
