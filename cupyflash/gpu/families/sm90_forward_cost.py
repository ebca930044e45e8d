"""What tiles of the Hopper forward cost: in how many shares their keys are dealt out, and which come first."""

from __future__ import annotations

from ...problem import FLOAT8, AttentionProblem
from ..device import Arch
from ..kernel_plan import ceil, pad
from ..measured import number
from . import shares
from .sm90_forward_tiles import NARROW, PACKED, ForwardTile, pack_of, tiles_of
from .sm90_memory import padded, value_parts

RATE, SCORE_SECONDS, LEAST_SECONDS = (
    number("sm90_forward.rate"),
    number("sm90_forward.score"),
    number("sm90_forward.visit"),
)
ENDS_SECONDS, GROUP_SECONDS = number("sm90_forward.ends"), number("sm90_forward.group")
# Times the least that a multiprocessor may have to compute: up to that they are taken in their order.
NARROW_OVERLOAD, OVERLOAD = 1.25, 1.03
TIMED_OVERLOAD = 1.08  # where it is reckoned in seconds, which are right within 10 %


def dealt(problem: AttentionProblem, t: ForwardTile, pack: int, arch: Arch) -> shares.Dealt:
    """In how many shares the keys of a tile with so many heads are dealt out."""
    asked = min(problem.seq_q, t.rows // pack) * min(problem.group, pack)  # rows of a tile
    score = max(2 * (problem.dim + problem.dim_v / value_parts(problem)) / RATE, SCORE_SECONDS)
    visit = shares.Visit(pad(asked, 64) * t.keys * score, LEAST_SECONDS * t.keys / 64)
    ends = ENDS_SECONDS + t.groups * GROUP_SECONDS
    tiles = shares.Tiles(tiles_of(problem, t, pack), t.rows, t.keys, t.blocks, visit, ends)
    found = shares.shares(problem, tiles, arch.sms)
    return found if problem.dtype != FLOAT8 else found._replace(number=1)


def shared_when_packed(problem: AttentionProblem, arch: Arch) -> bool:
    t = next((t for t in PACKED if max(padded(problem)) <= t.dim), PACKED[-1])
    return dealt(problem, t, pack_of(problem, t), arch).number > 1


def by_load(problem: AttentionProblem, arch: Arch, rows: tuple[ForwardTile, ...]) -> tuple[ForwardTile, ...]:
    """These rows, last those that give some multiprocessor too much to do."""
    if not rows:
        return ()

    def load(t: ForwardTile) -> float:  # rows of its tiles, also those in vain
        tiles = problem.batch * problem.heads_q * ceil(problem.seq_q, t.rows)
        return ceil(tiles, arch.sms) * t.rows * t.cost

    found = [dealt(problem, t, 1, arch) for t in rows]
    few = tiles_of(problem, rows[0], 1) <= 2 * arch.sms and problem.seq_k >= shares.LONG_KEYS
    uneven = (
        problem.right is not None and problem.left is None
    )  # so that the first tiles count more, the more there are
    timed = few and uneven or any(x.number > 1 for x in found)
    loads = [x.seconds * t.cost if timed else load(t) for x, t in zip(found, rows)]
    most = NARROW_OVERLOAD if rows is NARROW else OVERLOAD
    most = max(most, TIMED_OVERLOAD) if timed else most
    return tuple(t for _, t in sorted(zip(loads, rows), key=lambda x: x[0] > most * min(loads)))
