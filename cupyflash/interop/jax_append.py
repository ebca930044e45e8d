"""Integers of attention_append in a call that JAX traces: they are looked at when it runs, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..call import Arrays
from .jax_call import buffer_callback, has_gpu, refuse_check


class _Look(NamedTuple):
    """What XLA calls back; equal for calls that are, so that JAX compiles these once."""

    names: tuple[str, ...]
    look: Callable[..., None]
    how: tuple[tuple[str, Any], ...]

    def __call__(self, ctx: Any, out: Sequence[Any], *inputs: Any) -> None:
        arrays = {name: np.asarray(x) for name, x in zip(self.names, inputs)}
        self.look(arrays={name: x.astype(np.int64) for name, x in arrays.items()}, **dict(self.how))
        for target, x in zip(out, arrays.values()):
            np.asarray(target)[...] = x


def looked_at(arrays: Arrays, check: bool, look: Callable[..., None], **how: Any) -> Arrays:
    """The arrays as they come out of `look`, so that what is written by them waits for it. On a GPU they are as they
    were."""
    refuse_check(check, next(iter(arrays)))
    seen: Any = _Look((*arrays,), look, (*how.items(),))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.values()]

    def on_cpu(*xs: jax.Array) -> Any:
        return buffer_callback(seen, shapes, vmap_method="sequential")(*xs)

    def on_gpu(*xs: jax.Array) -> Any:
        return list(xs)

    inputs = arrays.values()
    found = jax.lax.platform_dependent(*inputs, cpu=on_cpu, cuda=on_gpu) if has_gpu() else on_cpu(*inputs)
    return dict(zip(arrays, found))
