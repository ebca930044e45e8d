"""sm90: wgmma tensor cores and the copy engine of Hopper."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ...tile_lists import ListUse
from ..device import Arch
from ..kernel_plan import PAIRWISE, Box, KernelPlan, Launch, Tiles, Workspace, ceil, features, lists, pad, scored
from ..score import light
from .sm80 import both_ways


def objection(problem: AttentionProblem, arch: Arch, backward: bool) -> str | None:
    if problem.dtype not in ("float16", "bfloat16", FLOAT8):
        return f"takes float16, bfloat16 and float8, not {problem.dtype}"
    if backward and problem.dtype == FLOAT8:
        return f"has a forward alone of {FLOAT8}"
    if arch.cc != 90:
        return f"is for compute capability 9.0, this GPU has {arch.cc / 10}"
    for name in PAIRWISE:
        if (x := problem.array(name)) and "key" not in x.axes and problem.seq_k > 1:
            return f"takes a {name} that differs between keys"
    if not 0 < min(problem.dim, problem.dim_v) or max(problem.dim, problem.dim_v) > 256:
        return f"takes head dimensions from 1 to 256, not {problem.dim} and {problem.dim_v}"
    fit = _fit_backward if backward else _fit_forward
    if _paired(problem) and fit(problem, arch, None) is None:
        return f"has no shared memory for {' and '.join(_paired(problem))} beside head dimension {problem.dim}"
    return None


def _paired(problem: AttentionProblem) -> list[str]:
    """The arrays over pairs that are given."""
    return [name for name in PAIRWISE if problem.has(name)]


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

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def registers(self) -> int:
        """Of a thread that computes, as kernels_cu/sm90/forward.cu shares them out."""
        at_start = 65536 // (128 * (self.groups + 1) * self.blocks) // 8 * 8
        loader = 40 if self.groups * self.blocks < 3 else 32
        return ((self.groups + 1) * at_start - loader) // self.groups // 8 * 8


@dataclass(frozen=True)
class BackwardTile:
    """A thread block has one warpgroup that moves data and `groups` that compute; it owns `keys` keys and visits `rows`
    queries at a time. The blocks of a cluster visit the same queries, and add to dQ once for all their keys.
    """

    rows: int
    keys: int
    groups: int
    stages: int  # Q tiles in flight
    do_stages: int  # dO tiles in flight
    spills: int = 0
    dim: int = 256  # for head dimensions up to this
    scored: bool | None = None  # as of the forward, and a mask

    @property
    def wide(self) -> bool:
        """Whether warpgroups share out the columns of dK and dV (and P goes through shared memory too), not the keys."""
        return self.keys < 64 * self.groups

    @property
    def clustered(self) -> bool:
        """Where two warpgroups share out the columns, what they add to dQ is what binds: half of it with twice the keys."""
        return self.wide and self.groups == 2

    @property
    def blocks(self) -> int:
        """Thread blocks of a multiprocessor. One warpgroup that computes alone would leave it idle between two tiles."""
        return 2 if self.groups == 1 else 1

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return 2 if self.clustered else 1

    def shares_rows(self, dim: int) -> bool:
        """Whether warpgroups share out the rows of dQ; else its columns."""
        return not self.wide and dim <= 64

    def part_rows(self, dim: int) -> int:
        """Rows of a warpgroup's part of dQ."""
        return self.rows // self.groups if self.shares_rows(dim) else self.rows

    def sums(self, dim: int, dim_v: int) -> int:
        """Sums of dK and dV that a thread holds."""
        if not self.wide:
            return (dim + dim_v) // 2
        return sum(ceil(ceil(n, 64), self.groups) for n in (dim, dim_v)) * self.keys // 2


DIMS = (32, 64, 96, 128, 192, 256)  # head dimensions are padded to one of these; the copy engine fills in zeros

