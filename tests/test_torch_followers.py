"""Who else follows a call on tensors: TorchScript, other tracers, autograd's own vmap, the FLOP counter."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest

import cupyflash

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from cupyflash.compat import flash_attn, flash_attn_interface, flash_mla, xformers
from cupyflash.torch import MultiheadAttention, attention, flex_attention, scaled_dot_product_attention

Function = Callable[[Any], Any]


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V, X = (numbers(2, 4, 4, 8, seed=n) for n in range(4))
LSE = numbers(2, 4, 4)
ENDS = torch.tensor([0, 3, 4], dtype=torch.int32)


class Layer(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class WithModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.attention(x[0], x[0], x[0])[0]


FUNCTIONS: dict[str, Function] = {
    "attention": lambda x: attention(x, K, V, causal=True),
    "the package": lambda x: cupyflash.attention(K, x, V),
    "attention_backward": lambda x: cupyflash.attention_backward(x, Q, K, V, V, LSE)[1],
    "sdpa": lambda x: scaled_dot_product_attention(x, K, V, is_causal=True),
    "flash_attn": lambda x: flash_attn.flash_attn_func(Q, x, V),
    "xFormers": lambda x: xformers.memory_efficient_attention(x, K, V),
}
LAYERS: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(Layer, f) for name, f in FUNCTIONS.items()},
    "a score": lambda: Layer(lambda x: attention(x, K, V, score=lambda s, b, h, i, j: s - i + j)),
    "dropout": lambda: Layer(lambda x: flash_attn.flash_attn_func(x, K, V, 0.5)),
    "flex_attention": lambda: Layer(lambda x: flex_attention(x, K, V)),
    "flex_attention, score_mod": lambda: Layer(
        lambda x: flex_attention(x, K, V, score_mod=lambda s, b, h, i, j: s + i - j)
    ),
    "MultiheadAttention": WithModule,
    "lengths": lambda: Layer(lambda x: attention(x[0], K[0], V[0], cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)),
    "flash_attn, lengths": lambda: Layer(
        lambda x: flash_attn.flash_attn_varlen_func(x[0].float(), K[0].float(), V[0].float(), ENDS, ENDS, 5, 5)
    ),
    "flash_attn, a cache": lambda: Layer(
        lambda x: flash_attn.flash_attn_with_kvcache(
            x.detach(), K.clone(), V.clone(), K[:, :1], V[:, :1], cache_seqlens=ENDS[:2]
        )
    ),
}


# ---- tracers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_torchscript_is_refused(name: str, grad: bool) -> None:
    """A trace would hold the example's result as a constant."""
    layer, x = LAYERS[name](), X.clone().requires_grad_(grad)
    layer(x)
    with pytest.raises(NotImplementedError, match=r"TorchScript; use torch\.compile or torch\.export"):
        torch.jit.trace(layer, x)
    with pytest.raises(NotImplementedError, match=NO_ONNX):
        torch.onnx.export(layer, (x,), io.BytesIO(), dynamo=False)
    layer(x)  # goes on


@pytest.mark.parametrize("strict", [False, True])
def test_onnx_is_refused(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    """By the exporter that reads programs of torch.export: what it tells of itself stands in for it, as it needs
    packages of its own."""
    layer = Layer(FUNCTIONS["attention"])
    torch.export.export(layer, (X,), strict=strict)
    monkeypatch.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)
    with pytest.raises(Exception, match=NO_ONNX):  # of Dynamo's, where it is strict
        torch.export.export(layer, (X,), strict=strict)


NO_ONNX = r"no operator in ONNX; export the model with torch\.nn\.functional\.scaled_dot_product_attention"
OTHERS = {  # that compute no attention
    cupyflash.block_mask, cupyflash.explain, cupyflash.tune, flash_attn_interface.get_scheduler_metadata,
    flash_mla.get_mla_metadata, xformers.unbind,
}  # fmt: skip


def scripted(x: torch.Tensor) -> torch.Tensor:
    return attention(x, x, x)


