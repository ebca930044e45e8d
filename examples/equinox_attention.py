"""An Equinox attention layer: equinox.nn.MultiheadAttention with our attention in the place of its own.

    python examples/equinox_attention.py [--steps N]

The layer has the stock layer's parameters, so that weights can be taken over, and is called as that is. Two models with
the same weights, one with either layer, learn to say which token stood three places before. Needs `equinox` and
`optax`.
"""

from __future__ import annotations

import argparse
from typing import Any

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    raise SystemExit(f"{error}; run pip install jax equinox optax") from None

from cupyflash.jax import attention

TOKENS, LENGTH, WIDTH, HEADS, BACK = 12, 24, 32, 2, 3


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """Of one sequence; under jax.vmap, all sequences are one call. A causal mask is best said by causal=True.

    Dropout goes by the number of the batch entry, and so not under vmap.
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        causal: bool = False,
        key: jax.Array | None = None,
        inference: bool | None = None,
        process_heads: Any = None,
    ) -> jax.Array:
        heads = [
            jax.vmap(project)(x).reshape(x.shape[0], self.num_heads, -1)
            for project, x in ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        ]
        q, k, v = heads if process_heads is None else process_heads(*heads)
        options: dict[str, Any] = {"causal": "top_left" if causal else False, "mask": mask}
        if self.dropout.p > 0 and not (self.dropout.inference if inference is None else inference):
            if key is None:
                raise RuntimeError("key is None; dropout needs one, or inference=True")
            options |= {"dropout": self.dropout.p, "seed": jax.random.bits(key, (1,), "uint32")}
        out = attention(q, k, v, **options)
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))


class Model(eqx.Module):
    """One layer of attention between embedded tokens."""

    tokens: eqx.nn.Embedding
    places: jax.Array
    attention: eqx.nn.MultiheadAttention
    read: eqx.nn.Linear

    def __init__(self, layer: type[eqx.nn.MultiheadAttention], key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(TOKENS, WIDTH, key=keys[0])
        self.places = jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.attention = layer(HEADS, WIDTH, key=keys[2])
        self.read = eqx.nn.Linear(WIDTH, TOKENS, key=keys[3])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.tokens)(tokens) + self.places
        ours = isinstance(self.attention, MultiheadAttention)
        how: dict[str, Any] = {"causal": True} if ours else {"mask": jnp.tri(LENGTH, dtype=bool)}
        return jax.vmap(self.read)(self.attention(x, x, x, **how))


def loss(model: Model, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the tokens BACK places before."""
    logits = jax.vmap(model)(tokens)[:, BACK:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, :-BACK]).mean()


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Returns the losses of every step with either layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(arguments)

    adam = optax.adam(0.01)

    @eqx.filter_jit
    def step(model: Model, state: Any, tokens: jax.Array) -> tuple[Model, Any, jax.Array]:
        found, gradients = eqx.filter_value_and_grad(loss)(model, tokens)
        change, state = adam.update(gradients, state)
        return eqx.apply_updates(model, change), state, found

    layers = {"equinox": eqx.nn.MultiheadAttention, "cupyflash": MultiheadAttention}
    models = {name: Model(layer, jax.random.key(0)) for name, layer in layers.items()}
    states = {name: adam.init(eqx.filter(model, eqx.is_array)) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for n in range(1, args.steps + 1):
        tokens = jax.random.randint(jax.random.key(n), (32, LENGTH), 0, TOKENS)
        for name, model in models.items():
            models[name], states[name], found = step(model, states[name], tokens)
            losses[name].append(float(found))
        if n % 50 == 0 or n == 1:
            print(f"step {n:4}  " + "  ".join(f"{name} {of[-1]:.4f}" for name, of in losses.items()))
    return losses


if __name__ == "__main__":
    main()
