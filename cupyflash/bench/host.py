"""The suite `host`: what a call costs the caller's thread."""

from __future__ import annotations

import functools
from typing import Any

from .. import attention, attention_backward
from ..passes import BACKWARD, FORWARD, Pass
from ..tools.timing import Candidate, host_sampler, interleave, reason, wall_sampler
from . import jitted, peers
from .suite import Measured, Options, Problem, case_of, importable

PEERS = ("torch", "standard", "jax-cudnn")
CHAIN = 8  # calls in a program, where what one adds to it is measured

# Who calls, and what is called. "jax, jitted": a program of one call; "jax, added": what one more call adds to a
# program.
ROWS = {
    "cupy": ("forward", "backward"),
    "torch": ("forward", "backward"),
    "torch, with grad": ("forward", "backward"),
    "jax": ("forward", "backward"),
    "jax, jitted": ("forward", "forward and backward"),
    "jax, added": ("forward", "forward and backward"),
}


def problems(options: Options) -> list[Problem]:
    fixed = {"dtype": "float16", "batch": 1, "seq": 128, "heads": 4, "dim": 64, "causal": True}
    return [
        {"library": library, "pass": direction, **fixed} for library, passes in ROWS.items() for direction in passes
    ]


def measure(problem: Problem, options: Options) -> Measured:
    """Microseconds until a call returns, on a problem so small that the GPU keeps up with the host; of what a call adds
    to a jitted program until it is done, as XLA may launch it in a thread of its own."""
    case = case_of(problem)
    candidates: dict[str, Candidate] = {}
    notes: dict[str, str] = {}
    for name, prepare in _prepares(problem, options.family).items():
        try:
            candidates[name] = prepare(case, FORWARD if problem["pass"] == "forward" else BACKWARD)
            candidates[name].call()
        except Exception as failure:  # noqa: BLE001 - as in compare; what these compute, the other suites check
            candidates.pop(name, None)
            notes[name] = reason(failure)
    if problem["library"] != "jax, added":
        sampler = host_sampler(candidates, 50 if options.quick else 200, _synchronize)
        seconds, failures = interleave(list(candidates), options.rounds, sampler)
    else:
        sampler = wall_sampler(candidates, options.min_ms, _ready)
        seconds, failures = interleave(list(candidates), options.rounds, sampler)
        seconds = _added(seconds)
        notes, failures = ({_who(name): why for name, why in x.items()} for x in (notes, failures))
    return {name: 1e6 * t for name, t in seconds.items()}, notes | failures


def _prepares(problem: Problem, family: str | None) -> dict[str, peers.Prepare]:
    library, forward = problem["library"], problem["pass"] == "forward"
    if library in ("jax, jitted", "jax, added"):
        lengths = (1,) if library == "jax, jitted" else (1, 1 + CHAIN)
        return {
            f"{name} x {n}" if len(lengths) > 1 else name: functools.partial(_chained, name, family, n)
            for name in ("jax-cudnn", "ours")
            for n in lengths
        }
    found = importable(("torch",))
    if library == "torch, with grad":
        return {**{name: _recorded(x) for name, x in found.items()}, "ours": _recorded(peers.ours_recorded(family))}
    if library == "cupy":
        found["standard"] = peers.standard
    if library == "jax" and forward:
        found["jax-cudnn"] = functools.partial(_chained, "jax-cudnn", None, 1)
    return {**found, "ours": functools.partial(_ours_in, library, family)}


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _ready(results: tuple[Any, ...]) -> None:
    import jax

    jax.block_until_ready(results)


def _recorded(prepare: peers.Prepare) -> peers.Prepare:
    """The same on tensors that require a gradient: the forward is recorded, too."""

    def recorded(case: peers.Case, of: Pass) -> Candidate:
        q, k, v = (x.detach().requires_grad_() for x in case[:3])
        return prepare(case._replace(q=q, k=k, v=v), of)

    return recorded


def _ours_in(library: str, family: str | None, case: peers.Case, of: Pass) -> Candidate:
    """This package on the arrays of one library."""
    if library == "torch":
        return peers.ours(family)(case, of)
    q, k, v, dout = _cupy(*case[:4]) if library == "cupy" else jitted.arrays(*case[:4])
    if of is FORWARD:
        return Candidate(lambda: attention(q, k, v, causal=case.causal, family=family))
    out, lse = attention(q, k, v, causal=case.causal, family=family, return_lse=True)
    return Candidate(lambda: attention_backward(dout, q, k, v, out, lse, causal=case.causal, family=family))


def _cupy(*tensors: Any) -> list[Any]:
    import cupy

    return [cupy.asarray(x.cpu().numpy()) for x in tensors]


def _chained(name: str, family: str | None, count: int, case: peers.Case, of: Pass) -> Candidate:
    """A jitted program of so many calls, the result of one being the queries of the next; or its gradients."""
    import jax

    attend = jitted.attend(name, case.causal, family)

    def chain(q: Any, k: Any, v: Any) -> Any:
        for _ in range(count):
            q = attend(q, k, v)
        return q

    if of is BACKWARD:
        return jitted.gradients(chain, case)
    q, k, v = jitted.arrays(*case[:3])
    call = jax.jit(chain)
    return Candidate(lambda: call(q, k, v))


def _who(name: str) -> str:
    return name.partition(" x ")[0]


def _added(seconds: dict[str, float]) -> dict[str, float]:
    """What one call adds, by name, from the times of short and long programs; 0 where that is less than they
    scatter."""
    names = [
        name for name in dict.fromkeys(map(_who, seconds)) if {f"{name} x 1", f"{name} x {1 + CHAIN}"} <= {*seconds}
    ]
    return {name: max(0.0, seconds[f"{name} x {1 + CHAIN}"] - seconds[f"{name} x 1"]) / CHAIN for name in names}
