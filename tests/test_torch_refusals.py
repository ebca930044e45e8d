"""Derivatives that there are not, or that nobody can follow: an error by name."""

from __future__ import annotations

from typing import Any

import pytest

import cupyflash

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad
from torch.func import grad, jvp
from torch_standard import standard

from cupyflash.torch import attention

Q, K, V = (torch.randn(2, 5, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3))
TWICE = "^attention can be differentiated twice, not three times$"
FORWARD_TWICE = "^attention has no second derivative in forward mode alone; take one of them in reverse mode: .*hessian"


def of_q(q: Any) -> Any:
    return attention(q, K, V).square().sum()


def test_third_derivatives_are_refused() -> None:
    q = Q.clone().requires_grad_()
    (g,) = torch.autograd.grad(of_q(q), q, create_graph=True)
    (h,) = torch.autograd.grad((g * K).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad((h * V).sum(), q)
    second = grad(lambda q: (grad(of_q)(q) * K).sum())
    with pytest.raises(RuntimeError, match=TWICE):
        grad(lambda q: (second(q) * V).sum())(Q)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.func.grad(lambda q: jvp(grad(of_q), (q,), (K,))[1].sum())(Q)
    with pytest.raises(NotImplementedError, match=FORWARD_TWICE):
        jvp(second, (Q,), (V,))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=TWICE[1:-1]):
        torch.compile(grad(lambda q: (second(q) * V).sum()), backend="aot_eager")(Q)


def test_forward_mode_of_forward_mode_is_refused() -> None:
    for call in (
        lambda: jvp(lambda q: jvp(of_q, (q,), (K,))[1], (Q,), (V,)),
        lambda: torch.func.jacfwd(torch.func.jacfwd(lambda x: of_q(Q + x)))(torch.zeros((), dtype=torch.float64)),
    ):
        with pytest.raises(NotImplementedError, match=FORWARD_TWICE):
            call()


def test_backward_through_tangents_within_their_level_is_refused() -> None:
    """It would give tangents of its own, which are of third order; when the level is over, it gives none."""
    q = Q.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(attention(forward_ad.make_dual(q, K), K, V)).tangent
        with pytest.raises(RuntimeError, match=TWICE):
            torch.autograd.grad(tangent.square().sum(), q, retain_graph=True)
    found = torch.autograd.grad(tangent.square().sum(), q)
    expected = grad(lambda q: jvp(lambda q: standard(q, K, V), (q,), (K,))[1].square().sum())(Q)
    torch.testing.assert_close(found[0], expected)


def test_out_and_lse_alone_are_refused() -> None:
    """They follow from q, k and v: no derivative by them is lost."""
    out, lse = attention(Q, K, V, return_lse=True)

    def of(x: Any) -> Any:
        return cupyflash.attention_backward(Q, Q, K, V, x, lse)[0].sum()

    told = "^out and lse are what attention made of q, k, v"
    with pytest.raises(NotImplementedError, match=told):
        jvp(of, (out,), (Q,))
    with pytest.raises(RuntimeError, match=told):
        grad(of)(out)
    with pytest.raises(RuntimeError, match=told):
        grad(lambda x: cupyflash.attention_jvp({"q": K}, Q, K, V, x, lse)[0].sum())(out)


def test_targets_are_refused() -> None:
    out, lse = attention(Q, K, V, return_lse=True)
    into = torch.empty_like(Q)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(Q, K)
        for name, call in (
            ("out", lambda: attention(q, K, V, out=into)),
            (
                "grads",
                lambda: cupyflash.attention_backward(Q, q, K, V, out, lse, grads=(into, into.clone(), into.clone())),
            ),
            ("tout", lambda: cupyflash.attention_jvp({"q": q}, Q, K, V, out, lse, tout=into)),
        ):
            with pytest.raises(ValueError, match=f"^{name} is given but "):
                call()


def test_float8_is_refused() -> None:
    q = Q[:, :, :, :16].float().repeat(1, 1, 1, 2).to(torch.float8_e4m3fn)
    bias = torch.randn(5, 5)
    with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone"):
        jvp(lambda b: attention(q, q, q, bias=b, out_dtype="bfloat16"), (bias,), (bias,))


# As a symbol of torch.compile's: what it is, and how it is given with tensors q, k.
OF_SYMBOLS: list[tuple[float, Any, str]] = [
    (4, lambda q, k, n: cupyflash.attention(q, k, latent=n), "latent is 4, of which there is a forward alone, but a"),
    (4, lambda q, k, n: cupyflash.attention(q, k, k, latent=n), "v is given, and latent is 4; it must be None there"),
    (0, lambda q, k, n: cupyflash.attention(q.detach(), k, latent=n), "latent is 0; it must be 1 or more"),
    (9, lambda q, k, n: cupyflash.attention(q.detach(), k, latent=n), "latent is 9; it must be at most the columns"),
    (3, lambda q, k, n: attention(q, k, k, window=(n, 1 - n)), "window's right bound is -2; it must be 0 or more keys"),
    (3, lambda q, k, n: attention(q, k, k, window=(n, n, n)), r"window is \(3, 3, 3\); it must be None or a pair"),
    (3, lambda q, k, n: attention(q, k, k, window=n), "window is 3; it must be None or a pair"),
    (3, lambda q, k, n: attention(q, k, k, causal=n), "causal is 3; it must be False, True, 'bottom_right'"),
    (3, lambda q, k, n: attention(q, k, k, deterministic=n), "deterministic is 3; it must be True or False"),
    (3, lambda q, k, n: attention(q, k, k, at=(n, n)), r"at is \(3, 3\); it must be None or four integers"),
    (0.5, lambda q, k, n: attention(q, k, k, dropout=n), "dropout is 0.5, but seed is not given"),
    (2.5, lambda q, k, n: attention(q, k, k, dropout=n, seed=1), "dropout is 2.5; it must be a share"),
    (2.5, lambda q, k, n: attention(q, k, k, softcap=-n), "softcap is -2.5; it must be more than 0"),
    (9, lambda q, k, n: append(k, latent=n), "latent is 9; it must be at most the columns of k_cache, 8, shape"),
    (4, lambda q, k, n: append(k, v_new=k, latent=n), "v_new is given, and latent is 4; it must be None there"),
    (2.5, lambda q, k, n: append(k, v_new=k, v_cache=k, k_descale=-n), "k_descale is -2.5; it must be more than 0"),
]  # fmt: skip


def append(k: Any, **given: Any) -> Any:
    return cupyflash.attention_append(None, k, k_cache=k.clone(), seqlens_k=torch.zeros(2, dtype=torch.int32), **given)


@pytest.mark.parametrize(("n", "call", "message"), OF_SYMBOLS, ids=range(len(OF_SYMBOLS)))
def test_numbers_that_are_symbols_are_told_as_numbers(n: float, call: Any, message: str) -> None:
    """PyTorch's compiler, which makes no text of them, says in its own error what ours is."""
    torch._dynamo.reset()
    q, k = Q.clone().requires_grad_(), K[:, :, :1].clone()
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, dynamic=True, backend="eager")(q, k, n)
    torch._dynamo.reset()
