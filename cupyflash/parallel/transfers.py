"""Rows and heads on their way: messages of a plan, sent from where they lie and received where they belong, as far as
these rows lie side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .arrays import Place, beside, empty, packed, put_all, put_sums, taken, wide, zeros
from .groups import Done, Group, Pending
from .rows import Span
from .steps import Deal, Round


class Keys:
    """K and V of a round, under way to whose rows see them."""

    def __init__(self, group: Group, of: Round, k: Any, v: Any) -> None:
        self._pending: Pending = Done()
        self._late: list[tuple[Any, Any]] = []
        own_heads = [x if of.heads == (0, x.shape[2]) else x[:, :, slice(*of.heads)] for x in (k, v)]
        if group.size == 1 and k.shape[1] == of.length:
            self._found = own_heads
            return
        own = of.own(group.rank)
        foreign = [m for m in of.receives if m.source != group.rank]
        self._sent, receives, found = [], [], []
        for x, mine in zip((k, v), own_heads):
            if own == [((0, of.length), (0, of.length))] and x.shape[1] == of.length:
                found.append(mine)  # there is nothing else to see
            else:
                found.append(empty((x.shape[0], of.length, *mine.shape[2:]), x))
                put_all([(found[-1][:, slice(*at)], mine[:, slice(*held)]) for held, at in own])
            for m in of.sends:
                self._sent += [(m.target, _packed_part(found[-1], mine, own, held)) for held in m.held]
            for m in foreign:
                for at in m.here:
                    part = found[-1][:, slice(*at)]
                    self._late.append((part, _room(part)))
                    receives.append((m.source, self._late[-1][1]))
        self._found = found
        self._pending = group.exchange(self._sent, receives)

    def wait(self) -> list[Any]:
        """K and V, (B, keys of the round, heads, D)."""
        self._pending.wait()
        put_all(self._late)
        return self._found


def _packed_part(room: Any, x: Any, own: Sequence[tuple[Span, Span]], held: Span) -> Any:
    """Rows that this rank holds: from the room of the round, where they lie side by side there."""
    at = among(own, held)
    if at is not None and beside(part := room[:, at : at + held[1] - held[0]]):
        return part
    return packed(x[:, slice(*held)])


def among(own: Sequence[tuple[Span, Span]], held: Span) -> int | None:
    """Where rows that a rank holds begin among the keys that it has, if they all are there."""
    found = [c + held[0] - a for (a, b), (c, _) in own if a <= held[0] and held[1] <= b]
    return found[0] if found else None


def _room(part: Any) -> Any:
    """What a message is sent from, or received in: a part of an array, or room for it where it is in pieces."""
    return part if beside(part) else empty(tuple(part.shape), part)


class Numbers(NamedTuple):
    """Of each query a number, (B, H, S), lse and dlse: each call takes those of some heads and rows, side by side."""

    arrays: dict[str, Any]
    places: Sequence[Sequence[Place | None]]  # of each round those of its calls
    longest: int = 0  # how many rows the rank has that has most
    calls: int = 0  # of a round, of the rank that has most


class Here(NamedTuple):
    """What a round's calls have, each."""

    of: Round
    keys: list[list[Any]]  # K and V
    numbers: list[dict[str, Any]]


class Sums(NamedTuple):
    """Gradients of a round's keys, K's and V's: of all, and of those that each call has."""

    every: Sequence[Any]
    parts: Sequence[Sequence[Any]]