def test_torchscript_cannot_compile_it() -> None:
    """Whoever scripts a function or a module that holds a call is told by us, not by some line of ours."""
    layer = torch.nn.Sequential(MultiheadAttention(8, 2))
    functions = (cupyflash, cupyflash.torch, flash_attn, flash_attn_interface, flash_mla, xformers)
    public = [getattr(module, name) for module in functions for name in module.__all__ if not name.startswith("_")]
    ours = {f for f in public if inspect.isfunction(f)} - OTHERS
    assert len(ours) > 20
    for given in (scripted, layer, *ours):
        with pytest.raises(NotImplementedError, match=r"^torch\.jit\.script compiles .* use torch\.compile or"):
            torch.jit.script(given)
    program = torch.export.export(Layer(FUNCTIONS["attention"]), (X,)).module()
    with pytest.raises(RuntimeError, match="unsupported input list type"):
        torch.jit.trace(program, X)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_make_fx(name: str, before: bool) -> None:
    """Before the dispatcher and behind it: a graph of operators, of any input."""
    graph = make_fx(FUNCTIONS[name], pre_dispatch=before)(X)
    torch.testing.assert_close(graph(Q), FUNCTIONS[name](Q), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "MultiheadAttention"])
def test_symbolic_trace_is_refused(name: str) -> None:
    refused = "is a .*Proxy; it must be a|traced variables cannot be used"  # the latter PyTorch's, where q is none
    with pytest.raises((TypeError, torch.fx.proxy.TraceError), match=refused):
        torch.fx.symbolic_trace(LAYERS[name]())


# ---- autograd's own vmap --------------------------------------------------------------------------------------------


def as_it_is(f: Function) -> Function:
    return f


def under_a_mode(f: Function) -> Function:
    def run(*args: Any, **options: Any) -> Any:
        with FlopCounterMode(display=False):
            return f(*args, **options)

    return run


def compiled(f: Function) -> Function:
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager")


def of_a_table(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, j]


@pytest.mark.parametrize("mode", [as_it_is, under_a_mode, compiled])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_batched_gradients(rank: int, mode: Callable[[Function], Function]) -> None:
    """By each input, through out, lse and both: those of one gradient after another."""
    lead = (3, 4)[4 - rank :]
    q, k, v = (
        numbers(*shape, seed=n).requires_grad_()
        for n, shape in enumerate(((*lead, 5, 8), (*lead, 6, 8), (*lead, 6, 7)))
    )
    arrays = {"bias": numbers(5, 6).requires_grad_()}
    if rank > 2:
        arrays["sinks"] = numbers(lead[-1]).requires_grad_()
        arrays["alibi_slopes"] = numbers(lead[-1], seed=1).requires_grad_()
    inputs = [q, k, v, *arrays.values()]

    def call(q: Any, k: Any, v: Any, *given: Any) -> Any:
        return attention(q, k, v, **dict(zip(arrays, given)), causal=True, layout="bhsd", return_lse=True)

    def gradients(outs: Any, grads: Any, **how: Any) -> Any:
        return torch.autograd.grad(outs, inputs, grads, retain_graph=True, materialize_grads=True, **how)

    def all_of_it() -> None:
        results = call(*inputs)
        grads = [numbers(3, *x.shape, seed=7) for x in results]
        for some in ((0,), (1,), (0, 1)):
            outs = [results[n] for n in some]
            found = gradients(outs, [grads[n] for n in some], is_grads_batched=True)
            each = [gradients(outs, [grads[n][entry] for n in some]) for entry in range(3)]
            for x, *y in zip(found, *each, strict=True):
                torch.testing.assert_close(x, torch.stack(y))

    if mode is compiled:
        call = compiled(call)
        all_of_it()
    else:
        mode(all_of_it)()


