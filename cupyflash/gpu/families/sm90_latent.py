"""The plan of latent attention on Hopper: V is the first 512 columns of K, which stands in shared memory once
(kernels_cu/sm90/latent.cu; for few rows latent_few.cu)."""

from __future__ import annotations

import math

from ...passes import FORWARD
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, ceil, features, query_numbers, scored
from ..measured import number
from . import shares
from .likely import as_dense
from .sm90_memory import check_tiles, common, dots

ROWS, KEYS = 64, 64
FEW_ROWS = 32  # heads that share keys times queries: up to so many rows are columns of S^T (latent_few.cu)
# Up to SPLIT_ROWS rows are made of shares by 16 warps of a block each, more by 4. Where few rows would leave
# multiprocessors idle, up to ROW_BLOCKS blocks have a row.
SPLIT_ROWS, ROW_BLOCKS = 2048, 4
# Where lengths are data, blocks have equal stretches of all key tiles: of LEAST_TILES at least, where some sequence has
# as many. To begin a tile of queries counts as BEGIN_TILES, and less is not cut off. At each place of results of shares
# PLACE_BLOCKS put rows together.
LEAST_TILES, BEGIN_TILES, PLACE_BLOCKS = 8, 2, 8
# Key tiles that are asked for to come to the L2 cache, before they have a place in shared memory, where several tiles
# of queries have the same keys. Elsewhere reading K once is what binds, and asking twice costs 7 to 10 %.
AHEAD = 2
DIM, DIM_V = 576, 512
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
    rows = rows_of_tile(problem)
    pack = pack_of(problem, rows)
    span = rows // pack  # queries of each of `pack` heads
    of_keys = ceil(problem.group, pack) * ceil(problem.seq_q, span)  # tiles of queries that have the same keys
    tiles = problem.batch * problem.heads_k * of_keys
    check_tiles("q", problem, tiles)
    wide, most = tiles // max(1, problem.batch), ceil(problem.seq_k, KEYS)
    stretches = (
        problem.has("seqlens_k") and problem.batch > 1 and problem.seq_q <= span and problem.left is None
        and LEAST_TILES < most and tiles * (most + BEGIN_TILES) < 2**30
    )  # fmt: skip
    if stretches:
        parts = ceil(most, LEAST_TILES)
    else:
        visit = shares.Visit(VISIT_SECONDS)
        parts = shares.shares(likely, shares.Tiles(tiles, span, KEYS, 1, visit), arch.sms).number
    grid = min(tiles * parts, arch.sms)
    if stretches and grid % wide * 16 <= grid:
        grid -= grid % wide
    columns = math.gcd(grid, wide) if stretches else 1
    results = math.prod(query_numbers(problem))
    by_shares = results <= SPLIT_ROWS and not stretches
    places = 2 * grid if stretches else 0
    row_blocks = blocks_of_row(results, arch.sms) if by_shares and parts > 1 else 1
    blocks, threads = (places * PLACE_BLOCKS, 128) if stretches else (results * row_blocks, 512 if by_shares else 128)
    combine = Launch("attention_combine", blocks, threads, waits=True)
    banded = problem.left is not None or problem.right is not None
    alike = not problem.ragged and (problem.seq_q <= span or not (banded or problem.seq_q % span))
    dynamic = not (alike or stretches) and tiles * parts > grid
    key_box = KEYS if problem.page is None else math.gcd(problem.page, KEYS)
    constants = (
        ("DIM", DIM), ("DIM_V", DIM_V), dots(problem)[0], ("ROWS", rows), ("KEYS", KEYS), ("KEY_BOX", key_box),
        ("SHARE_TILES", 0), ("LEAST_TILES", LEAST_TILES if stretches else 0), ("BEGIN_TILES", BEGIN_TILES),
        ("AHEAD", AHEAD if of_keys > 1 else 0), ("PACK", pack), ("ORDERED", False), ("SHARES", parts > 1),
        ("V_PARTS", 1), ("PLACE_BLOCKS", PLACE_BLOCKS), ("BY_SHARES", by_shares), ("ROW_BLOCKS", row_blocks),
        ("SHARED_MEMORY", MEMORY), *features(problem),
    )  # fmt: skip
    launch = Launch("attention_forward", grid, 384, MEMORY)
    left = shares.left(problem, parts, DIM_V)
    if stretches:
        left = (
            Workspace("share_out", "float32", (places * rows, DIM_V)),
            Workspace("share_lse", "float32", (places * rows,)),
        )
    notes = Workspace("share_notes", "uint32", (places, 4))
    spaces = (Workspace("counters", "uint32", (3 if dynamic else 0,)), *left, notes)
    return KernelPlan(
        **common(problem, arch, FORWARD) | {"source": "sm90/latent.cu" if rows == ROWS else "sm90/latent_few.cu"},
        constants=constants,
        launches=(launch, combine) if parts > 1 else (launch,),
        workspace=spaces,
        maps=(Box("q", span, pack), Box("k", key_box)),
        scalars=(("shares", parts), ("columns", columns)),
    )


def rows_of_tile(problem: AttentionProblem) -> int:
    """Of queries: all that have the same keys where these are few, a power of two of at least 8; else ROWS."""
    rows = power_of_two(problem.group * power_of_two(problem.seq_q))
    return max(8, rows) if rows <= FEW_ROWS else ROWS


def pack_of(problem: AttentionProblem, rows: int) -> int:
    """Of how many heads that share K a tile has rows."""
    return max(1, rows // power_of_two(problem.seq_q))


def blocks_of_row(results: int, sms: int) -> int:
    """How many blocks put each of so many rows together, a power of two: as long as multiprocessors would be idle."""
    blocks = max(1, min(ROW_BLOCKS, sms // max(1, results)))
    return 1 << blocks.bit_length() - 1


def power_of_two(n: int) -> int:
    """The least that is not less than n."""
    return 1 << max(0, n - 1).bit_length()
