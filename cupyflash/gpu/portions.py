"""Heads in portions: the launches of a plan are for some heads of K and V, and are repeated for the next ones, so that
workspace is taken for those of one portion. Kernels number the tiles of these alone
(kernels_cu/attention/tiles.cuh), and no result depends on it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..problem import ARRAY_RULES, ITEMSIZE, AttentionProblem
from .device import Arch
from .kernel_plan import KernelPlan, ceil, largest, query_numbers
from .measured import number

MOST = 64
ROOM = 2.55  # times q's bytes that workspace may take: portions cost time, and half of a backward's is 2.51 to 2.54
# Between portions multiprocessors wait for the last tile. A portion is reckoned to take no less than so many seconds,
# and fills every multiprocessor so many times, the last time nearly; all together take no more than LOSS times one.
SHORTEST, FEWEST_TIMES, LOSS = 2e-4, 2, 1.05
# Where more than LIMIT times q's bytes would be taken: the portions that bring it to that soonest, if they lose no more
# than LOSS, or MOST_LOSS where they save so many bytes. Between two some time is lost (H200: 18 to 50 us).
LIMIT, BETWEEN_SECONDS = 4.1, 3e-5
MOST_LOSS, MUCH = 1.15, 192 << 20


def divided(
    made: KernelPlan, problem: AttentionProblem, arch: Arch, make: Callable[[AttentionProblem], KernelPlan]
) -> KernelPlan:
    """A plan in portions, where what it splits takes more than ROOM; `make` plans a problem with fewer heads."""
    heads = sizes(made, problem, arch)
    if not heads:
        return made
    batch = 1 if problem.rows_q is None else problem.batch
    first = make(replace(problem, batch=batch, heads_q=heads[0] * problem.group, heads_k=heads[0]))
    if (first.constants, first.scalars) != (made.constants, made.scalars):
        return made  # alone they would have their keys dealt out in shares, which makes other sums
    told = (("first_head", 0), ("portion_heads", heads[0]))
    return replace(
        made, launches=first.launches, workspace=first.workspace, portions=heads, scalars=(*made.scalars, *told)
    )


def sizes(made: KernelPlan, problem: AttentionProblem, arch: Arch) -> tuple[int, ...]:
    """How many heads of K and V each portion has: the fewest portions of which none takes more workspace than ROOM, or
    as many as there may be without LOSS, or as LIMIT asks for; () where one is enough."""
    grids = {x.name: x.grid for x in made.launches}
    room = ROOM * ITEMSIZE[problem.dtype] * math.prod(query_numbers(problem)) * problem.dim
    taken = sum(x.nbytes for x in made.workspace)
    # Of packed sequences a head has the rows of all; else heads are numbered over the batch.
    packed = problem.rows_q is not None, problem.rows_k is not None
    if "attention_split" not in grids or "attention_combine" in grids:  # rows of shares are numbered over all heads
        return ()
    if f"attention_{made.of}" not in grids:  # of k without rows, a backward has no tiles
        return ()
    if taken <= room or packed[0] != packed[1]:
        return ()
    total = problem.heads_k * (1 if packed[0] else problem.batch)
    fewest, each = FEWEST_TIMES * int(dict(made.constants)["MIN_BLOCKS"]), grids[f"attention_{made.of}"] // total
    seconds = problem.flops(made.of) / (arch.sms * number("sm80.rate_4"))
    at_once = ceil(total * each, arch.sms)
    again = made.of.of_gradients and any(ARRAY_RULES[x.name].gradient for x in problem.given)  # is split for these
    limit = math.inf if again else LIMIT * largest(problem)
    found: tuple[int, ...] = ()
    times: dict[tuple[int, ...], float] = {}  # seconds, of those within LIMIT
    for portions in range(2, min(total, MOST) + 1):
        size = ceil(total, portions)
        heads = (size,) * (total // size) + ((total % size,) if total % size else ())
        tiles = [ceil(n * each, arch.sms) for n in heads]  # of the busiest multiprocessor
        little_lost = min(tiles) >= fewest and sum(tiles) <= LOSS * at_once
        if little_lost and portions * SHORTEST <= seconds and taken * (found or (total,))[0] > room * total:
            found = heads
        if taken * size <= limit * total:
            times[heads] = sum(tiles) / at_once * seconds + (len(heads) - 1) * BETWEEN_SECONDS
    if not times or taken * (found or (total,))[0] <= limit * total:
        return found
    soonest = min(times, key=lambda heads: times[heads])
    saved = taken * (total - soonest[0]) > MUCH * total
    return soonest if times[soonest] <= (MOST_LOSS if saved else LOSS) * seconds else found


def one_by_one(plan: KernelPlan) -> list[KernelPlan]:
    """The plan of each portion; of one that has none itself."""
    found, first = [], 0
    for heads in plan.portions:
        told = {"first_head": first, "portion_heads": heads}
        launches = [
            x if x.once else replace(x, grid=x.grid * heads // plan.portions[0])
            for x in plan.launches
            if first == 0 or not x.once
        ]
        scalars = [(name, told.get(name, value)) for name, value in plan.scalars]
        found.append(replace(plan, launches=tuple(launches), scalars=tuple(scalars)))
        first += heads
    return found or [plan]
