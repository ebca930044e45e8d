"""The plan of the Hopper jvp: the tangent of the forward's results along tangents of q, k and v."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...blockmask.tile_lists import ListUse
from ...passes import JVP
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Tiles, Workspace, ceil, features, lists, pad, room, scored
from ..measured import number
from .sm90_memory import BARRIERS, PairTiles, check_tiles, common, dots, padded, pair_stages


@dataclass(frozen=True)
class JvpTile:
    """A thread block has one warpgroup that loads and `warpgroups` that own 64 queries each; it visits `keys` keys at a
    time."""

    warpgroups: int
    keys: int
    stages: int  # K and V tiles in flight, with those of their tangents
    turns: int = 0  # 1: warpgroups take turns to issue products
    ahead: int = 0  # 1: what a key tile adds to the result is added under the scores of the next one
    held: int = 0  # 1: rows of Q are held in registers
    spills: int = 0
    dim: int = 256  # for head dimensions up to this
    plain: bool | None = None  # whether scores are no more than the product of Q and K, without dropout; None: or not
    cost: float = 1.0  # of a row, beside those of its table

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups


# What is spilled are addresses, once per tile, where tiles are tested or scores are more than products.
JVP_TILES = (
    JvpTile(2, 128, 2, spills=160, dim=64, plain=True),
    JvpTile(2, 64, 3, 1, 1, spills=8, dim=64),
    JvpTile(2, 64, 2, 1, 1, 1, spills=160, dim=128, plain=True),
    JvpTile(2, 64, 2, 1, spills=32, dim=128),
    JvpTile(2, 32, 2, 1, 1, 1, spills=64, dim=192, plain=True),
    JvpTile(2, 32, 2, 1, spills=128, dim=192),
    JvpTile(2, 32, 1, 0, 1, spills=512, plain=True),
    JvpTile(2, 32, 1, spills=640),
)
# Tried first where three warpgroups have registers enough, `_by_load`.
NARROW = (
    JvpTile(3, 80, 2, dim=32, plain=True),
    JvpTile(3, 64, 2, 0, 1, spills=320, dim=64, plain=True, cost=number("sm90_jvp.narrow")),
    JVP_TILES[0],
)
MIDDLE = (JvpTile(3, 48, 2, 0, 1, spills=120, dim=96, plain=True, cost=number("sm90_jvp.middle")), JVP_TILES[2])
# Whether the result leaves by the copy engine, where there is room.
STAGED = (True, False)


def _possible(t: JvpTile, problem: AttentionProblem) -> bool:
    """Have scores, their tangents, the 16-bit copies of both and the result room in registers?"""
    copies = t.keys // 2 if t.ahead else 0
    return t.keys + copies + pad(problem.dim_v, 16) // 2 <= (232 if t.warpgroups == 2 else 160)


TILES = Tiles(JVP_TILES, {
    "warpgroups": (2, 3), "keys": (32, 48, 64, 80, 96, 128), "stages": (1, 2, 3), "turns": (0, 1), "ahead": (0, 1),
    "held": (0, 1), "spills": (0,),
}, _possible)  # fmt: skip


class JvpFit(NamedTuple):
    """A tile and what there is room for beside it."""

    tile: JvpTile
    staged: bool
    pairs: PairTiles
    memory: int  # bytes of shared memory


def _memory(problem: AttentionProblem, t: JvpTile, staged: bool, pairs: PairTiles) -> int:
    """Bytes of shared memory that the kernel lays out."""
    row, row_v = (2 * pad(n, 64) for n in padded(problem))
    q, k, v = (problem.moves(name) for name in "qkv")
    keys = (1 + k) * row + (int(q or k or not v) + v) * row_v
    size = t.rows * ((1 + q) * row + staged * row_v) + t.stages * t.keys * keys
    return size + pairs.memory(t.rows, t.keys) + BARRIERS


def _by_load(problem: AttentionProblem, arch: Arch) -> tuple[JvpTile, ...]:
    """Those for the problem that give a multiprocessor the least to do, rows in vain too, first."""
    dim = max(padded(problem))
    rows = NARROW if dim <= 64 else MIDDLE

    def load(t: JvpTile) -> float:
        tiles = problem.batch * problem.heads_q * ceil(problem.seq_q, t.rows)
        return ceil(tiles, arch.sms) * t.rows * t.cost

    return tuple(sorted((t for t in rows if dim <= t.dim), key=load))


def fit(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> JvpFit | None:
    rows: tuple[JvpTile, ...] = TILES.rows(tile, _by_load(problem, arch))
    plain = not (scored(problem) or problem.dropout)
    for t, n, staged in itertools.product(rows, pair_stages(problem), STAGED):
        pairs = PairTiles(problem, n)
        size = _memory(problem, t, staged, pairs)
        if max(padded(problem)) <= t.dim and t.plain in (None, plain) and size <= room(arch, 1):
            return JvpFit(t, staged, pairs, size)
    return None


def plan(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = fit(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 jvp tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, staged, pairs, size = found
    dim, dim_v = padded(problem)
    tiles = problem.batch * problem.heads_q * ceil(problem.seq_q, t.rows)
    check_tiles("q", problem, tiles)
    banded = problem.block_mask is not None or problem.left is not None or problem.right is not None
    # Where tiles differ in length, thread blocks ask for their next one.
    alike = problem.seq_q <= t.rows or not (banded or problem.seq_q % t.rows)
    grid = min(tiles, arch.sms)
    constants = (
        ("DIM", dim), ("DIM_V", dim_v), dots(problem)[0], ("WARPGROUPS", t.warpgroups), ("BLOCKS", 1), ("KEYS", t.keys),
        ("STAGES", t.stages), ("KEY_BOX", t.keys), ("SHARE_TILES", 0),
        ("AHEAD", bool(t.ahead)), ("TURNS", bool(t.turns)), ("HELD", bool(t.held)), ("Q_STAGES", 1), ("OWN_Q", False),
        ("O_STAGED", staged), ("O_STRIPS", False), ("PACK", 1), ("ORDERED", False), ("SHARES", False), ("V_PARTS", 1),
        ("SHARED_MEMORY", size), *pairs.constants(), *features(problem), ("SUM_TILES", 0),
    )  # fmt: skip
    moved = [(f"t{name}", t.rows if name == "q" else t.keys) for name in "qkv" if problem.moves(name)]
    return KernelPlan(
        **common(problem, arch, JVP),
        constants=constants,
        launches=(Launch("attention_jvp", grid, 128 * (t.warpgroups + 1), size),),
        workspace=(Workspace("counters", "uint32", (3 if not alike and tiles > grid else 0,)),),
        spills=t.spills,
        maps=(
            *pairs.boxes(t.rows),
            *(Box(name, rows) for name, rows in moved),
            Box("q", t.rows),
            Box("k", t.keys),
            Box("v", t.keys),
            Box("tout", 64),
        ),
        scalars=(("shares", 1),),
        lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
    )
