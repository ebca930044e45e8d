"""What the suites are made of: how they are asked, the inputs of a problem, and the check that all results agree."""

from __future__ import annotations

import functools
import math
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..passes import Pass
from ..tools.timing import Candidate, flops, gpu_sampler, interleave, reason
from . import machine, peers
from .case import make_case

Problem = dict[str, Any]
Measured = tuple[dict[str, float], dict[str, str]]  # values by name ("ours" and the peers), notes by name

SUSTAINED_SECONDS = 1.0
TOLERANCE = 2e-2  # relative Frobenius error above which a result is wrong and its time means nothing


@dataclass(frozen=True)
class Options:
    """How to measure: the family to force, the dtype to use, rounds, and the least time of a sample.

    `only` has names of rows, or how they begin; `slow` asks for the slow peers too; `sustained` for a second of
    everybody on end, with clock and power.
    """

    family: str | None = None
    dtype: str = "bfloat16"
    rounds: int = 7
    min_ms: float = 20.0
    quick: bool = False
    only: tuple[str, ...] = ()
    slow: bool = False
    sustained: bool = False


class Suite(NamedTuple):
    """What a suite measures, and who beside us; `names` are those of its rows, where they have some; `sustained`:
    whether everybody can be run for a second on end."""

    unit: str
    peers: tuple[str, ...]
    problems: Callable[[Options], list[Problem]]
    measure: Callable[[Problem, Options], Measured]
    needs_gpu: bool = True
    names: tuple[str, ...] = ()
    sustained: bool = False


def compare(
    prepares: dict[str, peers.Prepare],
    case: peers.Case,
    of: Pass,
    exact: tuple[Any, ...] = (),
    noise: tuple[float, ...] = (),
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Run everyone once. Whoever fails, or disagrees with `exact`, is left out with a note.

    Where `exact` is not given, it is what the first that works has found. `noise`: how far from it each result must be,
    since it is random; else 0.
    """
    import torch

    candidates: dict[str, Candidate] = {}
    notes: dict[str, str] = {}
    reference = exact
    for name, prepare in prepares.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns once for every reason why a backend cannot
                candidate = prepare(case, of)
                with candidate.context():
                    results = tuple(_tensor(x) for x in candidate.call())
                if case.q.is_cuda:
                    torch.cuda.synchronize()
            errors = [relative_error(x, y) for x, y in zip(results, reference or results, strict=True)]
            error = max(abs(x - far) for x, far in zip(errors, noise or (0.0,) * len(errors), strict=True))
        except Exception as failure:  # noqa: BLE001 - a peer may fail in any way; the row goes on without it
            notes[name] = reason(failure)
            continue
        if not error < TOLERANCE:  # also where it is NaN
            judge = str(exact[0].dtype).removeprefix("torch.") if exact else next(iter(candidates), "itself")
            notes[name] = f"wrong: relative error {error:.2g} against {judge}"
        else:
            candidates[name] = candidate
            reference = reference or results
    if "ours" in candidates and len(candidates) == 1 and not exact:
        notes["ours"] = "unchecked: no peer takes this problem"
    return candidates, notes


def take_turns(
    candidates: dict[str, Candidate], options: Options, patience: float = math.inf
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds per call of everybody on the GPU, and notes: who failed; with `sustained` everybody's clock and power.

    `patience` as in `gpu_sampler`.
    """
    if not options.sustained:
        return interleave(list(candidates), options.rounds, gpu_sampler(candidates, options.min_ms, patience))
    sampler = gpu_sampler(candidates, 1e3 * SUSTAINED_SECONDS, patience, most=10**6)
    states: dict[str, str] = {}
    with machine.Meter() as meter:

        def sample(name: str) -> float:
            begin = time.monotonic()
            seconds = sampler(name)
            states[name] = meter.state((begin + time.monotonic()) / 2)  # the first half warms up
            return seconds

        seconds, failures = interleave(list(candidates), options.rounds, sample)
    return seconds, states | failures


def replayed(candidates: Sequence[Candidate]) -> Candidate:
    """Their calls, one after the other, as one CUDA graph, with the results of the last one; in the first's context."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with candidates[0].context(), torch.cuda.stream(side):
        for call in dict.fromkeys(x.call for x in candidates):  # so that nothing is compiled, and no workspace made,
            call()  # while the graph is
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with candidates[0].context(), torch.cuda.graph(graph):
        for x in candidates:
            results = x.call()

    return Candidate(functools.partial(_replay, graph, tuple(results), candidates))


def _replay(graph: Any, results: tuple[Any, ...], kept: Any) -> tuple[Any, ...]:
    """`kept`: whose arrays the graph reads."""
    graph.replay()
    return results


def relative_error(x: Any, y: Any) -> float:
    """Frobenius norm of the difference over that of y. x may lack axes of length 1."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(wide).view(y.shape), y.to(wide)
    return float((x - y).norm() / y.norm())


def _tensor(x: Any) -> Any:
    import torch

    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    return x if torch.is_tensor(x) else torch.from_dlpack(x)  # JAX's


def importable(names: tuple[str, ...]) -> dict[str, peers.Prepare]:
    return {name: peer for name in names if not isinstance(peer := peers.load(name), str)}


def flops_of(problem: Problem, of: Pass) -> float:
    return flops(**{key: problem[key] for key in ("batch", "seq", "heads", "dim", "causal")}, of=of)


def case_of(problem: Problem, device: str = "cuda") -> peers.Case:
    seed = zlib.crc32(repr(problem).encode())  # other data for every problem, the same in every run
    sizes = {key: problem[key] for key in ("batch", "seq", "heads", "dim", "causal", "dtype")}
    return make_case(**sizes, seed=seed, device=device)