FORWARD = (
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
    ForwardTile(2, 64, 2, banded=True, scored=False),
    ForwardTile(2, 64, 2, spills=168, banded=True),
    ForwardTile(2, 80, 2, scored=False),
    ForwardTile(2, 80, 2, spills=48),
    # Where a mask or a bias leaves less room.
    ForwardTile(2, 64, 2, spills=168),
    ForwardTile(2, 48, 2, spills=168),
)
PAIR_STAGES = (2, 1)  # tiles of mask and bias in flight: the first that there is room for
# Up to 32, those that are tried first, `_by_load`: four warpgroups with 64 keys at a time hide the exponentials, too. With a
# bias they alone: beside its tiles for 128 keys there would be no room for the next tile's Q. What is spilled are addresses,
# with mask and bias the loading thread's.
NARROW = (
    ForwardTile(3, 128, 3, spills=56, dim=32, scored=False, crowded=False),
    ForwardTile(4, 64, 4, spills=128, dim=32),
    ForwardTile(2, 64, 3, 2, spills=160, dim=32),
)
OVERLOAD = (
    1.25  # times the least rows that a multiprocessor may have to compute: up to that they are taken in their order
)
# Where heads share K and V and queries are few, a tile takes all queries of as many heads as it holds. Not of every
# number: each is a kernel to compile. The rows are tried first there: three warpgroups would spill, and under a window
# with key_mask two do, once per tile.
FEW = 64
PACKS = (64, 16, 8, 4, 2)
PACKED = (
    ForwardTile(2, 128, 4, dim=64),
    ForwardTile(2, 128, 2, spills=96, dim=128),
)
# Of 8 bits. Where keys or columns are no more than 64, the upper half of a row of shared memory is empty.
EIGHT = (
    ForwardTile(3, 128, 3, spills=400, dim=64, crowded=False),
    ForwardTile(2, 128, 3, spills=240, dim=64),
    ForwardTile(2, 192, 2, spills=168, dim=128, banded=True, scored=False),  # with scales of blocks; else none
    ForwardTile(3, 96, 2, dim=128, banded=False, scored=False),
    ForwardTile(2, 128, 2, spills=240, dim=192),
    ForwardTile(2, 96, 2, spills=240),
    ForwardTile(2, 64, 2, spills=168),
)
# With a block mask first those whose 128 queries are a block of most masks.
LISTED = (
    ForwardTile(2, 128, 4, dim=64, scored=False),
    ForwardTile(2, 128, 2, dim=128, scored=False),
    ForwardTile(2, 64, 3, 2, spills=160, dim=32),
)
# Where they do not, and keys are few too, two or three warpgroups would have rows that nobody asked for.
SHORT = (
    ForwardTile(1, 64, 4, 2, dim=64),
    ForwardTile(1, 64, 2, 2, spills=16, dim=128),  # with everything at once
)
# What may be spilled are addresses: the moving warps', and a worker's, once per tile or where it adds to dQ in turn.
BACKWARD = (
    BackwardTile(128, 128, 2, 2, 2, spills=184, dim=64, scored=False),
    BackwardTile(64, 128, 2, 2, 2, dim=64),
    BackwardTile(64, 128, 2, 2, 2, dim=128, scored=False),
    BackwardTile(64, 128, 2, 2, 2, spills=352, dim=128),  # with everything at once; a soft cap or a bias alone 64
    BackwardTile(64, 96, 3, 2, 1, spills=32, dim=192, scored=False),
    BackwardTile(64, 96, 3, 2, 1, spills=224, dim=192),
    BackwardTile(64, 64, 2, 2, 1, spills=32, scored=False),
    BackwardTile(64, 64, 2, 2, 1, spills=200),
)
# Of short sequences, where a head is one tile: two warpgroups of 128 queries and keys would have three quarters of it in vain.
SHORT_BACKWARD = (BackwardTile(64, 64, 1, 2, 2, dim=64),)
LISTED_SPILLS = 160  # more, with a block mask: its addresses
# The backward's order of key tiles, and room for sums of dQ.
CACHE = 16 << 20  # bytes of the L2 cache that Q, dO and dQ of heads dealt out together take; twice where tiles are
LONG = 1024  # longer than this, in queries
APART = 2  # deterministic, no causal mask: steps between two key tiles of a head
# Shares of a head's query tiles: at most so many; for each multiprocessor at most so many key tiles of them; what is not the
# visit of a query tile, in visits: a key tile's beginning and end, and its sums on their way to memory or back.
MOST_SHARES, SHARED_TILES = 32, 8
SHARE_COST, SUMS_COST = 1.5, 0.5
LONG_WALK, WORTH_SHARING = 24, 1.15  # from so many visits on, and where so much is gained by that reckoning
SHARE_SPILLS = 96  # bytes: where a share begins
WHOLE_SPILLS = 48  # where the warp that sends dQ begins with a head
FINISH_TICKETS = 4  # for each finishing warp, where tiles of dQ are taken in parts
WAVES = 3  # key tiles of every thread block for whose heads there is room: under work, loaded, being finished


