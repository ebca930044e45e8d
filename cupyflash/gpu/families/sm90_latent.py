"""The plan of latent attention on Hopper: V is the first 512 columns of K, which stands in shared memory once
(kernels_cu/sm90/latent.cu)."""

from __future__ import annotations

import math

from ...passes import FORWARD
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, ceil, features, query_numbers, scored
from ..measured import number
from . import shares
from .likely import as_dense
from .sm90_memory import common, dots

ROWS, KEYS = 64, 64
FEW_ROWS = 2048  # up to so many are made of shares by a block each, more by a warp
DIM, DIM_V = 576, 512
LEAST_TILES, MOST_LEFT = 8, 1 << 26  # key tiles of a share, at least; bytes that shares leave in memory, at most
# Q, two tiles of K, P, two numbers a row, barriers
MEMORY = 2 * (ROWS * DIM + 2 * KEYS * DIM + ROWS * KEYS) + 2 * 4 * ROWS + 128
TAKEN = ("sinks", "seqlens_k", "page_table")  # arrays
VISIT_SECONDS = number("sm90_latent.visit")


def objection(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why latent attention is left to the kernel that reads V by itself (sm90_forward.py); None where it is not."""
    if problem.latent != DIM_V or not DIM_V < problem.dim <= DIM:
        return f"has {problem.latent} of {problem.dim} columns, and not {DIM_V} of up to {DIM}"
    if problem.batch_invariant:
        return "takes no batch_invariant=True: who else is in the batch says how keys are shared out"
    others = [x.name for x in problem.given if x.name not in TAKEN]
    if others or scored(problem) or problem.block_mask is not None or problem.dropout or problem.widened:
        return "has more than causal, window, sinks, caches and pages, or a result of float32"
    return None if MEMORY <= arch.shared_memory else f"needs {MEMORY} bytes of shared memory"


def plan(problem: AttentionProblem, arch: Arch) -> KernelPlan:
    likely = as_dense(problem)
    pack = pack_of(problem)
    span = ROWS // pack  # queries of each of `pack` heads
    tiles = problem.batch * problem.heads_k * ceil(problem.group, pack) * ceil(problem.seq_q, span)
    if tiles >= 2**30:
        raise ValueError(f"q has batch {problem.batch} and {problem.heads_q} heads: {tiles} tiles; less than 2**30 fit")
    share_tiles, wide = 0, tiles // max(1, problem.batch)
    if problem.has("seqlens_k") and problem.batch > 1 and problem.seq_q <= span and problem.left is None:
        # By the lengths that there are; as few as leave no more than that in memory.
        share_tiles, most = LEAST_TILES, ceil(problem.seq_k, KEYS)
        while ceil(most, share_tiles) * left(problem) > MOST_LEFT and share_tiles < most:
            share_tiles *= 2
        parts = ceil(most, share_tiles)
    else:
        visit = shares.Visit(VISIT_SECONDS)
        parts = shares.shares(likely, shares.Tiles(tiles, span, KEYS, 1, visit), arch.sms).number
    share_tiles *= parts > 1
    grid = min(tiles * parts, arch.sms)
    rows = math.prod(query_numbers(problem))
    by_blocks = rows <= FEW_ROWS
    combine = Launch("attention_combine", rows, 512) if by_blocks else Launch("attention_combine", ceil(rows, 4), 128)
    banded = problem.left is not None or problem.right is not None
    alike = not problem.ragged and (problem.seq_q <= span or not (banded or problem.seq_q % span))
    dynamic = not alike and tiles * parts > grid
    key_box = KEYS if problem.page is None else math.gcd(problem.page, KEYS)
    constants = (
        ("DIM", DIM), ("DIM_V", DIM_V), dots(problem)[0], ("WARPGROUPS", 1), ("KEYS", KEYS), ("KEY_BOX", key_box),
        ("SHARE_TILES", share_tiles), ("PACK", pack), ("SHARES", parts > 1), ("V_PARTS", 1),
        ("BY_BLOCKS", by_blocks), ("SHARED_MEMORY", MEMORY), *features(problem),
    )  # fmt: skip
    launch = Launch("attention_forward", grid, 384, MEMORY)
    spaces = (Workspace("counters", "uint32", (3 if dynamic else 0,)), *shares.left(problem, parts, DIM_V))
    return KernelPlan(
        **common(problem, arch, FORWARD) | {"source": "sm90/latent.cu"},
        constants=constants,
        launches=(launch, combine) if parts > 1 else (launch,),
        workspace=spaces,
        maps=(Box("q", span, pack), Box("k", key_box)),
        scalars=(("shares", parts), ("wide", wide), ("processors", arch.sms)),
    )


def left(problem: AttentionProblem) -> int:
    """Bytes of a share's results."""
    return 4 * math.prod(query_numbers(problem)) * DIM_V


def pack_of(problem: AttentionProblem) -> int:
    """Of how many heads that share K a tile has rows."""
    return max(1, ROWS >> max(0, problem.seq_q - 1).bit_length())
