"""Judged to the bit, or by one rounding, where a tolerance would let the loss of half of all bits pass."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention, merge
from cupyflash.score import where

# ---- merge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("count", [1, 2, 64, 1000])
def test_many_parts_are_rounded_once(count: int, dtype: Any, rng: np.random.Generator) -> None:
    """Sums of 16 bits would stand still."""
    outs = [(1 + rng.random((2, 3, 2, 4))).astype(dtype) for _ in range(count)]
    lses = [rng.standard_normal((2, 2, 3)).astype(np.float32) for _ in range(count)]
    out, _ = merge(outs, lses)
    weights = np.exp(np.stack(lses).astype(np.float64))
    weights = (weights / weights.sum(0)).swapaxes(2, 3)[..., None]
    exact = (weights * np.stack(outs).astype(np.float64)).sum(0)
    rounding = float(ml_dtypes.finfo(dtype).eps) / 2
    assert (np.abs(out.astype(np.float64) / exact - 1) <= rounding + 1e-6).all()


# ---- the CPU's integers ---------------------------------------------------------------------------------------------


def reads(at: Any, dtype: Any = np.float64) -> np.ndarray:
    """What a score makes of each key, told by the weights of six keys."""
    keys = 6
    shapes = np.zeros((1, 1, 1, 1)), np.zeros((1, keys, 1, 1)), np.eye(keys)[None, :, None]
    q, k, v = (x.astype(dtype) for x in shapes)
    out, lse = attention(q, k, v, score=at, return_lse=True)
    return np.log(out[0, 0, 0]) + lse[0, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("large, expected", [
    (1e30, 1), (-1e30, -1), (3e9, 1), (-3e9, -1), (math.inf, 1), (-math.inf, -1), (math.nan, 0),
])  # fmt: skip
def test_what_is_too_large_becomes_the_largest_integer(large: float, expected: int, dtype: Any) -> None:
    """Not the lowest, as a processor's own conversion has it."""

    def sign(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        found = (s + where(j >= 0, large, 0.0)).astype(int)
        return where(found > 2**30, 1.0, where(found < -(2**30), -1.0, 0.0))

    assert np.allclose(reads(sign, dtype), expected, atol=1e-5)


@pytest.mark.parametrize("x", [-7, 7, -6, 6, -1, 0])
@pytest.mark.parametrize("y", [3, -3, 2, -2])
def test_division_of_constants_is_that_of_numbers(x: int, y: int) -> None:
    """Folded while a score is traced, or computed: the signs are the same."""
    from cupyflash.score import graph

    assert graph._FOLD["truncdiv"](x, y) == math.trunc(x / y)
    assert graph._FOLD["truncmod"](x, y) == math.fmod(x, y)
    assert graph._FOLD["floordiv"](x, y) == x // y and graph._FOLD["mod"](x, y) == x % y
    of_c = math.fmod(x, y) + math.trunc(x / y)
    for one in (f"({x})", f"(j - j + {x})"):  # a constant, and what becomes one when it runs
        assert np.allclose(reads(f"s + {one} % ({y}) + {one} / ({y})"), of_c, atol=1e-12)


# ---- tensors that a score_mod captures ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("held", ["float64", "float32", "float16", "bfloat16"])
def test_captured_tensors_keep_their_bits(held: str, dtype: str) -> None:
    """As a sum with a float32 score does: which keys win is decided by their last bits."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.nn.attention.flex_attention")
    from cupyflash.torch import flex_attention

    q = torch.zeros(1, 1, 3, 16, dtype=getattr(torch, dtype))
    step = float(torch.finfo(torch.float32 if held == "float64" else getattr(torch, held)).eps)
    table = torch.tensor([1.0, 1.0 + step, 1.0], dtype=getattr(torch, held))
    value = torch.eye(3, dtype=q.dtype).repeat(1, 6)[None, None, :, :16]

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + torch.where(table[j] > 1, 0.0, -torch.inf)

    out = flex_attention(q, q, value, score_mod)
    assert torch.equal(out, value[:, :, 1:2].expand_as(out))


# ---- block masks that a caller has made -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 12], ids=["sizes of ours", "others"])
def test_full_blocks_are_not_asked_of_mask_mod(size: int) -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    from cupyflash.torch import flex_attention

    def one(*numbers: int) -> Any:
        return torch.tensor(numbers, dtype=torch.int32).reshape(1, 1, 2, -1)

    mask = theirs.BlockMask.from_kv_blocks(
        one(1, 1), one(0, 0, 1, 1), one(1, 0), one(1, 0, 0, 0), BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(2 * size, 2 * size),
    )  # fmt: skip
    q, k, v = torch.randn(3, 1, 1, 2 * size, 16, dtype=torch.float64)
    seen = torch.zeros(2 * size, 2 * size, dtype=torch.bool)
    seen[:size, :size] = torch.ones(size, size).tril().bool()
    seen[:size, size:] = True  # full, which mask_mod would hide
    seen[size:, size:] = torch.ones(size, size).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)


# ---- where one thing is added to another ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["numbers", "booleans", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_models_mask_and_position_bias_both_count(mask: str, bias: bool) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from cupyflash.integrations.transformers import attention_forward

    q, k, v = torch.randn(3, 2, 2, 5, 8, dtype=torch.float64)
    of_position = torch.randn(1, 2, 5, 5, dtype=torch.float64) if bias else None
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[1, ..., 3:] = False
    as_numbers = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    given = {"numbers": as_numbers, "booleans": seen, "none": None}[mask]
    layer = torch.nn.Identity()
    out, _ = attention_forward(layer, q, k, v, given, scaling=1.0, is_causal=False, position_bias=of_position)
    total = (0 if of_position is None else of_position) + (as_numbers if mask != "none" else 0)
    expected = torch.softmax(q @ k.mT + total, -1) @ v
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_the_residual_has_no_gradient() -> None:
    jax = pytest.importorskip("jax")
    from cupyflash.jax import dot_product_attention

    q, k, v = (jax.random.normal(jax.random.key(n), (1, 5, 2, 4)) for n in range(3))

    def residual(*x: Any) -> Any:
        return dot_product_attention(*x, return_residual=True)[1].sum()

    assert float(residual(q, k, v)) != 0
    assert not any(x.any() for x in jax.grad(residual, (0, 1, 2))(q, k, v))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_sinks_under_vmap_beside_rows_that_see_nothing(library: str) -> None:
    """A sink of -inf there is no share at all, not NaN."""
    rng = np.random.default_rng(0)
    x, sinks = rng.standard_normal((1, 5, 2, 4)), np.array([[-np.inf, 0.0], [0.5, -np.inf]])
    seen = np.array([[True, True, False, True, True]])
    seen = np.tri(5, dtype=bool) & seen
    seen[2] = False
    expected = [attention(x, x, x, sinks=one, mask=seen, return_lse=True) for one in sinks]
    if library == "torch":
        torch = pytest.importorskip("torch")
        put, vmap = torch.from_numpy, torch.vmap
    else:
        jax = pytest.importorskip("jax")
        put, vmap = jax.numpy.asarray, jax.vmap
        x = x.astype("f4")
    there = put(x)
    found = vmap(lambda one: attention(there, there, there, sinks=one, mask=put(seen), return_lse=True))(
        put(sinks.astype(x.dtype))
    )
    for n in range(2):
        for found_one, want in zip(found, expected[n]):
            np.testing.assert_allclose(np.asarray(found_one[n]), want, atol=1e-6)
