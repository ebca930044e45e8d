"""Float8 problems: inputs, what they stand for, and how far a result may be from exact attention on that."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from reference import Standard, standard, state

from cupyflash.problem import BLOCK, AttentionProblem

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Quantized(NamedTuple):
    """q, k, v (B, S, H, D) in 8 bits, and what they are multiplied by, (B, H, blocks) or with lengths of 1, or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    descales: dict[str, np.ndarray]

    def meant(self) -> tuple[np.ndarray, ...]:
        """The numbers that they stand for, in float32."""
        found = []
        for name, x in zip("qkv", self[:3]):
            scale = self.descales.get(f"{name}_descale", np.ones((1, 1, 1), np.float32))
            rows = np.repeat(scale, BLOCK, 2)[:, :, : x.shape[1]] if scale.shape[2] > 1 else scale
            found.append(x.astype(np.float32) * np.moveaxis(rows, 1, 2)[..., None])
        return tuple(found)


def quantize(rng: np.random.Generator, *arrays: np.ndarray, by: str | None = None) -> Quantized:
    """With a scale for each head or block (`by`: "head", "block", or None for none) that brings its largest number to 448.

    Blocks are made of very different size.
    """
    given, descales = [], {}
    for name, x in zip("qkv", arrays):
        batch, seq, heads, _ = x.shape
        scale = np.ones((1, 1, 1), np.float32)
        if by is not None:
            blocks = -(-seq // BLOCK) if by == "block" else 1
            size = 2.0 ** rng.uniform(-2, 2, (batch, heads, blocks)).astype(np.float32)
            rows = np.repeat(size, BLOCK, 2)[:, :, :seq] if by == "block" else size
            x = x * np.moveaxis(rows, 1, 2)[..., None]
            parts = np.split(x, range(BLOCK, seq, BLOCK), axis=1) if by == "block" else [x]
            scale = np.stack([np.abs(part).max((1, 3)) for part in parts], -1).astype(np.float32) / 448
            descales[f"{name}_descale"] = scale
            rows = np.repeat(scale, BLOCK, 2)[:, :, :seq] if by == "block" else scale
            x = x / np.moveaxis(rows, 1, 2)[..., None]
        given.append(x.astype(FLOAT8))
    return Quantized(*given, descales)


def exact_of(
    x: Quantized, key_mask: Any = None, given: dict[str, np.ndarray] | None = None, **options: Any
) -> tuple[AttentionProblem, Standard]:
    """The problem that the numbers state, in float32, and exact attention on them."""
    meant = x.meant()
    problem = state(*meant, key_mask, **options, **(given or {}))
    return problem, standard(
        problem, *meant, key_mask, np.zeros((*x.q.shape[:3], x.v.shape[3]), np.float32), None, **(given or {})
    )
