"""The plan of the Hopper backward's tangent: what its results change by along tangents of q, k, v and dout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...blockmask.tile_lists import ListUse
from ...passes import BACKWARD_JVP
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Tiles, Workspace, ceil, features, lists, pad, room
from . import sm90_backward_jvp_once
from .sm90_backward_cost import even_rounds
from .sm90_memory import BARRIERS, common, dots, padded

NUMBERS = 4  # of each query: lse, delta and their tangents
CACHE = 16 << 20  # bytes of the L2 cache that what visits the tiles of heads dealt out together takes


@dataclass(frozen=True)
class BackwardJvpTile:
    """Of both kernels: a thread block has one warpgroup that loads and `warpgroups` that own 64 rows each.

    The kernel that owns queries visits `keys` keys at a time, the one that owns keys `rows` queries.
    """

    rows: int
    keys: int
    warpgroups: int
    query_stages: int  # tiles of queries in flight
    key_stages: int  # of keys
    ahead: int = (
        0  # 1: what keys add to tdQ is added under the scores of the next ones: three tiles in flight are two then
    )
    turns: int = 0  # 1: warpgroups take turns to issue products
    queries_held: int = 0  # 1: the kernel that owns queries has Q in registers; 2: and dO; 3: and their tangents
    keys_held: int = 0  # likewise K and V
    spills: int = 0
    dim: int = 128  # for head dimensions up to this
    plain: bool | None = None  # whether a pair's slope is a constant; None: or not


# What is spilled are addresses, where tiles are tested or a pair's slope is no constant.
BACKWARD_JVP_TILES = (
    BackwardJvpTile(64, 64, 2, 3, 3, 0, 1, 3, 1, dim=32, plain=True),
    BackwardJvpTile(32, 64, 2, 3, 3, 1, 1, 0, 3, spills=64, dim=64, plain=True),
    BackwardJvpTile(32, 64, 2, 3, 2, 0, 1, spills=352, dim=64),
    BackwardJvpTile(32, 64, 2, 2, 2, 0, 1, 0, 2, spills=64, dim=96, plain=True),
    BackwardJvpTile(32, 64, 2, 2, 2, 0, 1, spills=64, plain=True),
    BackwardJvpTile(32, 32, 2, 2, 2, 0, 1, spills=288),
    BackwardJvpTile(32, 32, 2, 1, 1, spills=288),
)


def _possible(t: BackwardJvpTile, problem: AttentionProblem) -> bool:
    """Do what is owned and what visits it come out even, is there a stage for what is added later beside the one that
    is under way, and have four tiles of scores and the results room in registers?"""
    most, own = 232 if t.warpgroups == 2 else 152, 64 * t.warpgroups
    return (
        own % t.rows == own % t.keys == 0
        and t.key_stages > t.ahead
        and 2 * t.rows + (pad(problem.dim, 16) + pad(problem.dim_v, 16)) // 2 <= most
        and 2 * t.keys + pad(problem.dim, 16) // 2 <= most
    )


TILES = Tiles(BACKWARD_JVP_TILES, {
    "rows": (32, 48, 64), "keys": (32, 48, 64, 80), "warpgroups": (2, 3), "query_stages": (1, 2, 3, 4),
    "key_stages": (1, 2, 3, 4), "ahead": (0, 1), "turns": (0, 1), "queries_held": (0, 1, 2, 3),
    "keys_held": (0, 1, 2, 3), "spills": (0,),
}, _possible)  # fmt: skip


class BackwardJvpFit(NamedTuple):
    """A tile, and bytes of shared memory of the kernel that owns queries and of the one that owns keys."""

    tile: BackwardJvpTile
    queries: int
    keys: int


def _memory(problem: AttentionProblem, t: BackwardJvpTile) -> tuple[int, int]:
    row, row_v = (2 * pad(n, 64) for n in padded(problem))
    q, k, v, dout = (problem.moves(name) for name in ("q", "k", "v", "dout"))
    of_query, of_key = (1 + q) * row + (1 + dout) * row_v, (1 + k) * row + (1 + v) * row_v
    own = 64 * t.warpgroups
    return (
        own * of_query + t.key_stages * t.keys * of_key + BARRIERS,
        own * of_key + t.query_stages * t.rows * (of_query + 4 * NUMBERS) + BARRIERS,
    )


def fit(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> BackwardJvpFit | None:
    plain = problem.softcap is None and problem.score is None
    for t in TILES.rows(tile):
        sizes = _memory(problem, t)
        if max(padded(problem)) <= t.dim and t.plain in (None, plain) and max(sizes) <= room(arch, 1):
            return BackwardJvpFit(t, *sizes)
    return None


def plan(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    at_once, found = sm90_backward_jvp_once.fit(problem, arch), fit(problem, arch, tile)
    if at_once is not None and (tile is None or found is None):
        return sm90_backward_jvp_once.plan(problem, arch, at_once)
    if found is None:
        raise ValueError(f"no sm90 backward_jvp tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, of_queries, of_keys = found
    dim, dim_v = padded(problem)
    own = 64 * t.warpgroups
    heads_q, heads_k = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    tiles = ceil(problem.seq_q, t.rows)  # of a head
    # Where tiles differ in length those of some heads are dealt out together, long ones first.
    traffic = 2 * (problem.seq_q + problem.seq_k) * (dim + dim_v)
    banded = problem.block_mask is not None or problem.left is not None or problem.right is not None
    together = even_rounds(heads_k, max(1, CACHE // max(1, traffic))) if banded else 1
    constants = (
        ("DIM", dim), ("DIM_V", dim_v), *dots(problem), ("WARPGROUPS", t.warpgroups), ("ROWS", t.rows),
        ("KEYS", t.keys), ("QUERY_STAGES", t.query_stages), ("KEY_STAGES", t.key_stages), ("AHEAD", bool(t.ahead)),
        ("TURNS", bool(t.turns)), ("QUERIES_HELD", t.queries_held), ("KEYS_HELD", t.keys_held),
        ("SHARED_MEMORY_QUERIES", of_queries), ("SHARED_MEMORY_KEYS", of_keys), *features(problem),
    )  # fmt: skip
    sides = {"q": t.rows, "dout": t.rows, "k": t.keys, "v": t.keys}
    moved = [Box(f"t{name}", sides[name]) for name in ("q", "k", "v", "dout") if problem.moves(name)]
    threads = 128 * (t.warpgroups + 1)
    return KernelPlan(
        **common(problem, arch, BACKWARD_JVP),
        constants=constants,
        launches=(
            Launch("attention_backward_jvp_prepare", heads_q * tiles, 128),
            Launch("attention_backward_jvp_dq", heads_q * ceil(problem.seq_q, own), threads, of_queries),
            Launch("attention_backward_jvp_dk_dv", heads_k * ceil(problem.seq_k, own), threads, of_keys),
        ),
        workspace=(Workspace("numbers", "float32", (heads_q, tiles, NUMBERS, t.rows), t.rows),),
        spills=t.spills,
        maps=(*moved, *(Box(name, sides[name]) for name in ("q", "k", "v", "dout"))),
        scalars=(("together", together),),
        lists=lists(problem, ListUse("key_lists", own, t.keys, "queries"), ListUse("query_lists", t.rows, own, "keys")),
    )
