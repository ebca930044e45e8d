"""The suite `cpu`: NumPy arrays on a CPU, beside the same in PyTorch, in JAX, and as NumPy users write it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from ..passes import FORWARD, PASSES, Pass
from ..tools.timing import Candidate, interleave, wall_sampler
from . import peers
from .suite import Measured, Options, Problem, case_of, compare, flops_of, importable

PEERS = ("torch", "jax", "numpy")
DTYPES = ("float32", "float64")

# batch, seq, heads, dim: a batch of sentences, of longer texts, one long one, and wide heads.
SHAPES = (8, 128, 12, 64), (2, 1024, 8, 64), (1, 4096, 8, 64), (1, 2048, 4, 128)
DENSE = 2048  # what is longer is left out of the peers that keep the whole score matrix: minutes


def problems(options: Options) -> list[Problem]:
    import torch

    shapes = SHAPES[:1] if options.quick else SHAPES
    threads, dtypes = torch.get_num_threads(), (options.dtype,) if options.dtype in DTYPES else DTYPES
    return [
        {"pass": direction, "dtype": dtype, "batch": batch, "heads": heads, "dim": dim, "causal": causal, "seq": seq,
         "threads": threads}
        for direction, dtype, (batch, seq, heads, dim), causal in itertools.product(
            ("forward", "backward"), dtypes, shapes, (False, True)
        )
    ]  # fmt: skip


def measure(problem: Problem, options: Options) -> Measured:
    """GFLOP/s of everybody, in turn; the host's clock."""
    of = PASSES[problem["pass"]]
    prepares: dict[str, peers.Prepare] = {**importable(("torch",)), "ours": peers.ours_numpy, "jax": _jax}
    if problem["seq"] <= DENSE:
        prepares["numpy"] = peers.standard
    candidates, notes = compare(prepares, case_of(problem, "cpu"), of)
    sampler = wall_sampler(candidates, options.min_ms, lambda results: None)  # all are there when a call returns
    seconds, failures = interleave(list(candidates), options.rounds, sampler)
    work = flops_of(problem, of) / 1e9
    return {name: work / t for name, t in seconds.items()}, notes | failures


def _jax(case: peers.Case, of: Pass) -> Candidate:
    """jax.nn.dot_product_attention, jitted; the backward from what its forward has kept."""
    import jax

    with jax.enable_x64(True):
        q, k, v, dout = (jax.numpy.asarray(x.numpy()) for x in case[:4])
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=case.causal)
        call: Any = jax.jit(attend)
        if of is FORWARD:
            return Candidate(lambda: (jax.block_until_ready(call(q, k, v)),))
        _, pull = jax.jit(lambda *x: jax.vjp(attend, *x))(q, k, v)
        back = jax.jit(lambda pull, dout: pull(dout))
        return Candidate(lambda: jax.block_until_ready(back(pull, dout)))
