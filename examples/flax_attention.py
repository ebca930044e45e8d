"""A Flax (nnx) attention layer: nnx.MultiHeadAttention with our attention in the place of its own.

    python examples/flax_attention.py [--steps N]

Its argument `attention_fn` takes `attend` below; parameters, dropout, decoding caches and all else are the stock
layer's. Two models with the same weights, one with either attention, learn to say which token stood three places
before. Needs `flax`.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cupyflash.jax import attention

TOKENS, LENGTH, WIDTH, HEADS, BACK = 12, 24, 32, 2, 3


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = nnx.nn.dtypes.promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """nnx.dot_product_attention, of (..., length, heads, dim). Dropout draws for each batch entry and head."""
    if module is not None:
        raise NotImplementedError("sow_weights is True; it must be False: the weights are never in memory")
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    lead = query.shape[:-3]

    def folded(x: jax.Array) -> jax.Array:  # axes before the last three as one
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) if len(lead) > 1 else x

    options: dict[str, Any] = {"causal": "top_left" if is_causal else False}
    if mask is not None:
        options["mask"] = folded(mask.astype(bool))
    if bias is not None:
        options["bias"] = folded(bias)
    if dropout_rate > 0 and not deterministic:
        options |= {"dropout": dropout_rate, "seed": jax.random.bits(dropout_rng, (1,), "uint32")}
    out = attention(folded(query), folded(key), folded(value), **options)
    return out.reshape(*lead, *out.shape[-3:])


class Model(nnx.Module):
    """One layer of attention between embedded tokens."""

    def __init__(self, rngs: nnx.Rngs, **how: Any) -> None:
        self.tokens = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **how)
        self.read = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.read(self.attention(x, is_causal=True))


def loss(model: Model, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the tokens BACK places before."""
    logits = model(tokens)[:, BACK:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, :-BACK]).mean()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    found, gradients = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, gradients)
    return found


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Returns the losses of every step with either attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(arguments)

    models = {"flax": Model(nnx.Rngs(0)), "cupyflash": Model(nnx.Rngs(0), attention_fn=attend)}
    optimizers = {name: nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for n in range(1, args.steps + 1):
        tokens = jax.random.randint(jax.random.key(n), (32, LENGTH), 0, TOKENS)
        for name, model in models.items():
            losses[name].append(float(step(model, optimizers[name], tokens)))
        if n % 50 == 0 or n == 1:
            print(f"step {n:4}  " + "  ".join(f"{name} {of[-1]:.4f}" for name, of in losses.items()))
    return losses


if __name__ == "__main__":
    main()
