"""The plan of the Hopper forward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...passes import FORWARD
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ...tile_lists import ListUse
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Tiles, Workspace, ceil, features, lists, pad, scored
from ..score import light
from . import shares
from .sm90_memory import BARRIERS, FEW, PairTiles, dots, padded, pair_stages, paired, room


@dataclass(frozen=True)
class ForwardTile:
    """A thread block has one warpgroup that loads and `groups` that own 64 queries each; it visits `keys` keys at a time."""

    groups: int
    keys: int
    stages: int  # K and V tiles in flight
    blocks: int = 1  # thread blocks of a multiprocessor
    spills: int = 0
    dim: int = 256  # for head dimensions up to this
    banded: bool | None = None  # causal or a window; None: either
    scored: bool | None = None  # more than the scaled product, or dropout, which ask for registers; None: either
    crowded: bool | None = None  # `_crowded`; None: either
    cost: float = 1.0  # of a row, beside those of its table

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def registers(self) -> int:
        """Of a thread that computes, as kernels_cu/sm90/forward.cu shares them out."""
        at_start = 65536 // (128 * (self.groups + 1) * self.blocks) // 8 * 8
        loader = 40 if self.groups * self.blocks < 3 else 32
        return ((self.groups + 1) * at_start - loader) // self.groups // 8 * 8


FORWARD_TILES = (
    # Addresses, once per tile: 24 bytes of a plain kernel; with slopes under a causal mask 208, which is faster by 9 % than two
    # warpgroups that spill none; with a soft cap, too, 376.
    ForwardTile(3, 128, 3, spills=400, dim=64, crowded=False),
    ForwardTile(2, 128, 2, dim=128, scored=False),
    # Addresses of the tile before, under a causal mask with slopes; with dropout, whose seed is in memory, words of its numbers.
    ForwardTile(2, 128, 2, spills=240, dim=128),
    ForwardTile(2, 128, 2, dim=192, scored=False),
    ForwardTile(2, 128, 2, spills=96, dim=192),
    ForwardTile(2, 96, 2, dim=192, scored=False),
    ForwardTile(2, 96, 2, spills=144, dim=192),
    ForwardTile(2, 64, 2, spills=64, banded=True, scored=False),  # with a window and a key mask; else none
    ForwardTile(2, 64, 2, spills=208, banded=True),
    ForwardTile(2, 80, 2, spills=64, scored=False),  # where Q and K are narrow and V is not; else none
    ForwardTile(2, 80, 2, spills=64),
    # Where a mask or a bias leaves less room.
    ForwardTile(2, 64, 2, spills=168),
    ForwardTile(2, 48, 2, spills=168),
)
# Up to 32, those that are tried first, `_by_load`: four warpgroups with 64 keys at a time hide the exponentials, too. With a
# bias they alone: beside its tiles for 128 keys there would be no room for the next tile's Q. What is spilled are addresses,
# with mask and bias the loading thread's.
NARROW = (
    ForwardTile(3, 128, 3, spills=56, dim=32, scored=False, crowded=False),
    ForwardTile(4, 64, 4, spills=128, dim=32),
    ForwardTile(2, 64, 3, 2, spills=160, dim=32),
)
# Up to 64, so too: short sequences leave most of a large tile empty, and few tiles most multiprocessors.
SMALL = ForwardTile(1, 64, 3, 3, spills=32, dim=64, scored=False, cost=1.15)
MIDDLE = (FORWARD_TILES[0], ForwardTile(4, 64, 3, spills=128, dim=64, scored=False, cost=1.12), SMALL)
# Up to 96, where every key is seen.
WIDER = (
    ForwardTile(2, 128, 2, dim=96, banded=False, scored=False),
    ForwardTile(3, 96, 2, spills=32, dim=96, banded=False, scored=False, cost=0.92),
)
# Where one tile has all keys and they are few, for many queries (cross-attention on 77 tokens): no more than it needs.
FEW_KEYS = (
    *(ForwardTile(3, n, 3, spills=32, dim=64, banded=False, scored=False) for n in (64, 80, 96)),
    *(ForwardTile(3, n, 2, spills=128, dim=128, banded=False, scored=False) for n in (64, 80)),
    *(ForwardTile(2, n, 2, spills=32, dim=192, banded=False, scored=False, cost=1.3) for n in (64, 80, 96)),
)
# Times the least that a multiprocessor may have to compute: up to that they are taken in their order.
NARROW_OVERLOAD, OVERLOAD = 1.25, 1.03
TIMED_OVERLOAD = 1.08  # where it is reckoned in seconds, which are right within 10 %
LONG_KEYS = 6144  # more keys than that are a long tile
# Where heads share K and V and queries are few, a tile takes all queries of as many heads as it holds. Not of every
# number: each is a kernel to compile. The rows are tried first there: three warpgroups would spill, and under a window
# with key_mask two do, once per tile.
PACKS = (64, 16, 8, 4, 2)
PACKED = (
    ForwardTile(2, 128, 4, dim=64),
    ForwardTile(2, 128, 2, spills=192, dim=128),
)
# Of 8 bits. Where keys or columns are no more than 64, the upper half of a row of shared memory is empty.
EIGHT = (
    ForwardTile(3, 128, 3, spills=400, dim=64, crowded=False),
    ForwardTile(2, 128, 3, spills=240, dim=64),
    ForwardTile(2, 192, 2, spills=320, dim=128, banded=True, scored=False),  # with scales of blocks; else none
    # With a mask and scales of blocks; else none.
    ForwardTile(3, 96, 2, spills=96, dim=128, banded=False, scored=False),
    ForwardTile(2, 128, 2, spills=320, dim=192),
    ForwardTile(2, 96, 2, spills=400),
    ForwardTile(2, 64, 2, spills=240),
    ForwardTile(2, 64, 1, spills=240),  # beside sums, mask and bias
)
# With a block mask first those whose 128 queries are a block of most masks.
LISTED = (
    ForwardTile(2, 128, 4, dim=64, scored=False),
    ForwardTile(2, 128, 2, spills=16, dim=128, scored=False),
    ForwardTile(2, 64, 3, 2, spills=160, dim=32),
)
# Where they do not, and keys are few too, two or three warpgroups would have rows that nobody asked for.
SHORT = (
    SMALL,
    ForwardTile(1, 64, 4, 2, spills=24, dim=64),
    ForwardTile(1, 64, 2, 2, spills=16, dim=128),  # with everything at once
)


def _crowded(problem: AttentionProblem) -> bool:
    """Whether three warpgroups have too few registers in the forward: for the words of dropout (two are faster, 258 to 236 TFLOP/s
    under a causal mask), for addresses with slopes under a window (650 bytes would be spilled), or for a large score function.
    """
    windowed = problem.left is not None or (problem.right is not None and problem.causal is None)
    heavy = problem.score is not None and not light(problem.score)
    return problem.dropout > 0 or (windowed and problem.has("alibi_slopes")) or heavy


def _busy(problem: AttentionProblem) -> bool:
    return scored(problem) or problem.dropout > 0


def _possible(t: ForwardTile, problem: AttentionProblem) -> bool:
    """Have scores, their 16-bit copy and the output room in what the kernel gives a thread that computes?"""
    return t.registers <= 256 and t.keys * 3 // 4 + pad(problem.dim_v, 16) // 2 <= t.registers - 32


# Of a multiprocessor of an H200: FLOP/s, seconds of a score at least (its exponential), of a visit of 64 keys at least, of a
# tile's begin and end, and more of these for each warpgroup. Fitted to 100 calls of one round, within 10 % (docs/hopper-forward.md).
RATE, SCORE_SECONDS, LEAST_SECONDS, ENDS_SECONDS, GROUP_SECONDS = 5.9e12, 5.2e-11, 6e-7, 2e-6, 1.4e-6
SHARE_SPILLS = 560  # more, with scores or dropout: addresses of a share, where tiles are tested

# Tensor cores sum P V of 8 bits over so many keys, or half as many more (kernels_cu/sm90/long_sums.cuh).
SUM_KEYS = 2048
# How the output leaves through shared memory: all of a tile by the copy engine, or 16 rows by 64 columns of a warp at a time.
STAGED, STRIPS = "staged", "strips"
STRIP_ROW = 128  # bytes
TURNED_KEYS = 128  # of the block that turns V (kernels_cu/sm90/turned_values.cuh)


TILES = Tiles(FORWARD_TILES, {
    "groups": (1, 2, 3, 4), "keys": (64, 80, 96, 128, 192), "stages": (2, 3, 4), "blocks": (1, 2, 3, 4), "spills": (0,),
}, _possible)  # fmt: skip


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
    """Bytes of shared memory that the forward lays out for inputs of `size` bytes; with room for sums of O where `summed`."""
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
    packed: bool
    sum_keys: int  # of how many keys there are sums of O; 0: of all
    memory: int  # bytes of shared memory


def _by_load(problem: AttentionProblem, arch: Arch) -> tuple[ForwardTile, ...]:
    """Those of a table for the problem; those come last that give some multiprocessor too much to do."""
    dim, most = max(padded(problem)), OVERLOAD
    rows: tuple[ForwardTile, ...]
    if dim <= 32:
        rows, most = NARROW, NARROW_OVERLOAD
    elif paired(problem):  # for a mask there is little room beside small tiles
        return ()
    elif problem.seq_k <= 96 and (dim > 64 or problem.seq_q > 192):
        rows = tuple(t for t in FEW_KEYS if t.keys >= problem.seq_k and t.dim >= dim)
        rows = tuple(t for t in rows if t.keys == rows[0].keys) if rows else ()
    else:
        rows = MIDDLE if dim <= 64 else WIDER
    if not rows:
        return ()

    def load(t: ForwardTile) -> float:  # rows of its tiles, also those in vain
        tiles = problem.batch * problem.heads_q * ceil(problem.seq_q, t.rows)
        return ceil(tiles, arch.sms) * t.rows * t.cost

    found = [dealt(problem, t, 1, arch) for t in rows]
    few = _tiles(problem, rows[0], 1) <= 2 * arch.sms and problem.seq_k >= shares.LONG_KEYS
    uneven = (
        problem.right is not None and problem.left is None
    )  # so that the first tiles count more, the more there are
    timed = few and uneven or any(x.number > 1 for x in found)
    loads = [x.seconds * t.cost if timed else load(t) for x, t in zip(found, rows)]
    most = max(most, TIMED_OVERLOAD) if timed else most
    return tuple(t for _, t in sorted(zip(loads, rows), key=lambda x: x[0] > most * min(loads)))


def fit(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> ForwardFit | None:
    dim, dim_v = padded(problem)
    listed = problem.block_mask is not None
    banded = listed or problem.left is not None or problem.right is not None
    # With few heads too, thread blocks would stand idle, and each is as long at a tile.
    few, heads = problem.seq_q <= FEW, problem.batch * problem.heads_q
    packed = (
        few
        and problem.dtype != FLOAT8
        and problem.group > 1
        and not (paired(problem) or listed or problem.dropout)
        and (2 * heads > arch.sms or _shared_when_packed(problem, arch))
    )
    short = few and problem.seq_k <= FEW and heads > arch.sms
    busy, crowded = _busy(problem), _crowded(problem)
    first = (
        PACKED if packed else SHORT[bool(paired(problem)) :] if short else LISTED if listed else _by_load(problem, arch)
    )
    eight = problem.dtype == FLOAT8
    rows: tuple[ForwardTile, ...] = (
        (*([TILES.tile(tile)] if tile else ()), *EIGHT) if eight else TILES.rows(tile, first)
    )
    sum_keys = SUM_KEYS if eight and 2 * problem.seq_k > 3 * SUM_KEYS else 0
    # Q tiles in flight: 2 where there is room, so that the next tile's comes early. And what shared memory has the output to
    # leave through? All of it leaves in boxes of one head, and of 16-bit numbers. (Beside two of Q strips would
    # spill.)
    staged = STAGED if problem.result_dtype != FLOAT8 and not packed else None
    strips = STRIPS if problem.result_dtype != FLOAT8 and not sum_keys else None
    places = ((2, staged), (2, None), (1, strips), (1, None))
    beside = [(q, o, n) for n in pair_stages(problem) for q, o in places]
    for t, (q_stages, output, in_flight) in itertools.product(rows, beside):
        pairs = PairTiles(problem, in_flight)
        size = forward_memory(t, dim, dim_v, q_stages, output, pairs, ITEMSIZE[problem.dtype], sum_keys > 0)
        fits = max(dim, dim_v) <= t.dim and t.banded in (None, banded) and t.scored in (None, busy)
        fits = fits and t.crowded in (None, crowded) and (not packed or _pack(problem, t) > 1)
        if fits and size <= room(arch, t.blocks):
            return ForwardFit(t, q_stages, output, pairs, packed, sum_keys, size)
    return None


def dealt(problem: AttentionProblem, t: ForwardTile, pack: int, arch: Arch) -> shares.Dealt:
    """In how many shares the keys of a tile with so many heads are dealt out."""
    asked = min(problem.seq_q, t.rows // pack) * min(problem.group, pack)  # rows of a tile
    score = max(2 * (problem.dim + problem.dim_v) / RATE, SCORE_SECONDS)
    visit = shares.Visit(pad(asked, 64) * t.keys * score, LEAST_SECONDS * t.keys / 64)
    ends = ENDS_SECONDS + t.groups * GROUP_SECONDS
    tiles = shares.Tiles(_tiles(problem, t, pack), t.rows, t.keys, t.blocks, visit, ends)
    found = shares.shares(problem, tiles, arch.sms)
    return found if problem.dtype != FLOAT8 else found._replace(number=1)


def _pack(problem: AttentionProblem, t: ForwardTile) -> int:
    """How many heads that share keys have room in a tile with all of their queries; 1: no two."""
    return next((n for n in PACKS if t.rows // n >= problem.seq_q), 1)


def _tiles(problem: AttentionProblem, t: ForwardTile, pack: int) -> int:
    return problem.batch * problem.heads_k * ceil(problem.group, pack) * ceil(problem.seq_q, t.rows // pack)


def _shared_when_packed(problem: AttentionProblem, arch: Arch) -> bool:
    t = next((t for t in PACKED if max(padded(problem)) <= t.dim), PACKED[-1])
    return dealt(problem, t, _pack(problem, t), arch).number > 1


def plan(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = fit(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, q_stages, output, pairs, packed, sum_keys, size = found
    dim, dim_v = padded(problem)
    listed = problem.block_mask is not None
    banded = listed or problem.left is not None or problem.right is not None
    pack = _pack(problem, t) if packed else 1
    span = t.rows // pack  # queries of each of `pack` heads
    # Whether warpgroups have their rows of Q each by itself. Of three the loading thread has no registers for it.
    own_q = q_stages == 1 and pack == 1 and t.groups * t.blocks < 3
    tiles = _tiles(problem, t, pack)
    if tiles >= 2**30:
        raise ValueError(f"q has batch {problem.batch} and {problem.heads_q} heads: {tiles} tiles; less than 2**30 fit")
    # Where tiles differ in length, thread blocks ask for their next one.
    alike = problem.seq_q <= t.rows or not (banded or problem.seq_q % t.rows)
    parts = dealt(problem, t, pack, arch).number
    grid = min(tiles * parts, t.blocks * arch.sms)
    dynamic = not alike and tiles * parts > grid
    # One tile for each block, and a long one: where products between exponentials pay at 128 columns, and can be.
    wide = max(dim, dim_v) == 128 and t.groups > 1
    lone = wide and tiles * parts == grid and problem.seq_k > LONG_KEYS and not problem.dropout
    constants = (
        ("DIM", dim), ("DIM_V", dim_v), dots(problem)[0], ("GROUPS", t.groups), ("BLOCKS", t.blocks), ("KEYS", t.keys), ("STAGES", t.stages),
        ("Q_STAGES", q_stages), ("OWN_Q", own_q), ("O_STAGED", output == STAGED), ("O_STRIPS", output == STRIPS), ("PACK", pack), ("SHARES", parts > 1), ("LONE", lone), ("SHARED_MEMORY", size), *pairs.constants(),
        *features(problem), ("SUM_TILES", sum_keys // t.keys),
    )  # fmt: skip
    launches = [Launch("attention_forward", grid, 128 * (t.groups + 1), size)]
    spaces = [Workspace("counters", "uint32", (3 if dynamic else 0,)), *shares.left(problem, parts, dim_v)]
    launches += shares.combine(problem, parts)
    values = Box("v", t.keys)
    if problem.dtype == FLOAT8:  # V is turned before
        tiles_k = ceil(problem.seq_k, TURNED_KEYS)
        launches.insert(0, Launch("attention_turn", problem.batch * problem.heads_k * tiles_k, 256))
        shape = (problem.batch, problem.heads_k, dim_v, tiles_k * TURNED_KEYS)
        spaces.append(Workspace("turned", problem.dtype, shape))
        values = Box("turned", dim_v)
    return KernelPlan(
        family="sm90",
        arch=arch.name,
        dtype=problem.dtype,
        of=FORWARD,
        source="sm90/forward.cu",
        constants=constants,
        launches=tuple(launches),
        alignment=16,
        workspace=tuple(spaces),
        spills=t.spills + (parts > 1 and _busy(problem)) * SHARE_SPILLS,
        maps=(*pairs.boxes(t.rows), Box("q", 64 if own_q else span, pack), Box("k", t.keys), values, Box("out", 64)),
        scalars=(("shares", parts),),
        given=problem.given,
        lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        out_dtype=problem.out_dtype,
    )
