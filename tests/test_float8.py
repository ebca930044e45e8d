"""Inputs of 8 bits (e4m3): what they stand for, on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float8 import FLOAT8, exact_of, quantize

from cupyflash import attention, attention_backward, explain


def drawn(rng: np.random.Generator, by: str | None = None, seq: tuple[int, int] = (150, 300)) -> Any:
    shapes = ((2, seq[0], 4, 64), (2, seq[1], 2, 64), (2, seq[1], 2, 40))
    return quantize(rng, *[rng.standard_normal(shape).astype(np.float32) for shape in shapes], by=by)


@pytest.mark.parametrize("by", [None, "head", "block"])
def test_what_they_stand_for(by: str | None, rng: np.random.Generator) -> None:
    x = drawn(rng, by)
    _, exact = exact_of(x, causal=True)
    out, lse = attention(*x[:3], causal=True, return_lse=True, **x.descales)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out.astype(np.float64), exact.out, rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(lse, exact.lse, rtol=1e-5, atol=1e-5)


def test_numbers(rng: np.random.Generator) -> None:
    """The same as arrays of one number; with another scale, too."""
    x = drawn(rng)
    for scale in (None, 0.3):
        given = {"q_descale": 0.5, "k_descale": 3.0, "v_descale": 0.25}
        as_arrays = {name: np.full((1, 1, 1), n, np.float32) for name, n in given.items()}
        results = [attention(*x[:3], scale=scale, return_lse=True, **y) for y in (given, as_arrays)]
        for one, other in zip(*results):
            np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16", ml_dtypes.float8_e4m3fn])
def test_results(dtype: Any, rng: np.random.Generator) -> None:
    x = drawn(rng)
    _, exact = exact_of(x)
    out = attention(*x[:3], out_dtype=dtype, out_scale=100)
    step = {1: 2**-4, 2: 2**-8}[out.dtype.itemsize]
    np.testing.assert_allclose(out.astype(np.float64), 100 * exact.out, rtol=step, atol=0.01)
    large = attention(*x[:3], out_dtype=dtype, out_scale=1e6).astype(np.float32)
    assert np.abs(large).max() == 448 if out.dtype == FLOAT8 else np.abs(large).max() > 448


def test_tensors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = drawn(rng, "head")
    given = [torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn) for a in x[:3]]
    scales = {name: torch.from_numpy(y) for name, y in x.descales.items()}
    out = attention(*given, **scales)
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.float().numpy(), attention(*x[:3], **x.descales).astype(np.float32))


def test_ranks_and_layouts(rng: np.random.Generator) -> None:
    x = drawn(rng, "block")
    expected = attention(*x[:3], **x.descales)
    turned = attention(*[a.transpose(0, 2, 1, 3) for a in x[:3]], layout="bhsd", **x.descales)
    np.testing.assert_array_equal(turned.transpose(0, 2, 1, 3), expected)
    one = attention(*[a[0] for a in x[:3]], **{name: y[0] for name, y in x.descales.items()})
    np.testing.assert_array_equal(one, expected[0])


def test_what_is_refused(rng: np.random.Generator) -> None:
    x = drawn(rng)
    q, k, v = x[:3]
    with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone"):
        attention_backward(v, q, k, v, v, np.ones((2, 4, 150), np.float32))
    with pytest.raises(ValueError, match=r"^k_descale has shape \(2, 2, 7\); it must be \(2, 2, 3\), \(batch, key_head, key_block\)"):
        attention(q, k, v, k_descale=np.ones((2, 2, 7), np.float32))
    with pytest.raises(TypeError, match="^v_descale has dtype float64; it must be float32"):
        attention(q, k, v, v_descale=np.ones((2, 2, 1)))
    for number in (0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="^q_descale is "):
            attention(q, k, v, q_descale=number)
    with pytest.raises(ValueError, match="^out_dtype is 'float32'; it must be bfloat16, float16, float8_e4m3fn or None"):
        attention(q, k, v, out_dtype="float32")
    with pytest.raises(TypeError, match="^bias has dtype float8_e4m3fn; it must be float32"):
        attention(q, k, v, bias=np.zeros((150, 300), FLOAT8))
    plain = [a.astype(np.float32) for a in x[:3]]
    with pytest.raises(TypeError, match="^q_descale is given with q of float32; it is for inputs of float8_e4m3fn"):
        attention(*plain, q_descale=np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="^out_dtype is bfloat16; with q of float32 it must be None"):
        attention(*plain, out_dtype="bfloat16")
    with pytest.raises(ValueError, match="^out_scale is 2.0; with q of float32 it must be 1.0"):
        attention(*plain, v_descale=2)


def test_explained() -> None:
    text = str(explain((2, 2048, 16, 128), dtype="fp8", arch="sm_90a"))
    assert "attention_turn" in text
