"""compat.flash_attn and compat.xformers beside their packages' definitions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import cupyflash

torch = pytest.importorskip("torch")

from test_torch_drop_ins import numbers, same
from torch.nn import functional as F

from cupyflash.compat import flash_attn, xformers


def by_definition(
    q: Any, k: Any, v: Any, causal: bool = False, window: Any = (-1, -1), slopes: Any = None, **o: Any
) -> Any:
    """softmax over keys in [i + Sk - Sq - left, i + Sk - Sq + right] of the scores, in plain operations."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * o.get("scale", q.shape[-1] ** -0.5)
    if o.get("softcap"):
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    if slopes is not None:
        scores = scores - slopes[..., None, None] * distance.abs()
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    for wanted, inside in ((left >= 0, distance >= -left), (right >= 0, distance <= right), (causal, distance <= 0)):
        seen = seen & inside if wanted else seen
    p = torch.where(seen, scores, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({}, {}), ({"softmax_scale": 0.3}, {"scale": 0.3}), ({"causal": True}, {"causal": True}),
        ({"window_size": (2, -1)}, {"window": (2, -1)}), ({"window_size": (3, 1)}, {"window": (3, 1)}),
        ({"window_size": (2, -1), "causal": True, "softcap": 1.5}, {"window": (2, -1), "causal": True, "softcap": 1.5}),
        ({"alibi_slopes": "h", "causal": True}, {"slopes": "h", "causal": True}),
        ({"alibi_slopes": "bh", "deterministic": True}, {"slopes": "bh"}),
    ],
    ids=str,
)  # fmt: skip
def test_flash_attn(options: dict[str, Any], means: dict[str, Any]) -> None:
    q, k, v = numbers(2, 5, 4, 8, grad=True), numbers(2, 7, 2, 8, grad=True), numbers(2, 7, 2, 8, seed=1, grad=True)
    if "alibi_slopes" in options:
        slopes = torch.rand(*((4,) if options["alibi_slopes"] == "h" else (2, 4)), dtype=torch.float64)
        options, means = options | {"alibi_slopes": slopes}, means | {"slopes": slopes}
    theirs = by_definition
    same(lambda: flash_attn.flash_attn_func(q, k, v, **options), lambda: theirs(q, k, v, **means), [q, k, v])
    kv = torch.stack((k, v), 2)
    same(lambda: flash_attn.flash_attn_kvpacked_func(q, kv, **options), lambda: theirs(q, k, v, **means), [q, k, v])
    qkv = torch.stack((q, q, q), 2)
    same(lambda: flash_attn.flash_attn_qkvpacked_func(qkv, **options), lambda: theirs(q, q, q, **means), [q])


