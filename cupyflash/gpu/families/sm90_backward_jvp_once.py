"""The plan of the Hopper backward's tangent in one kernel: tdQ is added up in memory, as dQ is in the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...passes import BACKWARD_JVP
from ...problem import ITEMSIZE, AttentionProblem
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
    query_tiles,
    room,
)
from . import sm90_backward_cost as cost
from .sm90_backward import FINISH, Finish
from .sm90_backward_tiles import BackwardTile
from .sm90_memory import BARRIERS, common, dots, padded, paired

NUMBERS = 4  # of each query: lse, delta and their tangents


@dataclass(frozen=True)
class OnceTile(BackwardTile):
    """Of the backward's; where warpgroups share out the columns (`wide`), one thread block alone does."""

    least: int = 0  # for head dimensions above this, as the products have them on average

    @property
    def clustered(self) -> bool:
        return False


# What may be spilled are addresses: with window, block mask, slopes, dropout, a mask of keys and a tangent of dout at
# once, 260 bytes.
SPILLS = 264
# Columns that warpgroups share out are 256 of each, whatever the head dimensions: up to 192 sm80 is faster.
TILES = (
    OnceTile(64, 128, 2, 2, 2, dim=64),
    OnceTile(32, 128, 2, 2, 2, dim=128),
    OnceTile(32, 64, 2, 1, 1, least=192),
)


# Times q's bytes that sums of tdQ and numbers of queries may take: with tout, where that is computed first, 4.
ROOM = 3
BUSY = 2  # key tiles of every thread block between two heads whose sums lie in one place: under work, being finished


class OnceFit(NamedTuple):
    """A tile, what turns sums to rows, bytes of shared memory, and heads: those whose key tiles are dealt out as one,
    and those for whose sums there is room."""

    tile: OnceTile
    finish: Finish
    memory: int
    together: int
    resident: int


def fit(problem: AttentionProblem, arch: Arch) -> OnceFit | None:
    for t in () if untaken(problem) else _tiles(problem):
        for finish in FINISH:
            size = _memory(problem, t) + finish.warps * finish.stages * (512 * finish.fragments + 16)
            if size <= room(arch, 1):
                dealt = _dealt_out(problem, t, arch)
                return OnceFit(t, finish, size, *dealt) if dealt else None
    return None


def untaken(problem: AttentionProblem) -> list[str]:
    """What it does not take, of head dimensions for which it has tiles: arrays over pairs, slopes that are no
    constants, sums in the order of keys, and a tangent of dout where warpgroups share out the columns."""
    tiles = _tiles(problem)
    options = [name for name in ("softcap", "score") if getattr(problem, name) is not None]
    in_order = ["deterministic=True"] if problem.deterministic else []
    of_dout = ["tangent of dout"] if problem.moves("dout") and any(t.wide for t in tiles) else []
    return paired(problem) + options + in_order + of_dout if tiles else []


def _tiles(problem: AttentionProblem) -> list[OnceTile]:
    """Those for its head dimensions."""
    columns = (7 * problem.dim + 3 * problem.dim_v) / 10  # of Q and K are seven products, of V and dO three
    none = not min(problem.dim, problem.dim_v)
    return [t for t in TILES if not none and max(padded(problem)) <= t.dim and columns > t.least]


def _columns(problem: AttentionProblem, t: OnceTile) -> tuple[int, int]:
    """Of Q and K, and of V, that the kernel is compiled for: sums have as many as Q."""
    return (t.dim, t.dim) if t.wide else padded(problem)


