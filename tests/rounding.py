"""Conversions that NumPy makes one by one, in several times as long: of and to float16, kept in wider numbers, and
8 bits."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST, _SMALLEST = 65504, 2.0**-14  # normal ones of float16
_FEW = 4096  # so many are converted sooner


def rounded_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same as x.astype(dtype).astype(x.dtype), of float32 or float64."""
    within = dtype == np.float16 and x.size > _FEW
    if not (within and x.max() <= _LARGEST and x.min() >= -_LARGEST):  # or NaN
        return x.astype(dtype).astype(x.dtype)
    return _cut(x, np.finfo(x.dtype).nmant - 10, _SMALLEST)


def widened(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same as x.astype(dtype, copy=False), for a wider one."""
    if x.dtype == np.float16 and x.size > _FEW:
        bits = x.view(np.int16).astype(np.int32)  # and copies of the sign's
        bits <<= 13
        bits &= np.int32(~(0b111 << 28))
        found = bits.view(np.float32)
        found *= np.float32(2.0**112)  # exponents count from -127, not from -15
        if found.max() <= _LARGEST and found.min() >= -_LARGEST:  # else infinities, or NaN
            return found.astype(dtype, copy=False)
    return x.astype(dtype, copy=False)


def _cut(x: np.ndarray, bits: int, smallest: float) -> np.ndarray:
    """float32 or float64 with so many bits less, the nearest ones; below `smallest` all are as far apart as there."""
    unsigned, mantissa = (np.uint32, 23) if x.dtype == np.float32 else (np.uint64, 52)
    far = x.view(unsigned) & np.array(np.inf, x.dtype).view(unsigned)
    np.maximum(far, np.array(smallest, x.dtype).view(unsigned), out=far)
    far += unsigned((bits << mantissa) + (1 << (mantissa - 1)))  # 1.5 * 2^(e + bits): a sum with it has so many less
    found = x + far.view(x.dtype)
    found -= far.view(x.dtype)
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
