"""Rounding in wider arrays is the conversion there and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from rounding import FLOAT8, from_float8, rounded_to, to_float8, widened


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_to_the_nearest(wide: type, dtype: type, rng: np.random.Generator) -> None:
    """Every float16, what lies half-way between two and beside that, and numbers of any size."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    every = np.sort(every[np.isfinite(every)])
    halves = (every[1:] + every[:-1]) / 2
    near = [np.nextafter(halves.astype(wide), wide(side)) for side in (-np.inf, np.inf)]
    some = rng.standard_normal(50000) * 2.0 ** rng.uniform(-40, 14, 50000)
    numbers = np.concatenate([every, halves, *near, some]).astype(wide)
    for x in (numbers[np.abs(numbers) <= 65504], numbers, numbers[1::2], np.append(numbers, wide(np.nan)), numbers[:9]):
        with np.errstate(over="ignore"):
            right = x.astype(dtype).astype(wide)
        with np.errstate(over="ignore"):
            found = rounded_to(x, np.dtype(dtype))
        assert found.dtype == wide and np.array_equal(found, right, equal_nan=True)


@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_to_wider_ones(wide: type, rng: np.random.Generator) -> None:
    """Every float16, infinities and NaN too; few and many; and those of other formats."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    for x in (every, every[:9], finite, finite[::-3], finite[:63000].reshape(70, 9, 100).transpose(1, 0, 2)):
        found, right = widened(x, np.dtype(wide)), x.astype(wide)
        assert found.dtype == wide and np.array_equal(found, right, equal_nan=True)
        assert np.array_equal(np.signbit(found), np.signbit(right))
    for dtype in (ml_dtypes.bfloat16, np.float32, wide):
        x = rng.standard_normal(5000).astype(dtype)
        assert widened(x, np.dtype(wide)).dtype == wide and np.array_equal(widened(x, np.dtype(wide)), x.astype(wide))


def test_8_bits(rng: np.random.Generator) -> None:
    every = np.arange(256, dtype=np.uint8).view(FLOAT8)
    for dtype in ("float32", "float64"):
        found = from_float8(every.reshape(16, 16)[:, ::-1], dtype)
        assert found.dtype == dtype and np.array_equal(
            found, every.reshape(16, 16)[:, ::-1].astype(dtype), equal_nan=True
        )
    exact = np.sort(every.astype(np.float32)[np.isfinite(every)])
    halves = (exact[1:] + exact[:-1]) / 2
    near = [np.nextafter(halves, np.float32(side)) for side in (-np.inf, np.inf)]
    some = (rng.standard_normal(20000) * 2.0 ** rng.uniform(-20, 12, 20000)).astype(np.float32)
    numbers = np.concatenate([exact, halves, *near, some])
    for x in (numbers, numbers[::-3]):
        found, right = (of.astype("float32") for of in (to_float8(x), x.astype(FLOAT8)))
        assert np.array_equal(found, right, equal_nan=True)
