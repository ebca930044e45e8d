"""All that a call runs, one plan after the other. Its corridor, `explain` and `tune` plan by this. Pure, as
`plan` is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..gradients import apart, lengths_of
from ..passes import FORWARD, JVP, Pass
from ..problem import AttentionProblem, View
from .device import Arch
from .kernel_plan import KernelPlan
from .plan import plan


def plans(
    problem: AttentionProblem,
    arch: Arch,
    of: Pass = FORWARD,
    family: str | None = None,
    tiles: Mapping[str, Sequence[int]] | None = None,
    wrt: tuple[str, ...] = (),
    views: Mapping[str, View] | None = None,
    through_lse: bool = False,
) -> tuple[KernelPlan | None, ...]:
    """The plan of the pass, then one for each of `apart(wrt)`, which finds what the first leaves; None where all
    results are 0.

    `tiles`: as `plan` takes them. `views`: of the arrays in `wrt`, at least. `through_lse`: whether lse has a gradient,
    or a tangent of one.
    """
    first = plan(problem, arch, of, family, tiles) if _reached(problem, of, through_lse) else None
    found = [first]
    for names in apart(wrt):
        made = None
        if _array_reached(problem, names, through_lse):
            made = plan(problem, arch, of, family, lengths=lengths_of(names, dict(views or {})))
        found.append(made.after(first) if made and first else made)
    return tuple(found)


def _reached(problem: AttentionProblem, of: Pass, through_lse: bool) -> bool:
    """Whether anything reaches the results of a pass."""
    if of is JVP and not problem.tangents:
        return False
    return not problem.empty and (not of.of_gradients or problem.dim_v > 0 or through_lse)


def _array_reached(problem: AttentionProblem, names: tuple[str, ...], through_lse: bool) -> bool:
    """Whether anything reaches the gradients of optional arrays. Without keys lse is the sink."""
    rows = 0 not in (problem.batch, problem.heads_q, problem.seq_q)
    through_out = problem.seq_k > 0 and problem.dim_v > 0
    return rows and (through_out or through_lse and (problem.seq_k > 0 or "sinks" in names))