def _dealt_out(problem: AttentionProblem, t: OnceTile, arch: Arch) -> tuple[int, int] | None:
    """`together` and `resident` as of the backward, or of as many heads as there is ROOM for; None where key tiles
    would wait for it, and where there are none."""
    if 0 in (problem.batch, problem.heads_k, problem.seq_q, problem.seq_k):
        return None
    together, resident = cost.dealt_out(problem, problem, t, cost.Dealt(), arch.sms)
    heads, each = problem.batch * problem.heads_k, 4 * _columns(problem, t)[0]  # bytes of a query's sums
    most = (ROOM * ITEMSIZE[problem.dtype] * problem.dim - 4 * NUMBERS) * heads // each
    if resident <= most:
        return together, resident
    if problem.block_mask is not None:  # whose longest tiles, of all heads, are the first
        return None
    tiles = ceil(problem.seq_k, t.keys)
    fewer = (n for n in range(together, 0, -1) if (most // n - 1) * n * tiles >= BUSY * arch.sms)
    return next(((n, most) for n in fewer), None)


def _memory(problem: AttentionProblem, t: OnceTile) -> int:
    row = 2 * pad(t.dim, 64)
    q, k, v, dout = (1 + problem.moves(name) for name in ("q", "k", "v", "dout"))
    size = row * (t.keys * (k + v) + t.rows * t.stages * (q + dout)) + t.stages * 4 * NUMBERS * t.rows
    columns = 64 if t.wide else pad(t.dim, 64)  # of a part of tdQ; wide: P and tP are as large
    return size + (2 + t.wide) * 2 * t.rows * t.keys + 4 * columns * t.warpgroups * t.rows + BARRIERS


def plan(problem: AttentionProblem, arch: Arch, found: OnceFit) -> KernelPlan:
    t, finish, size, together, resident = found
    dim, dim_v = _columns(problem, t)
    all_keys, all_queries = key_tiles(problem, t.keys), query_tiles(problem, t.rows)
    kv_heads = problem.heads_k * problem.batch
    tiles = all_queries // max(1, kv_heads)  # of queries, for one head of K and V
    cleared = cost.first_cleared(resident, together, arch.sms, all_keys // max(1, kv_heads))
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), ("COLUMN_PARTS", 1), *dots(problem), ("ROWS", t.rows), ("KEYS", t.keys),
        ("WARPGROUPS", t.warpgroups), ("CLUSTER", 1), ("STAGES", t.stages), ("DO_STAGES", t.do_stages),
        ("FINISHERS", finish.warps), ("FINISH_FRAGMENTS", finish.fragments), ("FINISH_STAGES", finish.stages),
        ("FINISH_PARTS", 1), ("SHARED_MEMORY", size), ("PAIR_STAGES", 1), ("MASK_BY_QUERY", False),
        ("BIAS_BY_QUERY", False), *features(problem), ("DETERMINISTIC", False), ("FIRST_STORES", False),
        ("VECTOR_RED", True), ("SHARES", False), ("SHARE_SUMS", 0), ("WHOLE_DQ", False),
        ("WHOLE_BY_LENGTH", False), ("MOVED", True), ("ORDERED", False), ("BY_VISITS", False),
    )  # fmt: skip
    sides = {"q": t.rows, "k": t.keys, "v": t.keys, "dout": t.rows}
    moved = [Box(f"t{name}", n) for name, n in sides.items() if problem.moves(name)]
    return KernelPlan(
        **common(problem, arch, BACKWARD_JVP) | {"source": "sm90/backward_jvp_once.cu"},
        constants=constants,
        launches=(
            Launch("attention_backward_jvp_prepare", all_queries, 128),
            Launch("attention_backward_jvp", arch.sms, 128 * (t.warpgroups + 1), size),
        ),
        workspace=(
            Workspace(
                "numbers", "float32", (kv_heads * problem.group, tiles // problem.group, NUMBERS, t.rows), t.rows
            ),
            Workspace("dq_sum", "float32", (resident * tiles, t.rows * dim)),
            Workspace("counters", "uint32", (2 + kv_heads + all_queries,)),
            Workspace("share_sums", "float32", (0, 0)),
        ),
        spills=SPILLS,
        maps=(*moved, *(Box(name, n) for name, n in sides.items())),
        scalars=(
            ("together", together),
            ("resident", resident),
            ("shares", 1),
            ("whole_heads", 0),
            ("cleared", cleared),
        ),
        lists=both_ways(problem, t.rows, t.keys, "keys"),
    )
