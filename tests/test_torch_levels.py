"""Derivatives without operators, at levels of torch.func within each other: what standard attention gives, or what the
operators do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch_standard import standard

from cupyflash import attention_backward, attention_backward_jvp, attention_jvp
from cupyflash.interop import torch_derivatives, torch_levels, torch_schema
from cupyflash.torch import attention

Function = Callable[..., Any]


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V, X, U, W = (numbers(1, 3, 2, 4, seed=n) for n in range(6))
BIAS, TBIAS = numbers(1, 3, 2, 3, seed=6), numbers(1, 3, 2, 3, seed=7)
TWICE = "attention can be differentiated twice, not three times"
FORWARD_TWICE = "attention has no second derivative in forward mode alone"
Y = torch.zeros(2, dtype=X.dtype)


def square(a: Function, x: Any, k: Any = K) -> Any:
    return a(x, k, x).square().sum()


def along(a: Function, y: Any) -> Any:
    """A function of two numbers."""
    return square(a, X + y[0] * U + y[1] * W)


def again(a: Function, u: Any = U, through: Function = lambda f, x: f(x), inputs: Any = X) -> Any:
    """A double backward."""
    x = inputs.clone().requires_grad_()
    (g,) = torch.autograd.grad(through(lambda x: a(x, K, x), x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g, x, u)


def dual(a: Function, x: Any, u: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(a(forward_ad.make_dual(x, u), K, V))


def after(a: Function, x: Any, u: Any) -> Any:
    """Gradients of a tangent, once forward mode is over."""
    x, u = x.clone().requires_grad_(), u.clone().requires_grad_()
    return torch.autograd.grad((dual(a, x, u).tangent * W).sum(), (x, u))


def pulled(a: Function, x: Any, w: Any) -> Any:
    return vjp(lambda x: a(x, K, x), x)[1](w)[0]


FUNCTIONAL = torch.autograd.functional
WAYS: dict[str, Function] = {
    "jvp of a grad, by what that takes from outside": lambda a: jvp(
        lambda x: grad(lambda k: square(a, x, k))(K), (X,), (U,)
    ),
    "grad of a jvp, likewise": lambda a: grad(lambda x: jvp(lambda k: square(a, x, k), (K,), (U,))[1])(X),
    "grad of a grad, likewise": lambda a: grad(lambda x: (grad(lambda k: square(a, x, k))(K) * U).sum())(X),
    "jvp of a jvp, by another": lambda a: jvp(lambda x: jvp(lambda s: a(x, K, V) * s, (U,), (W,))[1], (X,), (Q,)),
    "jvp of a grad, by another": lambda a: jvp(lambda x: grad(lambda s: (a(x, K, V) * s).sum())(U), (X,), (W,)),
    "vjp of a pullback": lambda a: vjp(lambda w: pulled(a, X, w), W)[1](U),
    "vjp of a pullback, by both": lambda a: vjp(functools.partial(pulled, a), X, W)[1](U),
    "jvp of a pullback": lambda a: jvp(lambda x: pulled(a, x, W), (X,), (U,)),
    "vmap of a pullback": lambda a: vmap(vjp(lambda x: a(x, K, x), X)[1])(torch.stack((U, W))),
    "jvp along what moves": lambda a: jvp(lambda u: jvp(lambda x: a(x, K, x), (X,), (u,))[1], (U,), (W,)),
    "vmap of grad of vmap of jvp": lambda a: vmap(
        grad(lambda x: vmap(lambda u: jvp(functools.partial(square, a), (x,), (u,))[1])(torch.stack((U, W))).sum())
    )(torch.stack((X, Q))),
    "jacfwd of jacrev": lambda a: jacfwd(jacrev(functools.partial(along, a)))(Y),
    "jacrev of jacfwd": lambda a: jacrev(jacfwd(functools.partial(along, a)))(Y),
    "jacrev of jacrev": lambda a: jacrev(jacrev(functools.partial(along, a)))(Y),
    "linearize": lambda a: linearize(lambda x: a(x, K, x), X)[1](U),
    "linearize of grad": lambda a: linearize(grad(functools.partial(square, a)), X)[1](U),
    "functionalize": lambda a: jvp(functionalize(grad(functools.partial(square, a))), (X,), (U,)),
    "jacobian, forward mode": lambda a: FUNCTIONAL.jacobian(
        functools.partial(along, a), Y, vectorize=True, strategy="forward-mode"
    ),
    "hessian, forward mode": lambda a: FUNCTIONAL.hessian(
        functools.partial(along, a), Y, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "hessian, at once": lambda a: FUNCTIONAL.hessian(functools.partial(along, a), Y, vectorize=True),
    "grad of what requires grad": lambda a: torch.autograd.grad(
        grad(functools.partial(square, a))(x := X.clone().requires_grad_()), x, U
    ),
    "forward_ad within grad": lambda a: grad(lambda x: (dual(a, x, U).tangent * W).sum())(X),
    "grad within forward_ad": lambda a: dual(lambda x, k, v: grad(functools.partial(square, a))(x), X, U),
    "gradients of a tangent": lambda a: after(a, X, U),
    "a gradient to be negated": lambda a: again(a, torch._neg_view(U)),
    "a gradient to be negated, once": lambda a: torch.autograd.grad(
        a(x := X.clone().requires_grad_(), K, V), x, torch._neg_view(U)
    ),
    "a query to be negated": lambda a: jvp(lambda k: a(torch._neg_view(X), k, V), (K,), (U,)),
    "checkpoint": lambda a: again(a, U, lambda f, x: checkpoint(f, x, use_reentrant=False)),
    "under no_grad": lambda a: torch.no_grad()(lambda: jvp(grad(functools.partial(square, a)), (X,), (U,)))(),
    "in inference mode": lambda a: torch.inference_mode()(lambda: jvp(lambda x: a(x, K, x), (X,), (U,)))(),
    "a parameter": lambda a: again(a, U, inputs=torch.nn.Parameter(X)),
    "in another thread": lambda a: again(a, U, lambda f, x: in_a_thread(f, x)),
}


def in_a_thread(f: Function, x: Any) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return grad(lambda y: threads.submit(f, x).result().sum() + (y * x).sum())(x) * threads.submit(f, x).result()


@pytest.mark.parametrize("way", WAYS)
def test_levels(way: str) -> None:
    torch.testing.assert_close(WAYS[way](attention), WAYS[way](standard))


def by_hand(x: Any, u: Any) -> Any:
    out, lse = attention(x, K, V, return_lse=True)
    return attention_jvp({"q": u}, x, K, V, out, lse)


def gradients_by_hand(x: Any, u: Any, w: Any) -> Any:
    out, lse = attention(X, K, V, return_lse=True)
    return attention_backward_jvp({"q": u}, w, x, K, V, out, lse)[1]


def with_bias(x: Any, b: Any) -> Any:
    return sum(y.square().sum() for y in attention(x, K, V, bias=b.mT, sinks=b[0, 0, :, 0], return_lse=True))


OURS: dict[str, Function] = {
    "by hand": lambda: vjp(by_hand, X, U)[1]((W, W[..., 0].mT)),
    "by hand, gradients": lambda: vjp(functools.partial(gradients_by_hand, X), U, W)[1](Q),
    "by hand, a third": lambda: vjp(gradients_by_hand, X, U, W)[1](Q),
    "a bias": lambda: jvp(grad(with_bias, (0, 1)), (X.mT, BIAS), (U.mT, TBIAS)),
    "dropout": lambda: jvp(grad(lambda x: attention(x, K, V, dropout=0.3, seed=2**64 - 3).sum()), (X,), (U,)),
    "twice forward": lambda: jvp(lambda x: jvp(lambda k: attention(x, k, V), (K,), (U,))[1], (X,), (W,)),
    "three times": lambda: jvp(grad(lambda x: jvp(functools.partial(square, attention), (x,), (U,))[1]), (X,), (W,)),
    "three times back": lambda: grad(lambda x: (grad(lambda x: (pulled(attention, x, W) * U).sum())(x) * W).sum())(X),
    "into out": lambda: jvp(lambda x: attention(x, K, V, out=torch.empty_like(X)), (X,), (U,)),
    "into grads": lambda: grad(
        lambda w: attention_backward(w, X, K, V, X, X[..., 0].mT, grads=(Q, Q, Q)).dq.sum()
    )(W),
    "a wrong shape": lambda: jvp(lambda x: attention(x, K[:, :, :1].mT, V), (X,), (U,)),
    "a wrong dtype": lambda: grad(lambda x: attention(x, K.float(), V).sum())(X),
    "a wrong option": lambda: jvp(lambda x: attention(x, K, V, window="x"), (X,), (U,)),
    "a family": lambda: jvp(lambda x: attention(x, K, V, family="sm90"), (X,), (U,)),
}  # fmt: skip


@pytest.mark.parametrize("way", OURS)
def test_what_operators_say(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, and the words of what is refused."""

    def outcome() -> Any:
        try:
            return OURS[way]()
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return type(error), str(error)

    found = outcome()
    monkeypatch.setattr(torch_levels, "served", lambda: False)
    expected = outcome()
    if type(expected[0]) is type:
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def test_recorded_while_forward_mode_was_off() -> None:
    """Whether what a node has kept has tangents was not looked at then."""

    def tangent(x: Any, through: Function) -> Any:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(x, U)
            with forward_ad._set_fwd_grad_enabled(False):
                made = through(x)
            (g,) = torch.autograd.grad(made, x, W, create_graph=True)
            return forward_ad.unpack_dual(g).tangent

    found, _ = vjp(lambda x: tangent(x, lambda x: attention(x, K, x)), X)
    torch.testing.assert_close(found, jvp(lambda x: pulled(attention, x, W), (X,), (U,))[1])
    with pytest.raises(NotImplementedError, match=FORWARD_TWICE):
        tangent(
            X.clone().requires_grad_(),
            lambda x: torch.autograd.grad(attention(x, K, x), x, W, create_graph=True),
        )


