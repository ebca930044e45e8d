"""simt: plain CUDA, for any dtype, any head dimension and any GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...blockmask.tile_lists import ListUse
from ...passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ..array_gradient import Lengths, work
from ..device import Arch
from ..kernel_plan import (
    KernelPlan,
    Launch,
    Tiles,
    Workspace,
    ceil,
    features,
    key_tiles,
    lists,
    query_numbers,
    query_tiles,
    scored,
)
from ..score_gradient import score_work

MAX_DIM = 4096


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    if problem.dtype == FLOAT8:
        return f"takes no {problem.dtype}"
    if problem.cache_dtype is not None and of is not FORWARD:
        return f"takes no k and v of {problem.cache_dtype} beside q of {problem.dtype} in a {of}"
    if max(problem.dim, problem.dim_v) > MAX_DIM:
        return f"takes head dimensions up to {MAX_DIM}, not {problem.dim} and {problem.dim_v}"
    return None


@dataclass(frozen=True)
class Tile:
    """A block owns `owned` rows and `columns` columns of the result, and visits the other side `visited` rows at a
    time.

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
    wave: float = 0  # how long all that a GPU has at once take; 0: not weighed

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
JVP_TILES = (
    Tile(64, 64, 32, 32, 2, dim=32, sums=4),
    Tile(32, 64, 64, 32, 4, dim=64, sums=4, wave=1),
    Tile(64, 64, 64, 32, 3, spills=150, dim=64, sums=4, wave=1.4),
    Tile(32, 64, 128, 32, 3, dim=128, sums=4, wave=1),
    Tile(64, 64, 128, 16, 2, dim=128, sums=4, wave=1.4),
    Tile(64, 32, 256, 16, 2, spills=176, sums=4),
    Tile(64, 32, 32, 16, 2, dim=32, sums=8),
    Tile(32, 32, 64, 16, 3, spills=16, dim=64, sums=8),
    Tile(32, 32, 128, 16, 3, spills=64, sums=8),
)
BACKWARD_JVP_TILES = (
    Tile(32, 64, 32, 32, 4, dim=32, sums=4, scored=True),
    Tile(32, 64, 32, 32, 3, dim=32, sums=4),
    Tile(32, 32, 64, 32, 4, spills=16, dim=64, sums=4),
    Tile(64, 32, 128, 32, 2, spills=120, sums=4),
    Tile(32, 32, 32, 16, 3, spills=64, dim=32, sums=8),
    Tile(32, 32, 64, 16, 2, dim=64, sums=8),
    Tile(32, 32, 128, 16, 2, spills=128, sums=8),
)
TRIED = {
    "owned": (32, 64), "visited": (32, 64), "columns": (32, 64, 128, 256), "depth": (16, 32), "blocks": (2, 3, 4),
    "spills": (0,), "threads": (128,),
}  # fmt: skip


