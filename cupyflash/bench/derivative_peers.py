"""Who takes part in the suite `derivatives`: each asked for the same derivatives, as its users write it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .. import attention, attention_backward, attention_backward_jvp, attention_jvp
from ..tools.timing import Candidate

Three = tuple[Any, Any, Any]
Attend = Callable[[Any, Any, Any], Any]  # (q, k, v) -> out, of (B, H, S, D)
KNOWN = ("jvp", "step")  # what the Triton package has
MOST_EXACT = 2**24  # scores of an entry of the batch; where there are more, one head is compared


class Inputs(NamedTuple):
    """(B, H, S, D): q, k and v, their tangents, out's cotangent, and those of the gradients of q, k and v."""

    at: Three
    along: Three
    dout: Any
    weights: Three
    bias: Any
    hidden: Any
    causal: bool

    def exact(self) -> Inputs:
        """In float64 the first entry of the batch, of one head where scores are many."""
        _, heads, seq, _ = self.dout.shape
        heads = heads if heads * seq**2 <= MOST_EXACT else 1

        def some(x: Any) -> Any:
            return None if x is None else x[:1, :heads].double()

        at, along, weights = (three(map(some, x)) for x in (self.at, self.along, self.weights))
        return self._replace(at=at, along=along, weights=weights, dout=some(self.dout), bias=some(self.bias))


def three(arrays: Iterable[Any]) -> Three:
    q, k, v = arrays
    return q, k, v


class Way(NamedTuple):
    """`found`: what it gave as PyTorch's tensors (B, H, S, D). `temporary`: bytes beside inputs and results, where the
    library tells."""

    candidate: Candidate
    found: Callable[[tuple[Any, ...]], Sequence[Any]] = lambda results: results
    temporary: int | None = None


def by_hand(x: Inputs) -> Attend:
    """Standard attention as people write it: scores in the inputs' dtype, softmax in at least float32."""
    import torch

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.mT * q.shape[-1] ** -0.5
        if x.bias is not None:
            s = s + x.bias
        if x.hidden is not None:
            s = s.masked_fill(x.hidden, -torch.inf)
        return s.softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v

    return attend


def sdpa_math(x: Inputs) -> Attend:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, x.bias, is_causal=x.causal)

    return attend


def ours(x: Inputs, family: str | None) -> Attend:
    return functools.partial(attention, bias=x.bias, causal=x.causal, layout="bhsd", family=family)


def jvp_flash(x: Inputs, what: str) -> Attend:
    """The package jvp_flash_attention by its own rules; dimensions that it has no kernel for are padded."""
    import torch
    from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found]

    if what not in KNOWN or x.bias is not None:
        raise NotImplementedError(f"it has no {what}")
    dim = x.dout.shape[-1]
    more = next(n for n in (16, 32, 64, 128, 256) if n >= dim) - dim

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (torch.nn.functional.pad(a, (0, more)) if more else a for a in (q, k, v))
        scale = dim**-0.5
        out = JVPAttn.fwd_dual(q, k, v, attn_mask=None, causal=x.causal, sm_scale=scale, verify_attn_mask=False)
        return out[..., :dim]

    return attend


def torch_call(what: str, attend: Attend, x: Inputs) -> Callable[[], tuple[Any, ...]]:
    """What PyTorch's users write. "both": forward and backward."""
    import torch

    grad: Callable[..., tuple[Any, ...]] = torch.autograd.grad
    jvp_of: Callable[..., tuple[Any, ...]] = torch.func.jvp

    def leaves(*arrays: Any) -> list[Any]:
        return [a.detach().requires_grad_() for a in arrays]

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return (attend(*x.at),)

    def both() -> tuple[Any, ...]:
        at = leaves(*x.at)
        return grad(attend(*at), at, x.dout)

    def jvp() -> tuple[Any, ...]:
        with torch.no_grad():
            return jvp_of(attend, x.at, x.along)

    def step() -> tuple[Any, ...]:
        at = leaves(*x.at)
        out, tangent = jvp_of(attend, tuple(at), x.along)
        return grad(out, at, out.detach() - tangent.detach())

    def double() -> tuple[Any, ...]:
        *at, dout = leaves(*x.at, x.dout)
        return grad(grad(attend(*at), at, dout, create_graph=True), [*at, dout], x.weights)

    def hvp() -> tuple[Any, ...]:
        gradients = torch.func.grad(lambda *at: (attend(*at) * x.dout).sum(), (0, 1, 2))
        found: tuple[Any, ...] = jvp_of(gradients, x.at, x.along)[1]
        return found

    return {"forward": forward, "both": both, "jvp": jvp, "step": step, "double": double, "hvp": hvp}[what]


