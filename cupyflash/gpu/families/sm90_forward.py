"""The plan of the Hopper forward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ...blockmask.tile_lists import ListUse
from ...passes import FORWARD
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, ceil, features, lists, pad, places, room
from . import shares
from . import sm90_forward_cost as cost
from .likely import as_dense, even
from .sm90_forward_tiles import (
    EIGHT,
    LISTED,
    PACKED,
    SHORT,
    TILES,
    TWO_BLOCKS,
    ForwardTile,
    busy,
    crowded,
    pack_of,
    tiles_of,
    weighed,
)
from .sm90_memory import (
    BARRIERS,
    FEW,
    ORDERED_WORDS,
    PairTiles,
    check_tiles,
    columns_of_v,
    common,
    dots,
    padded,
    pair_stages,
    paired,
    value_parts,
)

SHARE_SPILLS = 560  # more, with scores or dropout: addresses of a share, where tiles are tested
LENGTHS_SPILLS = 160  # more, where lengths or places are data: those of a tile, and of the one before
LONG_KEYS = 6144  # more keys than that are a long tile
# Tensor cores sum P V of 8 bits over so many keys, or half as many more (kernels_cu/sm90/long_sums.cuh).
SUM_KEYS = 2048
# How the output leaves through shared memory: all of a tile by TMA, or 16 rows by 64 columns of a warp at a
# time.
STAGED, STRIPS = "staged", "strips"
STRIP_ROW = 128  # bytes
NEXT_TILE = 48  # bytes: of packed sequences, what the scheduler hands to the producer
# Of the block that lists the tiles of packed sequences (kernels_cu/sm90/tile_order.cuh).
ORDER_THREADS = 1024
TURNED_KEYS = 128  # of the block that turns V (kernels_cu/sm90/turned_values.cuh)


def forward_memory(
    t: ForwardTile,
    dim: int,
    dim_v: int,
    q_stages: int,
    output: str | None,
    pairs: PairTiles,
    size: int = 2,
    summed: bool = False,
) -> int:
    """Bytes of shared memory that the forward lays out for inputs of `size` bytes; with room for sums of O where
    `summed`."""
    row = pad(size * dim, 128)  # bytes in shared memory
    values = t.keys * pad(size * dim_v, 128) if size > 1 else dim_v * pad(t.keys, 128)
    rings = t.stages * (t.keys * row + values) + pairs.memory(t.rows, t.keys) + BARRIERS
    whole = (output == STAGED or summed) * pad(2 * dim_v, 128)
    return rings + t.rows * (q_stages * row + whole + (output == STRIPS) * STRIP_ROW)


class ForwardFit(NamedTuple):
    """A tile and what there is room for beside it."""

    tile: ForwardTile
    q_stages: int
    output: str | None
    pairs: PairTiles
    pack: int  # heads that share K and V, of which a tile has rows
    sum_keys: int  # of how many keys there are sums of O; 0: of all
    memory: int  # bytes of shared memory


def fit(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> ForwardFit | None:
    dim, dim_v = padded(problem)
    listed, likely = problem.block_mask is not None, as_dense(problem)
    banded = listed or problem.left is not None or problem.right is not None
    # With few heads too, thread blocks would stand idle, and each is as long at a tile.
    few, heads = likely.seq_q <= FEW, likely.batch * problem.heads_q
    packed = (
        few
        and problem.dtype != FLOAT8
        and problem.group > 1
        and not (paired(problem) or listed or problem.dropout)
        and (2 * heads > arch.sms or cost.shared_when_packed(likely, arch))
    )
    short = few and likely.seq_k <= FEW and heads > arch.sms
    mixed = cost.mixed(problem, arch)
    asks, too_many = busy(problem), crowded(problem)
    first = (
        (SHORT[0], *PACKED)
        if mixed > 1
        else (*[TWO_BLOCKS] * cost.two_blocks(problem, likely, arch), *PACKED)
        if packed
        else SHORT[bool(paired(problem)) :]
        if short
        else LISTED
        if listed
        else cost.by_load(likely, arch, weighed(likely))
    )
    eight = problem.dtype == FLOAT8
    rows: tuple[ForwardTile, ...] = (
        (*([TILES.tile(tile)] if tile else ()), *EIGHT) if eight else TILES.rows(tile, first)
    )
    packs = [mixed if mixed > 1 else pack_of(likely, t) if packed else 1 for t in rows]
    tried = [(t, pack) for t, pack in zip(rows, packs) if not packed or pack > 1]
    if not tile and not (short and dim <= SHORT[0].dim):
        tried = [*cost.by_seconds(likely if even(problem) else problem, arch), *tried]
    sum_keys = SUM_KEYS if eight and 2 * problem.seq_k > 3 * SUM_KEYS else 0
    # Q tiles in flight: 2 where there is room, so that the next tile's comes early. And what shared memory has the
    # output to leave through? All of it leaves in boxes of one head, and of 16-bit numbers. (Beside two of Q strips
    # would spill.)
    sixteen = problem.result_dtype != FLOAT8 and not problem.widened
    strips = STRIPS if sixteen and not sum_keys else None
    for t, pack in tried:
        staged = STAGED if sixteen and pack == 1 else None
        places = ((2, staged), (2, None), (1, strips), (1, None))
        for in_flight, (q_stages, output) in itertools.product(pair_stages(problem), places):
            pairs = PairTiles(problem, in_flight)
            size = forward_memory(t, dim, dim_v, q_stages, output, pairs, ITEMSIZE[problem.dtype], sum_keys > 0)
            size += NEXT_TILE * (problem.rows_q is not None)
            fits = max(dim, dim_v) <= t.dim and t.banded in (None, banded) and t.scored in (None, asks)
            if fits and t.crowded in (None, too_many) and size <= room(arch, t.blocks):
                return ForwardFit(t, q_stages, output, pairs, pack, sum_keys, size)
    return None


def plan(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = fit(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, q_stages, output, pairs, pack, sum_keys, size = found
    dim, dim_v, likely = padded(problem)[0], columns_of_v(problem), as_dense(problem)
    listed = problem.block_mask is not None
    banded = listed or problem.left is not None or problem.right is not None
    span = t.rows // pack  # queries of each of `pack` heads
    # Whether warpgroups have their rows of Q each by itself. Of three the producer has no registers for it.
    own_q = q_stages == 1 and pack == 1 and t.warpgroups * t.blocks < 3
    tiles = tiles_of(problem, t, pack)
    check_tiles("q", problem, tiles)
    # Where tiles differ in length, thread blocks ask for their next one.
    alike = not problem.ragged and (problem.seq_q <= span or not (banded or problem.seq_q % span))
    parts = min(cost.dealt(likely, t, pack, arch).number, shares.most(problem))
    if problem.max_seqlen_q is not None and cost.packed_tiles(problem, pack) >= arch.sms:
        parts = 1  # (it is the longest: others may be many, and short)
    share_tiles, v_parts = 0, value_parts(problem)
    if v_parts == 1 and cost.longest_q(problem) <= span:
        share_tiles, parts = shares.by_length(problem, likely, t.keys, parts)
    grid = min(tiles * parts, t.blocks * arch.sms)
    dynamic = not alike and tiles * parts > grid
    ordered = dynamic and parts == 1 and cost.ordered(problem, span, pack, tiles / grid)
    # One tile for each block, and a long one: where products between exponentials pay at 128 columns, and can be.
    wide = max(padded(problem)) == 128 and t.warpgroups > 1
    long = not problem.ragged and problem.seq_k > LONG_KEYS
    lone = wide and tiles * parts == grid and long and not problem.dropout
    key_box = t.keys if problem.page is None else math.gcd(problem.page, t.keys)
    constants = (
        ("DIM", dim), ("DIM_V", dim_v), dots(problem)[0], ("WARPGROUPS", t.warpgroups), ("BLOCKS", t.blocks),
        ("KEYS", t.keys), ("STAGES", t.stages), ("KEY_BOX", key_box), ("Q_STAGES", q_stages),
        ("OWN_Q", own_q), ("O_STAGED", output == STAGED), ("O_STRIPS", output == STRIPS),
        ("PACK", pack), ("ORDERED", ordered), ("BY_VISITS", ordered and cost.by_visits(problem)),
        ("SHARES", parts > 1), ("SHARE_TILES", share_tiles),
        ("V_PARTS", v_parts), ("LONE", lone), ("SHARED_MEMORY", size), *pairs.constants(),
        *features(problem), ("SUM_TILES", sum_keys // t.keys),
    )  # fmt: skip
    launches = [Launch("attention_forward", grid, 128 * (t.warpgroups + 1), size, waits=True)]
    spaces = [Workspace("counters", "uint32", (3 if dynamic else 0,)), *shares.left(problem, parts, v_parts * dim_v)]
    combined = shares.combined(problem, parts, v_parts * dim_v, arch.sms)
    launches += shares.combine(combined, parts, arch, True)
    if ordered:
        launches.insert(0, Launch("attention_order", 1, ORDER_THREADS))
        spaces.append(Workspace("order", "uint32", (ORDERED_WORDS * (1 + places(problem, problem.rows_q or 0, span)),)))
    packed_q, packed_k = problem.rows_q is not None, problem.rows_k is not None
    values = Box("v", key_box, windows=packed_k)
    if problem.dtype == FLOAT8:  # V is turned before
        tiles_k = ceil(problem.seq_k, TURNED_KEYS)
        launches.insert(0, Launch("attention_turn", problem.batch * problem.heads_k * tiles_k, 256))
        shape = (problem.batch, problem.heads_k, dim_v, tiles_k * TURNED_KEYS)
        spaces.append(Workspace("turned", problem.dtype, shape))
        values = Box("turned", dim_v)
    return KernelPlan(
        **common(problem, arch, FORWARD),
        constants=constants,
        launches=tuple(launches),
        workspace=tuple(spaces),
        spills=t.spills + (parts > 1 and busy(problem)) * SHARE_SPILLS + problem.shifts * LENGTHS_SPILLS,
        maps=(
            *pairs.boxes(t.rows),
            Box("q", 64 if own_q else span, pack, packed_q),
            Box("k", key_box, windows=packed_k),
            values,
            Box("out", 64, windows=packed_q),
        ),
        scalars=(("shares", parts), ("combine_lanes", combined.lanes)),
        lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        out_dtype=problem.out_dtype,
    )
