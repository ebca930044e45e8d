"""The plan of the Hopper backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...passes import BACKWARD
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import (
    Box,
    KernelPlan,
    Launch,
    Workspace,
    both_ways,
    ceil,
    features,
    key_tiles,
    pad,
    places,
    query_tiles,
    room,
    scored,
)
from . import sm90_backward_cost as cost
from .likely import as_dense
from .sm90_backward_tiles import (
    BACKWARD_TILES,
    SHORT_BACKWARD,
    TILES,
    BackwardTile,
    cluster_keys,
    column_parts,
    has_all_keys,
    some_have_all_keys,
    weighed,
)
from .sm90_memory import BARRIERS, FEW, ORDERED_WORDS, PairTiles, check_tiles, common, dots, padded, pair_stages

LISTED_SPILLS = 192  # more, with a block mask: its addresses
LENGTHS_SPILLS = 160  # more, where lengths or places are data: those of a tile's sequence
SHARE_SPILLS = 128  # bytes: where a share begins
COLUMN_SPILLS = 264  # more, where columns are shared out: where lie what is sent to the other block, and what is read
WHOLE_SPILLS = 48  # where the warp that sends dQ begins with a head, or consumers store it
CLUSTER_BARRIERS = 64  # bytes more, of what the blocks of a cluster send to each other
FINISH_TICKETS = 12  # for each finishing warp, where tiles of dQ are taken in parts
SUMS = 208  # that a thread of the narrow consumers has registers for: of S and dP, dK and dV
FEW_COLUMNS = 64  # with more, what scores take leaves no registers for rows of dQ
FEW_ADD = 8  # key tiles to each tile of dQ, in a window of no more than this part of the keys


@dataclass(frozen=True)
class Finish:
    """How float32 sums of dQ are turned to rows: by so many warps of the warpgroup that moves data."""

    warps: int
    fragments: int  # of 512 bytes, that one turns at a time
    stages: int  # and how many times as many are in flight


FINISH = (  # the first that there is room for
    *(Finish(2, n, stages) for stages in (4, 2, 1) for n in (8, 12, 6)),
    Finish(1, 6, 1),
    Finish(1, 2, 1),
)
NO_FINISH = Finish(0, 2, 1)


def backward_memory(
    t: BackwardTile, finish: Finish, dim: int, dim_v: int, pairs: PairTiles, parts_of_columns: int = 1
) -> int | None:
    """Bytes of shared memory that a thread block with so many columns lays out; None for a tile that it cannot take."""
    if parts_of_columns > t.cluster or dim - t.rest(dim) > 64 * t.warpgroups * t.cluster:  # 64 columns of dQ for each
        return None
    if t.rest(dim) > 64 or (t.rest(dim) and t.rows % (8 * t.warpgroups)):
        return None
    if not t.wide and t.rows + t.sums(dim, dim_v) > SUMS:
        return None
    blocks, blocks_v = pad(dim, 64), pad(dim_v, 64)  # columns in shared memory
    if t.wide and (t.rows != 64 or t.stages != 2 or (t.clustered and t.keys % 32)):
        return None
    if t.shares_rows(dim) and t.rows % (16 * t.warpgroups):
        return None
    part_rows = t.part_rows(dim)
    if part_rows // 8 % (finish.fragments // 2):
        return None
    s_tile = 2 * (t.keys * pad(t.rows, 64) if t.wide else t.rows * pad(t.keys, 64))  # of P or dS
    parts = 256 * t.warpgroups * part_rows + 4 * t.rows * t.rest(dim)
    if not t.wide and t.warpgroups * 2 * 64 * max(blocks, blocks_v) > 2 * s_tile + parts:  # dK and dV leave there
        return None
    size = 2 * (t.keys * (blocks + blocks_v) + t.rows * (t.stages * blocks + t.do_stages * blocks_v))
    size += t.stages * 8 * t.rows + pairs.memory(t.rows, t.keys)  # lse and delta
    size += BARRIERS + t.clustered * CLUSTER_BARRIERS
    # P, dS of two steps, also the other block's, and some columns of its K; else dS of two steps, or P and dS.
    # Of columns: P, dS of two steps, and what the other block has of S and dP.
    if parts_of_columns > 1:
        size += 3 * s_tile + 2 * 4 * t.rows * t.keys
    else:
        size += 5 * s_tile + 2 * t.keys * 64 * t.warpgroups if t.clustered else 2 * s_tile + parts
    return size + finish.warps * finish.stages * (512 * finish.fragments + 16)


class BackwardFit(NamedTuple):
    """A tile and what there is room for beside it."""

    tile: BackwardTile
    finish: Finish
    pairs: PairTiles
    memory: int  # bytes of shared memory


def fit(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> BackwardFit | None:
    likely = as_dense(problem)
    short = max(likely.seq_q, likely.seq_k) <= FEW
    first = SHORT_BACKWARD * short + _first(problem, likely, arch)
    rows: tuple[BackwardTile, ...] = TILES.rows(tile, first)
    return next((found for t in rows if (found := _fit(problem, arch, t)) is not None), None)


def _fit(problem: AttentionProblem, arch: Arch, t: BackwardTile) -> BackwardFit | None:
    """The tile with most beside it that there is room for."""
    dim, dim_v = _columns(problem, t)
    if max(dim, dim_v) > t.dim or t.scored not in (None, _busy(problem)):
        return None
    for in_flight in pair_stages(problem):
        pairs = PairTiles(problem, in_flight)
        for finish in (NO_FINISH,) if has_all_keys(problem, t) else FINISH:
            size = backward_memory(t, finish, dim, dim_v, pairs, column_parts(problem))
            if size is not None and size <= room(arch, t.blocks):
                return BackwardFit(t, finish, pairs, size)
    return None


def _first(problem: AttentionProblem, likely: AttentionProblem, arch: Arch) -> tuple[BackwardTile, ...]:
    """Tiles that are weighed with each other, what takes least first."""
    dim = max(padded(problem))
    found = [t for t in weighed(likely, dim) if _fit(problem, arch, t) is not None]
    if dim > FEW_COLUMNS and not any(has_all_keys(problem, t) for t in found):
        found += [t for t in BACKWARD_TILES if has_all_keys(problem, t) and _fit(problem, arch, t) is not None][:1]

    def effort(t: BackwardTile) -> float:
        if dim <= FEW_COLUMNS:
            return cost.effort(likely, t, arch.sms)
        return cost.shared_effort(likely, t, _dealt(problem, t, arch), _clusters(arch, t))

    # Those whose dQ is no sum come first.
    return tuple(sorted(found, key=lambda t: (not has_all_keys(problem, t), effort(t))) if len(found) > 1 else found)


def _clusters(arch: Arch, t: BackwardTile) -> int:
    """Those at work at once."""
    return max(1, t.blocks * arch.sms // t.cluster)


def _dealt(problem: AttentionProblem, t: BackwardTile, arch: Arch) -> cost.Dealt:
    sums = 4 * _consumers(problem, t) * 128 * t.sums(*_columns(problem, t))
    return cost.shares(problem, t, _clusters(arch, t), sums)


def _consumers(problem: AttentionProblem, t: BackwardTile) -> int:
    """Warpgroups that own keys of a head."""
    return ceil(problem.seq_k, cluster_keys(problem, t)) * t.cluster * t.warpgroups


def _busy(problem: AttentionProblem) -> bool:
    """Whether what is done with scores takes registers."""
    return scored(problem) or problem.has("mask") or problem.dropout > 0


def _columns(problem: AttentionProblem, t: BackwardTile) -> tuple[int, int]:
    """Of Q and K, and of V, that a thread block has, padded: where they are shared out, to whole blocks of 64."""
    n = column_parts(problem)
    if n == 1 and not t.wide:
        own = problem.dim, problem.dim_v
        dim, dim_v = (x if x <= 64 else pad(least, 16) for x, least in zip(padded(problem), own))
        return dim, dim_v
    return padded(problem) if n == 1 else (pad(ceil(problem.dim, n), 64), pad(ceil(problem.dim_v, n), 64))


def plan(problem: AttentionProblem, arch: Arch, tile: Sequence[int] | None) -> KernelPlan:
    found = fit(problem, arch, tile)
    if found is None:
        raise ValueError(f"no sm90 backward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    t, finish, pairs, size = found
    columns, (dim, dim_v), likely = column_parts(problem), _columns(problem, t), as_dense(problem)
    whole, keys = has_all_keys(problem, t), cluster_keys(problem, t)
    cluster, clusters = t.cluster, _clusters(arch, t)
    # Of all heads; packed sequences are one entry of a batch.
    all_keys, all_queries = key_tiles(problem, keys), query_tiles(problem, t.rows)
    kv_heads = problem.heads_k * (problem.batch if problem.rows_k is None else 1)
    tiles = all_queries // max(1, kv_heads)  # of queries, for one head of K and V
    check_tiles("k", problem, all_keys)
    check_tiles("q", problem, all_queries)
    of_head = all_keys // max(1, kv_heads)
    share_sums = 128 * t.sums(dim, dim_v)  # numbers that one of them leaves in memory, where queries are in shares
    consumers = of_head * cluster * t.warpgroups  # that own keys of a head
    dealt = _dealt(problem, t, arch)
    heads = dealt.count(kv_heads)  # or shares of their queries
    together, resident = cost.dealt_out(problem, likely, t, dealt, clusters)
    in_shares = dealt.shares > 1
    summed = consumers * (kv_heads - dealt.whole) if in_shares else 0
    first_stores = not whole and not in_shares and cluster == 1 and _few_add(problem, t)
    dq_dim = pad(columns * dim, 32)  # of its sums
    parts = 1 if whole else _finish_parts(t, dq_dim, kv_heads * tiles, max(1, finish.warps) * clusters * cluster)
    ordered = cost.ordered(problem, likely, t)
    short = some_have_all_keys(problem, t) and not t.rest(dim)
    short = short and not (max(dim, dim_v) > FEW_COLUMNS and _busy(problem))
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", columns * dim), ("DIM_V", columns * dim_v), ("COLUMN_PARTS", columns),
        *((name, min(n, own)) for (name, n), own in zip(dots(problem), (dim, dim_v))),
        ("ROWS", t.rows), ("KEYS", t.keys),
        ("WARPGROUPS", t.warpgroups), ("CLUSTER", cluster),
        ("STAGES", t.stages), ("DO_STAGES", t.do_stages), ("FINISHERS", finish.warps),
        ("FINISH_FRAGMENTS", finish.fragments), ("FINISH_STAGES", finish.stages), ("FINISH_PARTS", parts),
        ("SHARED_MEMORY", size),
        *pairs.constants(), *features(problem), ("DETERMINISTIC", problem.deterministic and not whole),
        ("FIRST_STORES", first_stores), ("VECTOR_RED", True),
        ("SHARES", in_shares), ("SHARE_SUMS", share_sums), ("WHOLE_DQ", whole), ("MOVED", False),
        ("WHOLE_BY_LENGTH", short),
        ("ORDERED", ordered), ("BY_VISITS", ordered and cost.by_visits(problem, together)),
    )  # fmt: skip
    cleared = cost.first_cleared(resident, together, clusters, of_head)
    cleared *= bool(finish.warps) and not (first_stores or short)  # (some of these have no sums)
    blocks = clusters if finish.warps else min(of_head * heads, clusters)  # those without keys finish dQ
    launches = (
        Launch("attention_backward_prepare", all_queries + ordered, 128),
        Launch("attention_backward", cluster * blocks, 128 * (t.warpgroups + 1), size, waits=True),
    )
    workspace = [
        Workspace("delta", "float32", (kv_heads * problem.group, tiles // problem.group, 2, t.rows), t.rows),  # and lse
        Workspace("dq_sum", "float32", (0 if whole else resident * ceil(tiles, dealt.most), t.rows * dq_dim)),
        Workspace("counters", "uint32", (2 + heads + all_queries + max(summed, first_stores),)),
        Workspace("share_sums", "float32", (summed * dealt.shares, share_sums)),
    ]
    if ordered:
        lines = 1 + places(problem, problem.rows_k or 0, keys) + places(problem, problem.rows_q or 0, t.rows)
        workspace.append(Workspace("order", "uint32", (ORDERED_WORDS * lines,)))
    out_rows = t.keys if t.wide else 64  # of dK and dV that leave at once: all, or a warpgroup's own
    boxes = [("q", t.rows), ("k", t.keys), ("v", t.keys), ("dout", t.rows), ("dk", out_rows), ("dv", out_rows)]
    boxes += [("dq", t.part_rows(dim))] * (whole and cluster == 1 or short)
    maps = (
        *pairs.boxes(t.rows),
        *(Box(name, n, windows=problem.rows_k is not None and not t.wide) for name, n in boxes),
    )
    spills = t.spills + in_shares * SHARE_SPILLS + whole * WHOLE_SPILLS
    spills += COLUMN_SPILLS * (columns > 1)
    spills += LISTED_SPILLS * (problem.block_mask is not None) + LENGTHS_SPILLS * problem.shifts
    return KernelPlan(
        **common(problem, arch, BACKWARD),
        constants=constants,
        launches=launches,
        workspace=tuple(workspace),
        spills=spills,
        maps=maps,
        scalars=(
            ("together", together),
            ("resident", resident),
            ("shares", dealt.shares),
            ("whole_heads", dealt.whole),
            ("cleared", cleared),
        ),
        lists=both_ways(problem, t.rows, keys, "queries" if t.wide else "keys"),
        out_dtype=problem.out_dtype,
        dq_dtype=problem.dq_dtype,
    )


def _few_add(problem: AttentionProblem, t: BackwardTile) -> bool:
    """Whether a window lets few key tiles add to each tile of dQ: then the first stores, and there need be no zeros."""
    if problem.left is None or problem.right is None or problem.block_mask is not None:
        return False
    if problem.deterministic or problem.ragged:
        return False
    # (Short beside the sequence: key tiles start from the last one, which under a causal mask has the fewest queries.)
    return problem.left + problem.right <= min(FEW_ADD * t.keys, problem.seq_k // FEW_ADD)


def _finish_parts(t: BackwardTile, dim: int, tiles: int, warps: int) -> int:
    """In how many parts a tile of dQ is turned to rows, where tiles are few beside the warps that do: its time comes
    after all else."""
    columns = dim // 32 * (t.warpgroups if t.shares_rows(dim) else 1)  # a part is some of them
    parts = max(n for n in (1, 2, 3, 4) if columns % n == 0)
    return parts if parts * tiles <= FINISH_TICKETS * warps else 1