def test_what_outlives_all_of_its_levels() -> None:
    kept = []

    def f(x: Any) -> Any:
        kept.append(x)
        return square(attention, x)

    grad(lambda x: grad(f)(x).sum())(X)
    torch.testing.assert_close(grad(f)(kept[0]), grad(f)(X))
    torch.testing.assert_close(attention(kept[0], K, V), attention(X, K, V))


def test_eager_derivatives_go_by_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through PyTorch's dispatcher they would cost the host some 50 us for each level and pass more."""
    given, u = (Q, K, V), (X, U, W)
    f = functools.partial(attention, causal=True)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return f(q, k, v).square().sum()

    def tangents(g: Any) -> Any:
        with forward_ad.dual_level():
            found = g(*map(forward_ad.make_dual, given, u))
            return [forward_ad.unpack_dual(x).tangent for x in (found if isinstance(found, tuple) else (found,))]

    def gradients(*inputs: Any) -> Any:
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        grads = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
        return torch.autograd.grad(grads, inputs, u)

    gradient = grad(loss, (0, 1, 2))
    ways: dict[str, Callable[[], Any]] = {
        "jvp": lambda: jvp(f, given, u),
        "forward_ad": lambda: tangents(f),
        "again": lambda: gradients(*given),
        "hvp": lambda: torch.autograd.functional.hvp(loss, given, u),
        "jvp of grad": lambda: jvp(gradient, given, u),
        "grad of jvp": lambda: grad(lambda *x: jvp(f, x, u)[1].square().sum(), (0, 1, 2))(*given),
        "grad of grad": lambda: grad(lambda *x: sum((a * b).sum() for a, b in zip(gradient(*x), u)), (0, 1, 2))(*given),
    }
    expected = gradients(*given)
    monkeypatch.setattr(torch_schema, "operator", lambda of: pytest.fail(f"{of} goes by an operator"))
    found = {name: way() for name, way in ways.items()}
    for of_hessian in (found["again"], found["hvp"][1], found["jvp of grad"][1], found["grad of grad"]):
        for x, y in zip(of_hessian, expected):
            torch.testing.assert_close(x, y)
    torch.testing.assert_close(found["jvp"][1], found["forward_ad"][0])


def test_what_has_been_taken_apart_is_not_asked_for_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question costs the host as much as a small operator."""
    looked, unpack = [], torch_derivatives._unpack
    monkeypatch.setattr(torch_derivatives, "_unpack", lambda x, level: looked.append(unpack(x, level)) or looked[-1])
    dual(attention, X.clone().requires_grad_(), U)
    assert len(looked) == 2 + 3  # whether there is one at all, twice, and each input's
