"""simt: plain CUDA, for any dtype, any head dimension and any GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...passes import BACKWARD, FORWARD, Pass
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ...tile_lists import ListUse
from ..array_gradient import Lengths, work
from ..device import Arch
from ..kernel_plan import KernelPlan, Launch, Tiles, Workspace, ceil, features, lists, scored
from ..score_gradient import score_work

MAX_DIM = 4096


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    if problem.dtype == FLOAT8:
        return f"takes no {problem.dtype}"
    if max(problem.dim, problem.dim_v) > MAX_DIM:
        return f"takes head dimensions up to {MAX_DIM}, not {problem.dim} and {problem.dim_v}"
    return None


@dataclass(frozen=True)
class Tile:
    """A block owns `owned` rows and `columns` columns of the result, and visits the other side `visited` rows at a time.

    Operands come to shared memory in pieces of `depth` columns (of Q, K) or rows (of V).
    """

    owned: int
    visited: int
    columns: int
    depth: int
    blocks: int  # thread blocks that should fit on a multiprocessor: bounds the registers
    spills: int = 0  # bytes per thread: addresses that do not change in the loop, written once and read once per tile
    threads: int = 128
    dim: int = MAX_DIM  # for head dimensions up to this
    sums: int | None = None  # and sums kept in numbers of this many bytes; None: any
    scored: bool | None = None  # scores that are more than the scaled product; None: either

    def fits(self, problem: AttentionProblem) -> bool:
        size, widest = ITEMSIZE[problem.lse_dtype], max(problem.dim, problem.dim_v)
        return self.sums in (None, size) and widest <= self.dim and self.scored in (None, scored(problem))


FORWARD_TILES = (
    Tile(64, 64, 32, 32, 3, dim=32, sums=4),
    Tile(64, 64, 64, 32, 3, dim=64, sums=4),
    Tile(64, 64, 128, 16, 2, dim=128, sums=4),
    Tile(64, 32, 256, 16, 2, sums=4),
    Tile(64, 32, 32, 16, 2, dim=32, sums=8),
    Tile(32, 32, 64, 16, 3, dim=64, sums=8),
    Tile(32, 32, 128, 16, 3, spills=64, sums=8),
)
BACKWARD_TILES = (
    Tile(32, 64, 32, 32, 4, dim=32, sums=4, scored=True),
    Tile(64, 32, 32, 32, 2, dim=32, sums=4),
    Tile(64, 32, 64, 32, 3, spills=48, dim=64, sums=4),
    Tile(64, 32, 128, 32, 2, sums=4),
    Tile(32, 32, 32, 16, 3, dim=32, sums=8),
    Tile(32, 32, 64, 16, 2, dim=64, sums=8),
    Tile(32, 32, 128, 16, 2, spills=64, sums=8),
)
TRIED = {
    "owned": (32, 64), "visited": (32, 64), "columns": (32, 64, 128, 256), "depth": (16, 32), "blocks": (2, 3, 4),
    "spills": (0,), "threads": (128,),
}  # fmt: skip


def _possible(t: Tile, problem: AttentionProblem, sides: int) -> bool:
    """Do the pieces come out even, and have the tile's sums room in the registers? The backward has two of each."""
    sums = sides * t.owned * (t.columns + t.visited) // t.threads * (ITEMSIZE[problem.lse_dtype] // 4)
    return t.visited % t.depth == 0 and sums + 30 <= min(255, 65536 // (t.threads * t.blocks))


TILES = {
    FORWARD: Tiles(FORWARD_TILES, TRIED, functools.partial(_possible, sides=1)),
    BACKWARD: Tiles(BACKWARD_TILES, TRIED, functools.partial(_possible, sides=2)),
}


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    t = next(row for row in TILES[of].rows(tile) if row.fits(problem))
    pairs = problem.batch * problem.heads_q
    tiles_q, tiles_k = ceil(problem.seq_q, t.owned), ceil(problem.seq_k, t.owned)
    # A block owns t.columns columns of the result: a wider one takes several blocks, which share their rows.
    parts, parts_v = ceil(problem.dim, t.columns), max(1, ceil(problem.dim_v, t.columns))
    constants = (*_tile_constants(t), *features(problem))
    common = _common(problem, arch, of, t)
    if of is FORWARD:
        launch = Launch("attention_forward", pairs * tiles_q * parts_v, t.threads)
        return KernelPlan(
            **common,
            source="simt/forward.cu",
            constants=constants,
            launches=(launch,),
            lists=lists(problem, _by_query(t)),
        )
    pairs_k = problem.batch * problem.heads_k
    launches: tuple[Launch, ...] = (
        Launch("attention_backward_delta", ceil(pairs * problem.seq_q, t.threads), t.threads),
        Launch("attention_backward_dk_dv", pairs_k * tiles_k * max(parts, parts_v), t.threads),
    )
    if problem.dim:  # else dQ has no elements, and no block
        launches += (Launch("attention_backward_dq", pairs * tiles_q * parts, t.threads),)
    workspace = (Workspace("delta", problem.lse_dtype, (pairs, problem.seq_q)),)
    return KernelPlan(
        **common,
        source="simt/backward.cu",
        constants=constants,
        launches=launches,
        workspace=workspace,
        lists=lists(problem, _by_query(t), ListUse("query_lists", t.visited, t.owned, "queries")),
    )


def gradients(problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan:
    """The plan that gives the gradients of arrays, of these lengths along (batch, head, query, key)."""
    t = next(row for row in TILES[BACKWARD].table if row.fits(problem))
    of_arrays = work(problem, lengths, t.owned, t.visited, t.threads, 0, arch.sms)
    of_arrays += score_work(problem, lengths, t.owned, t.visited, t.threads, 0, arch.sms)
    pairs = problem.batch * problem.heads_q
    delta = Launch("attention_backward_delta", ceil(pairs * problem.seq_q, t.threads), t.threads, fills=("delta",))
    return KernelPlan(
        **_common(problem, arch, BACKWARD, t),
        source="simt/array_gradient.cu",
        constants=(*_tile_constants(t), *of_arrays.constants, *features(problem)),
        launches=(delta, *of_arrays.launches),
        workspace=(Workspace("delta", problem.lse_dtype, (pairs, problem.seq_q)), *of_arrays.workspace),
        scalars=of_arrays.scalars,
        lists=lists(problem, _by_query(t)),
        wrt=tuple(lengths),
    )


def _common(problem: AttentionProblem, arch: Arch, of: Pass, t: Tile) -> dict[str, Any]:
    """What all plans of this family say alike."""
    return {
        "family": "simt",
        "arch": arch.name,
        "dtype": problem.dtype,
        "of": of,
        "alignment": ITEMSIZE[problem.dtype],
        "spills": _spills(t, problem),
        "given": problem.given,
    }


def _by_query(t: Tile) -> ListUse:
    return ListUse("key_lists", t.owned, t.visited, "queries")


SCORED_SPILLS = 600  # more, with arrays that scores read: their addresses. And with dropout, for its generator's words


def _spills(t: Tile, problem: AttentionProblem) -> int:
    return t.spills + SCORED_SPILLS * (scored(problem) or problem.dropout > 0)


def _tile_constants(t: Tile) -> tuple[tuple[str, int], ...]:
    names = ("owned", "visited", "columns", "depth", "threads", "blocks")
    return tuple((name.upper(), getattr(t, name)) for name in names)
