"""Attention for JAX: eager arrays on CPU and GPU, differentiable by `jax.grad` outside `jax.jit`."""

from .vjp import attention

__all__ = ["attention"]
