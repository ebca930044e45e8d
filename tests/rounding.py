"""Conversions that NumPy makes one by one, in several times as long: float16 kept in float32, and 8 bits."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST, _SMALLEST = 65504, 2.0**-14  # normal ones of float16
_FEW = 4096  # so many are converted sooner


def rounded_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same as x.astype(dtype).astype(x.dtype)."""
    within = dtype == np.float16 and x.dtype == np.float32 and x.size > _FEW
    if not (within and x.max() <= _LARGEST and x.min() >= -_LARGEST):  # or NaN
        return x.astype(dtype).astype(x.dtype)
    return _cut(x, 13, _SMALLEST)


def _cut(x: np.ndarray, bits: int, smallest: float) -> np.ndarray:
    """float32 with so many bits less, the nearest ones; below `smallest` all are as far apart as there."""
    far = x.view(np.uint32) & np.uint32(0xFF << 23)
    np.maximum(far, np.float32(smallest).view(np.uint32), out=far)
    far += np.uint32((bits << 23) + (1 << 22))  # 1.5 * 2^(e + bits): a sum with it has so many less
    found = x + far.view(np.float32)
    found -= far.view(np.float32)
    return found


@functools.cache
def _of_bits(dtype: str) -> np.ndarray:
    """Each of the 8 bits."""
    return np.arange(256, dtype=np.uint8).view(FLOAT8).astype(dtype)


@functools.cache
def _to_bits() -> np.ndarray:
    """Of the upper halves of all float32, which have more bits than the 8 have."""
    with np.errstate(all="ignore"):
        return (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).astype(FLOAT8)


def from_float8(x: np.ndarray, dtype: str) -> np.ndarray:
    """The same as x.astype(dtype)."""
    return _of_bits(dtype).take(x.view(np.uint8))


def to_float8(x: np.ndarray) -> np.ndarray:
    """The same as x.astype(FLOAT8), for finite float32, but for the sign of 0."""
    return _to_bits().take(_cut(np.ascontiguousarray(x), 20, 2.0**-6).view(np.uint32) >> 16)
