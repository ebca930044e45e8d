"""Launches of the kernels that sum the gradients of arrays that scores read
(kernels_cu/attention/array_gradient.cuh)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..problem import ARRAYS, AttentionProblem
from .kernel_plan import Launch, Workspace, by_line, ceil, places
from .params import GRADIENTS

# Of the arrays whose gradients are wanted, along AXES; of those that a score function reads, along their own.
Lengths = Mapping[str, tuple[int, ...]]

OVER_PAIRS = {row.name: row.axes for row in ARRAYS if row.adds and row.gradient}  # whose gradients are sums of dS
SINK_THREADS = 256  # of the block that sums a head's
WAVES = 2  # blocks for each multiprocessor, where tiles are too few and are shared


class Work(NamedTuple):
    """What a plan has of it."""

    launches: tuple[Launch, ...]
    workspace: tuple[Workspace, ...]
    scalars: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, bool], ...]

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(*(x + y for x, y in zip(self, other)))  # type: ignore[arg-type]


def work(
    problem: AttentionProblem,
    lengths: Lengths,
    rows: int,
    keys: int,
    threads: int,
    shared_memory: int,
    sms: int,
    stay: bool = False,
    parts: int = 1,
) -> Work:
    """For tiles of `rows` queries by `keys` keys.

    `stay`: a block stays on each multiprocessor and takes tile after tile. `parts`: of what a tile sums, that are left
    to be added where the array is broadcast along queries.
    """
    launches, workspace, scalars = [], [], []
    for name, axes in OVER_PAIRS.items():
        splits = left = elements = 1
        of_queries, of_keys = lengths.get(name, (1,) * 4)[2:]
        if name in lengths:
            own, summed = _tiles(problem, name, lengths[name], rows, keys)
            elements = math.prod(lengths[name])
            if 0 < own < sms:
                splits = max(1, min(summed, sms // own if stay else ceil(WAVES * sms, own)))
            grid = (min(splits * own, sms) if stay else splits * own) if elements else 0
            launches.append(Launch(f"attention_backward_{name}", grid, threads, shared_memory))
            over_queries = "key" not in axes or of_queries < problem.seq_q
            left = splits * (parts if over_queries else 1)
            if left > 1:
                launches.append(Launch(f"attention_backward_{name}_add", ceil(elements, 128), 128))
        workspace.append(Workspace(f"d{name}_parts", problem.lse_dtype, (left if left > 1 else 0, elements)))
        scalars.append((f"d{name}_splits", splits))
        if problem.ragged:
            scalars += [(f"d{name}_queries", of_queries), (f"d{name}_keys", of_keys)]
    if "sinks" in lengths:
        launches.append(Launch("attention_backward_sinks", lengths["sinks"][1], SINK_THREADS))
    return Work(
        tuple(x for x in launches if x.grid), tuple(workspace), tuple(scalars),
        tuple((f"D_{name.upper()}", name in lengths) for name in GRADIENTS),
    )  # fmt: skip


def _tiles(problem: AttentionProblem, name: str, lengths: tuple[int, ...], rows: int, keys: int) -> tuple[int, int]:
    """How many tiles the array has, and how many tiles of pairs each of these is read by."""
    summed = [problem.batch, problem.heads_q, ceil(problem.seq_q, rows), ceil(problem.seq_k, keys)]
    own = [problem.batch, problem.heads_q, ceil(lengths[2], rows), ceil(lengths[3], keys)]
    along = [length > 1 for length in lengths]
    if by_line(problem, name):  # its tiles are those of all sequences
        summed[0], own[2], along[2] = 1, places(problem, lengths[2], rows), True
    return math.prod(n for n, x in zip(own, along) if x), math.prod(n for n, x in zip(summed, along) if not x)
