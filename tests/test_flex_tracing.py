"""How flex_attention's functions are traced: once, by threads, of every kind."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch.nn.attention.flex_attention")


import test_flex_attention
from test_flex_attention import D, H, qkv, standard

from cupyflash.torch import flex_attention, score_mod

eager = test_flex_attention.eager


def test_what_is_traced_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the same code, the same numbers, and tensors of the same form; the tensors' values are those of the
    call."""
    runs: list[int] = []
    make = score_mod.make_fx
    monkeypatch.setattr(score_mod, "make_fx", lambda f: (runs.append(1), make(f))[1])
    monkeypatch.setattr(score_mod, "_plans", {})
    q, k, v = qkv(rng, dtype="float64")

    def alibi(slopes: Any, factor: float = 1.0) -> Any:
        return lambda s, b, h, i, j: s + slopes[h] * factor * (j - i)

    def same(mod: Any, times: int) -> None:
        torch.testing.assert_close(flex_attention(q, k, v, mod), standard(q, k, v, mod)[0], atol=1e-5, rtol=1e-5)
        assert len(runs) == times

    slopes = torch.rand(H)
    seen = weakref.ref(slopes)
    same(alibi(slopes), 1)
    same(alibi(torch.rand(H)), 1)
    del slopes
    gc.collect()
    assert seen() is None  # what was traced keeps no tensors
    same(alibi(torch.rand(H).double()), 2)
    same(alibi(torch.rand(H), 2.0), 3)
    slopes = torch.rand(H)
    mod = alibi(slopes)
    same(mod, 3)
    slopes.mul_(2)
    same(mod, 3)
    # A number that a function asks a tensor for, and a tensor in an object that nobody knows, may be others the next
    # time.
    length, held = torch.tensor(3), [torch.rand(H)]
    for mod in (lambda s, b, h, i, j: s * (j < int(length)), lambda s, b, h, i, j: s + held[0][h]):
        same(mod, len(runs) + 1)
        length.fill_(5)
        held[0] = torch.rand(H)
        same(mod, len(runs) + 1)


LENGTHS: dict[str, Callable[[Any], int]] = {
    "nonzero": lambda x: len(x.nonzero()), "where": lambda x: torch.where(x)[0].shape[0],
    "booleans": lambda x: x[x != 0].shape[0],
    "masked_select": lambda x: x.masked_select(x > 0).numel(), "unique": lambda x: len(x.unique()),
    "repeat_interleave": lambda x: len(x.repeat_interleave(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHS)
def test_a_number_of_elements_that_follows_from_values(name: str, rng: np.random.Generator) -> None:
    length = LENGTHS[name]

    def of(x: Any) -> Any:
        return lambda s, b, h, i, j: s * length(x)

    q, k, v = qkv(rng, dtype="float64")
    for mod in (of(torch.tensor([0, 0, 0, 1])), of(torch.tensor([0, 1, 2, 3]))):
        torch.testing.assert_close(flex_attention(q, k, v, mod), standard(q, k, v, mod)[0])


def test_what_is_drawn_is_drawn_in_each_call(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)

    def drawn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * torch.rand(())

    assert not torch.equal(flex_attention(q, k, v, drawn), flex_attention(q, k, v, drawn))


def test_threads_that_trace_at_once(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)

    def error(n: int) -> Any:
        held = [torch.full((H,), float(n))]  # a list, which nobody knows: it is run in each call
        found = flex_attention(q, k, v, lambda s, b, h, i, j: s * held[0][h])
        return (found - flex_attention(q, k, v, scale=n / D**0.5)).abs().max()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert max(threads.map(error, range(40))) < 1e-4
    finally:
        sys.setswitchinterval(interval)


def test_functions_of_every_kind(rng: np.random.Generator) -> None:
    """Partial ones, methods and objects, with arguments of their own; under autocast and inference_mode."""
    q, k, v = qkv(rng, dtype="float64")
    slopes = torch.rand(H, dtype=torch.float64)

    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(slopes)

        def forward(self, s: Any, b: Any, h: Any, i: Any, j: Any, factor: float = 1.0) -> Any:
            return s + factor * self.slopes[h] * (j - i)

    module = Bias()
    expected = standard(q, k, v, module)[0]
    with torch.inference_mode():
        torch.testing.assert_close(flex_attention(q, k, v, module), expected.detach())
    for mod in (module, module.forward, functools.partial(module.forward, factor=1.0)):
        found = flex_attention(q, k, v, mod)
        grads = [torch.autograd.grad(x.sum(), module.slopes, retain_graph=True)[0] for x in (found, expected)]
        torch.testing.assert_close((found, grads[0]), (expected, grads[1]))
    with pytest.raises(NotImplementedError, match="^score_mod is given under torch.func .* as score, with the tensors"):
        torch.func.grad(lambda x: flex_attention(q, k, v, lambda s, b, h, i, j: s * x[h]).sum())(slopes)
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(*(x.float() for x in (q, k, v)), module)
    assert out.dtype is torch.bfloat16 and (out - expected).abs().max() < 0.05