def test_batched_gradients_of_a_score_and_by_hand() -> None:
    table = numbers(4, 6).requires_grad_()
    out = attention(Q, K, V, score=of_a_table, score_arrays={"table": table})
    grads = numbers(3, *out.shape)
    (found,) = torch.autograd.grad(out, table, grads, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(
        found, torch.stack([torch.autograd.grad(out, table, x, retain_graph=True)[0] for x in grads])
    )

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any) -> Any:
            out, lse = attention(q, K, V, return_lse=True)
            ctx.save_for_backward(q, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            q, out, lse = ctx.saved_tensors
            return cupyflash.attention_backward(dout, q, K, V, out, lse)[0]

    q = Q.clone().requires_grad_()
    of = [torch.autograd.grad(f(q), q, grads, is_grads_batched=True)[0] for f in (Ours.apply, FUNCTIONS["attention"])]
    torch.testing.assert_close(of[0], torch.autograd.grad(attention(q, K, V), q, grads, is_grads_batched=True)[0])
    assert not torch.equal(*of)  # the other is causal


def test_a_jacobian_at_once() -> None:
    f = FUNCTIONS["sdpa"]
    by_rows, at_once, forward = (
        torch.autograd.functional.jacobian(f, X, vectorize=vectorize, strategy=strategy)
        for vectorize, strategy in ((False, "reverse-mode"), (True, "reverse-mode"), (True, "forward-mode"))
    )
    torch.testing.assert_close(at_once, by_rows)
    torch.testing.assert_close(forward, by_rows)


def test_a_hessian_at_once() -> None:
    def f(x: Any) -> Any:
        return attention(x, x, V[0], causal=True, layout="bhsd").square().sum()

    by_rows, at_once, forward = (
        torch.autograd.functional.hessian(f, X[0], vectorize=vectorize, outer_jacobian_strategy=strategy)
        for vectorize, strategy in ((False, "reverse-mode"), (True, "reverse-mode"), (True, "forward-mode"))
    )
    torch.testing.assert_close(at_once, by_rows)
    torch.testing.assert_close(forward, by_rows)
    torch.testing.assert_close(torch.func.hessian(f)(X[0]), by_rows)


def test_gradients_batched_twice_are_refused() -> None:
    q = Q.clone().requires_grad_()
    out = attention(q, K, V)

    def both(dout: Any) -> Any:
        return torch.autograd.grad(out, q, torch.stack((dout, dout)), is_grads_batched=True, retain_graph=True)[0]

    with pytest.raises(NotImplementedError, match="batched twice"):
        torch._vmap_internals._vmap(both)(numbers(3, *out.shape))


def test_batched_gradients_with_dropout_are_refused() -> None:
    q = Q.clone().requires_grad_()
    out = attention(q, K, V, dropout=0.5, seed=1)
    with pytest.raises(NotImplementedError, match="dropout is given under vmap"):
        torch.autograd.grad(out, q, out[None], is_grads_batched=True)


# ---- the FLOP counter -----------------------------------------------------------------------------------------------


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(8, 8), (8, 6)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_flops(kv_heads: int, dims: tuple[int, int], causal: bool) -> None:
    """As PyTorch counts its own attention."""
    shapes = (2, 4, 5, dims[0]), (2, kv_heads, 7, dims[0]), (2, kv_heads, 7, dims[1])
    q, k, v = (numbers(*shape).requires_grad_() for shape in shapes)

    def theirs() -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def ours() -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    forward, backward = counted(theirs), sdpa_backward_flop_count((*q.shape[:3], dims[1]), *shapes)
    assert counted(ours) == forward > 0
    assert counted(lambda: ours().sum().backward()) - forward == backward
    # Standard attention keeps the scores, and so has a product less, that of q and k.
    assert counted(lambda: theirs().sum().backward()) - forward == backward - 2 * 2 * 4 * 5 * 7 * dims[0]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_flops_of_other_forms(rank: int, layout: str) -> None:
    lead, heads = (3,) * (rank == 4), (2,) * (rank > 2)

    def drawn(length: int, dim: int) -> Any:
        rows = (*heads, length) if layout == "bhsd" else (length, *heads)
        return numbers(*lead, *rows, dim).requires_grad_()

    q, k, v = drawn(5, 8), drawn(7, 8), drawn(7, 6)
    pairs = 5 * 7 * (3 if lead else 1) * (2 if heads else 1)
    call = functools.partial(attention, q, k, v, layout=layout)
    assert counted(call) == 2 * pairs * (8 + 6)
    assert counted(lambda: call().sum().backward()) == 2 * pairs * (4 * 8 + 3 * 6)


def test_flops_of_derivatives() -> None:
    """A tangent by each of q, k and v is 5 products, by v alone 2; the gradients of gradients are these and 10 more."""
    q, k, v = Q.clone().requires_grad_(), K, V
    product = 2 * 2 * 4 * 4 * 4 * 8

    def again() -> None:
        (g,) = torch.autograd.grad(attention(q, q, q).square().sum(), q, create_graph=True)
        torch.autograd.grad(g.sum(), q)

    assert counted(lambda: torch.func.jvp(attention, (Q, k, v), (Q, k, v))) == (2 + 5) * product
    assert counted(lambda: torch.func.jvp(lambda v: attention(Q, k, v), (v,), (v,))) == (2 + 2) * product
    assert counted(again) == (2 + 5 + 5 + 10 + 5) * product
