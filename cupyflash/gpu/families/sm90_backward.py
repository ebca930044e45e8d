"""The plan of the Hopper backward."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...passes import BACKWARD
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Tiles, Workspace, ceil, features, pad, scored
from .sm80 import both_ways
from .sm90_memory import BARRIERS, FEW, PairTiles, dots, padded, pair_stages, room


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


# What may be spilled are addresses: the moving warps', and a worker's, once per tile or where it adds to dQ in turn.
BACKWARD_TILES = (
    BackwardTile(128, 128, 2, 2, 2, spills=184, dim=64, scored=False),
    BackwardTile(64, 128, 2, 2, 2, spills=32, dim=64),
    BackwardTile(64, 128, 2, 2, 2, dim=128, scored=False),
    BackwardTile(64, 128, 2, 2, 2, spills=352, dim=128),  # with everything at once; a soft cap or a bias alone 64
    BackwardTile(64, 96, 3, 2, 1, spills=32, dim=192, scored=False),
    BackwardTile(64, 96, 3, 2, 1, spills=224, dim=192),
    BackwardTile(64, 64, 2, 2, 1, spills=32, scored=False),
    BackwardTile(64, 64, 2, 2, 1, spills=200),
)
# Of short sequences, where a head is one tile: two warpgroups of 128 queries and keys would have three quarters of it in vain.
SHORT_BACKWARD = (BackwardTile(64, 64, 1, 2, 2, dim=64),)
LISTED_SPILLS = 192  # more, with a block mask: its addresses
# The backward's order of key tiles, and room for sums of dQ.
CACHE = 16 << 20  # bytes of the L2 cache that Q, dO and dQ of heads dealt out together take; twice where tiles are
LONG = 1024  # longer than this, in queries
APART = 2  # deterministic, no causal mask: steps between two key tiles of a head
# Shares of a head's query tiles: at most so many; for each multiprocessor at most so many key tiles of them; what is not the
# visit of a query tile, in visits: a key tile's beginning and end, and its sums on their way to memory or back.
MOST_SHARES, SHARED_TILES = 32, 32
SHARE_COST, SUMS_COST = 1.5, 0.5
# A visit takes so much longer for each doubling of what Q, dO and dQ of the shares under work take beyond what the L2 cache holds.
SPILLED_COST, HELD = 0.08, 6 * CACHE
ENOUGH = 1.02  # times the least
LONG_WALK, WORTH_SHARING = 24, 1.08  # from so many visits on, and where so much is gained by that reckoning
SHARE_SPILLS = 128  # bytes: where a share begins
WHOLE_SPILLS = 48  # where the warp that sends dQ begins with a head
FINISH_TICKETS = 4  # for each finishing warp, where tiles of dQ are taken in parts
FEW_ADD = 8  # key tiles to each tile of dQ, in a window of no more than this part of the keys
WAVES = 3  # key tiles of every thread block for whose heads there is room: under work, loaded, being finished


def _possible(t: BackwardTile, problem: AttentionProblem) -> bool:
    """How the warpgroups share out the keys is in the table."""
    return (t.keys, t.groups) in {(row.keys, row.groups) for row in BACKWARD_TILES}


TILES = Tiles(BACKWARD_TILES, {
    "rows": (64, 80, 96, 128), "keys": (64, 80, 96, 128), "groups": (2, 3), "stages": (1, 2), "do_stages": (1, 2),
    "spills": (0,),
}, _possible)  # fmt: skip


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


def fit(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> BackwardFit | None:
    dim, dim_v = padded(problem)
    busy = scored(problem) or problem.has("mask") or problem.dropout > 0
    short = max(problem.seq_q, problem.seq_k) <= FEW
    rows: tuple[BackwardTile, ...] = TILES.rows(tile, SHORT_BACKWARD if short else ())
    ways = (
        (t, n, finish)
        for t in rows
        for n in pair_stages(problem)
        for finish in ((NO_FINISH,) if _whole(problem, t) else FINISH)
    )
    for t, in_flight, finish in ways:
        pairs = PairTiles(problem, in_flight)
        size = backward_memory(t, finish, dim, dim_v, pairs)
        fits = max(dim, dim_v) <= t.dim and t.scored in (None, busy)
        if fits and size is not None and size <= room(arch, t.blocks):
            return BackwardFit(t, finish, pairs, size)
    return None


def plan(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = fit(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 backward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, finish, pairs, size = found
    dim, dim_v = padded(problem)
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
    first_stores = not whole and shares == 1 and cluster == 1 and _few_add(problem, t)
    parts = 1 if whole else _finish_parts(t, dim, kv_heads * tiles, max(1, finish.warps) * clusters * cluster)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), *dots(problem), ("ROWS", t.rows), ("KEYS", t.keys), ("GROUPS", t.groups), ("CLUSTER", cluster),
        ("STAGES", t.stages), ("DO_STAGES", t.do_stages), ("FINISHERS", finish.warps),
        ("FINISH_FRAGMENTS", finish.fragments), ("FINISH_STAGES", finish.stages), ("FINISH_PARTS", parts), ("SHARED_MEMORY", size),
        *pairs.constants(), *features(problem), ("DETERMINISTIC", problem.deterministic and not whole),
        ("FIRST_STORES", first_stores), ("VECTOR_RED", True),
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
        Workspace("counters", "uint32", (2 + kv_heads * shares + kv_heads * tiles + max(summed, first_stores),)),
        Workspace("share_sums", "float32", (summed * shares, share_sums)),
    )
    out_rows = t.keys if t.wide else 64  # of dK and dV that leave at once: all, or a warpgroup's own
    maps = (
        *pairs.boxes(t.rows), Box("q", t.rows), Box("k", t.keys), Box("v", t.keys), Box("dout", t.rows), Box("dk", out_rows),
        Box("dv", out_rows), *([Box("dq", t.part_rows(dim))] if whole else []),
    )  # fmt: skip
    spills = t.spills + (shares > 1) * SHARE_SPILLS + whole * WHOLE_SPILLS
    spills += LISTED_SPILLS * (problem.block_mask is not None)
    return KernelPlan(
        family="sm90",
        arch=arch.name,
        dtype=problem.dtype,
        of=BACKWARD,
        source="sm90/backward.cu",
        constants=constants,
        launches=launches,
        alignment=16,
        workspace=workspace,
        spills=spills,
        maps=maps,
        scalars=(("together", together), ("resident", resident), ("shares", shares)),
        given=problem.given,
        lists=both_ways(problem, t.rows, cluster * t.keys, "queries" if t.wide else "keys"),
    )


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
    tried = [n for n in range(1, most + 1) if n <= 8 or n % 4 == 0]
    times = {n: _time(problem, t, walks, n, clusters) for n in tried}
    least = min(times.values())
    best = next(n for n in tried if times[n] <= ENOUGH * least)  # the fewest: their sums take memory
    return best if times[best] * WORTH_SHARING < times[1] else 1


def _few_add(problem: AttentionProblem, t: BackwardTile) -> bool:
    """Whether a window lets few key tiles add to each tile of dQ: then the first stores, and there need be no zeros."""
    if problem.left is None or problem.right is None or problem.block_mask is not None or problem.deterministic:
        return False
    # (Short beside the sequence: key tiles start from the last one, which under a causal mask has the fewest queries.)
    return problem.left + problem.right <= min(FEW_ADD * t.keys, problem.seq_k // FEW_ADD)


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
    under_work = min(heads, max(together, ceil(clusters, len(walks)))) * _traffic(problem, shares)
    if _whole(problem, t):  # each is read once, and there are no sums
        return max(busy)
    return max(busy) * (1 + SPILLED_COST * max(0.0, math.log2(max(1, under_work) / HELD)))


def _traffic(problem: AttentionProblem, shares: int) -> int:
    """Bytes of Q, dO and the sums of dQ of a share."""
    return ceil(problem.group * problem.seq_q, shares) * (6 * problem.dim + 2 * problem.dim_v)


def _dealt_out(problem: AttentionProblem, t: BackwardTile, shares: int, clusters: int) -> tuple[int, int]:
    """Heads of K and V, or shares of their queries, whose key tiles are dealt out as one, and for how many there is room for
    sums of dQ."""
    heads, key_tiles = problem.batch * problem.heads_k * shares, ceil(problem.seq_k, t.keys * t.cluster)
    tiles = ceil(problem.group * ceil(problem.seq_q, t.rows), shares)  # of them
    # A causal mask makes key tiles of different length: those of some heads are dealt out together, long ones first. Of one
    # long head the first tile takes as long as all others do on all multiprocessors: at the end they would stand idle.
    traffic = _traffic(problem, shares)
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
