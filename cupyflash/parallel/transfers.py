"""Rows and heads on their way: messages of a plan, packed, sent, and put where they belong."""

from __future__ import annotations

from typing import Any

from .arrays import empty, packed, put, rows_of, spread, zeros
from .groups import Group
from .rows import Span
from .steps import Deal, Message, Round


class Keys:
    """K and V of a round, under way to whose rows see them."""

    def __init__(self, group: Group, of: Round, k: Any, v: Any) -> None:
        self._group, self._of, self._own = group, of, (k, v)
        self._heads = slice(*of.heads)
        sends = [(m.target, rows_of(x, m.held, self._heads)) for m in of.sends for x in (k, v)]
        foreign = [m for m in of.receives if m.source != group.rank]
        self._received = [(m, [self._room(m, x) for x in (k, v)]) for m in foreign]
        self._sent = sends  # they stay until they have arrived
        self._pending = group.exchange(sends, [(m.source, x) for m, both in self._received for x in both])

    def _room(self, m: Message, x: Any) -> Any:
        count = sum(b - a for a, b in m.here)
        return empty((x.shape[0], count, self._of.heads[1] - self._of.heads[0], x.shape[3]), x)

    def wait(self) -> tuple[Any, Any]:
        """K and V, (B, keys of the round, heads, D)."""
        self._pending.wait()
        own = [m for m in self._of.receives if m.source == self._group.rank]
        alone = not self._received and self._own[0].shape[1] == self._of.length
        if alone and len(own) == 1 and own[0].held == ((0, self._of.length),):
            return self._own[0][:, :, self._heads], self._own[1][:, :, self._heads]
        heads = self._of.heads[1] - self._of.heads[0]
        found = []
        for n, x in enumerate(self._own):
            room = empty((x.shape[0], self._of.length, heads, x.shape[3]), x)
            for m in own:
                spread(room, m.here, rows_of(x, m.held, self._heads))
            for m, both in self._received:
                spread(room, m.here, both[n])
            found.append(room)
        return found[0], found[1]


class Returns:
    """Gradients of a round's keys, in wide numbers, under way to who holds these."""

    def __init__(self, group: Group, of: Round, grads: tuple[Any, Any]) -> None:
        self._group, self._of, self._grads = group, of, grads
        every = slice(None)
        sends = [(m.source, rows_of(x, m.here, every)) for m in of.receives if m.source != group.rank for x in grads]
        self._received = {
            m.target: (m, [empty((x.shape[0], sum(b - a for a, b in m.held), *x.shape[2:]), x) for x in grads])
            for m in of.sends
        }
        self._sent = sends
        self._pending = group.exchange(sends, [(r, x) for r, (_, both) in self._received.items() for x in both])

    def add_to(self, dk: Any, dv: Any) -> None:
        """In the order of ranks, whoever came first: the same bits in every run."""
        self._pending.wait()
        own = [m for m in self._of.receives if m.source == self._group.rank]
        for rank in range(self._group.size):
            for n, target in enumerate((dk, dv)):
                part = target[:, :, slice(*self._of.heads)]
                if rank == self._group.rank:
                    for m in own:
                        spread(part, m.held, rows_of(self._grads[n], m.here, slice(None)), add=True)
                elif rank in self._received:
                    m, both = self._received[rank]
                    spread(part, m.held, both[n], add=True)


def to_heads(group: Group, deal: Deal, group_of: int, xs: list[Any]) -> list[Any]:
    """(B, own rows, all heads, D) of each rank of a team to (B, rows of the team, own heads, D).

    group_of: heads of x for each that is dealt out.
    """
    spans = _spans(deal, group_of)
    own = spans[group.rank]
    counts = [sum(b - a for (a, b), _ in some) for some in deal.rows]
    others = [r for r in range(group.size) if r != group.rank]
    sends = [(r, packed(x[:, :, slice(*spans[r])])) for r in others for x in xs]
    rooms = {r: [empty((x.shape[0], counts[r], own[1] - own[0], x.shape[3]), x) for x in xs] for r in others}
    pending = group.exchange(sends, [(r, x) for r, some in rooms.items() for x in some])
    rooms[group.rank] = [x[:, :, slice(*own)] for x in xs]
    pending.wait()
    found = [empty((x.shape[0], deal.length, own[1] - own[0], x.shape[3]), x) for x in xs]
    for r, some in rooms.items():
        for target, x in zip(found, some):
            for (a, b), (c, d) in deal.rows[r]:
                put(target[:, c:d], x[:, a:b])
    return found


def from_heads(group: Group, deal: Deal, group_of: int, xs: list[Any], targets: list[Any]) -> None:
    """Back again: (B, rows of the team, own heads, D) to (B, own rows, all heads, D), which are written."""
    spans = _spans(deal, group_of)
    others = [r for r in range(group.size) if r != group.rank]
    sends = [(r, rows_of(x, tuple(at for _, at in deal.rows[r]), slice(None))) for r in others for x in xs]
    mine = deal.rows[group.rank]
    count = sum(b - a for (a, b), _ in mine)
    rooms = {r: [empty((x.shape[0], count, spans[r][1] - spans[r][0], x.shape[3]), x) for x in xs] for r in others}
    pending = group.exchange(sends, [(r, x) for r, some in rooms.items() for x in some])
    rooms[group.rank] = [rows_of(x, tuple(at for _, at in mine), slice(None)) for x in xs]
    pending.wait()
    for r, some in rooms.items():
        for target, x in zip(targets, some):
            spread(target[:, :, slice(*spans[r])], tuple(own for own, _ in mine), x)


def summed(group: Group, x: Any) -> Any:
    """The sum over all ranks, added in their order."""
    if group.size == 1:
        return x
    own = packed(x)
    others = [r for r in range(group.size) if r != group.rank]
    rooms = {r: empty(tuple(x.shape), x) for r in others}
    pending = group.exchange([(r, own) for r in others], list(rooms.items()))
    pending.wait()
    rooms[group.rank] = own
    total = zeros(tuple(x.shape), x)
    for r in range(group.size):
        total += rooms[r]
    return total


def _spans(deal: Deal, group_of: int) -> list[Span]:
    return [(a * group_of, b * group_of) for a, b in deal.heads]
