"""From a problem to the kernels that answer it: which family, and that family's plan. Pure; tested without a GPU.

A family is a module of `gpu/families`, a row in `FAMILIES`. The order is the preference; the first family with nothing
to object is chosen, and the objections of the others are kept for `explain`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..passes import FORWARD, Pass
from ..places import WINDOW
from ..problem import AttentionProblem
from . import portions
from .array_gradient import Lengths
from .device import Arch
from .families import flash1, simt, sm80, sm90
from .grouping import grouped
from .kernel_plan import KernelPlan, Launch, Tiles, Workspace, ceil
from .params import layout
from .score import BEYOND, moves, tables

__all__ = ["FAMILIES", "ON_REQUEST", "Family", "KernelPlan", "plan"]


class Family(Protocol):
    """What the module of a family has."""

    TILES: dict[Pass, Tiles[Any]]  # {}: there is nothing to choose

    def objection(self, problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
        """Why it does not take a problem, or None."""

    def plan(self, problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
        """The plan of a problem that it takes, with this tile where that fits, else with one from the table."""

    def gradients(self, problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan | None:
        """The plan that gives the gradients of arrays, of these lengths along (batch, head, query, key), or the
        tangents of the gradients where tangents are given. None: it leaves that to the next family."""


FAMILIES: dict[str, Family] = {"sm90": sm90, "sm80": sm80, "simt": simt, "flash1": flash1}
ON_REQUEST = ("flash1",)  # families that are taken only where they are named

PARAMETERS = 4096  # bytes of them that every driver takes

# Bytes that kernels may spill more than their tiles declare, with a score function like those of the tests.
SCORE_SPILLS = 448


def check_family(family: Any) -> None:
    """ValueError where that is no name of a family, and not None."""
    if family is not None and not (isinstance(family, str) and family in FAMILIES):
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(map(repr, FAMILIES))}, or None")


def plan(
    problem: AttentionProblem,
    arch: Arch,
    of: Pass = FORWARD,
    family: str | None = None,
    tiles: Mapping[str, Sequence[int]] | None = None,
    lengths: Lengths | None = None,
) -> KernelPlan:
    """Choose the family (or take the one named) and plan the problem on `arch`.

    `tiles` are those that were timed for such a problem on this GPU, by family; they are tried before the table's. With
    `lengths` of arrays along (batch, head, query, key), it is the backward with respect to these alone. Raises
    ValueError where the family named, or every family, objects to the problem.
    """
    check_family(family)
    # Positions in the kernels have 32 bits, and so have sums of those whose diagonal is data.
    limit = 29 if problem.shifts else 30
    for name, length, rows in (("q", problem.seq_q, problem.rows_q), ("k", problem.seq_k, problem.rows_k)):
        if (longest := max(length, rows or 0)) >= 2**limit:
            raise ValueError(f"{name} has a sequence of {longest}; the kernels take less than 2**{limit}")
    for side in ("left", "right"):
        if problem.has("at") and abs(bound := getattr(problem, side) or 0) >= WINDOW:
            raise ValueError(
                f"window's {side} bound is {bound}, and at is an array on a GPU; it must be None or less than {WINDOW}"
            )
    if problem.at is not None and abs(problem.diagonal) >= 2**limit:
        _, _, query, key = problem.at
        raise ValueError(
            f"at has query {query} and key {key}, {abs(problem.diagonal)} apart; the kernels take less than 2**{limit}"
        )
    if problem.sms is not None:  # as of a GPU that has no more
        arch = dataclasses.replace(arch, sms=min(arch.sms, problem.sms))
    objections: list[str] = []
    for name, room in FAMILIES.items():
        if family == name or (family is None and name not in ON_REQUEST):
            why = room.objection(problem, arch, of)
            if why is None:
                if lengths:
                    made = _gradients(name, problem, arch, lengths)
                else:
                    tuned = {} if problem.batch_invariant else tiles or {}  # which follow from lengths
                    together = grouped(problem)
                    tile = tuned.get(name)
                    if tile and not (of_pass := room.TILES[of]).possible(of_pass.tile(tile), problem):
                        tile = None  # one that was not found for such a problem
                    make = functools.partial(room.plan, arch=arch, of=of, tile=tile)
                    planned = together or problem
                    made = portions.divided(make(planned), planned, arch, make)
                    made = dataclasses.replace(made, grouped=together is not None)
                made = dataclasses.replace(made, passed_over=tuple(objections), tangents=problem.tangents)
                return _checked(with_tables(made, problem), problem)
            objections.append(f"{name} {why}")
    raise ValueError(f"no kernel family takes this problem: {'; '.join(objections)}")


def _checked(made: KernelPlan, problem: AttentionProblem) -> KernelPlan:
    """Blocks of a launch are numbered with 31 bits. With tangents of arrays that a score function reads parameters may
    be more than older drivers take."""
    blocks = max(x.grid for portion in portions.one_by_one(made) for x in portion.launches)
    if blocks >= 2**31:
        size = f"batch {problem.batch} and {problem.heads_q} heads"
        raise ValueError(f"q has {size}: {blocks} blocks; less than 2**31 fit")
    read = [x.name for x in made.tangents if made.score is not None and made.score.array(x.name)]
    if read and (taken := layout(made).itemsize) > PARAMETERS:
        raise ValueError(
            f"tangents has {len(read)} arrays that score reads: kernels have {taken} bytes of parameters then, but "
            f"{PARAMETERS} fit: stack some"
        )
    return made


def _gradients(family: str, problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan:
    """From this family, or from the first after it that gives them."""
    names, problem = list(FAMILIES), dataclasses.replace(problem, add=False)  # these have no targets
    found = (FAMILIES[name].gradients(problem, arch, lengths) for name in names[names.index(family) :])
    return next(made for made in found if made is not None)


def with_tables(made: KernelPlan, problem: AttentionProblem) -> KernelPlan:
    """A plan with the problem's score function, and with what is computed of that before (gpu/score.py)."""
    if problem.score is None:
        return made
    found = tables(problem.score, moves(problem.score, problem.tangents))
    made = dataclasses.replace(made, score=problem.score, spills=made.spills + SCORE_SPILLS)
    if not found.tabled:
        return made
    span = problem.seq_q + problem.seq_k + 2 * BEYOND
    lines = found.lines(problem.batch, problem.heads_q)
    launch = Launch("attention_score_tables", lines * ceil(span, 128), 128, once=True)
    space = Workspace("score_tables", problem.lse_dtype, (len(found.tabled), lines, span))
    numbers = (("score_span", span), ("score_origin", problem.seq_q + BEYOND), ("score_plane", lines * span))
    return dataclasses.replace(
        made, launches=(launch, *made.launches), workspace=(*made.workspace, space), scalars=(*made.scalars, *numbers)
    )
