"""The model of gpt.py in JAX, with AdamW, from the same weights: as functions of a dictionary of them, by PyTorch's
names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .gpt import BETAS, DECAY, RATE, Size

Attend = Callable[..., Any]  # (q, k, v) -> out, (B, S, H, D) each, causal
Weights = dict[str, Any]
EPSILON = 1e-5  # PyTorch's, in layer norms


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Mean over all tokens, in float32."""
    logits = logits.astype(jnp.float32)
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - own).mean()


def logits_of(weights: Weights, tokens: Any, size: Size, attend: Attend, dtype: Any) -> Any:
    """Token numbers (B, S) to logits (B, S, vocabulary); products in `dtype`, norms and the residual in float32."""

    def linear(name: str, x: Any) -> Any:
        return x.astype(dtype) @ weights[f"{name}.weight"].astype(dtype).T + weights[f"{name}.bias"].astype(dtype)

    def norm(name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["embedding.weight"][tokens] + weights["positions.weight"][: tokens.shape[1]]
    for n in range(size.layers):
        block = f"blocks.{n}"
        qkv = linear(f"{block}.qkv", norm(f"{block}.norm_1", x))
        q, k, v = jnp.moveaxis(qkv.reshape(*tokens.shape, 3, size.heads, -1), 2, 0)
        x = x + linear(f"{block}.out", attend(q, k, v).reshape(*tokens.shape, -1))
        wide = jax.nn.gelu(linear(f"{block}.up", norm(f"{block}.norm_2", x)), approximate=True)
        x = x + linear(f"{block}.down", wide)
    return norm("norm", x).astype(dtype) @ weights["embedding.weight"].astype(dtype).T


def stepper(weights: dict[str, np.ndarray], size: Size, attend: Attend, dtype: Any) -> Callable[[Any], Any]:
    """A step of training on tokens (B, S + 1); returns the loss."""

    def loss_of(weights: Weights, tokens: Any) -> Any:
        return cross_entropy(logits_of(weights, tokens[:, :-1], size, attend, dtype), tokens[:, 1:])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, Any], tokens: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(state["weights"], tokens)
        count = state["count"] + 1
        (first, second), corrections = BETAS, [1 - beta**count for beta in BETAS]

        def moved(w: Any, mean: Any, square: Any) -> Any:
            return w * (1 - RATE * DECAY) - RATE * (mean / corrections[0]) / (jnp.sqrt(square / corrections[1]) + 1e-8)

        means = jax.tree.map(lambda m, g: first * m + (1 - first) * g, state["means"], slopes)
        squares = jax.tree.map(lambda s, g: second * s + (1 - second) * g**2, state["squares"], slopes)
        updated = jax.tree.map(moved, state["weights"], means, squares)
        return loss, {"weights": updated, "means": means, "squares": squares, "count": count}

    own = {name: jnp.array(x) for name, x in weights.items()}
    zeros = [{name: jnp.zeros_like(x) for name, x in own.items()} for _ in range(2)]
    state = {"weights": own, "means": zeros[0], "squares": zeros[1], "count": jnp.zeros((), jnp.int32)}

    def run(tokens: Any) -> Any:
        nonlocal state
        loss, state = step(state, tokens)
        return loss

    return run
