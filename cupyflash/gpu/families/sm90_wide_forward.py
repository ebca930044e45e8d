"""The plan of the Hopper forward of wide heads, which the two thread blocks of a cluster share out
(kernels_cu/sm90/wide_forward.cu)."""

from __future__ import annotations

from ...passes import FORWARD
from ...problem import FLOAT8, AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, ceil, features, pad, query_tiles
from . import sm90_forward, sm90_forward_cost
from .sm90_forward_tiles import busy
from .sm90_memory import SPLIT_FROM, WIDEST_OF_CLUSTER, check_tiles, common, dots, paired

ROWS, KEYS, CLUSTER = 128, 128, 2
OWN_KEYS = KEYS // CLUSTER  # of a tile, those of which a block computes S
K_COLUMNS, V_KEYS = 128, 32  # of a piece of K, which has all own keys, and of V, which has all own columns
PIECE = 2 * OWN_KEYS * K_COLUMNS  # bytes of the larger
# What else there is in shared memory: P that is sent, two numbers for each row, barriers and notes.
SENT, NUMBERS, BARRIERS = ROWS * KEYS // 2 * 2, 2 * 4 * ROWS, 512
SPILLS = 168  # bytes, with scores: of slopes under a soft cap


def takes(problem: AttentionProblem, arch: Arch) -> bool:
    """Whether this kernel does. Other wide heads are left to the one whose blocks compute S again for each part of V
    (sm90_forward.py)."""
    if not all(SPLIT_FROM <= n <= most for n, most in zip((problem.dim, problem.dim_v), WIDEST_OF_CLUSTER)):
        return False
    if problem.dtype == FLOAT8 or problem.widened or problem.result_dtype == FLOAT8 or problem.add:
        return False  # it has results of 16 bits, of inputs of as many
    if problem.ragged or problem.shifts or problem.batch_invariant:
        return False
    if paired(problem) or problem.block_mask is not None or _stages(problem, arch) < KEYS // V_KEYS:
        return False
    # With few queries heads share a tile of them, or their keys are dealt out.
    fit = sm90_forward.fit(problem, arch, None)
    return fit is None or (fit.pack == 1 and sm90_forward_cost.dealt(problem, fit.tile, 1, arch).number == 1)


def plan(problem: AttentionProblem, arch: Arch) -> KernelPlan:
    dim, columns = pad(problem.dim, 64), _columns(problem)
    banded = problem.left is not None or problem.right is not None
    tiles, clusters = query_tiles(problem, ROWS), max(1, arch.sms // CLUSTER)
    check_tiles("q", problem, tiles)
    # Where tiles differ in length, clusters ask for their next one.
    alike = problem.seq_q <= ROWS or not (banded or problem.seq_q % ROWS)
    dynamic = not alike and tiles > clusters
    stages = _stages(problem, arch)
    size = _memory(dim, stages)
    constants = (
        ("DIM", dim), ("DIM_V", CLUSTER * columns), dots(problem)[0], ("ROWS", ROWS), ("KEYS", KEYS),
        ("STAGES", stages), ("CLUSTER", CLUSTER), ("SHARED_MEMORY", size), *features(problem),
        ("OWN_KEYS", OWN_KEYS), ("K_COLUMNS", K_COLUMNS), ("V_KEYS", V_KEYS),
    )  # fmt: skip
    grid = CLUSTER * min(tiles, clusters)
    return KernelPlan(
        **common(problem, arch, FORWARD) | {"source": "sm90/wide_forward.cu"},
        constants=constants,
        launches=(Launch("attention_forward", grid, 3 * 128, size, waits=True),),
        workspace=(Workspace("counters", "uint32", (3 if dynamic else 0,)),),
        spills=busy(problem) * SPILLS,
        maps=(Box("q", 64), Box("k", OWN_KEYS), Box("v", V_KEYS)),
        out_dtype=problem.out_dtype,
    )


def _columns(problem: AttentionProblem) -> int:
    """Of V and O, those of a block, as a product takes them."""
    return 192 if ceil(problem.dim_v, CLUSTER) <= 192 else 256


def _stages(problem: AttentionProblem, arch: Arch) -> int:
    """Pieces of K and V in flight: as many as there is room for."""
    return (arch.shared_memory - _memory(pad(problem.dim, 64), 0)) // PIECE


def _memory(dim: int, stages: int) -> int:
    return 2 * ROWS * dim + stages * PIECE + SENT + NUMBERS + BARRIERS
