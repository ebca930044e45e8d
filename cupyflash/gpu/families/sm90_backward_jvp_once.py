"""The plan of the Hopper backward's tangent in one kernel, of narrow heads: tdQ is added up in memory, as dQ is in the
backward."""

from __future__ import annotations

from dataclasses import dataclass

from ...passes import BACKWARD_JVP
from ...problem import AttentionProblem
from ..device import Arch
from ..kernel_plan import Box, KernelPlan, Launch, Workspace, both_ways, features, key_tiles, pad, query_tiles
from . import sm90_backward_cost as cost
from .sm90_backward import FINISH
from .sm90_backward_tiles import BackwardTile
from .sm90_memory import BARRIERS, common, dots, padded, paired, room

NUMBERS = 4  # of each query: lse, delta and their tangents


@dataclass(frozen=True)
class OnceTile(BackwardTile):
    """Where warpgroups share out the columns (`wide`), one thread block alone does."""

    @property
    def clustered(self) -> bool:
        return False


NARROW, WIDE = OnceTile(64, 128, 2, 3, 3, dim=64), OnceTile(32, 64, 2, 1, 1)


def _tile(problem: AttentionProblem) -> OnceTile | None:
    dim = max(padded(problem))
    return NARROW if dim <= NARROW.dim else WIDE if dim > 128 else None


def objection(problem: AttentionProblem, arch: Arch) -> bool:
    return (
        (t := _tile(problem)) is None
        or problem.deterministic
        or problem.softcap is not None
        or problem.score is not None
        or bool(paired(problem))
        or (t.wide and (problem.moves("dout") or not (0 < min(problem.dim, problem.dim_v) and max(padded(problem)) <= t.dim)))
        or _memory(problem, t, 1) > room(arch, 1)
    )


def _memory(problem: AttentionProblem, t: OnceTile, stages: int) -> int:
    row = 2 * pad(t.dim, 64)
    q, k, v, dout = (1 + problem.moves(name) for name in ("q", "k", "v", "dout"))
    size = row * (t.keys * (k + v) + t.rows * stages * (q + dout)) + stages * 4 * NUMBERS * t.rows
    return size + (2 + t.wide) * 2 * t.rows * t.keys + 4 * 64 * t.warpgroups * t.rows + BARRIERS


def plan(problem: AttentionProblem, arch: Arch) -> KernelPlan:
    t = _tile(problem)
    assert t is not None
    dim, dim_v = (t.dim, t.dim) if t.wide else padded(problem)
    stages, finish, size = next(
        (n, x, size)
        for n in range(t.stages, 0, -1)
        for x in FINISH
        if (size := _memory(problem, t, n) + x.warps * x.stages * (512 * x.fragments + 16)) <= room(arch, 1)
    )
    all_keys, all_queries = key_tiles(problem, t.keys), query_tiles(problem, t.rows)
    kv_heads = problem.heads_k * problem.batch
    tiles = all_queries // max(1, kv_heads)  # of queries, for one head of K and V
    together, resident = cost.dealt_out(problem, t, 1, arch.sms)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), ("COLUMN_PARTS", 1), *dots(problem), ("ROWS", t.rows), ("KEYS", t.keys),
        ("WARPGROUPS", t.warpgroups), ("CLUSTER", 1), ("STAGES", stages), ("DO_STAGES", stages),
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
            Workspace("delta", "float32", (kv_heads * problem.group, tiles // problem.group, NUMBERS, t.rows), t.rows),
            Workspace("dq_sum", "float32", (resident * tiles, t.rows * dim)),
            Workspace("counters", "uint32", (2 + kv_heads + all_queries,)),
            Workspace("share_sums", "float32", (0, 0)),
        ),
        spills=t.spills,
        maps=(*moved, *(Box(name, n) for name, n in sides.items())),
        scalars=(("together", together), ("resident", resident), ("shares", 1)),
        lists=both_ways(problem, t.rows, t.keys, "keys"),
    )
