"""The plan of the Hopper backward's tangent in one kernel: tdQ is added up in memory, as dQ is in the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...passes import BACKWARD_JVP
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, both_ways, features, key_tiles, pad, query_tiles, room
from . import sm90_backward_cost as cost
from .sm90_backward import FINISH, Finish
from .sm90_backward_tiles import BackwardTile
from .sm90_memory import BARRIERS, common, dots, padded, paired

NUMBERS = 4  # of each query: lse, delta and their tangents


@dataclass(frozen=True)
class OnceTile(BackwardTile):
    """Of the backward's; where warpgroups share out the columns (`wide`), one thread block alone does."""

    least: int = 0  # for head dimensions above this

    @property
    def clustered(self) -> bool:
        return False


# What may be spilled are addresses: with window, block mask, slopes, dropout and a mask of keys at once, 228 bytes.
SPILLS = 240
# Columns that warpgroups share out are 256, whatever the head dimension: up to 192 sm80 is faster.
TILES = (
    OnceTile(64, 128, 2, 2, 2, dim=64),
    OnceTile(32, 128, 2, 2, 2, dim=128),
    OnceTile(32, 64, 2, 1, 1, least=192),
)


class OnceFit(NamedTuple):
    """A tile, what turns sums to rows, and bytes of shared memory."""

    tile: OnceTile
    finish: Finish
    memory: int


def fit(problem: AttentionProblem, arch: Arch) -> OnceFit | None:
    """None for what it does not take: sums in the order of keys, slopes that are no constants, arrays over pairs."""
    if problem.deterministic or problem.softcap is not None or problem.score is not None or paired(problem):
        return None
    dims, widest = (problem.dim, problem.dim_v), max(padded(problem))
    for t in TILES:
        if not (t.least < widest <= t.dim and min(dims)) or (t.wide and problem.moves("dout")):
            continue
        for finish in FINISH:
            size = _memory(problem, t) + finish.warps * finish.stages * (512 * finish.fragments + 16)
            if size <= room(arch, 1):
                return OnceFit(t, finish, size)
    return None


def _memory(problem: AttentionProblem, t: OnceTile) -> int:
    row = 2 * pad(t.dim, 64)
    q, k, v, dout = (1 + problem.moves(name) for name in ("q", "k", "v", "dout"))
    size = row * (t.keys * (k + v) + t.rows * t.stages * (q + dout)) + t.stages * 4 * NUMBERS * t.rows
    columns = 64 if t.wide else pad(t.dim, 64)  # of a part of tdQ; wide: P and tP are as large
    return size + (2 + t.wide) * 2 * t.rows * t.keys + 4 * columns * t.warpgroups * t.rows + BARRIERS


def plan(problem: AttentionProblem, arch: Arch, found: OnceFit) -> KernelPlan:
    t, finish, size = found
    dim, dim_v = (t.dim, t.dim) if t.wide else padded(problem)
    all_keys, all_queries = key_tiles(problem, t.keys), query_tiles(problem, t.rows)
    kv_heads = problem.heads_k * problem.batch
    tiles = all_queries // max(1, kv_heads)  # of queries, for one head of K and V
    together, resident = cost.dealt_out(problem, t, 1, arch.sms)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), ("COLUMN_PARTS", 1), *dots(problem), ("ROWS", t.rows), ("KEYS", t.keys),
        ("WARPGROUPS", t.warpgroups), ("CLUSTER", 1), ("STAGES", t.stages), ("DO_STAGES", t.do_stages),
        ("FINISHERS", finish.warps), ("FINISH_FRAGMENTS", finish.fragments), ("FINISH_STAGES", finish.stages),
        ("FINISH_PARTS", 1), ("SHARED_MEMORY", size), ("PAIR_STAGES", 1), ("MASK_BY_QUERY", False),
        ("BIAS_BY_QUERY", False), *features(problem), ("DETERMINISTIC", False), ("FIRST_STORES", False),
        ("VECTOR_RED", True), ("SHARES", False), ("SHARE_SUMS", 0), ("WHOLE_DQ", False), ("MOVED", True),
    )  # fmt: skip
    sides = {"q": t.rows, "k": t.keys, "v": t.keys, "dout": t.rows}
    moved = [Box(f"t{name}", n) for name, n in sides.items() if problem.moves(name)]
    return KernelPlan(
        **common(problem, arch, BACKWARD_JVP) | {"source": "sm90/backward_jvp_once.cu"},
        constants=constants,
        launches=(
            Launch("attention_backward_jvp_prepare", all_queries, 128),
            Launch("attention_backward_jvp", min(all_keys, arch.sms), 128 * (t.warpgroups + 1), size),
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
        scalars=(("together", together), ("resident", resident), ("shares", 1)),
        lists=both_ways(problem, t.rows, t.keys, "keys"),
    )
