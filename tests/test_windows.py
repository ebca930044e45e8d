"""Every window argument of every entry: on each side 0, 1, more than there are keys, and no bound."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import attention, masks
from cupyflash.problem import OPTIONS
from cupyflash.tools import command_options

Window = tuple[int | None, int | None]
BOUNDS = (None, 0, 1, 9)
WINDOWS: list[Window] = list(itertools.product(BOUNDS, BOUNDS))
SQ, SK = 5, 7


def arrays(dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((1, n, 2, 4)).astype(dtype) for n in (SQ, SK, SK)]


def inside(window: Window, causal: bool | str = False, diagonal: int = SK - SQ) -> np.ndarray:
    away = np.arange(SK) - np.arange(SQ)[:, None] - (0 if causal == "top_left" else diagonal)
    left, right = window
    seen = np.ones((SQ, SK), bool)
    for wanted, some in ((causal, away <= 0), (left is not None, away >= -(left or 0)),
                         (right is not None, away <= (right or 0))):  # fmt: skip
        seen &= some if wanted else True
    return seen


def by_definition(window: Window, causal: bool | str = False, dtype: str = "float64") -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in arrays(dtype))
    s = np.where(inside(window, causal), np.einsum("bihd,bjhd->bhij", q, k) / 2, -np.inf)
    p = np.exp(s - np.where(np.isneginf(s), 0, s).max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", p / np.where(total, total, 1), v)


def same(found: Any, window: Window, causal: bool | str = False) -> None:
    np.testing.assert_allclose(np.asarray(found), by_definition(window, causal), rtol=0, atol=1e-12)


def or_minus_one(window: Window) -> tuple[int, int]:
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_attention(causal: bool | str) -> None:
    for window in WINDOWS:
        same(attention(*arrays(), window=window, causal=causal), window, causal)
        same(attention(*arrays(), window=[*window], causal=causal), window, causal)
    for bad in ((-1, 0), (0, -1), (-1, None)):
        with pytest.raises(ValueError, match=r"^window's (left|right) bound is -1; it must be 0 or more keys, or None"):
            attention(*arrays(), window=bad, causal=causal)


@pytest.mark.parametrize("diagonal", [0, SK - SQ])
def test_patterns_of_block_masks(diagonal: int) -> None:
    """Whose right side is the left one's where it is not said."""
    for left, right in itertools.product((0, 1, 9), BOUNDS):
        mask = cupyflash.block_mask(masks.window(left, right, diagonal), shape=(1, 1, SQ, SK), block=16)
        expected = inside((left, left if right is None else right), diagonal=diagonal)
        found = mask.pairs(0, 0, slice(0, SQ), slice(0, SK))
        assert np.array_equal(np.broadcast_to(True if found is None else found, expected.shape), expected)
    for bad in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="is -1; it must be 0 or more"):
            masks.window(*bad)


def test_the_command_line() -> None:
    row = next(row for row in OPTIONS if row.name == "window")
    for left, right in WINDOWS:
        text = ",".join("" if x is None else str(x) for x in (left, right))
        assert command_options._value(row, text) == (left, right)
    for text in ("-1,0", "0,-1"):
        with pytest.raises(ValueError, match="is -1; it must be 0 or more"):
            command_options._value(row, text)


def test_flash_attn() -> None:
    """-1, and any other negative number, is no bound."""
    torch = pytest.importorskip("torch")
    from cupyflash.compat import flash_attn

    q, k, v = (torch.from_numpy(x) for x in arrays())
    for window, causal in itertools.product(WINDOWS, (False, True)):
        size = or_minus_one(window)
        same(flash_attn.flash_attn_func(q, k, v, window_size=size, causal=causal), window, causal)
        same(flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), window_size=size, causal=causal), window,
             causal)  # fmt: skip
    same(flash_attn.flash_attn_func(q, k, v, window_size=(-2, -3)), (None, None))


def test_xformers() -> None:
    torch = pytest.importorskip("torch")
    from cupyflash.compat import xformers

    q, k, v = (torch.from_numpy(x) for x in arrays())
    for left, right in itertools.product((0, 1, 9), (0, 1, 9)):
        mask = xformers.LocalAttentionFromBottomRightMask(left, right)
        same(xformers.memory_efficient_attention(q, k, v, mask), (left, right))
    for size in (1, 2, 9):
        mask = xformers.LowerTriangularFromBottomRightLocalAttentionMask(size)
        same(xformers.memory_efficient_attention(q, k, v, mask), (size - 1, 0))
    for left, right in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="is -1; it must be a number of keys, 0 or more"):
            xformers.LocalAttentionFromBottomRightMask(left, right)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pytorch_traced(window: Window) -> None:
    """By the operator that torch.compile and torch.export put into a graph."""
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    given = [torch.from_numpy(x) for x in arrays()]
    graph = make_fx(lambda *x: attention(*x, window=window))(*given)
    assert "cupyflash" in str(graph.graph)
    same(graph(*given), window)
    same(torch.func.vmap(lambda *x: attention(*x, window=window))(*given), window)


@pytest.mark.parametrize("causal", [False, True])
def test_jax(causal: bool) -> None:
    jax = pytest.importorskip("jax")
    import cupyflash.jax as ours

    given = arrays("float32")

    def close(found: Any, window: Window, of: bool | str) -> None:
        np.testing.assert_allclose(np.asarray(found), by_definition(window, of, "float32"), rtol=0, atol=1e-5)

    for window in ((0, 0), (0, None), (None, 0), (1, 0), (0, 9)):
        close(jax.jit(lambda *x, w=window: ours.attention(*x, window=w, causal=causal))(*given), window, causal)
    for size in (0, 1, (0, 0), (0, 1), (1, 0)):
        window = (size, size) if isinstance(size, int) else size
        found = ours.dot_product_attention(*given, local_window_size=size, is_causal=causal)
        theirs = jax.nn.dot_product_attention(*given, local_window_size=size, is_causal=causal)
        seen = inside(window, "top_left" if causal else False, 0).any(1)  # of a row that sees nothing theirs is a mean
        np.testing.assert_allclose(np.asarray(found)[:, seen], np.asarray(theirs)[:, seen], rtol=0, atol=1e-5)
