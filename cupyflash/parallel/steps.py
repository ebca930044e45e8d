"""The plan of a call over several ranks, as plain data: who computes what with whose keys, and what is sent.

Two exchanges, one inside the other. "heads": the ranks of a team hand each other rows, so that each has all rows of the
team for some of the heads. "keys": rounds, each of some key heads and a stretch of the keys, in which each rank gets
the keys that its rows see. Nothing here names a library, and every rank makes the same plan of all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..passes import FORWARD, Pass
from .arrays import Place, place
from .rows import Rows, Span, common, cut, joined, without

STRETCH = 128  # rows at whose multiples stretches of the keys begin
GROUP_WORK = 1e11  # operations of a group of heads: some 0.2 ms of a GPU, in which its launches and transfers hide
GROUP_ROWS = 1 << 16  # rows of a group's query heads in a call: some tiles for each multiprocessor
NEAR_HEADS = 3  # times as many bytes as keys that heads may have between near ranks: one call is quicker than its parts
GROUPS = 4  # more hide little more, and each begins and ends with idle multiprocessors
GROUP_BYTES = 1 << 24  # of K and V that come to a rank for a group: 0.05 ms, about what a group more costs


class Sight(Protocol):
    """Which keys some queries may see."""

    def keys(self, rows: Span) -> Span:
        """The hull of those; perhaps empty."""

    def full(self, rows: Span, keys: Span) -> bool:
        """Whether each of these queries sees each of these keys."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Band:
    """By position: query i stands on key i + diagonal, and sees `left` keys before it and `right` behind; None: all."""

    length: int  # of the keys
    left: int | None = None
    right: int | None = None
    diagonal: int = 0

    def keys(self, rows: Span) -> Span:
        if rows[1] <= rows[0]:
            return 0, 0
        begin = 0 if self.left is None else rows[0] + self.diagonal - self.left
        end = self.length if self.right is None else rows[1] + self.diagonal + self.right
        return common((0, self.length), (begin, max(begin, end)))

    def full(self, rows: Span, keys: Span) -> bool:
        (a, b), (lo, hi) = rows, keys
        before = self.left is None or b - 1 + self.diagonal - self.left <= lo
        return before and (self.right is None or a + self.diagonal + self.right >= hi - 1)


def band_of(
    rows: Rows, key_rows: Rows, window: tuple[int | None, int | None] | None, causal: bool | str | None
) -> Band:
    """What `attention` means by these two options, of the whole."""
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    return Band(key_rows.length, left, right, 0 if causal == "top_left" else key_rows.length - rows.length)


