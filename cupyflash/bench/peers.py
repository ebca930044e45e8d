"""Who is measured: this package and every other attention that can be imported, each as a `Candidate` for a case."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from .. import attention, attention_backward
from ..timing import Candidate, reason


class Case(NamedTuple):
    """Inputs that everyone shares: PyTorch tensors (B, S, H, D)."""

    q: Any
    k: Any
    v: Any
    dout: Any
    causal: bool


Prepare = Callable[[Case, bool], Candidate]  # (case, backward) -> what is timed: (out,) or (dq, dk, dv)


def make_case(
    batch: int, seq: int, heads: int, dim: int, causal: bool, dtype: str, seed: int, device: str = "cuda"
) -> Case:
    """Random normal inputs (zeros would run faster than real data does)."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, seq, heads, dim)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    q, k, v, dout = (torch.randn(shape, **options) for _ in range(4))
    return Case(q, k, v, dout, causal)


def ours(family: str | None = None) -> Prepare:
    """This package on the PyTorch tensors themselves."""

    def prepare(case: Case, backward: bool) -> Candidate:
        q, k, v, dout, causal = case
        if not backward:
            return Candidate(lambda: (attention(q, k, v, causal=causal, family=family),))
        out, lse = attention(q, k, v, causal=causal, family=family, return_lse=True)
        return Candidate(lambda: attention_backward(dout, q, k, v, out, lse, causal=causal, family=family))

    return prepare


def ours_numpy(case: Case, backward: bool) -> Candidate:
    """This package on NumPy arrays that share the memory of the CPU tensors."""
    q, k, v, dout = (x.numpy() for x in case[:4])
    if not backward:
        return Candidate(lambda: (attention(q, k, v, causal=case.causal),))
    out, lse = attention(q, k, v, causal=case.causal, return_lse=True)
    return Candidate(lambda: attention_backward(dout, q, k, v, out, lse, causal=case.causal))


def sdpa(backend: str | None = None) -> Prepare:
    """PyTorch's scaled_dot_product_attention with one of its backends, or the one that PyTorch chooses."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context = nullcontext if backend is None else functools.partial(sdpa_kernel, getattr(SDPBackend, backend))

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return functools.partial(_differentiable, forward, context)


def fa4() -> Prepare:
    """FlashAttention-4, where flash_attn.cute is installed."""
    flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return functools.partial(_differentiable, forward, nullcontext)


def fa3() -> Prepare:
    """FlashAttention-3: the flash_attn_3 package, or the operator library that CUPYFLASH_PEER_FA3 names."""
    import torch

    if path := os.environ.get("CUPYFLASH_PEER_FA3"):
        torch.ops.load_library(path)
    else:
        importlib.import_module("flash_attn_3._C")
    operators = torch.ops.flash_attn_3

    def prepare(case: Case, backward: bool) -> Candidate:
        q, k, v, dout, causal = case
        forward = functools.partial(operators.fwd, q, k, v, is_causal=causal, num_splits=1)
        if not backward:
            return Candidate(lambda: (forward()[0],))
        out, lse = forward()[:2]

        def call() -> tuple[Any, ...]:
            # What bwd returns differs between versions; what it writes to does not.
            grads = tuple(torch.empty_like(x) for x in (q, k, v))
            operators.bwd(dout, q, k, v, out, lse, *grads, is_causal=causal)
            return grads

        return Candidate(call)

    return prepare


def standard(case: Case, backward: bool) -> Candidate:
    """Attention as CuPy users write it: the score matrix in memory, cuBLAS for the products."""
    import cupy
    import torch

    q, k, v, dout = (cupy.from_dlpack(x).transpose(0, 2, 1, 3) for x in case[:4])
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    hidden = cupy.triu(cupy.ones((q.shape[2], k.shape[2]), bool), 1) if case.causal else None

    def forward() -> tuple[Any, Any]:
        p = q @ k.swapaxes(2, 3)
        p *= scale
        if hidden is not None:
            p = cupy.where(hidden, -cupy.inf, p)
        p -= p.max(-1, keepdims=True)
        cupy.exp(p, out=p)
        p /= p.sum(-1, keepdims=True)
        return p @ v, p

    def as_torch(*arrays: Any) -> tuple[Any, ...]:
        return tuple(torch.from_dlpack(x.transpose(0, 2, 1, 3)) for x in arrays)

    if not backward:
        return Candidate(lambda: as_torch(forward()[0]))
    out, p = forward()

    def call() -> tuple[Any, ...]:
        ds = dout @ v.swapaxes(2, 3)
        ds -= (dout * out).sum(-1, keepdims=True)
        ds *= p
        ds *= scale
        return as_torch(ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)

    return Candidate(call)


LOADERS: dict[str, Callable[[], Prepare]] = {
    "fa2": functools.partial(sdpa, "FLASH_ATTENTION"),
    "cudnn": functools.partial(sdpa, "CUDNN_ATTENTION"),
    "fa3": fa3,
    "fa4": fa4,
    "efficient": functools.partial(sdpa, "EFFICIENT_ATTENTION"),
    "math": functools.partial(sdpa, "MATH"),
    "standard": lambda: standard,
    "sm80": lambda: ours("sm80"),
    "flash1": lambda: ours("flash1"),
    "torch": sdpa,
}

# Packages whose versions a result depends on, besides PyTorch's own.
PACKAGES = ("cupyflash", "numpy", "cupy-cuda13x", "cupy-cuda12x", "cuda-core", "jax", "flash-attn-3", "flash-attn")


@functools.cache
def load(name: str) -> Prepare | str:
    """The peer, or the reason why it cannot be had here."""
    try:
        return LOADERS[name]()
    except Exception as error:  # noqa: BLE001 - a broken installation of a peer fails in any way it likes
        return reason(error)


def versions() -> dict[str, str]:
    """Versions of everything whose speed a result depends on, as far as it is installed."""
    import torch

    found = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if cudnn := torch.backends.cudnn.version():
        found["cudnn"] = str(cudnn)
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _differentiable(forward: Callable[..., Any], context: Callable[[], Any], case: Case, backward: bool) -> Candidate:
    """A candidate from a function that PyTorch differentiates; the backward is timed alone."""
    import torch

    q, k, v, dout, causal = case
    if not backward:
        return Candidate(lambda: (forward(q, k, v, causal),), context)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with context():
        out = forward(*leaves, causal)
    return Candidate(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), context)
