"""What the NumPy path keeps of masks from tile to tile, and what it must not."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention, attention_backward, attention_jvp
from cupyflash.cpu import hiding
from cupyflash.score import where


def test_masks_that_change_between_calls(rng):
    """The bits of bands are kept; those of what a caller may write to through another view are not."""
    q, k, v = (rng.standard_normal((1, 40, 2, 8), dtype=np.float32) for _ in range(3))
    mask = np.ones((40, 40), bool)
    fixed = mask.view()
    fixed.flags.writeable = False
    for causal in (False, True):
        for hidden in (3, 7):
            mask[:] = True
            mask[hidden:, hidden] = False
            out, lse = attention(q, k, v, causal=causal, mask=fixed, return_lse=True)
            expected, of_rows = attention(q, k, v, causal=causal, mask=mask.copy(), return_lse=True)
            np.testing.assert_array_equal(out, expected)
            given = {"causal": causal, "deterministic": True}
            found = attention_backward(out, q, k, v, out, lse, mask=fixed, **given)
            wanted = attention_backward(out, q, k, v, expected, of_rows, mask=mask.copy(), **given)
            for x, y in zip(found[:3], wanted[:3]):
                np.testing.assert_array_equal(x, y)


def test_what_is_shared_goes_with_its_array():
    seen = hiding.shared(np.tri(5, 7, dtype=bool))
    scores = np.zeros((5, 7), np.float32)
    hiding.hide(scores, seen)
    np.testing.assert_array_equal(scores, np.where(np.tri(5, 7, dtype=bool), np.float32(0), np.float32(-np.inf)))
    hiding.silence(scores, seen)
    assert not scores.any()
    number = id(seen)
    for n in range(8):  # more than are kept
        hiding.hide(scores, hiding.shared(np.ones((5, 7 + n), bool)[:, :7]))
        hiding.silence(scores, hiding.shared(np.ones((5, 7 + n), bool)[:, :7]))
    del seen
    gc.collect()
    assert number not in hiding._shared


@pytest.mark.parametrize("by", ["bias", "score"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_lowest_number_hides_as_minus_infinity_does(dtype, by, rng):
    """Whole rows, and what is not finite in others; in every pass, bit by bit."""
    work = np.dtype("float64" if dtype == "float64" else "float32")
    q, k, v, dout, tq = rng.standard_normal((5, 2, 70, 2, 8)).astype(getattr(ml_dtypes, dtype, dtype))
    v[:, 3, :, 5] = np.nan
    bias = rng.standard_normal((2, 70, 70)).astype(work)
    bias[0, :40], bias[:, :, 3] = -np.inf, -np.inf

    def found(lowest: float) -> list[Any]:
        options: Any = {"bias": np.where(np.isneginf(bias), work.type(lowest), bias)}
        if by == "score":
            options = {"score": lambda s, b, h, i, j: where((h == 0) & (i < 40) | (j == 3), lowest, s)}
        out, lse = attention(q, k, v, return_lse=True, **options)
        grads = attention_backward(dout, q, k, v, out, lse, dlse=lse, **options)
        return [out, lse, *grads[:3], *attention_jvp({"q": tq}, q, k, v, out, lse, **options)]

    wanted = found(-np.inf)
    assert np.isneginf(wanted[1][:, 0, :40]).all() and np.isfinite(wanted[0].astype("f4")).all()
    for x, y in zip(found(float(np.finfo(work).min)), wanted):
        np.testing.assert_array_equal(x, y)