def _crowded(problem: AttentionProblem) -> bool:
    """Whether three warpgroups have too few registers in the forward: for the words of dropout (two are faster, 258 to 236 TFLOP/s
    under a causal mask), for addresses with slopes under a window (650 bytes would be spilled), or for a large score function.
    """
    windowed = problem.left is not None or (problem.right is not None and problem.causal is None)
    heavy = problem.score is not None and not light(problem.score)
    return problem.dropout > 0 or (windowed and problem.has("alibi_slopes")) or heavy


def _forward_possible(t: ForwardTile, problem: AttentionProblem) -> bool:
    """Have scores, their 16-bit copy and the output room in what the kernel gives a thread that computes?"""
    return t.keys * 3 // 4 + pad(problem.dim_v, 16) // 2 <= t.registers - 32


def _backward_possible(t: BackwardTile, problem: AttentionProblem) -> bool:
    """How the warpgroups share out the keys is in the table."""
    return (t.keys, t.groups) in {(row.keys, row.groups) for row in BACKWARD}


TILES: dict[bool, Tiles[Any]] = {
    False: Tiles(FORWARD, {
        "groups": (1, 2, 3, 4), "keys": (64, 80, 96, 128, 192), "stages": (2, 3, 4), "blocks": (1, 2, 3, 4), "spills": (0,),
    }, _forward_possible),
    True: Tiles(BACKWARD, {
        "rows": (64, 80, 96, 128), "keys": (64, 80, 96, 128), "groups": (2, 3), "stages": (1, 2), "do_stages": (1, 2),
        "spills": (0,),
    }, _backward_possible),
}  # fmt: skip


def plan(problem: AttentionProblem, arch: Arch, backward: bool, tile: Sequence[int] | None) -> KernelPlan:
    return (_backward if backward else _forward)(problem, arch, tile)


def _padded(problem: AttentionProblem) -> tuple[int, int]:
    """The head dimensions that kernels are compiled for: 32 where both are, of 16-bit numbers."""
    least = DIMS[0] if max(problem.dim, problem.dim_v) <= DIMS[0] and problem.dtype != FLOAT8 else 64
    dim, dim_v = (next(d for d in DIMS if max(n, least) <= d) for n in (problem.dim, problem.dim_v))
    return dim, dim_v


TURNED_KEYS = 128  # of the block that turns V (kernels_cu/sm90/turned_values.cuh)
RESERVED = 1024  # bytes of a multiprocessor's shared memory that each thread block takes for itself
BARRIERS = 256  # bytes for barriers, more than any ring takes


def _share(arch: Arch, blocks: int) -> int:
    """Bytes of shared memory that each of so many thread blocks of a multiprocessor can have."""
    return (arch.shared_memory + RESERVED) // blocks - RESERVED


@dataclass(frozen=True)
class PairTiles:
    """Tiles of the arrays over pairs, mask and bias, in shared memory, `stages` in flight."""

    problem: AttentionProblem
    stages: int = 1

    def _given(self) -> list[tuple[str, int, bool]]:
        """Name, bytes of an element, and whether queries differ."""
        found = [x for x in self.problem.given if x.name in PAIRWISE]
        return [(x.name, ITEMSIZE[x.dtype], "query" in x.axes) for x in found]

    def memory(self, rows: int, keys: int) -> int:
        """Bytes of all: blocks of 128 bytes a row."""
        tiles = [ceil(keys * size, 128) * (128 * rows if by_query else 1024) for _, size, by_query in self._given()]
        return self.stages * sum(tiles)

    def boxes(self, rows: int) -> tuple[Box, ...]:
        return tuple(Box(name, rows if by_query else 1) for name, _, by_query in self._given())

    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        by_query = {name: differ for name, _, differ in self._given()}
        flags = ((f"{name.upper()}_BY_QUERY", by_query.get(name, False)) for name in PAIRWISE)
        return ("PAIR_STAGES", self.stages), *flags


