"""Launches of the kernels that sum the gradients of arrays that scores read (kernels_cu/attention/array_gradient.cuh)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..problem import AttentionProblem
from .kernel_plan import Launch, Workspace, ceil
from .params import GRADIENTS
from .score import Read, reads_of

# Of the arrays whose gradients are wanted, along AXES; of those that a score function reads, along their own.
Lengths = Mapping[str, tuple[int, ...]]

OVER_PAIRS = ("bias", "alibi_slopes")  # those whose gradients are sums of dS
SINK_THREADS = 256  # of the block that sums a head's
WAVES = 2  # blocks for each multiprocessor, where tiles are too few and are shared
SCORE_THREADS = 128  # of the blocks that clear and finish the sums of a score function's arrays


class Work(NamedTuple):
    """What a plan has of it."""

    launches: tuple[Launch, ...]
    workspace: tuple[Workspace, ...]
    scalars: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, bool], ...]

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(*(x + y for x, y in zip(self, other)))  # type: ignore[arg-type]


def work(
    problem: AttentionProblem, lengths: Lengths, rows: int, keys: int, threads: int, shared_memory: int, sms: int
) -> Work:
    """For tiles of `rows` queries by `keys` keys."""
    launches, workspace, scalars = [], [], []
    extents = (problem.batch, problem.heads_q, ceil(problem.seq_q, rows), ceil(problem.seq_k, keys))
    for name in OVER_PAIRS:
        splits = elements = 1
        if name in lengths:
            own = math.prod(n for n, length in zip(extents, lengths[name]) if length > 1)
            summed = math.prod(n for n, length in zip(extents, lengths[name]) if length == 1)
            elements = math.prod(lengths[name])
            if 0 < own < sms:
                splits = max(1, min(summed, ceil(WAVES * sms, own)))
            launches.append(Launch(f"attention_backward_{name}", splits * own, threads, shared_memory))
            if splits > 1:
                launches.append(Launch(f"attention_backward_{name}_add", ceil(elements, 128), 128))
        workspace.append(
            Workspace(f"d{name}_parts", problem.lse_dtype, (splits if splits > 1 else 0, elements))
        )
        scalars.append((f"d{name}_splits", splits))
    if "sinks" in lengths:
        launches.append(Launch("attention_backward_sinks", problem.heads_q, SINK_THREADS))
    return Work(
        tuple(x for x in launches if x.grid), tuple(workspace), tuple(scalars),
        tuple((f"D_{name.upper()}", name in lengths) for name in GRADIENTS),
    ) + _of_score(problem, lengths, extents, rows * keys, threads, shared_memory, sms)  # fmt: skip


def _of_score(
    problem: AttentionProblem, lengths: Lengths, extents: tuple[int, int, int, int], pairs: int, threads: int,
    shared_memory: int, sms: int,
) -> Work:  # fmt: skip
    """For arrays that a score function reads (score_gradient.cuh). `extents`: batch, heads and tiles; `pairs` in a tile."""
    wanted = [name for name in lengths if problem.reads(name)]
    constants = (("D_SCORE", bool(wanted)), ("DETERMINISTIC", problem.deterministic))
    splits = [_splits(read, extents, sms) for read in reads_of(problem.score, wanted)] if problem.score else []
    blocks = sum(shared * own for own, shared in splits)
    elements = sum(math.prod(lengths[name]) for name in wanted)
    deterministic = problem.deterministic and bool(wanted)
    launches = [
        Launch("attention_backward_score_clear", ceil(elements, SCORE_THREADS), SCORE_THREADS),
        Launch("attention_backward_score_largest", blocks if deterministic else 0, threads, shared_memory),
        Launch("attention_backward_score", blocks, threads, shared_memory),
        Launch("attention_backward_score_finish", ceil(elements, SCORE_THREADS), SCORE_THREADS),
    ]
    workspace = (
        Workspace("score_sums", "uint64" if problem.deterministic else problem.lse_dtype, (elements,)),
        Workspace("score_largest", "uint64", (int(deterministic),)),
    )
    scalars = [("score_bits", min(60, (blocks * pairs).bit_length()))]  # of how often an element may be added to
    for n, (own, shared) in enumerate(splits):
        scalars += [(f"score_splits_{n}", shared), (f"score_blocks_{n}", shared * own)]
    return Work(tuple(x for x in launches if x.grid), workspace, tuple(scalars), constants)


def _splits(read: Read, extents: tuple[int, int, int, int], sms: int) -> tuple[int, int]:
    """How many tiles of sums there are, and how many blocks share what one sums."""
    by = (read.by_batch, read.by_head, read.by_query, read.by_key)
    own = math.prod(n for n, differ in zip(extents, by) if differ)
    summed = math.prod(n for n, differ in zip(extents, by) if not differ)
    return own, max(1, min(summed, ceil(WAVES * sms, max(1, own))))