def test_flash_attn_positions_and_results() -> None:
    """Arguments stand where flash-attn has them, and lse is the second of three results."""
    q = numbers(2, 5, 4, 8)
    out, lse, probabilities = flash_attn.flash_attn_func(q, q, q, 0.0, 0.3, True, (-1, -1), 0.0, None, False, True)
    expected = cupyflash.attention(q, q, q, scale=0.3, causal=True, return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    assert probabilities is None
    names = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip
    for function, first in (
        (flash_attn.flash_attn_func, ["q", "k", "v"]), (flash_attn.flash_attn_kvpacked_func, ["q", "kv"]),
        (flash_attn.flash_attn_qkvpacked_func, ["qkv"]),
    ):  # fmt: skip
        shown = inspect.signature(function).parameters
        assert list(shown) == [*first, *names]
        assert {name: x.default for name, x in shown.items() if name in names} == names
    window = torch.tensor([3, 1])  # as flash-attn's own tests have it
    found = flash_attn.flash_attn_func(q, q, q, window_size=window)
    torch.testing.assert_close(found, cupyflash.attention(q, q, q, window=(3, 1)))


def test_what_of_flash_attn_is_refused() -> None:
    q = numbers(2, 5, 4, 8)
    with pytest.raises(
        ValueError, match=r"^qkv has shape \(2, 5, 4, 8\); it must be \(batch, sequence, 3, heads, dim\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(q)


# ---- xFormers -------------------------------------------------------------------------------------------------------


class Elsewhere:
    """A class of xFormers' own, which is known by its name."""


class TensorElsewhere(torch.Tensor):
    """The same, where xFormers (0.0.28 and later) makes it a tensor without elements around one."""

    HOLDS_DENSE_TENSOR = False
    _subtensor: Any

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self._subtensor = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


BIASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (None, {}),
    "tensor": (numbers(2, 4, 5, 7), {"bias": numbers(2, 4, 5, 7)}),
    "top left": (xformers.LowerTriangularMask(), {"causal": "top_left"}),
    "with a bias": (
        xformers.LowerTriangularMask().add_bias(numbers(2, 4, 5, 7)),
        {"causal": "top_left", "bias": numbers(2, 4, 5, 7)},
    ),
    "bottom right": (xformers.LowerTriangularFromBottomRightMask(), {"causal": True}),
    "the last three": (
        xformers.LowerTriangularFromBottomRightMask().make_local_attention(3), {"causal": True, "window": (2, 0)},
    ),
    "local": (xformers.LocalAttentionFromBottomRightMask(2, 1), {"window": (2, 1)}),
    "xFormers' own": (type("LowerTriangularMask", (Elsewhere,), {})(), {"causal": "top_left"}),
    "xFormers' own tensor": (type("LowerTriangularMask", (TensorElsewhere,), {})(torch.empty(0)),
        {"causal": "top_left"}),
    "xFormers' own with a bias": (
        type("LowerTriangularMaskWithTensorBias", (TensorElsewhere,), {})(numbers(2, 4, 5, 7)),
        {"causal": "top_left", "bias": numbers(2, 4, 5, 7)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_xformers(name: str) -> None:
    bias, means = BIASES[name]
    q, k, v = numbers(2, 5, 4, 8, grad=True), numbers(2, 7, 4, 8, grad=True), numbers(2, 7, 4, 6, grad=True)
    attend = xformers.memory_efficient_attention
    same(lambda: attend(q, k, v, bias, scale=0.3), lambda: cupyflash.attention(q, k, v, scale=0.3, **means), [q, k, v])


def test_xformers_of_other_ranks() -> None:
    q, k = numbers(2, 5, 8, grad=True), numbers(2, 7, 8, grad=True)
    bias = numbers(2, 5, 7, grad=True)
    attend = xformers.memory_efficient_attention
    same(lambda: attend(q, k, k, bias), lambda: F.scaled_dot_product_attention(q, k, k, bias), [q, k, bias])
    q, k = numbers(2, 5, 2, 3, 8, grad=True), numbers(2, 7, 2, 1, 8, grad=True)
    expected = cupyflash.attention(q.flatten(2, 3), k.flatten(2, 3), k.flatten(2, 3), return_lse=True)
    for keys in (k.expand(-1, -1, -1, 3, -1), k.repeat(1, 1, 1, 3, 1)):  # in memory once, and three times
        out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, keys, keys)
        torch.testing.assert_close((out.flatten(2, 3), lse.flatten(1, 2)), expected)
    assert out.shape == (2, 5, 2, 3, 8) and lse.shape == (2, 2, 3, 5)
    assert attend(q, keys, keys, output_dtype=torch.float32).dtype is torch.float32
    out = xformers.memory_efficient_attention_forward(q, keys, keys)  # without a graph, as there
    assert not out.requires_grad
    torch.testing.assert_close(out, attend(q, keys, keys))


def test_what_of_xformers_is_refused() -> None:
    q = numbers(2, 5, 4, 8)
    block = type("PagedBlockDiagonalGappyKeysMask", (Elsewhere,), {})()
    with pytest.raises(NotImplementedError, match="^attn_bias is a PagedMask; it must be None, a tensor or one of"):
        xformers.memory_efficient_attention(q, q, q, type("PagedMask", (TensorElsewhere,), {})(q))
    for options, error, message in (
        (
            {"attn_bias": block},
            NotImplementedError,
            "^attn_bias is a PagedBlockDiagonalGappyKeysMask; it must be None, a tensor or one of",
        ),
        ({"p": 1.5}, ValueError, "^p is 1.5; it must be from 0 to 1"),
    ):
        with pytest.raises(error, match=message):
            xformers.memory_efficient_attention(q, q, q, **options)
    with pytest.raises(ValueError, match=r"^query has shape \(5, 8\); it must have 3, 4 or 5 dimensions"):
        xformers.memory_efficient_attention(q[0, :, 0], q[0, :, 0], q[0, :, 0])
    with pytest.raises(ValueError, match="^_window_size is 0; it must be a number of keys, 1 or more"):
        xformers.LowerTriangularFromBottomRightLocalAttentionMask(0)
    with pytest.raises(ValueError, match="^window_right is -1; it must be a number of keys, 0 or more"):
        xformers.LocalAttentionFromBottomRightMask(2, -1)
