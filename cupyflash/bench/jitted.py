"""The suite `jax`: gradients under jit beside JAX's cuDNN attention; and what the suite `host` takes of JAX."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

from ..passes import BACKWARD, FORWARD, Pass
from ..tools.timing import Candidate, interleave, wall_sampler
from . import peers, scores
from .suite import Measured, Options, Problem, case_of, compare, flops_of

PEERS = ("jax-cudnn",)
PEER = "cudnn"  # implementation= of jax.nn.dot_product_attention

Attend = Callable[..., Any]  # (q, k, v, bias=None) -> out, of JAX arrays


def problems(options: Options) -> list[Problem]:
    """16k tokens of sequence 2048, hidden 2048: full, causal, and with a bias (1, H, S, S) whose gradient is wanted
    too."""
    batch = 2 if options.quick else 8
    return [
        {"pass": "forward and backward", "dtype": options.dtype, "dim": dim, "causal": causal, "bias": bias,
            "seq": 2048,
         "batch": batch, "heads": 2048 // dim}
        for dim, (causal, bias) in itertools.product((64, 128), ((False, False), (True, False), (False, True)))
    ]  # fmt: skip


def measure(problem: Problem, options: Options) -> Measured:
    """TFLOP/s of one jitted program that has the gradients of q, k, v (and of the bias); results are compared with
    standard attention in float32. The clock is the host's, as XLA's stream takes no events: many calls until the last
    is done."""
    import jax

    case = draw(problem)
    prepares: dict[str, peers.Prepare] = {
        name: functools.partial(gradients, attend(name, case.causal, options.family)) for name in (*PEERS, "ours")
    }
    candidates, notes = compare(prepares, case, BACKWARD, scores.exact(case, BACKWARD))
    seconds, failures = interleave(
        list(candidates), options.rounds, wall_sampler(candidates, options.min_ms, jax.block_until_ready)
    )
    work = sum(flops_of(problem, of) for of in (FORWARD, BACKWARD)) / 1e12
    return {name: work / t for name, t in seconds.items()}, notes | failures


def draw(problem: Problem, device: str = "cuda") -> peers.Case:
    case = case_of(problem, device)
    if not problem["bias"]:
        return case
    import torch

    shape = (1, problem["heads"], problem["seq"], problem["seq"])
    bias = torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device, dtype=case.q.dtype)
    return case._replace(scores={"bias": bias}, wrt=("bias",))


def attend(name: str, causal: bool, family: str | None = None) -> Attend:
    """Our attention, or that of jax.nn for "jax-cudnn"."""
    import jax

    if name != "ours":
        return functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation=PEER)
    from ..jax import attention

    def ours(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return attention(q, k, v, bias=bias, causal=causal, family=family)

    return ours


def gradients(attend: Attend, case: peers.Case, of: Pass = BACKWARD) -> Candidate:
    """Forward and backward as one jitted program; its results are the gradients of q, k, v and of what `wrt` names."""
    import jax

    *inputs, dout = arrays(case.q, case.k, case.v, *case.wanted, case.dout)
    call = jax.jit(lambda inputs, dout: jax.vjp(attend, *inputs)[1](dout))
    return Candidate(lambda: call(inputs, dout))


def require_gpu() -> None:
    """RuntimeError where JAX sees no GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the memory
    import jax

    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX sees no GPU, its backend is {jax.default_backend()}")


def arrays(*tensors: Any) -> list[Any]:
    """Tensors as JAX arrays."""
    if tensors[0].is_cuda:
        require_gpu()
        import torch

        torch.cuda.synchronize()
    import jax

    return [jax.numpy.from_dlpack(x.detach()).copy() for x in tensors]
