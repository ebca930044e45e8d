"""Timing side by side, and the little statistics that the suites share."""

from __future__ import annotations

import math
import random
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ..passes import BACKWARD, Pass

HIGHER_IS_BETTER = ("TFLOP/s", "GFLOP/s", "tokens/s")


class Candidate(NamedTuple):
    """Something to time: `call` does the work once, inside `context`, which is entered once per sample."""

    call: Callable[[], tuple[Any, ...]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def flops(batch: int, seq: int, heads: int, dim: int, causal: bool, of: Pass) -> float:
    """The papers' count: 4 B H S² D for the forward, half of it with a causal mask, 2.5 times it for the backward."""
    forward = 4.0 * batch * heads * seq * seq * dim * (0.5 if causal else 1.0)
    return forward * 2.5 if of is BACKWARD else forward


def interleave(
    names: Sequence[str], rounds: int, sample: Callable[[str], float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Sample everyone once per round, each round in another order, and take medians.

    Clocks and power drift within a run, so candidates measured one after the other would not be comparable.
    Returns the medians and, for those who failed, the reason.
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(names), len(names)):
            if name not in failures:
                try:
                    samples[name].append(sample(name))
                except Exception as error:  # noqa: BLE001 - a peer may fail in any way; it must not take the others with it
                    failures[name] = reason(error)
    return {name: statistics.median(samples[name]) for name in names if name not in failures}, failures


def torch_event() -> Any:
    """A CUDA event for PyTorch's current stream."""
    import torch

    return torch.cuda.Event(enable_timing=True)


def cupy_event() -> Any:
    """A CUDA event for CuPy's current stream, with the methods of PyTorch's."""
    import cupy

    class Event:
        def __init__(self) -> None:
            self.event = cupy.cuda.Event()
            self.record, self.synchronize = self.event.record, self.event.synchronize

        def elapsed_time(self, end: Event) -> float:
            return float(cupy.cuda.get_elapsed_time(self.event, end.event))

    return Event()


def gpu_sampler(
    candidates: Mapping[str, Candidate],
    min_ms: float,
    patience: float = math.inf,
    event: Callable[[], Any] = torch_event,
    most: int = 1000,
) -> Callable[[str], float]:
    """A function for `interleave` that gives seconds per call on the GPU, from CUDA events around at least `min_ms`,
    but no more than `most` calls.

    Whose call takes longer than `patience` seconds is timed in its first round alone.
    """
    start, end = event(), event()
    counts: dict[str, int] = {}
    slow: dict[str, float] = {}

    def seconds(name: str, count: int) -> float:
        call, context = candidates[name]
        with context():
            call()  # keeps the GPU busy while the host queues what is timed
            start.record()
            for _ in range(count):
                call()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    def sample(name: str) -> float:
        if name in slow:
            return slow[name]
        if name not in counts:
            first = seconds(name, 1)
            if first > patience:
                slow[name] = first
                return first
            counts[name] = min(most, max(1, math.ceil(min_ms / 1e3 / seconds(name, 2))))
        return seconds(name, counts[name])

    return sample


def host_sampler(
    candidates: Mapping[str, Candidate], calls: int, synchronize: Callable[[], object] = lambda: None
) -> Callable[[str], float]:
    """A function for `interleave` that gives seconds per call until the call returns."""

    def sample(name: str) -> float:
        call, context = candidates[name]
        with context():
            call()
            synchronize()
            return timeit.timeit(call, number=calls) / calls

    return sample


def wall_sampler(
    candidates: Mapping[str, Candidate], min_ms: float, wait: Callable[[tuple[Any, ...]], object]
) -> Callable[[str], float]:
    """A function for `interleave` that gives seconds per call by the host's clock, from at least `min_ms` of calls
    until `wait` has seen the last one's results: for who queues work where no event can be put."""
    counts: dict[str, int] = {}

    def seconds(name: str, count: int) -> float:
        call, context = candidates[name]
        with context():
            wait(call())
            start = time.perf_counter()
            for _ in range(count - 1):
                call()
            wait(call())
            return (time.perf_counter() - start) / count

    def sample(name: str) -> float:
        if name not in counts:
            counts[name] = max(1, math.ceil(min_ms / 1e3 / seconds(name, 2)))
        return seconds(name, counts[name])

    return sample


def reason(error: BaseException) -> str:
    """An error as one short line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def ratio(ours: float | None, other: float | None, unit: str) -> float | None:
    """How many times better than `other` ours is; larger is better whatever the unit."""
    if not ours or not other:
        return None
    return ours / other if unit in HIGHER_IS_BETTER else other / ours


def best(peers: Mapping[str, float | None], unit: str) -> float | None:
    """The best value that any peer reached."""
    values = [value for value in peers.values() if value is not None]
    return (max if unit in HIGHER_IS_BETTER else min)(values, default=None)


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of those that are there; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def significant(value: float | None, digits: int = 4) -> float | None:
    """Rounded to a number of significant digits: what a measurement holds."""
    return None if value is None else float(f"{value:.{digits}g}")
