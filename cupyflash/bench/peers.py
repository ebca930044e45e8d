"""Who is measured: this package and every other attention that can be imported, each as a `Candidate` for a case."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import operator
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .. import attention, attention_backward
from ..passes import BACKWARD, FORWARD, Pass
from ..tools.timing import Candidate, reason
from . import serving_peers
from .case import Case, Prepare


def ours(family: str | None = None) -> Prepare:
    """This package on the PyTorch tensors themselves."""

    def prepare(case: Case, of: Pass) -> Candidate:
        q, k, v, dout = case[:4]
        given: dict[str, Any] = {"causal": case.causal, **case.scores, "family": family}
        if case.window is not None:
            given["window"] = case.window
        if of is FORWARD:
            return Candidate(lambda: (attention(q, k, v, **given),))
        out, lse = attention(q, k, v, **given, return_lse=True)
        if not case.wrt:
            return Candidate(lambda: attention_backward(dout, q, k, v, out, lse, **given))
        given["wrt"] = case.wrt
        read = case.scores.get("score_arrays", {})

        def call() -> tuple[Any, ...]:
            found = attention_backward(dout, q, k, v, out, lse, **given)
            of_arrays = (found.dscore_arrays[x] if x in read else getattr(found, f"d{x}") for x in case.wrt)
            return (*found[:3], *of_arrays)

        return Candidate(call)

    return prepare


def ours_recorded(family: str | None = None) -> Prepare:
    """The same as PyTorch's autograd records it and differentiates it."""

    def forward(case: Case) -> Any:
        return attention(*case[:3], causal=case.causal, family=family)

    return functools.partial(differentiable, forward, nullcontext)


def ours_numpy(case: Case, of: Pass) -> Candidate:
    """This package on NumPy arrays that share the memory of the CPU tensors."""
    q, k, v, dout = (x.numpy() for x in case[:4])
    if of is FORWARD:
        return Candidate(lambda: (attention(q, k, v, causal=case.causal),))
    out, lse = attention(q, k, v, causal=case.causal, return_lse=True)
    return Candidate(lambda: attention_backward(dout, q, k, v, out, lse, causal=case.causal))


def sdpa(backend: str | None = None) -> Prepare:
    """PyTorch's scaled_dot_product_attention with one of its backends, or the one that PyTorch chooses.

    It takes one array for bias and masks: a bias with a key mask is added up in every call. A window it does not take.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    context = nullcontext if backend is None else functools.partial(sdpa_kernel, getattr(SDPBackend, backend))

    def prepare(case: Case, of: Pass) -> Candidate:
        if case.window is not None:
            raise NotImplementedError("PyTorch's scaled_dot_product_attention has no window")
        lengths, heads = ((case.q.shape[axis], case.k.shape[axis]) for axis in (1, 2))
        # PyTorch aligns is_causal at the top left.
        last_aligned = causal_lower_right(*lengths) if case.causal and lengths[0] != lengths[1] else None
        grouped = {"enable_gqa": True} if heads[0] != heads[1] else {}
        hidden = None
        if "key_mask" in case.scores:
            seen = case.scores["key_mask"][:, None, None]
            hidden = torch.zeros_like(seen, dtype=case.q.dtype).masked_fill(~seen, -torch.inf)

        def forward(case: Case) -> Any:
            q, k, v = (x.transpose(1, 2) for x in case[:3])
            added = case.scores.get("bias", case.scores.get("mask"))
            if hidden is not None:
                added = hidden if added is None else added + hidden
            causal = case.causal
            if last_aligned is not None:
                added, causal = last_aligned, False
            dropout = case.scores.get("dropout", 0.0)
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, added, dropout_p=dropout, is_causal=causal, **grouped
            )
            return out.transpose(1, 2)

        return differentiable(forward, context, case, of)

    return prepare


def flex() -> Prepare:
    """FlexAttention as torch.compile makes it, with kernel options of its own choice; the block mask is made
    beforehand."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # or a backward could not be called again

    def prepare(case: Case, of: Pass) -> Candidate:
        torch._dynamo.reset()  # every row compiles the same functions again, and the number of times is limited
        causal = case.causal
        # Arrays without their axes of length 1, and at which of (b, h, i, j) they are read.
        pairs = {"bias": (0, 1, 2, 3), "mask": (0, 1, 2, 3), "key_mask": (0, 3)}
        scores = {name: x.squeeze() if name in pairs else x for name, x in case.scores.items()}
        axes = {
            name: tuple(axis for axis, n in zip(pairs[name], x.shape) if n > 1)
            for name, x in case.scores.items()
            if name in pairs
        }
        masks = [(scores[name], axes[name]) for name in axes if name != "bias"]
        softcap, slopes, sinks, own = (scores.get(name) for name in ("softcap", "alibi_slopes", "sinks", "score"))

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            tests = [mask[tuple((b, h, i, j)[axis] for axis in own)] for mask, own in masks]
            return functools.reduce(operator.and_, [*tests, i >= j] if causal else tests)

        block_mask = None
        if masks or causal or case.visible:
            (batch, seq), device = case.q.shape[:2], case.q.device
            block_mask = create_block_mask(
                case.visible or visible, batch if masks else None, None, seq, seq, device=device
            )

        def attend(q: Any, k: Any, v: Any, bias: Any, read: dict[str, Any]) -> Any:
            def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                if own is not None:
                    s = own(s, b, h, i, j, **read)
                if softcap is not None:
                    s = softcap * torch.tanh(s / softcap)
                if slopes is not None:  # with a causal mask: no key is to the right
                    s = s + slopes[h] * (j - i)
                if bias is not None:
                    s = s + bias[tuple((b, h, i, j)[axis] for axis in axes["bias"])]
                return s

            changed = any(x is not None for x in (own, softcap, slopes, bias))
            given: dict[str, Any] = {"score_mod": score if changed else None, "block_mask": block_mask}
            if sinks is None:
                return flex_attention(q, k, v, **given)
            out, found = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
            return (out * torch.sigmoid(found.lse - sinks[:, None])[..., None]).to(out.dtype)

        compiled = torch.compile(attend, dynamic=False, fullgraph=True)

        def forward(case: Case) -> Any:
            q, k, v = (x.transpose(1, 2) for x in case[:3])
            return compiled(q, k, v, case.scores.get("bias"), case.scores.get("score_arrays", {})).transpose(1, 2)

        return differentiable(forward, nullcontext, case._replace(scores=scores), of)

    return prepare