def forward_memory(
    t: ForwardTile, dim: int, dim_v: int, q_stages: int, o_staged: bool, pairs: PairTiles, size: int = 2
) -> int:
    """Bytes of shared memory that the forward lays out for inputs of `size` bytes."""
    row = pad(size * dim, 128)  # bytes in shared memory
    values = t.keys * pad(size * dim_v, 128) if size > 1 else dim_v * pad(t.keys, 128)
    rings = t.stages * (t.keys * row + values) + pairs.memory(t.rows, t.keys) + BARRIERS
    return rings + t.rows * (q_stages * row + o_staged * pad(2 * dim_v, 128))


class ForwardFit(NamedTuple):
    """A tile and what there is room for beside it."""

    tile: ForwardTile
    q_stages: int
    o_staged: bool
    pairs: PairTiles
    packed: bool
    memory: int  # bytes of shared memory


def _by_load(problem: AttentionProblem, arch: Arch) -> tuple[ForwardTile, ...]:
    """NARROW; those come last that give some multiprocessor too much to do."""

    def load(t: ForwardTile) -> int:  # rows of its tiles, also those in vain
        tiles = problem.batch * problem.heads_q * ceil(problem.seq_q, t.rows)
        return ceil(tiles, arch.sms) * t.rows

    least = min(map(load, NARROW))
    return tuple(sorted(NARROW, key=lambda t: load(t) > OVERLOAD * least))


