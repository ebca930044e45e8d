"""Forward mode, and derivatives of second order: right, or an error by name; never zero. Whoever follows the call, and
however it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import cupyflash

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode
from torch_standard import standard

from cupyflash.compat import flash_attn, xformers
from cupyflash.torch import MultiheadAttention, attention, flex_attention, scaled_dot_product_attention

Function = Callable[[Any], Any]


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


K, V, Q, X, U = (numbers(2, 4, 4, 8, seed=n) for n in range(5))
module = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).requires_grad_(False)
OUT = attention(Q, K, V, return_lse=True)
both = functools.partial(attention, return_lse=True)
heads_first = functools.partial(standard, layout="bhsd")


def relative(score: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return score + table[h, j]


def projected(x: Any) -> Any:
    """What `module` computes."""
    q, k, v = (
        (y @ w.mT + b).unflatten(-1, (2, 4))
        for y, w, b in zip((x[0], K[0], V[0]), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3))
    )
    return module.out_proj(standard(q, k, v).flatten(-2))


def of_gradients(v: Any, w: Any, n: int) -> Any:
    """The gradient of standard attention by one of q, k, v."""
    return vjp(standard, Q, K, v)[1](w)[n]


def pushed(f: Function, x: Any, u: Any) -> Any:
    """As jvp, by reverse mode twice: it may stand within a dual level."""
    pull = vjp(f, x)[1]
    return vjp(lambda w: pull(w)[0], torch.zeros_like(x))[1](u)[0]


class Entry(NamedTuple):
    ours: Function
    standard: Function
    order: int = 0  # of a derivative that it is, 0 also along what that is linear in
    forward: bool = False  # whether it is one in forward mode


ENTRIES: dict[str, Entry] = {
    "attention": Entry(lambda x: attention(x, K, V, causal=True), lambda x: standard(x, K, V, causal=True)),
    "the package": Entry(lambda x: cupyflash.attention(K, x, V), lambda x: standard(K, x, V)),
    "lse": Entry(lambda x: both(K, x, V)[1], lambda x: standard(K, x, V, return_lse=True)[1]),
    "bias": Entry(
        lambda x: attention(Q, K, V, bias=x[0, :, :, :4], layout="bhsd"),
        lambda x: heads_first(Q, K, V, bias=x[0, :, :, :4])
    ),
    "score_arrays": Entry(
        lambda x: attention(Q, K, V, score=relative, score_arrays={"table": x[0].flatten(1)}, layout="bhsd"),
        lambda x: heads_first(Q, K, V, bias=x[0].flatten(1)[:, None, :4]),
    ),
    "attention_backward, dout": Entry(
        lambda x: cupyflash.attention_backward(x, Q, K, V, *OUT)[1], lambda x: of_gradients(V, x, 1)
    ),
    "attention_backward, v": Entry(
        lambda x: cupyflash.attention_backward(Q, Q, K, x, *both(Q, K, x))[0], lambda x: of_gradients(x, Q, 0), 1
    ),
    "attention_jvp, k's": Entry(
        lambda x: cupyflash.attention_jvp({"k": x}, Q, K, V, *OUT)[0],
        lambda x: pushed(lambda k: standard(Q, k, V), K, x)
    ),
    "attention_jvp, v": Entry(
        lambda x: cupyflash.attention_jvp({"k": U}, Q, K, x, *both(Q, K, x))[0],
        lambda x: pushed(lambda k: standard(Q, k, x), K, U), 1, True,
    ),
    "attention_backward_jvp, v's": Entry(
        lambda x: cupyflash.attention_backward_jvp({"v": x}, Q, Q, K, V, *OUT)[0],
        lambda x: pushed(lambda v: of_gradients(v, Q, 0), V, x),
    ),
    "attention_backward_jvp, q": Entry(
        lambda x: cupyflash.attention_backward_jvp({"v": U}, Q, x, K, V, *both(x, K, V))[1], lambda x: x, 2
    ),
    "sdpa": Entry(
        lambda x: scaled_dot_product_attention(x, K, V, is_causal=True),
        lambda x: heads_first(x, K, V, causal="top_left")
    ),
    "MultiheadAttention": Entry(lambda x: module(x[0], K[0], V[0])[0], projected),
    "flex_attention": Entry(lambda x: flex_attention(Q, K, x), lambda x: heads_first(Q, K, x)),
    "flex_attention, score_mod": Entry(
        lambda x: flex_attention(Q, x, V, score_mod=lambda s, b, h, i, j: s + X[0, h, i, j] * s * s),
        lambda x: heads_first(Q, x, V, score=lambda s: s + X[0, :, :, :4] * s * s),
    ),
    "flash_attn": Entry(lambda x: flash_attn.flash_attn_func(Q, x, V), lambda x: standard(Q, x, V)),
    "flash_attn, packed": Entry(
        lambda x: flash_attn.flash_attn_kvpacked_func(Q, torch.stack((x, V), 2)), lambda x: standard(Q, x, V)
    ),
    "xFormers": Entry(lambda x: xformers.memory_efficient_attention(x, K, V), lambda x: standard(x, K, V)),
    "xFormers, forward alone": Entry(
        lambda x: xformers.memory_efficient_attention_forward(x, K, V), lambda x: standard(x, K, V)
    ),
}  # fmt: skip


def dual(f: Function, x: Any, u: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, u))).tangent


def square(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def twice(f: Function, x: Any, u: Any) -> Any:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(square(f)(x), x, create_graph=True)
    return torch.autograd.grad((g * u).sum(), x)[0]


class Way(NamedTuple):
    run: Callable[[Function, Any, Any], Any]
    order: int
    forward: bool = True  # whether the first derivative that is taken is in forward mode


WAYS: dict[str, Way] = {
    "jvp": Way(lambda f, x, u: jvp(f, (x,), (u,))[1], 1),
    "forward_ad": Way(dual, 1),
    "jacfwd": Way(lambda f, x, u: jacfwd(lambda y: f(x + y[0] * u + y[1] * x))(torch.zeros(2, dtype=x.dtype)), 1),
    "jvp of vmap": Way(lambda f, x, u: jvp(vmap(f), (torch.stack((x, x)),), (torch.stack((u, u)),))[1], 1),
    "vmap of jvp": Way(
        lambda f, x, u: vmap(lambda x, u: jvp(f, (x,), (u,))[1])(torch.stack((x, x)), torch.stack((u, u))), 1
    ),
    "grad": Way(lambda f, x, u: grad(square(f))(x), 1, False),
    "jvp of grad": Way(lambda f, x, u: jvp(grad(square(f)), (x,), (u,))[1], 2, False),
    "grad of jvp": Way(lambda f, x, u: grad(lambda x: jvp(square(f), (x,), (u,))[1])(x), 2),
    "grad of grad": Way(lambda f, x, u: grad(lambda x: (grad(square(f))(x) * u).sum())(x), 2, False),
    "hessian": Way(
        lambda f, x, u: hessian(lambda y: square(f)(x + y[0] * u + y[1] * x))(torch.zeros(2, dtype=x.dtype)), 2, False
    ),
    "vmap of grad of jvp": Way(
        lambda f, x, u: vmap(lambda x: grad(lambda x: jvp(square(f), (x,), (u,))[1])(x))(torch.stack((x, u))), 2
    ),
    "double backward": Way(twice, 2, False),
    "forward_ad of backward": Way(
        lambda f, x, u: dual(
            lambda x: torch.autograd.grad(square(f)(x.requires_grad_()), x, create_graph=True)[0], x, u
        ),
        2,
        False,
    ),
    "hvp": Way(lambda f, x, u: torch.autograd.functional.hvp(square(f), x, u)[1], 2, False),
    "vhp": Way(lambda f, x, u: torch.autograd.functional.vhp(square(f), x, u)[1], 2, False),
}


def compiled(f: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, **options)


def dispatched(f: Callable[..., Any]) -> Callable[..., Any]:
    def under(*args: Any) -> Any:
        with FlopCounterMode(display=False):
            return f(*args)

    return under


BY_AUTOGRAD = ("forward_ad", "double backward", "forward_ad of backward", "hvp", "vhp")  # without torch.func
TWICE = "attention can be differentiated twice, not three times"
FORWARD_TWICE = "attention has no second derivative in forward mode alone"


@functools.cache
def expected(entry: str, way: str) -> Any:
    return WAYS[way].run(ENTRIES[entry].standard, X, U)


def check(entry: str, way: str, mode: Callable[..., Any]) -> None:
    """Right; or refused, if it is a third derivative of attention, or a second one in forward mode alone."""
    (ours, _, order, forward), (run, more, forward_too) = ENTRIES[entry], WAYS[way]
    call = mode(functools.partial(run, ours))
    if "score_mod" in entry and way not in BY_AUTOGRAD:
        with pytest.raises(NotImplementedError, match=r"^score_mod is given under torch\.func"):
            call(X, U)
    elif order and (order + more > 2 or (forward and forward_too)):
        with pytest.raises((NotImplementedError, RuntimeError), match=f"{TWICE}|{FORWARD_TWICE}"):
            call(X, U)
    else:
        torch.testing.assert_close(call(X, U), expected(entry, way))


TABLE = [(x, y) for x in ENTRIES for y in WAYS if "forward alone" not in x or "grad" not in y and WAYS[y].order == 1]


@pytest.mark.parametrize("mode", [lambda f: f, dispatched], ids=["eager", "dispatch mode"])
@pytest.mark.parametrize("entry, way", TABLE)
def test_derivatives(entry: str, way: str, mode: Callable[..., Any]) -> None:
    check(entry, way, mode)


QUICK = ("jvp", "forward_ad", "jvp of grad", "grad of jvp", "vmap of jvp")
NOT_COMPILED = BY_AUTOGRAD[1:]  # PyTorch compiles no second backward


def some(entry: str, way: str) -> Any:
    """One of all, and of the others one way: a compilation takes a part of a second."""
    quick = way in QUICK if entry == "attention" else way == "forward_ad"
    return pytest.param(entry, way, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("entry, way", [some(*x) for x in TABLE if x[1] not in NOT_COMPILED])
def test_compiled_derivatives(entry: str, way: str) -> None:
    try:
        check(entry, way, functools.partial(compiled, fullgraph="flex" not in entry))  # which breaks the graph
    except RuntimeError as error:  # PyTorch's (2.13), of a linear under vmap of jvp
        if entry != "MultiheadAttention" or "Tensor device mismatch" not in str(error):
            raise


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("way", [x for x in WAYS if x not in NOT_COMPILED])
def test_derivatives_by_inductor(way: str) -> None:
    check("attention", way, functools.partial(compiled, backend="inductor", fullgraph=True))


# Under a transform PyTorch compiles the transform's own code piece by piece: that takes seconds.
@pytest.mark.parametrize("way", ["forward_ad", "jvp", slow("grad"), slow("vmap of jvp"), slow("jvp of grad")])
@pytest.mark.parametrize("warm, backend", [(True, "aot_eager"), slow(False, "aot_eager"), slow(True, "inductor")])
def test_tangents_into_what_is_compiled(way: str, warm: bool, backend: str) -> None:
    f = compiled(ENTRIES["attention"].ours, backend)
    if warm:
        torch.testing.assert_close(f(X), ENTRIES["attention"].standard(X))
    if way == "forward_ad" and backend == "inductor":
        with pytest.raises(NotImplementedError, match=r"a program of torch\.compile is given tensors with tangents"):
            WAYS[way].run(f, X, U)
    else:
        torch.testing.assert_close(WAYS[way].run(f, X, U), expected("attention", way))


@pytest.mark.parametrize("way", ["jvp", "forward_ad", "vmap of jvp", "grad of jvp", "jvp of grad", "double backward"])
def test_derivatives_of_programs(way: str) -> None:
    """A program that was exported has no line of ours between: the operator is asked."""

    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return attention(x, K, V, score=relative, score_arrays={"table": x[0].flatten(1)})

    program = torch.export.export(Layer(), (X,)).module()
    of = WAYS[way].run
    torch.testing.assert_close(
        of(program, X, U), of(lambda x: standard(x, K, V, bias=x[0].flatten(1)[:, None, :4]), X, U)
    )


@pytest.mark.parametrize("mode", [lambda f: f, dispatched], ids=["eager", "dispatch mode"])
@pytest.mark.parametrize("way", ["jvp", "vmap of jvp", "grad of jvp", "hessian", "double backward"])
def test_a_block_mask_that_is_converted_within_transforms(way: str, mode: Callable[..., Any]) -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
    of = WAYS[way].run
    found = mode(functools.partial(of, lambda x: flex_attention(x, K, V, block_mask=mask)))(X, U)
    torch.testing.assert_close(found, of(lambda x: heads_first(x, K, V, causal="top_left"), X, U))


@pytest.mark.parametrize("mode", [lambda f: f, dispatched], ids=["eager", "dispatch mode"])
def test_a_tangent_of_what_a_score_mod_reads(mode: Callable[..., Any]) -> None:
    table = numbers(4, 16)

    def of(x: Any) -> Any:
        return flex_attention(Q, K, V, score_mod=lambda s, b, h, i, j: s + x[h, j])

    def by_standard(x: Any) -> Any:
        return heads_first(Q, K, V, bias=x[:, None, :4])

    for way in BY_AUTOGRAD:
        run = WAYS[way].run
        torch.testing.assert_close(
            mode(functools.partial(run, of))(table, table.sin()), run(by_standard, table, table.sin())
        )


@pytest.mark.parametrize("mode", [lambda f: f, dispatched, compiled], ids=["eager", "dispatch mode", "compiled"])
def test_without_tangents_all_is_served(mode: Callable[..., Any]) -> None:
    """Beside others' tangents, too."""

    def f(x: Any, u: Any) -> Any:
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, u).sin()
            return forward_ad.unpack_dual(y).tangent + attention(x, K, V)

    torch.testing.assert_close(mode(f)(X, U), X.cos() * U + attention(X, K, V))