class SentKeys:
    """K and V of each round of a call, by messages: those of the next travel while one is computed with. Where `grads`,
    dk and dv, are given, gradients of them go back to who holds the keys."""

    def __init__(self, group: Group, plan: Sequence[Round], k: Any, v: Any, grads: Any, numbers: Numbers) -> None:
        self._group, self._plan, self._kv, self._grads, self._numbers = group, plan, (k, v), grads, numbers
        self._returns: Returns | None = None

    def __iter__(self) -> Iterator[Here]:
        plan, (given, places, *_) = self._plan, self._numbers
        under_way = Keys(self._group, plan[0], *self._kv) if plan else None
        for n, of in enumerate(plan):
            assert under_way is not None
            here = under_way
            under_way = Keys(self._group, plan[n + 1], *self._kv) if n + 1 < len(plan) else None
            numbers = [{name: packed(taken(x, at)) for name, x in given.items()} for at in places[n]]
            self._of, self._here = of, here.wait()
            yield Here(of, [[taken(x, at) for x in self._here] for at in of.places], numbers)
        if self._returns is not None:
            self._returns.write(*self._grads)

    def room(self) -> Sums:
        """Where the gradients of a round's keys are to be written, in wide numbers."""
        every = [empty(tuple(x.shape), like, wide(like)) for x, like in zip(self._here, self._grads)]
        self._sums = Sums(every, [[taken(x, at) for x in every] for at in self._of.places])
        return self._sums

    def add(self, n: int, parts: Sequence[Any]) -> None:
        """What the n-th call of the round has written beside these."""
        first = self._of.steps[n].here[0]
        put_sums([
            (x[:, a:b], [x[:, a:b]] * begun + [part[:, a - first : b - first]])
            for x, part in zip(self._sums.every, parts) for (a, b), begun in self._of.added(n)
        ])  # fmt: skip

    def give(self, sums: Sums) -> None:
        """They are written: who holds the keys adds them to its own."""
        sent = Returns(self._group, self._of, sums.every)
        if self._returns is not None:  # these travelled while the last was computed
            self._returns.write(*self._grads)
        self._returns = sent


class Returns:
    """Gradients of a round's keys, in wide numbers, under way to who holds these."""

    def __init__(self, group: Group, of: Round, grads: Sequence[Any]) -> None:
        self._heads, self._parts = slice(*of.heads), parts_of(of, group.rank)
        foreign = [m for m in of.receives if m.source != group.rank]
        self._sent = [(m.source, packed(x[:, slice(*at)])) for x in grads for m in foreign for at in m.here]
        self._pieces, receives = [], []  # of k and of v: by rank and number, from their first row on
        for x in grads:
            own = {(group.rank, n): x[:, at[0] :] for n, (_, at) in enumerate(of.own(group.rank))}
            others = {
                (m.target, n): empty((x.shape[0], b - a, *x.shape[2:]), x)
                for m in of.sends
                for n, (a, b) in enumerate(m.held)
            }
            receives += [(rank, room) for (rank, _), room in others.items()]
            self._pieces.append(own | others)
        self._pending = group.exchange(self._sent, receives)

    def write(self, dk: Any, dv: Any) -> None:
        self._pending.wait()
        put_sums([
            (target[:, a:b, self._heads], [pieces[x.rank, x.piece][:, x.at : x.at + b - a] for x in parts])
            for target, pieces in zip((dk, dv), self._pieces) for (a, b), parts in self._parts
        ])  # fmt: skip


class PartOf(NamedTuple):
    """Gradients of some rows, of those that one rank has."""

    rank: int
    piece: int  # of the rows that are held, as the message to the rank has them
    at: int  # row of it


def parts_of(of: Round, rank: int, more: Sequence[Span] = ()) -> list[tuple[Span, list[PartOf]]]:
    """Rows that a rank holds, and whose gradients are added up there: in the order of ranks, whoever came first, and
    rounded once, so that all runs give the same bits. Rows that no rank sees are left out. more: pieces behind those
    that the rank has itself."""
    held = {m.target: m.held for m in of.sends} | {rank: (*(x for x, _ in of.own(rank)), *more)}
    pieces = [(r, n, span) for r in sorted(held) for n, span in enumerate(held[r])]
    ends = sorted({x for _, _, span in pieces for x in span})
    found = []
    for a, b in itertools.pairwise(ends):
        parts = [PartOf(r, n, a - first) for r, n, (first, last) in pieces if first <= a and b <= last]
        if parts:
            found.append(((a, b), parts))
    return found


