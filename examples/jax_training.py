"""A training loop in JAX, around attention that is differentiated by `jax.grad`.

    python examples/jax_training.py [--steps N]

The model looks things up: it is given pairs of a vector and a colour, and a vector that is one of these with noise, and
has to say its colour. How to compare vectors, it has to learn: half of their numbers say nothing. The whole step is
compiled.
"""

from __future__ import annotations

import argparse
from typing import Any

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise SystemExit(f"{error}; run pip install jax") from None

from cupyflash.jax import attention

PAIRS, WIDTH, COLOURS, HEADS, DIM = 24, 16, 5, 2, 8
Weights = dict[str, jax.Array]


def examples(key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Vectors (B, N, W), their colours (B, N, C) as one-hot rows, questions (B, N, W) and the answers (B, N)."""
    for_vectors, for_noise, for_colours, for_order = jax.random.split(key, 4)
    vectors = jax.random.normal(for_vectors, (batch, PAIRS, WIDTH))
    colours = jax.random.randint(for_colours, (batch, PAIRS), 0, COLOURS)
    asked = jax.random.randint(for_order, (batch, PAIRS), 0, PAIRS)
    noise = jax.random.normal(for_noise, vectors.shape) * jnp.where(jnp.arange(WIDTH) < WIDTH // 2, 0.1, 3.0)
    questions = jnp.take_along_axis(vectors, asked[..., None], axis=1) + noise
    return vectors, jax.nn.one_hot(colours, COLOURS), questions, jnp.take_along_axis(colours, asked, axis=1)


def loss(weights: Weights, vectors: jax.Array, colours: jax.Array, questions: jax.Array, answers: jax.Array) -> Any:
    """Mean cross-entropy of the answers."""

    def heads(x: jax.Array, name: str) -> jax.Array:  # (B, N, heads, width of a head)
        return (x @ weights[name]).reshape(*x.shape[:2], HEADS, -1)

    q, k, v = heads(questions, "query"), heads(vectors, "key"), heads(colours, "value")
    o = attention(q, k, v)
    scores = o.reshape(*answers.shape, -1) @ weights["read"]
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), answers[..., None], axis=-1).mean()


def adam(weights: Weights, gradients: Weights, moments: Any, step: int, rate: float = 0.02) -> tuple[Weights, Any]:
    """Adam (Kingma and Ba 2015)."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, moments[1], gradients)

    def moved(w: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return w - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8)

    return jax.tree.map(moved, weights, mean, square), (mean, square)


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(arguments)

    key = jax.random.key(0)
    shapes = {
        "query": (WIDTH, HEADS * DIM), "key": (WIDTH, HEADS * DIM), "value": (COLOURS, HEADS * COLOURS),
        "read": (HEADS * COLOURS, COLOURS),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    weights = {n: jax.random.normal(k, shape) * shape[0] ** -0.5 for k, (n, shape) in zip(keys, shapes.items())}
    moments = (jax.tree.map(jnp.zeros_like, weights),) * 2

    @jax.jit
    def train(weights: Weights, moments: Any, key: jax.Array, step: int) -> tuple[jax.Array, Weights, Any]:
        found, gradients = jax.value_and_grad(loss)(weights, *examples(key, 32))
        return found, *adam(weights, gradients, moments, step)

    losses = []
    for step in range(1, args.steps + 1):
        key, now = jax.random.split(key)
        found, weights, moments = train(weights, moments, now, step)
        losses.append(float(found))
        if step % 50 == 0 or step == 1:
            print(f"step {step:4}  loss {losses[-1]:.3f} (not knowing: {jnp.log(COLOURS):.3f})")
    return losses


if __name__ == "__main__":
    main()
