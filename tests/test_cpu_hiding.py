"""What the NumPy path keeps of masks from tile to tile, and what it must not."""

from __future__ import annotations

import gc

import numpy as np

from cupyflash import attention, attention_backward
from cupyflash.cpu import hiding


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
