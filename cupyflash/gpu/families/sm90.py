"""sm90: wgmma tensor cores and TMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...lengths import untaken
from ...passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from ...problem import FLOAT8, AttentionProblem
from ..device import Arch
from ..kernel_plan import PAIRWISE, KernelPlan, Tiles
from ..tensormap import WINDOW
from . import (
    sm90_backward,
    sm90_backward_jvp,
    sm90_backward_jvp_once,
    sm90_forward,
    sm90_gradients,
    sm90_jvp,
    sm90_latent,
    sm90_wide_forward,
)
from .sm90_memory import PART, SPLIT_FROM, WIDEST, WIDEST_OF_CLUSTER, paired, unplaced

PAGE_ROWS = 8  # of which pages are made: after so many rows the swizzle of shared memory begins anew
MOVED = ("q", "k", "v", "dout", "dlse")  # what these kernels take tangents of


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    known = of in (FORWARD, BACKWARD) and not problem.batch_invariant and problem.dtype != FLOAT8
    if (why := untaken(problem)) and not known:
        return f"{why} with {FLOAT8}" if problem.dtype == FLOAT8 else why
    if of is BACKWARD and (problem.rows_q is None) != (problem.rows_k is None):
        return "has no backward of packed sequences on one side alone"
    if max(problem.rows_q or 0, problem.rows_k or 0) > WINDOW:
        return f"takes packed arrays of up to {WINDOW} rows"
    if problem.page is not None and problem.page % PAGE_ROWS:
        return f"takes pages of a multiple of {PAGE_ROWS} rows, not {problem.page}"
    if problem.ragged and (problem.seq_k == 0 or (problem.page is not None and problem.pages == 0)):
        return "takes no k without rows"
    if problem.dtype not in ("float16", "bfloat16", FLOAT8):
        return f"takes float16, bfloat16 and float8, not {problem.dtype}"
    if of is not FORWARD and problem.dtype == FLOAT8:
        return f"has a forward alone of {FLOAT8}"
    if arch.cc != 90:
        return f"is for compute capability 9.0, this GPU has {arch.cc / 10}"
    if problem.cache_dtype is not None:
        return f"takes no k and v of {problem.cache_dtype} beside q of {problem.dtype}"
    if others := [x.name for x in problem.tangents if x.name not in MOVED]:
        return f"takes no tangent of {' and '.join(others)}"
    if of.moved and (why := unplaced(problem)):
        return why
    if of is BACKWARD_JVP:
        dims = (problem.dim, problem.dim_v)
        fits = 0 < min(dims) <= max(dims) <= PART and sm90_backward_jvp.fit(problem, arch, None) is not None
        fits = fits or sm90_backward_jvp_once.fit(problem, arch) is not None
        if fits:
            return None
        others = sm90_backward_jvp_once.untaken(problem)
        takes = f"takes no {' and '.join(others)} in a" if others else "has no"
        return f"{takes} {of} of head dimensions {problem.dim} and {problem.dim_v}"
    for name in PAIRWISE:
        if (x := problem.array(name)) and "key" not in x.axes and problem.seq_k > 1:
            return f"takes a {name} that differs between keys"
    most_of = {FORWARD: WIDEST, BACKWARD: WIDEST_OF_CLUSTER}
    dim, dim_v = (PART, PART) if problem.dtype == FLOAT8 else most_of.get(of, (PART, PART))
    if of is BACKWARD and PART < max(problem.dim, problem.dim_v) < SPLIT_FROM:
        return f"leaves head dimensions from {PART + 1} to {SPLIT_FROM - 1} in a {of} to sm80, which is faster there"
    if not (0 < problem.dim <= dim and 0 < problem.dim_v <= dim_v):
        most = f"{dim}" if dim == dim_v else f"{dim} and {dim_v}"
        return f"takes head dimensions from 1 to {most} in a {of}, not {problem.dim} and {problem.dim_v}"
    if (paired(problem) or of is JVP) and _planner(of).fit(problem, arch, None) is None:
        return f"has no shared memory for {' and '.join(paired(problem))} beside head dimension {problem.dim}"
    return None


_PLANNERS: dict[Pass, Any] = {
    FORWARD: sm90_forward,
    BACKWARD: sm90_backward,
    JVP: sm90_jvp,
    BACKWARD_JVP: sm90_backward_jvp,
}
TILES: dict[Pass, Tiles[Any]] = {of: room.TILES for of, room in _PLANNERS.items()}


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    if of is FORWARD and problem.latent is not None and sm90_latent.objection(problem, arch) is None:
        return sm90_latent.plan(problem, arch)
    if of is FORWARD and tile is None and sm90_wide_forward.takes(problem, arch):
        return sm90_wide_forward.plan(problem, arch)
    made: KernelPlan = _planner(of).plan(problem, arch, tile)
    return made


gradients = sm90_gradients.gradients


def _planner(of: Pass) -> Any:
    return _PLANNERS[of]