def _possible(t: Tile, problem: AttentionProblem, sides: int) -> bool:
    """Do the pieces come out even, and have the tile's sums room in the registers? `sides`: how many of each
    there are."""
    sums = sides * t.owned * (t.columns + t.visited) // t.threads * (ITEMSIZE[problem.lse_dtype] // 4)
    return t.visited % t.depth == 0 and sums + 30 <= min(255, 65536 // (t.threads * t.blocks))


TILES = {
    FORWARD: Tiles(FORWARD_TILES, TRIED, functools.partial(_possible, sides=1)),
    BACKWARD: Tiles(BACKWARD_TILES, TRIED, functools.partial(_possible, sides=2)),
    JVP: Tiles(JVP_TILES, TRIED, functools.partial(_possible, sides=2)),
    BACKWARD_JVP: Tiles(BACKWARD_JVP_TILES, TRIED, functools.partial(_possible, sides=2)),
}


def _tile(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> Tile:
    """The first that fits; of those that are weighed the one whose thread blocks need the least time, in whole waves.

    Where a band makes blocks of different length, the first: it has the smallest ones, which leave less idle at the
    end.
    """
    first, *others = (row for row in TILES[of].rows(tile) if row.fits(problem))
    banded = problem.left is not None or problem.right is not None or problem.block_mask is not None
    if not first.wave or banded:
        return first

    def time(t: Tile) -> float:
        return ceil(query_tiles(problem, t.owned), arch.sms * t.blocks) * t.wave

    return min((first, *(t for t in others if t.wave and t.dim == first.dim)), key=time)


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    t = _tile(problem, arch, of, tile)
    tiles_q, tiles_k = query_tiles(problem, t.owned), key_tiles(problem, t.owned)
    # A block owns t.columns columns of the result: a wider one takes several blocks, which share their rows.
    parts, parts_v = ceil(problem.dim, t.columns), max(1, ceil(problem.dim_v, t.columns))
    constants = (*_tile_constants(t), *features(problem))
    common = _common(problem, arch, of, t) | {"out_dtype": problem.out_dtype, "dq_dtype": problem.dq_dtype}
    if not of.of_gradients:
        launch = Launch(f"attention_{of}", tiles_q * parts_v, t.threads)
        return KernelPlan(
            **common,
            source=f"simt/{of}.cu",
            constants=constants,
            launches=(launch,),
            lists=lists(problem, _by_query(t)),
        )
    launches: tuple[Launch, ...] = (
        _of_rows(problem, of, t),
        Launch(f"attention_{of}_dk_dv", tiles_k * max(parts, parts_v), t.threads),
    )
    if problem.dim:  # else dQ has no elements, and no block
        launches += (Launch(f"attention_{of}_dq", tiles_q * parts, t.threads),)
    return KernelPlan(
        **common,
        source=f"simt/{of}.cu",
        constants=constants,
        launches=tuple(x for x in launches if x.grid),
        workspace=_workspace(problem, of),
        lists=lists(problem, _by_query(t), ListUse("query_lists", t.visited, t.owned, "queries")),
    )


def gradients(problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan:
    of = BACKWARD_JVP if problem.tangents else BACKWARD
    t = next(row for row in TILES[of].table if row.fits(problem))
    of_arrays = work(problem, lengths, t.owned, t.visited, t.threads, 0, arch.sms)
    of_arrays += score_work(problem, lengths, t.owned, t.visited, t.threads, 0, arch.sms)
    return KernelPlan(
        **_common(problem, arch, of, t),
        source=f"simt/array_gradient{'_jvp' * of.moved}.cu",
        constants=(*_tile_constants(t), *of_arrays.constants, *features(problem)),
        launches=(_of_rows(problem, of, t), *of_arrays.launches),
        workspace=(*_workspace(problem, of), *of_arrays.workspace),
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
        "alignment": ITEMSIZE[problem.cache_dtype or problem.dtype],
        "cache_dtype": problem.cache_dtype,
        "spills": _spills(t, problem),
        "given": problem.given,
    }


def _of_rows(problem: AttentionProblem, of: Pass, t: Tile) -> Launch:
    """What comes before a backward: a number for each query, or two."""
    rows = math.prod(query_numbers(problem))
    return Launch(f"attention_{of}_delta", ceil(rows, t.threads), t.threads, fills=_deltas(of))


def _workspace(problem: AttentionProblem, of: Pass) -> tuple[Workspace, ...]:
    return tuple(Workspace(name, problem.lse_dtype, query_numbers(problem)) for name in _deltas(of))


def _deltas(of: Pass) -> tuple[str, ...]:
    return ("delta", "tdelta") if of.moved else ("delta",)


def _by_query(t: Tile) -> ListUse:
    return ListUse("key_lists", t.owned, t.visited, "queries")


SCORED_SPILLS = 600  # more, with arrays that scores read: their addresses. And with dropout, for its generator's words


def _spills(t: Tile, problem: AttentionProblem) -> int:
    of_scales = 8 * (problem.cache_dtype is not None)  # addresses of what rows of caches are multiplied by
    return t.spills + of_scales + SCORED_SPILLS * (scored(problem) or problem.dropout > 0)


def _tile_constants(t: Tile) -> tuple[tuple[str, int], ...]:
    names = ("owned", "visited", "columns", "depth", "threads", "blocks")
    return tuple((name.upper(), getattr(t, name)) for name in names)