class ByHeads(NamedTuple):
    """An array of which each rank gets all rows of some heads: who holds which of its rows, and how many of its heads
    belong to one that is handed over."""

    deal: Deal
    group_of: int
    x: Any

    def heads(self, some: Span) -> list[slice]:
        """Of each rank: the `some` of those that it gets."""
        return [slice((a + some[0]) * self.group_of, (a + some[1]) * self.group_of) for a, _ in self.deal.heads]

    def shape(self, heads: int) -> tuple[int, int, int, int]:
        """Of all rows of so many heads."""
        return self.x.shape[0], self.deal.length, heads * self.group_of, self.x.shape[3]

    def nbytes(self, heads: int) -> int:
        """Of so many heads, in the team that has most rows: all teams cut them alike."""
        batch, _, count, dim = self.shape(heads)
        return int(batch * self.deal.longest * count * dim * self.x.itemsize)


class ToHeads:
    """(B, own rows, all heads, D) of each rank of a team, under way to (B, rows of the team, own heads, D).

    some: which of the heads that a rank gets.
    """

    def __init__(self, group: Group, arrays: Sequence[ByHeads], some: Span) -> None:
        self._late, self._sent, receives, self._found = [], [], [], []
        early, beside_it = list[tuple[Any, Any]](), list[tuple[Any, Any]]()
        others = [r for r in range(group.size) if r != group.rank]
        for array in arrays:
            x, heads, rows = array.x, array.heads(some), array.deal.rows
            own = x[:, :, heads[group.rank]]
            found = empty((x.shape[0], array.deal.length, *own.shape[2:]), x)
            for r in others:
                for (a, b), _ in rows[group.rank]:
                    part = x[:, a:b, heads[r]]
                    early.append((_room(part), part))
                    self._sent.append((r, early[-1][0]))
                for _, (a, b) in rows[r]:
                    part = found[:, a:b]
                    self._late.append((part, _room(part)))
                    receives.append((r, self._late[-1][1]))
            beside_it += [(found[:, c:d], own[:, a:b]) for (a, b), (c, d) in rows[group.rank]]
            self._found.append(found)
        put_all(early)
        self._pending = group.exchange(self._sent, receives)
        put_all(beside_it)

    def wait(self) -> list[Any]:
        self._pending.wait()
        put_all(self._late)
        return self._found


class FromHeads:
    """Back again: (B, rows of the team, own heads, D), under way to arrays of (B, own rows, all heads, D)."""

    def __init__(self, group: Group, arrays: Sequence[ByHeads], some: Span, targets: Sequence[Any]) -> None:
        self._late, self._sent, receives = [], [], []
        early, beside_it = list[tuple[Any, Any]](), list[tuple[Any, Any]]()
        others = [r for r in range(group.size) if r != group.rank]
        for array, target in zip(arrays, targets):
            x, heads, rows = array.x, array.heads(some), array.deal.rows
            for r in others:
                for _, (a, b) in rows[r]:
                    part = x[:, a:b]
                    early.append((_room(part), part))
                    self._sent.append((r, early[-1][0]))
                for (a, b), _ in rows[group.rank]:
                    part = target[:, a:b, heads[r]]
                    room = empty(tuple(part.shape), x)
                    receives.append((r, room))
                    self._late.append((part, room))
            beside_it += [(target[:, a:b, heads[group.rank]], x[:, c:d]) for (a, b), (c, d) in rows[group.rank]]
        put_all(early)
        self._pending = group.exchange(self._sent, receives)
        put_all(beside_it)

    def wait(self) -> None:
        """Until the targets are written."""
        self._pending.wait()
        put_all(self._late)


def gathered(group: Group, *xs: Any) -> list[list[Any]]:
    """Of each array those of all ranks, in their order."""
    own = [packed(x) for x in xs]
    rooms = {r: [empty(tuple(x.shape), x) for x in xs] for r in range(group.size) if r != group.rank}
    sends, receives = [(r, x) for r in rooms for x in own], [(r, x) for r, some in rooms.items() for x in some]
    group.exchange(sends, receives).wait()
    rooms[group.rank] = own
    return [[rooms[r][n] for r in range(group.size)] for n in range(len(xs))]


def summed(group: Group, x: Any) -> Any:
    """The sum over all ranks, added in their order."""
    if group.size == 1:
        return x
    total = zeros(tuple(x.shape), x)
    for part in gathered(group, x)[0]:
        total += part
    return total