def _fit_forward(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> ForwardFit | None:
    dim, dim_v = _padded(problem)
    listed = problem.block_mask is not None
    banded = listed or problem.left is not None or problem.right is not None
    paired = bool(_paired(problem))
    # With few heads too, thread blocks would stand idle, and each is as long at a tile.
    few, heads = problem.seq_q <= FEW, problem.batch * problem.heads_q
    packed = (
        few
        and problem.dtype != FLOAT8
        and problem.group > 1
        and 2 * heads > arch.sms
        and not (paired or listed or problem.dropout)
    )
    short = few and problem.seq_k <= FEW and heads > arch.sms
    busy, crowded = scored(problem) or problem.dropout > 0, _crowded(problem)
    first = PACKED if packed else SHORT if short else LISTED if listed else _by_load(problem, arch)
    eight = problem.dtype == FLOAT8
    rows: tuple[ForwardTile, ...] = (
        (*([TILES[False].tile(tile)] if tile else ()), *EIGHT) if eight else TILES[False].rows(tile, first)
    )
    # Q tiles in flight: 2 where there is room, so that the next tile's comes early. And has the output shared memory to
    # leave through? It leaves in boxes of one head.
    staged = not packed and problem.result_dtype != FLOAT8  # in boxes of 16-bit numbers
    room = [(q, o, n) for n in (PAIR_STAGES if paired else (1,)) for q, o in ((2, staged), (2, False), (1, False))]
    for t, (q_stages, o_staged, pair_stages) in itertools.product(rows, room):
        pairs = PairTiles(problem, pair_stages)
        size = forward_memory(t, dim, dim_v, q_stages, o_staged, pairs, ITEMSIZE[problem.dtype])
        fits = max(dim, dim_v) <= t.dim and t.banded in (None, banded) and t.scored in (None, busy)
        fits = fits and t.crowded in (None, crowded)
        if fits and size <= _share(arch, t.blocks):
            return ForwardFit(t, q_stages, o_staged, pairs, packed, size)
    return None


def _forward(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = _fit_forward(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, q_stages, o_staged, pairs, packed, size = found
    dim, dim_v = _padded(problem)
    listed = problem.block_mask is not None
    banded = listed or problem.left is not None or problem.right is not None
    pack = next(n for n in PACKS if t.rows // n >= problem.seq_q) if packed else 1
    span = t.rows // pack  # queries of each of `pack` heads
    tiles = problem.batch * problem.heads_k * ceil(problem.group, pack) * ceil(problem.seq_q, span)
    if tiles >= 2**30:
        raise ValueError(f"q has batch {problem.batch} and {problem.heads_q} heads: {tiles} tiles; less than 2**30 fit")
    # Where tiles differ in length, thread blocks ask for their next one.
    alike = problem.seq_q <= t.rows or not (banded or problem.seq_q % t.rows)
    grid = min(tiles, t.blocks * arch.sms)
    dynamic = not alike and tiles > grid
    constants = (
        ("DIM", dim), ("DIM_V", dim_v), ("GROUPS", t.groups), ("BLOCKS", t.blocks), ("KEYS", t.keys), ("STAGES", t.stages),
        ("Q_STAGES", q_stages), ("O_STAGED", o_staged), ("PACK", pack), ("SHARED_MEMORY", size), *pairs.constants(),
        *features(problem),
    )  # fmt: skip
    launches = [Launch("attention_forward", grid, 128 * (t.groups + 1), size)]
    spaces, values = [Workspace("counters", "uint32", (3 if dynamic else 0,))], Box("v", t.keys)
    if problem.dtype == FLOAT8:  # V is turned before
        tiles_k = ceil(problem.seq_k, TURNED_KEYS)
        launches.insert(0, Launch("attention_turn", problem.batch * problem.heads_k * tiles_k, 256))
        shape = (problem.batch, problem.heads_k, dim_v, tiles_k * TURNED_KEYS)
        spaces.append(Workspace("turned", problem.dtype, shape))
        values = Box("turned", dim_v)
    return KernelPlan(
        "sm90", arch.name, problem.dtype, False, "sm90/forward.cu", constants,
        tuple(launches), 16, tuple(spaces), t.spills,
        (*pairs.boxes(t.rows), Box("q", span, pack), Box("k", t.keys), values, Box("out", 64)),
        given=problem.given, lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")), out_dtype=problem.out_dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class Finish:
    """How float32 sums of dQ are turned to rows: by so many warps of the warpgroup that moves data."""

    warps: int
    fragments: int  # of 512 bytes, that one turns at a time
    stages: int  # and how many times as many are in flight


FINISH = (Finish(2, 8, 4), Finish(2, 8, 2), Finish(2, 8, 1), Finish(1, 2, 1))  # the first that there is room for
NO_FINISH = Finish(0, 2, 1)


def _whole(problem: AttentionProblem, t: BackwardTile) -> bool:
    """Whether a tile has all keys of a head: then its part of dQ is all of it, and leaves without float32 sums."""
    return not t.wide and 0 < problem.seq_k <= t.keys and problem.block_mask is None


def backward_memory(t: BackwardTile, finish: Finish, dim: int, dim_v: int, pairs: PairTiles) -> int | None:
    """Bytes of shared memory that the backward lays out; None for a tile that it cannot take."""
    blocks, blocks_v = pad(dim, 64), pad(dim_v, 64)  # columns in shared memory
    if t.wide and (
        t.rows != 64 or t.stages != 2 or dim > 64 * t.groups * (1 + t.clustered) or (t.clustered and t.keys % 32)
    ):
        return None
    if t.shares_rows(dim) and t.rows % (16 * t.groups):
        return None
    part_rows = t.part_rows(dim)
    if part_rows // 8 % (finish.fragments // 2):
        return None
    s_tile = 2 * (t.keys * pad(t.rows, 64) if t.wide else t.rows * pad(t.keys, 64))  # of P or dS
    parts = 256 * t.groups * part_rows
    if not t.wide and t.groups * 2 * 64 * (blocks + blocks_v) > 2 * s_tile + parts:  # dK and dV leave there
        return None
    size = 2 * (t.keys * (blocks + blocks_v) + t.rows * (t.stages * blocks + t.do_stages * blocks_v))
    size += t.stages * 8 * t.rows + pairs.memory(t.rows, t.keys) + BARRIERS  # lse and delta
    # P, dS of two steps, also the other block's, and some columns of its K; else dS of two steps, or P and dS.
    size += 5 * s_tile + 2 * t.keys * 64 * t.groups if t.clustered else 2 * s_tile + parts
    return size + finish.warps * finish.stages * (512 * finish.fragments + 16)


class BackwardFit(NamedTuple):
    """A tile and what there is room for beside it."""

    tile: BackwardTile
    finish: Finish
    pairs: PairTiles
    memory: int  # bytes of shared memory


def _fit_backward(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> BackwardFit | None:
    dim, dim_v = _padded(problem)
    busy = scored(problem) or problem.has("mask") or problem.dropout > 0
    short = max(problem.seq_q, problem.seq_k) <= FEW
    rows: tuple[BackwardTile, ...] = TILES[True].rows(tile, SHORT_BACKWARD if short else ())
    ways = (
        (t, n, finish)
        for t in rows
        for n in (PAIR_STAGES if _paired(problem) else (1,))
        for finish in ((NO_FINISH,) if _whole(problem, t) else FINISH)
    )
    for t, pair_stages, finish in ways:
        pairs = PairTiles(problem, pair_stages)
        size = backward_memory(t, finish, dim, dim_v, pairs)
        fits = max(dim, dim_v) <= t.dim and t.scored in (None, busy)
        if fits and size is not None and size <= _share(arch, t.blocks):
            return BackwardFit(t, finish, pairs, size)
    return None


def _backward(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = _fit_backward(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 backward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, finish, pairs, size = found
    dim, dim_v = _padded(problem)
    whole = _whole(problem, t)
    cluster, clusters = t.cluster, t.blocks * arch.sms // t.cluster  # those at work at once
    kv_heads, key_tiles = problem.batch * problem.heads_k, ceil(problem.seq_k, cluster * t.keys)
    tiles = problem.group * ceil(problem.seq_q, t.rows)  # of queries, for one head of K and V
    for name, heads, n in (("k", problem.heads_k, key_tiles), ("q", problem.heads_q, tiles)):
        if kv_heads * n >= 2**30:
            raise ValueError(
                f"{name} has batch {problem.batch} and {heads} heads: {kv_heads * n} tiles; less than 2**30 fit"
            )
    shares = _shares(problem, t, clusters)
    together, resident = _dealt_out(problem, t, shares, clusters)
    summed = (
        kv_heads * key_tiles * cluster * t.groups if shares > 1 else 0
    )  # workers' keys whose sums are left in memory
    share_sums = 128 * t.sums(dim, dim_v)  # numbers of one of them
    parts = 1 if whole else _finish_parts(t, dim, kv_heads * tiles, max(1, finish.warps) * clusters * cluster)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), ("ROWS", t.rows), ("KEYS", t.keys), ("GROUPS", t.groups), ("CLUSTER", cluster),
        ("STAGES", t.stages), ("DO_STAGES", t.do_stages), ("FINISHERS", finish.warps),
        ("FINISH_FRAGMENTS", finish.fragments), ("FINISH_STAGES", finish.stages), ("FINISH_PARTS", parts), ("SHARED_MEMORY", size),
        *pairs.constants(), *features(problem), ("DETERMINISTIC", problem.deterministic and not whole),
        ("VECTOR_RED", True),
        ("SHARES", shares > 1), ("SHARE_SUMS", share_sums), ("WHOLE_DQ", whole),
    )  # fmt: skip
    launches = (
        Launch("attention_backward_prepare", kv_heads * tiles, 128),
        Launch(
            "attention_backward", cluster * min(kv_heads * key_tiles * shares, clusters), 128 * (t.groups + 1), size
        ),
    )
    workspace = (
        Workspace(
            "delta", "float32", (problem.batch * problem.heads_q, ceil(problem.seq_q, t.rows), 2, t.rows), t.rows
        ),  # and lse
        Workspace("dq_sum", "float32", (0 if whole else resident * ceil(tiles, shares), t.rows * dim)),
        Workspace("counters", "uint32", (2 + kv_heads * shares + kv_heads * tiles + summed,)),
        Workspace("share_sums", "float32", (summed * shares, share_sums)),
    )
    out_rows = t.keys if t.wide else 64  # of dK and dV that leave at once: all, or a warpgroup's own
    maps = (
        *pairs.boxes(t.rows), Box("q", t.rows), Box("k", t.keys), Box("v", t.keys), Box("dout", t.rows), Box("dk", out_rows),
        Box("dv", out_rows), *([Box("dq", t.part_rows(dim))] if whole else []),
    )  # fmt: skip
    return KernelPlan(
        "sm90", arch.name, problem.dtype, True, "sm90/backward.cu", constants, launches, 16, workspace,
        t.spills + (shares > 1) * SHARE_SPILLS + whole * WHOLE_SPILLS + LISTED_SPILLS * (problem.block_mask is not None), maps,
        (("together", together), ("resident", resident), ("shares", shares)), problem.given,
        lists=both_ways(problem, t.rows, cluster * t.keys, "queries" if t.wide else "keys"),
    )  # fmt: skip


def _shares(problem: AttentionProblem, t: BackwardTile, clusters: int) -> int:
    """In how many shares the query tiles of a head of K and V are dealt out."""
    keys, queries = t.keys * t.cluster, problem.group * ceil(problem.seq_q, t.rows)
    all_tiles = problem.batch * problem.heads_k * ceil(problem.seq_k, keys)
    most = min(MOST_SHARES, SHARED_TILES * clusters // max(1, all_tiles), queries)
    if most < 2 or problem.block_mask is not None:  # whose visits are not known here
        return 1
    walks = _walks(problem, t.rows, keys)
    if problem.group * max(map(len, walks), default=0) < LONG_WALK:
        return 1
    times = {n: _time(problem, t, walks, n, clusters) for n in range(1, most + 1)}
    best = min(times, key=lambda n: times[n])
    return best if times[best] * WORTH_SHARING < times[1] else 1


def _finish_parts(t: BackwardTile, dim: int, tiles: int, warps: int) -> int:
    """In how many parts a tile of dQ is turned to rows, where tiles are few beside the warps that do: its time comes after all else."""
    columns = dim // 32 * (t.groups if t.shares_rows(dim) else 1)  # a part is some of them
    parts = max(n for n in (1, 2, 3, 4) if columns % n == 0)
    return parts if parts * tiles <= FINISH_TICKETS * warps else 1


def _walks(problem: AttentionProblem, rows: int, keys: int) -> list[range]:
    """The tiles of `rows` queries of a head that visit each tile of `keys` keys."""
    found = []
    for begin in range(0, problem.seq_k, keys):
        first, end = 0, problem.seq_q
        if problem.right is not None:
            first = max(0, begin - problem.diagonal - problem.right)
        if problem.left is not None:
            end = min(end, min(begin + keys, problem.seq_k) - problem.diagonal + problem.left)
        found.append(range(first // rows, ceil(end, rows)) if first < end else range(0))
    return found


def _time(problem: AttentionProblem, t: BackwardTile, walks: list[range], shares: int, clusters: int) -> float:
    """How long the backward takes, in visits of a query tile: clusters take key tiles in the order of their tickets."""
    tiles, heads = ceil(problem.seq_q, t.rows), problem.batch * problem.heads_k * shares
    together, _ = _dealt_out(problem, t, shares, clusters)

    def before(n: int, walk: range) -> int:
        """How many of the first n query tiles, head by head, visit a key tile."""
        return n // tiles * len(walk) + min(max(0, n % tiles - walk.start), len(walk))

    bounds = [problem.group * tiles * n // shares for n in range(shares + 1)]
    costs = [
        [before(end, x) - before(begin, x) + SHARE_COST + (shares > 1) * SUMS_COST for x in walks]
        for begin, end in itertools.pairwise(bounds)
    ]
    costs[-1] = [cost + (shares > 1) * shares * SUMS_COST for cost in costs[-1]]
    busy = [0.0] * clusters
    for first in range(0, heads, together):
        for tile in range(len(walks)):
            for n in range(first, min(first + together, heads)):
                heapq.heapreplace(busy, busy[0] + costs[n % shares][tile])
    return max(busy)


def _dealt_out(problem: AttentionProblem, t: BackwardTile, shares: int, clusters: int) -> tuple[int, int]:
    """Heads of K and V, or shares of their queries, whose key tiles are dealt out as one, and for how many there is room for
    sums of dQ."""
    heads, key_tiles = problem.batch * problem.heads_k * shares, ceil(problem.seq_k, t.keys * t.cluster)
    queries = ceil(problem.group * problem.seq_q, shares)
    tiles = ceil(problem.group * ceil(problem.seq_q, t.rows), shares)  # of them
    # A causal mask makes key tiles of different length: those of some heads are dealt out together, long ones first. Of one
    # long head the first tile takes as long as all others do on all multiprocessors: at the end they would stand idle.
    traffic = queries * (6 * problem.dim + 2 * problem.dim_v)
    together, spare = 1, ceil(WAVES * clusters, key_tiles)
    if problem.block_mask is not None and not problem.deterministic:  # the longest tiles of all heads are the first
        return min(heads, max(2, ceil(2 * CACHE, traffic))), heads
    if problem.right is not None:
        long = problem.seq_q > LONG
        together = min(heads, max(2, ceil(2 * CACHE, traffic)) if long else max(1, CACHE // traffic))
    # The key tiles of a head add to dQ in order. Taken at once, each would wait for the one before: all but one stand idle
    # for some steps. So they are taken some steps apart, and in between those of other heads.
    elif problem.deterministic:
        groups = ceil(heads, ceil(APART * clusters, tiles))
        together = ceil(heads, groups)
        spare = max(0, spare - together)  # a head is under work for as long as all of them
    return together, min(heads, 2 * together + spare)
