"""sm90: wgmma tensor cores and the copy engine of Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...passes import BACKWARD, FORWARD, Pass
from ...problem import FLOAT8, AttentionProblem
from ..device import Arch
from ..kernel_plan import PAIRWISE, KernelPlan, Tiles
from . import sm90_backward, sm90_forward
from .sm90_memory import paired


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    if problem.dtype not in ("float16", "bfloat16", FLOAT8):
        return f"takes float16, bfloat16 and float8, not {problem.dtype}"
    if of is BACKWARD and problem.dtype == FLOAT8:
        return f"has a forward alone of {FLOAT8}"
    if arch.cc != 90:
        return f"is for compute capability 9.0, this GPU has {arch.cc / 10}"
    for name in PAIRWISE:
        if (x := problem.array(name)) and "key" not in x.axes and problem.seq_k > 1:
            return f"takes a {name} that differs between keys"
    if not 0 < min(problem.dim, problem.dim_v) or max(problem.dim, problem.dim_v) > 256:
        return f"takes head dimensions from 1 to 256, not {problem.dim} and {problem.dim_v}"
    if paired(problem) and _planner(of).fit(problem, arch, None) is None:
        return f"has no shared memory for {' and '.join(paired(problem))} beside head dimension {problem.dim}"
    return None


TILES: dict[Pass, Tiles[Any]] = {FORWARD: sm90_forward.TILES, BACKWARD: sm90_backward.TILES}


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    return _planner(of).plan(problem, arch, tile)


def _planner(of: Pass) -> Any:
    return {FORWARD: sm90_forward, BACKWARD: sm90_backward}[of]
