"""Gradients of arrays for the problems of sm90, on wgmma and TMA."""

from __future__ import annotations

from ...passes import BACKWARD
from ...problem import AttentionProblem
from ..array_gradient import Lengths, work
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, ceil, features
from .sm90_memory import BARRIERS, PairTiles, common, unplaced

ROWS, KEYS = 128, 128  # a thread block's tile: 64 queries for each of two warpgroups that compute
WORKERS = 8  # their warps
DIMS = (32, 64, 96, 128, 192, 256)  # head dimensions are padded to one of these
DEPTH = 64  # columns of a piece of the operands
NOTE = 32  # bytes that the producer tells with each
SPILLS = 400  # of addresses, with everything at once 376, without dropout 144; a bias alone none
# Pieces in flight, and tiles of mask and bias: the first that there is room for.
STAGES = ((5, 2), (4, 2), (5, 1), (4, 1))


def shared_memory(stages: int, pairs: PairTiles) -> int:
    """Bytes that the kernel lays out."""
    return stages * (2 * DEPTH * (ROWS + KEYS) + NOTE) + pairs.memory(ROWS, KEYS) + BARRIERS


def gradients(problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan | None:
    # Lists of a block mask, and lengths, would have to reach the consumers with each tile. Of K without rows there is
    # no tensor map.
    if problem.block_mask is not None or problem.ragged or not problem.seq_k or problem.tangents:
        return None
    if any(map(problem.reads, lengths)) or unplaced(problem) or max(problem.dim, problem.dim_v) > DIMS[-1]:
        return None
    rows = ((stages, PairTiles(problem, n)) for stages, n in STAGES)
    stages, pairs = next((n, x) for n, x in rows if shared_memory(n, x) <= arch.shared_memory)
    size = shared_memory(stages, pairs)
    dim, dim_v = (next(d for d in DIMS if n <= d) for n in (problem.dim, problem.dim_v))
    of_arrays = work(problem, lengths, ROWS, KEYS, 384, size, arch.sms, stay=True, parts=WORKERS)
    constants = (
        ("DIM", dim), ("DIM_V", dim_v), ("ROWS", ROWS), ("KEYS", KEYS), ("STAGES", stages), ("SHARED_MEMORY", size),
        *pairs.constants(), *of_arrays.constants, *features(problem),
    )  # fmt: skip
    heads, tiles_q = problem.batch * problem.heads_q, ceil(problem.seq_q, ROWS)
    prepare = Launch("attention_backward_prepare", heads * tiles_q, 128, fills=("delta",))
    maps = (*pairs.boxes(ROWS), Box("q", ROWS), Box("k", KEYS), Box("v", KEYS), Box("dout", ROWS))
    return KernelPlan(
        **common(problem, arch, BACKWARD) | {"source": "sm90/array_gradient.cu"},
        constants=constants,
        launches=(prepare, *of_arrays.launches),
        workspace=(Workspace("delta", "float32", (heads, tiles_q, 2, ROWS), ROWS), *of_arrays.workspace),
        spills=SPILLS,
        maps=maps,
        scalars=of_arrays.scalars,
        wrt=tuple(lengths),
    )
