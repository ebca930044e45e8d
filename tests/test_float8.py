"""Inputs of 8 bits (e4m3): what they stand for, on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float8_problems import FLOAT8, exact_of
from float8_problems import quantize as draw_quantized

from cupyflash import attention, attention_backward, explain
from cupyflash.float8 import quantize, rotation


def drawn(rng: np.random.Generator, by: str | None = None, seq: tuple[int, int] = (150, 300)) -> Any:
    shapes = ((2, seq[0], 4, 64), (2, seq[1], 2, 64), (2, seq[1], 2, 40))
    return draw_quantized(rng, *[rng.standard_normal(shape).astype(np.float32) for shape in shapes], by=by)


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
    with pytest.raises(
        ValueError, match=r"^k_descale has shape \(2, 2, 7\); it must be \(2, 2, 3\), \(batch, key_head, key_block\)"
    ):
        attention(q, k, v, k_descale=np.ones((2, 2, 7), np.float32))
    with pytest.raises(TypeError, match="^v_descale has dtype float64; it must be float32"):
        attention(q, k, v, v_descale=np.ones((2, 2, 1)))
    for number in (0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="^q_descale is "):
            attention(q, k, v, q_descale=number)
    with pytest.raises(
        ValueError, match="^out_dtype is 'float32'; it must be bfloat16, float16, float8_e4m3fn or None"
    ):
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


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("by", ["block", "head", None])
def test_quantize(library: str, by: str | None, rng: np.random.Generator) -> None:
    xp: Any = pytest.importorskip("jax.numpy" if library == "jax" else library)
    put = xp.from_numpy if library == "torch" else xp.asarray
    arrays = [
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 150, 4, 64), (2, 300, 2, 64), (2, 300, 2, 40))
    ]
    arrays[0][0, :128] *= 50
    arrays[2][:, :, 0] = 0
    exact = attention(*arrays)
    quantized = [quantize(put(x), by) for x in arrays]
    blocks = {"block": (2, 4, 2), "head": (2, 4, 1), None: (1, 1, 1)}
    assert tuple(quantized[0][1].shape) == blocks[by]
    given = [x for x, _ in quantized]
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), [y for _, y in quantized]))
    if by is None:
        turned = [quantize(put(np.ascontiguousarray(x.transpose(0, 2, 1, 3))), by, layout="bhsd") for x in arrays]
        np.testing.assert_array_equal(np.asarray(turned[0][1]), np.asarray(quantized[0][1]))
    out = attention(*given, out_dtype="fp16", **scales)
    found = np.asarray(out).astype(np.float32)
    rows = slice(128, None) if by == "block" else slice(None)  # those 50 times as large are a matter of luck
    assert np.sqrt(((found - exact)[:, rows] ** 2).mean() / (exact[:, rows] ** 2).mean()) < (
        0.06 if by == "block" else 0.4
    )


def test_what_quantize_refuses() -> None:
    with pytest.raises(ValueError, match="^by is 'row'; it must be 'block', 'head' or None"):
        quantize(np.ones((2, 3)), "row")
    with pytest.raises(TypeError, match="^x is a list"):
        quantize([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^x has 1 dimensions, shape \(3,\)"):
        quantize(np.ones(3))
    with pytest.raises(ValueError, match="^dim is 0"):
        rotation(0)


@pytest.mark.parametrize("dim", [1, 3, 64, 96, 128])
def test_a_rotation_spreads_what_is_large(dim: int, rng: np.random.Generator) -> None:
    matrix = rotation(dim, seed=3)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    if dim >= 64:
        # As the paper has them: one number in a thousand is ten times as large.
        q, k, v = (rng.standard_normal((1, 512, 4, dim)).astype(np.float32) for _ in range(3))
        for x in (q, k, v):
            x += 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
        exact = attention(q, k, v)
        errors = []
        for turn in (np.eye(dim, dtype=np.float32), matrix):
            pairs = [quantize(x, "head") for x in (q @ turn, k @ turn, v)]
            names = ("q_descale", "k_descale", "v_descale")
            out = attention(*[x for x, _ in pairs], **dict(zip(names, [y for _, y in pairs]))).astype(np.float32)
            errors.append(np.sqrt(((out - exact) ** 2).mean()))
        assert errors[1] < errors[0]
