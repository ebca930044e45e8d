"""Attention forward on NumPy arrays of 8 bits: that of the numbers which they stand for, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from ..problem import BLOCK, DESCALES, FLOAT8, AttentionProblem
from .forward import forward as _forward

DTYPES = {FLOAT8: ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def forward(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """As `cpu.forward.forward`; out in the problem's `result_dtype`, times `out_scale`."""
    numbers = {name: _meant(x, given.pop(f"{name}_descale", None)) for name, x in (("q", q), ("k", k), ("v", v))}
    left = tuple(x for x in problem.given if x.name not in DESCALES)
    out, lse = _forward(
        replace(problem, dtype="float32", out_dtype=None, out_scale=1.0, given=left), **numbers, **given
    )
    return rounded(out * np.float32(problem.out_scale), problem.result_dtype), lse


def cached(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same of k and v of 8 bits beside q of 16, whose scales (B, Sk, Hk, 1) have one for each row."""
    one = np.float32(1)
    with np.errstate(all="ignore"):  # what belongs to nobody may be anything
        k = k.astype(np.float32) * given.pop("k_descale", one)
        v = v.astype(np.float32) * (given.pop("v_descale", one) * np.float32(problem.out_scale))
    left = tuple(x for x in problem.given if x.name not in DESCALES)
    return _forward(replace(problem, cache_dtype=None, out_scale=1.0, given=left), q, k, v, **given)


def _meant(x: np.ndarray, descale: np.ndarray | None) -> np.ndarray:
    """The numbers in (B, S, H, D) that x stands for. `descale` is broadcast to (B, H, blocks)."""
    numbers = x.astype(np.float32)
    if descale is None:
        return numbers
    scale = descale.reshape((1,) * (3 - descale.ndim) + descale.shape)
    rows = np.repeat(scale, BLOCK, axis=2)[:, :, : x.shape[1]] if scale.shape[2] > 1 else scale
    return numbers * np.moveaxis(rows, 1, 2)[..., None]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x in another dtype; in 8 bits, which have no infinity, 448 is the largest."""
    if dtype == FLOAT8:
        x = np.clip(x, -448, 448)
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype])
