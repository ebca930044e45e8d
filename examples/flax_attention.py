"""A Flax (nnx) attention layer: nnx.MultiHeadAttention with our attention in the place of its own.

    python examples/flax_attention.py [--steps N]

Its argument `attention_fn` takes ours; parameters, dropout, decoding caches and all else are the stock layer's. Two
models with the same weights, one with either attention, learn to say which token stood three places before. Needs
`flax`.
"""

from __future__ import annotations

import argparse
from typing import Any

try:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{error}; run pip install jax flax optax") from None

from cupyflash.integrations.flax import attention_fn

TOKENS, LENGTH, WIDTH, HEADS, BACK = 12, 24, 32, 2, 3


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

    models = {"flax": Model(nnx.Rngs(0)), "cupyflash": Model(nnx.Rngs(0), attention_fn=attention_fn)}
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