def xla(x: Inputs) -> Callable[..., Any]:
    """JAX's standard attention, of a bias, q, k and v."""
    import jax

    def attend(bias: Any, q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=x.causal, implementation="xla")

    return attend


def ours_in_jax(x: Inputs, family: str | None) -> Callable[..., Any]:
    """The same of ours."""
    from ..jax import attention as attention_in_jax

    def attend(bias: Any, q: Any, k: Any, v: Any) -> Any:
        return attention_in_jax(q, k, v, bias=bias, causal=x.causal, family=family)

    return attend


def jax_way(what: str, x: Inputs, attend: Callable[..., Any]) -> Way:
    """What JAX's users write, under jit; products of float32 are whole."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import jax
    import torch

    from .jitted import arrays

    if x.dout.dtype == torch.float64:
        jax.config.update("jax_enable_x64", True)
    rows = arrays(*(a.transpose(1, 2).contiguous() for a in (*x.at, *x.along, *x.weights, x.dout)))
    at, along, weights, dout = tuple(rows[:3]), tuple(rows[3:6]), tuple(rows[6:9]), rows[9]
    bias = None if x.bias is None else arrays(x.bias)[0]

    def pulled(bias: Any, at: Any, dout: Any) -> Any:
        return jax.vjp(functools.partial(attend, bias), *at)[1](dout)

    def forward(bias: Any, at: Any, along: Any, weights: Any, dout: Any) -> Any:
        return (attend(bias, *at),)

    def both(bias: Any, at: Any, along: Any, weights: Any, dout: Any) -> Any:
        return pulled(bias, at, dout)

    def jvp(bias: Any, at: Any, along: Any, weights: Any, dout: Any) -> Any:
        return jax.jvp(functools.partial(attend, bias), at, along)

    def step(bias: Any, at: Any, along: Any, weights: Any, dout: Any) -> Any:
        out, tangent = jvp(bias, at, along, weights, dout)
        return pulled(bias, at, out - tangent)

    def double(bias: Any, at: Any, along: Any, weights: Any, dout: Any) -> Any:
        by_at, by_dout = jax.vjp(lambda at, dout: pulled(bias, at, dout), at, dout)[1](weights)
        return *by_at, by_dout

    def hvp(bias: Any, at: Any, along: Any, weights: Any, dout: Any) -> Any:
        return jax.jvp(lambda *at: pulled(bias, at, dout), at, along)[1]

    given = (bias, at, along, weights, dout)
    function = {"forward": forward, "both": both, "jvp": jvp, "step": step, "double": double, "hvp": hvp}[what]
    with jax.default_matmul_precision("default" if x.dout.itemsize == 2 else "highest"):
        call = jax.jit(function).lower(*given).compile()

    def found(results: tuple[Any, ...]) -> Sequence[Any]:
        return [torch.from_dlpack(y).transpose(1, 2) for y in results]

    memory = call.memory_analysis()
    return Way(Candidate(lambda: call(*given)), found, int(memory.temp_size_in_bytes) if memory else None)


def family_ways(what: str, x: Inputs, family: str) -> dict[str, Way]:
    """J u or H u of a family by the public functions, and the forward or backward that it belongs to."""
    given: dict[str, Any] = {"causal": x.causal, "bias": x.bias, "layout": "bhsd", "family": family}
    tangents = dict(zip("qkv", x.along))
    out, lse = attention(*x.at, **given, return_lse=True)
    if what == "Ju":
        return {
            "ours": Way(Candidate(lambda: attention_jvp(tangents, *x.at, out, lse, **given))),
            "ours_alone": Way(Candidate(lambda: attention(*x.at, **given, return_lse=True))),
        }
    jvp = attention_jvp(tangents, *x.at, out, lse, **given)
    return {
        "ours": Way(Candidate(lambda: attention_backward_jvp(tangents, x.dout, *x.at, out, lse, jvp=jvp, **given))),
        "ours_alone": Way(Candidate(lambda: attention_backward(x.dout, *x.at, out, lse, **given))),
    }
