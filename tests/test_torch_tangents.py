"""Forward mode: no tangent is lost in silence, whoever follows the call and however it is made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import cupyflash

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from cupyflash.compat import flash_attn, xformers
from cupyflash.torch import MultiheadAttention, attention, flex_attention, scaled_dot_product_attention

Function = Callable[[Any], Any]


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


K, V, Q = (numbers(2, 4, 4, 8, seed=n) for n in range(3))
LSE = numbers(2, 4, 4)
module = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).requires_grad_(False)


def relative(score: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return score + table[h, j]


ENTRIES: dict[str, Function] = {
    "attention": lambda x: attention(x, K, V, causal=True),
    "the package": lambda x: cupyflash.attention(K, x, V),
    "lse": lambda x: attention(K, x, V, return_lse=True)[1],
    "bias": lambda x: attention(Q, K, V, bias=x[0, :, :, :4], layout="bhsd"),
    "score_arrays": lambda x: attention(
        Q, K, V, score=relative, score_arrays={"table": x[0].flatten(1)}, layout="bhsd"
    ),
    "attention_backward, dout": lambda x: cupyflash.attention_backward(x, Q, K, V, V, LSE)[1],
    "attention_backward, lse": lambda x: cupyflash.attention_backward(Q, Q, K, V, V, x[..., 0])[1],
    "attention_backward, v": lambda x: cupyflash.attention_backward(Q, Q, K, x, V, LSE)[0],
    "sdpa": lambda x: scaled_dot_product_attention(x, K, V, is_causal=True),
    "MultiheadAttention": lambda x: module(x[0], K[0], V[0])[0],
    "flex_attention": lambda x: flex_attention(Q, K, x),
    "flash_attn": lambda x: flash_attn.flash_attn_func(Q, x, V),
    "flash_attn, packed": lambda x: flash_attn.flash_attn_kvpacked_func(Q, torch.stack((x, V), 2)),
    "xFormers": lambda x: xformers.memory_efficient_attention(x, K, V),
    "xFormers, forward alone": lambda x: xformers.memory_efficient_attention_forward(x, K, V),
}  # fmt: skip


def dual(f: Function, x: Any, u: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, u))).tangent


def square(f: Function) -> Function:
    return lambda x: f(x).square().sum()


WAYS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "jvp": lambda f, x, u: jvp(f, (x,), (u,))[1],
    "forward_ad": dual,
    "jacfwd": lambda f, x, u: jacfwd(f)(x),
    "jvp of vmap": lambda f, x, u: jvp(vmap(f), (torch.stack((x, x)),), (torch.stack((u, u)),))[1],
    "vmap of jvp": lambda f, x, u: vmap(lambda x, u: jvp(f, (x,), (u,))[1])(torch.stack((x, x)), torch.stack((u, u))),
    "jvp of grad": lambda f, x, u: jvp(grad(square(f)), (x,), (u,))[1],
    "grad of jvp": lambda f, x, u: grad(lambda x: jvp(square(f), (x,), (u,))[1])(x),
}


def compiled(f: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, **options)


def dispatched(f: Callable[..., Any]) -> Callable[..., Any]:
    def under(*args: Any) -> Any:
        with FlopCounterMode(display=False):
            return f(*args)

    return under


# Ours, and where gradients of operators or of modules are transformed, PyTorch's.
FORWARD_MODE = "has no derivative in forward mode"
REFUSED = f"{FORWARD_MODE}|must override the setup_context|must implement the jvp function|Tensor device mismatch"
X, U = numbers(2, 4, 4, 8, seed=3), numbers(2, 4, 4, 8, seed=4)


def refused(call: Callable[[], Any], match: str = FORWARD_MODE) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=match):
        call()


@pytest.mark.parametrize("mode", [lambda f: f, dispatched], ids=["eager", "dispatch mode"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_tangents_are_refused(entry: str, way: str, mode: Callable[..., Any]) -> None:
    ENTRIES[entry](X)
    refused(lambda: mode(functools.partial(WAYS[way], ENTRIES[entry]))(X, U), REFUSED)


def some(entry: str, way: str) -> Any:
    """One of all, and of the others one way: a compilation takes a part of a second."""
    quick = entry == "attention" or way == "forward_ad"
    return pytest.param(entry, way, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("entry, way", itertools.starmap(some, itertools.product(ENTRIES, WAYS)))
def test_tangents_are_refused_by_compilers(entry: str, way: str) -> None:
    whole = "flex" not in entry  # which breaks the graph
    refused(lambda: compiled(functools.partial(WAYS[way], ENTRIES[entry]), fullgraph=whole)(X, U), REFUSED)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# Under a transform PyTorch compiles the transform's own code piece by piece: that takes seconds.
@pytest.mark.parametrize("way", ["forward_ad", slow("jvp"), slow("vmap of jvp")])
@pytest.mark.parametrize("warm, backend", [(True, "aot_eager"), slow(False, "aot_eager"), slow(True, "inductor")])
def test_tangents_into_what_is_compiled(way: str, warm: bool, backend: str) -> None:
    f = compiled(ENTRIES["attention"], backend)
    if warm:
        torch.testing.assert_close(f(X), ENTRIES["attention"](X))
    refused(lambda: WAYS[way](f, X, U))


@pytest.mark.parametrize("way", ["jvp", "forward_ad", "vmap of jvp"])
def test_tangents_into_programs_and_operators(way: str) -> None:
    """By whoever calls an operator: a program that was exported has no line of ours between."""

    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return attention(x, K, V, score=relative, score_arrays={"table": x[0].flatten(1)})

    program = torch.export.export(Layer(), (X,)).module()
    torch.testing.assert_close(program(U), Layer()(U))
    refused(lambda: WAYS[way](program, X, U))


def test_a_tangent_of_what_a_score_mod_reads() -> None:
    table = numbers(4, 16)

    def of(x: Any) -> Any:
        return flex_attention(Q, K, V, score_mod=lambda s, b, h, i, j: s + x[h, j])

    assert of(table).isfinite().all()
    refused(lambda: dual(of, table, table))
    refused(lambda: dispatched(functools.partial(dual, of))(table, table))


@pytest.mark.parametrize("mode", [lambda f: f, dispatched, compiled], ids=["eager", "dispatch mode", "compiled"])
def test_without_tangents_all_is_served(mode: Callable[..., Any]) -> None:
    """Beside others' tangents, too."""

    def f(x: Any, u: Any) -> Any:
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, u).sin()
            return forward_ad.unpack_dual(y).tangent + attention(x, K, V)

    torch.testing.assert_close(mode(f)(X, U), X.cos() * U + attention(X, K, V))