@dataclass(frozen=True)
class Blocks:
    """By a block mask inside a band: for each block of rows the first key and the last but one that it leaves."""

    band: Band
    block: int
    hulls: tuple[Span, ...]

    def keys(self, rows: Span) -> Span:
        if rows[1] <= rows[0]:
            return 0, 0
        some = [x for x in self.hulls[rows[0] // self.block : -(-rows[1] // self.block)] if x[1] > x[0]]
        hull = (min(a for a, _ in some), max(b for _, b in some)) if some else (0, 0)
        return common(self.band.keys(rows), hull)

    def full(self, rows: Span, keys: Span) -> bool:
        return False


@dataclass(frozen=True)
class Step:
    """One call: queries, of the whole and of the rank's arrays, with keys, of the whole and of those of the round."""

    rows: Span
    local: Span
    keys: Span
    here: Span
    full: bool


@dataclass(frozen=True)
class Message:
    """Rows of K and V that go from one rank to another, and their gradients back: of the whole, in the array of who
    holds them, and among the keys that the other has in this round."""

    source: int
    target: int
    rows: tuple[Span, ...]
    held: tuple[Span, ...]
    here: tuple[Span, ...]
    length: int  # how many keys the other then has


@dataclass(frozen=True)
class Round:
    """Of some key heads, and a stretch of the keys."""

    heads: Span  # of the keys
    first: bool  # of its heads: results are merged into those of the rounds before
    last: bool
    has: tuple[Span, ...]  # the keys that this rank then has, one span behind the other
    steps: tuple[Step, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]  # that from itself too
    longest: int  # how many keys the rank has that has most

    @functools.cached_property
    def length(self) -> int:
        return sum(b - a for a, b in self.has)

    @functools.cached_property
    def places(self) -> list[Place | None]:
        """Of each step where its keys are among these."""
        return [place((x.here, self.length)) for x in self.steps]

    @functools.cached_property
    def begun(self) -> list[list[Span] | None]:
        """Of each step those of its keys that no step before has, where another has some. None where no other has any:
        gradients of them are what it writes."""
        found: list[list[Span] | None] = []
        for n, x in enumerate(self.steps):
            fresh = without(x.here, [y.here for y in self.steps[:n]])
            found.append(None if sum(b - a for a, b in fresh) == x.here[1] - x.here[0] else fresh)
        return found

    def added(self, n: int) -> list[tuple[Span, bool]]:
        """Of such a step its keys, in spans, and whether steps before have them."""
        here, fresh = self.steps[n].here, self.begun[n] or ()
        return [(x, False) for x in fresh] + [(x, True) for x in without(here, fresh)]

    def own(self, rank: int) -> list[tuple[Span, Span]]:
        """Rows that the rank holds itself: in its arrays, and among the keys that it then has."""
        return [pair for m in self.receives if m.source == rank for pair in zip(m.held, m.here)]


def wanted(rows: Rows, sight: Sight, rank: int, stretch: Span, block: int = 1) -> list[Span]:
    """The keys that a rank's rows see of a stretch, from block to block."""
    found = []
    for span, _ in rows.local(rank):
        a, b = common(sight.keys(span), stretch)
        if b > a:
            found.append(common((a // block * block, -(-b // block) * block), stretch))
    return joined(found)


def message(key_rows: Rows, has: Sequence[Span], source: int, target: int) -> Message | None:
    """What the source holds of the keys that the target wants."""
    rows, held, here = [], [], []
    for span, own in key_rows.local(source):
        at = 0
        for want in has:
            a, b = common(span, want)
            if b > a:
                rows.append((a, b))
                held.append((own[0] + a - span[0], own[0] + b - span[0]))
                here.append((at + a - want[0], at + b - want[0]))
            at += want[1] - want[0]
    return Message(source, target, tuple(rows), tuple(held), tuple(here), at) if rows else None


@functools.lru_cache(maxsize=256)
def reach(rows: Rows, sight: Sight) -> int:
    """Of a query and a key that the calls of all ranks are about: masks may hide some of them."""
    found = 0
    for r in range(rows.size):
        for (a, b), _ in rows.local(r):
            lo, hi = sight.keys((a, b))
            found += (b - a) * (hi - lo)
    return found


@functools.lru_cache(maxsize=256)
def lighter(
    rows: Rows, key_rows: Rows, sight: Sight, heads_q: int, heads_k: int, of: Pass, ratio: int, *, near: bool
) -> str:
    """Of the two exchanges that for which a rank waits less. ratio: of the bytes of a wide number to those of one of K.
    near: ranks reach each other's memory."""
    seen = fetched(rows, key_rows, sight) * (NEAR_HEADS if near else 1)
    of_keys = (2 if of is FORWARD else 2 + 2 * ratio) * heads_k * rows.size * seen  # K and V; dK and dV, wide
    of_heads = (2 if of is FORWARD else 4) * (heads_q + heads_k)  # Q, K, V and O; backward dO and three gradients, too
    return "keys" if of_keys < of_heads or (of_keys == of_heads and not near) else "heads"


def arriving(rows: Rows, key_rows: Rows, sight: Sight) -> float:
    """How many keys arrive at the rank that gets most, in the exchange of keys."""
    return fetched(rows, key_rows, sight) * (key_rows.length - min(key_rows.count(r) for r in range(rows.size)))


@functools.lru_cache(maxsize=256)
def fetched(rows: Rows, key_rows: Rows, sight: Sight) -> float:
    """The share of the keys that others hold that some rank's rows see."""
    most = 0.0
    for r in range(rows.size):
        has = wanted(rows, sight, r, (0, key_rows.length))
        own = sum(b - a for want in has for span, _ in key_rows.local(r) for a, b in [common(span, want)])
        others = key_rows.length - key_rows.count(r)
        most = max(most, (sum(b - a for a, b in has) - own) / others if others else 0.0)
    return most


def usual_groups(rows: Rows, sight: Sight, heads: int, of_q: int, work: int, sent: float) -> int:
    """Into how many groups a rank's key heads are cut: as many, all alike, as have enough to do for what the next one
    needs to come, fill a GPU, and hide what is worth a group. of_q: query heads of all batch entries; work: operations
    of a pair, of all these; sent: bytes of K and V that come to a rank."""
    calls = max(1, *(len(rows.local(r)) for r in range(rows.size)))
    by_work = int(work * reach(rows, sight) / rows.size / GROUP_WORK)
    by_rows = of_q * rows.length // (rows.size * calls) // GROUP_ROWS
    most = max(1, int(min(heads, GROUPS, by_work, by_rows, sent / GROUP_BYTES)))
    return max(n for n in range(1, most + 1) if heads % n == 0)


@functools.lru_cache(maxsize=256)
def rounds(
    rows: Rows, key_rows: Rows, sight: Sight, rank: int, heads: int, *, groups: int, stretches: int = 1, block: int = 1
) -> tuple[Round, ...]:
    """What a rank does in the exchange of keys: groups of key heads, each over all stretches of the keys.

    block: the keys of a step begin at multiples of it, as those of a block mask do.
    """
    found = []
    multiple = math.lcm(STRETCH, block)
    parts = [x for x in cut(key_rows.length, stretches, multiple) if x[1] > x[0]] or [(0, 0)]
    plans = [_stretch(rows, key_rows, sight, rank, x, block, n == 0) for n, x in enumerate(parts)]
    for some in cut(heads, min(groups, max(1, heads))):
        for n, (has, steps, sends, receives, longest) in enumerate(plans):
            found.append(Round(some, n == 0, n == len(plans) - 1, has, steps, sends, receives, longest))
    return tuple(found)


_Plan = tuple[tuple[Span, ...], tuple[Step, ...], tuple[Message, ...], tuple[Message, ...], int]


def _stretch(rows: Rows, key_rows: Rows, sight: Sight, rank: int, stretch: Span, block: int, first: bool) -> _Plan:
    all_wanted = [wanted(rows, sight, r, stretch, block) for r in range(rows.size)]
    has, steps = all_wanted[rank], []
    for span, local in rows.local(rank):
        a, b = common(sight.keys(span), stretch)
        keys = common((a // block * block, -(-b // block) * block), stretch) if b > a else (stretch[0], stretch[0])
        if keys[1] > keys[0] or first:  # rows that see nothing have a result too
            here = _here(has, keys)
            steps.append(Step(span, local, keys, here, keys[1] > keys[0] and sight.full(span, keys)))
    sends = [x for r in range(rows.size) if r != rank and (x := message(key_rows, all_wanted[r], rank, r))]
    receives = [x for r in range(rows.size) if (x := message(key_rows, has, r, rank))]
    steps.sort(key=lambda x: x.keys[0] - x.keys[1])  # the longest first: others add to what it wrote
    longest = max(sum(b - a for a, b in x) for x in all_wanted)
    return tuple(has), tuple(steps), tuple(sends), tuple(receives), longest


def _here(has: Sequence[Span], keys: Span) -> Span:
    """Where keys that lie in one of these spans stand, of the spans one behind the other."""
    at = 0
    for a, b in has:
        if keys[1] > keys[0] and a <= keys[0] < b:
            return at + keys[0] - a, at + keys[1] - a
        at += b - a
    return 0, 0


@dataclass(frozen=True)
class Deal:
    """The exchange of heads, of one rank of a team: rows that each member holds, in the team's rows, and its heads."""

    heads: tuple[Span, ...]  # of each member
    rows: tuple[tuple[tuple[Span, Span], ...], ...]  # of each member: (in its own array, in the team's)
    length: int  # of the team's rows
    longest: int  # of those of the team that has most


@functools.lru_cache(maxsize=256)
def deal(rows: Rows, team: range, heads: int) -> Deal:
    """Of the ranks `team`, who hold these rows and deal out so many heads."""
    of_teams = rows.together(len(team))
    of_team = of_teams.local(team.start // len(team))
    found = []
    for rank in team:
        own = []
        for span, local in rows.local(rank):
            for whole, at in of_team:
                a, b = common(span, whole)
                if b > a:
                    own.append(
                        ((local[0] + a - span[0], local[0] + b - span[0]), (at[0] + a - whole[0], at[0] + b - whole[0]))
                    )
        found.append(tuple(own))
    longest = max(of_teams.count(n) for n in range(of_teams.size))
    return Deal(tuple(cut(heads, len(team))), tuple(found), sum(b - a for _, (a, b) in of_team), longest)