def fa2() -> Prepare:
    """FlashAttention-2: PyTorch's; for windows, which that does not take, the package flash_attn."""
    plain = sdpa("FLASH_ATTENTION")

    def prepare(case: Case, of: Pass) -> Candidate:
        return plain(case, of) if case.window is None else _flash_attn("flash_attn")(case, of)

    return prepare


def fa4() -> Prepare:
    """FlashAttention-4, where flash_attn.cute is installed."""
    return _flash_attn("flash_attn.cute")


def _flash_attn(module: str) -> Prepare:
    """A package with FlashAttention's Python interface."""
    flash_attn_func = importlib.import_module(module).flash_attn_func

    def forward(case: Case) -> Any:
        window = {} if case.window is None else {"window_size": case.window}
        out = flash_attn_func(*case[:3], causal=case.causal, **window)
        return out[0] if isinstance(out, tuple) else out

    return functools.partial(differentiable, forward, nullcontext)


def fa3_operators() -> Any:
    """Of the flash_attn_3 package, or of the operator library that CUPYFLASH_PEER_FA3 names."""
    import torch

    if path := os.environ.get("CUPYFLASH_PEER_FA3"):
        torch.ops.load_library(path)
    else:
        importlib.import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3


def fa3() -> Prepare:
    """FlashAttention-3's operators, forward and backward."""
    import torch

    operators = fa3_operators()

    def prepare(case: Case, of: Pass) -> Candidate:
        q, k, v, dout, causal = case[:5]
        window = {} if case.window is None else dict(zip(("window_size_left", "window_size_right"), case.window))
        # 0: where a Hopper GPU's multiprocessors would be idle it decides itself in how many parts to split the keys.
        splits = int(q.shape[0] * q.shape[2] * -(-q.shape[1] // 128) > 132)
        forward = functools.partial(operators.fwd, q, k, v, is_causal=causal, num_splits=splits, **window)
        if of is FORWARD:
            return Candidate(lambda: (forward()[0],))
        out, lse = forward()[:2]

        def call() -> tuple[Any, ...]:
            # What bwd returns differs between versions; what it writes to does not.
            grads = tuple(torch.empty_like(x) for x in (q, k, v))
            operators.bwd(dout, q, k, v, out, lse, *grads, is_causal=causal, **window)
            return grads

        return Candidate(call)

    return prepare


def standard(case: Case, of: Pass) -> Candidate:
    """Attention as CuPy or NumPy users write it: the score matrix in memory, BLAS for the products."""
    import torch

    xp = importlib.import_module("cupy" if case.q.is_cuda else "numpy")
    q, k, v, dout = (xp.from_dlpack(x).transpose(0, 2, 1, 3) for x in case[:4])
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    hidden = xp.triu(xp.ones((q.shape[2], k.shape[2]), bool), 1) if case.causal else None

    def forward() -> tuple[Any, Any]:
        p = q @ k.swapaxes(2, 3)
        p *= scale
        if hidden is not None:
            p = xp.where(hidden, q.dtype.type(-xp.inf), p)
        p -= p.max(-1, keepdims=True)
        xp.exp(p, out=p)
        p /= p.sum(-1, keepdims=True)
        return p @ v, p

    def as_torch(*arrays: Any) -> tuple[Any, ...]:
        return tuple(torch.from_dlpack(x.transpose(0, 2, 1, 3)) for x in arrays)

    if of is FORWARD:
        return Candidate(lambda: as_torch(forward()[0]))
    out, p = forward()

    def call() -> tuple[Any, ...]:
        ds = dout @ v.swapaxes(2, 3)
        ds -= (dout * out).sum(-1, keepdims=True)
        ds *= p
        ds *= scale
        return as_torch(ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)

    return Candidate(call)


def cudnn8() -> Prepare:
    """cuDNN's forward of 8 bits, by nvidia-cudnn-frontend. All scales are 1; on Hopper its result has 8 bits, too."""
    return functools.partial(_cudnn8, importlib.import_module("cudnn"))


def _cudnn8(frontend: Any, case: Case, of: Pass) -> Candidate:
    import torch

    if of is BACKWARD:
        raise ValueError("a forward alone")
    eight, single = frontend.data_type.FP8_E4M3, frontend.data_type.FLOAT
    graph = frontend.pygraph(
        io_data_type=eight, intermediate_data_type=single, compute_data_type=single, handle=frontend.create_handle()
    )
    given = {name: x.transpose(1, 2) for name, x in zip("qkv", case[:3])}  # (B, H, S, D), where they lie
    out = torch.empty_like(case.q).transpose(1, 2)
    one, seen = torch.ones((1, 1, 1, 1), device=out.device), torch.empty((2, 1, 1, 1, 1), device=out.device)

    def described(name: str, x: Any, kind: Any) -> Any:
        return graph.tensor(name=name, dim=[*x.shape], stride=[*x.stride()], data_type=kind)

    inputs = {name: described(name, x, eight) for name, x in given.items()}
    names = (*(f"descale_{x}" for x in "qkvs"), "scale_s", "scale_o")
    scales = {name: described(name, one, single) for name in names}
    o, _, *largest = graph.sdpa_fp8(
        **inputs, **scales, is_inference=True, attn_scale=out.shape[-1] ** -0.5, use_causal_mask=case.causal
    )
    o.set_output(True).set_dim([*out.shape]).set_stride([*out.stride()]).set_data_type(eight)
    for x in largest:
        x.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(single)
    graph.build([frontend.heur_mode.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=out.device, dtype=torch.uint8)
    memory = {inputs[name]: x for name, x in given.items()} | dict.fromkeys(scales.values(), one)
    memory |= {o: out, **dict(zip(largest, seen))}

    def call() -> tuple[Any, ...]:
        graph.execute(memory, workspace)
        return (out.transpose(1, 2),)

    return Candidate(call)


LOADERS: dict[str, Callable[[], Prepare]] = {
    "fa2": fa2,
    "cudnn": functools.partial(sdpa, "CUDNN_ATTENTION"),
    "fa3": fa3,
    "fa4": fa4,
    "flashinfer": serving_peers.flashinfer,
    "flashinfer-tc": functools.partial(serving_peers.flashinfer, tensor_cores=True),
    "flashmla": serving_peers.flashmla,
    "efficient": functools.partial(sdpa, "EFFICIENT_ATTENTION"),
    "math": functools.partial(sdpa, "MATH"),
    "flex": flex,
    "standard": lambda: standard,
    "sm80": lambda: ours("sm80"),
    "flash1": lambda: ours("flash1"),
    "torch": sdpa,
    "cudnn8": cudnn8,
}

# Packages whose versions a result depends on, besides PyTorch's own.
PACKAGES = (
    "cupyflash",
    "numpy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-core",
    "jax",
    "triton",
    "flash-attn-3",
    "flash-attn",
    "flashinfer-python",
    "flash-mla",
    "nvidia-cudnn-frontend",
)


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


def differentiable(
    forward: Callable[[Case], Any], context: Callable[[], AbstractContextManager[Any]], case: Case, of: Pass
) -> Candidate:
    """A candidate from a function that PyTorch differentiates; the backward is timed alone."""
    import torch

    if of is FORWARD:
        return Candidate(lambda: (forward(case),), context)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v, *case.wanted)]
    q, k, v, *wanted = leaves
    with context():
        out = forward(case._replace(q=q, k=k, v=v).with_wanted(wanted))
    return Candidate(lambda: torch.autograd.grad(out, leaves, case.dout, retain_graph=True), context)
