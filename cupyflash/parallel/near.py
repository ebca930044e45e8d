"""Transfers among ranks that reach each other's memory, a window: keys are pushed while others are computed with, their
gradients are fetched, heads are put where they belong; there are no messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .arrays import packed, wide
from .rows import Span
from .steps import Round
from .transfers import ByHeads, write_sums

_ALL = slice(None)
ALIGNED = 1024  # bytes at whose multiples arrays begin


class NearKeys:
    """K and V of each round of a call, and the gradients of them, as `transfers.SentKeys`.

    Two places for keys: while one is computed with, the other is written to. Backward two for gradients: while one is
    written by who computes, ranks fetch theirs from the other.
    """

    def __init__(self, window: Any, rank: int, plan: Sequence[Round], k: Any, v: Any, grads: Any, memo: Any) -> None:
        self._window, self._rank, self._plan, self._kv, self._grads = window, rank, plan, (k, v), grads
        key = "moves", k.shape[2], len(plan)
        if key not in memo:
            moves = [_moves(of, rank, k, v) for of in plan]
            memo[key] = moves, [max(x.sizes[n] for x in moves) for n in range(2)]
        self._moves, (self._size, more) = memo[key]
        self._sums_at = 2 * self._size, 2 * self._size + more
        self._given: tuple[int, tuple[Any, Any]] | None = None
        self.may = window.begin(2 * self._size + (2 * more if grads is not None else 0))

    def __iter__(self) -> Iterator[tuple[Round, Any, Any]]:
        coming = self._push(0)
        for n, of in enumerate(self._plan):
            self._window.arrived()
            here, _ = coming
            if n + 1 < len(self._plan):
                coming = self._push(n + 1)
            self._fetch()
            self._at = n
            yield (of, *here)
        if self._given is not None:
            self._window.arrived()
            self._fetch()
        self._window.end()

    def room(self, k_of: Any, v_of: Any) -> tuple[Any, Any]:
        """Where the gradients of a round's keys are to be written, in wide numbers."""
        return self._sums(self._rank, self._at, self._moves[self._at].shapes)

    def give(self, of: Round, sums: tuple[Any, Any]) -> None:
        """These are the gradients of a round's keys: who holds the keys adds them to its own."""
        self._given = self._at, sums

    def _sums(self, rank: int, n: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
        begins, grads = self._moves[n].of_sums, self._grads
        k_sum, v_sum = (
            self._window.array(rank, self._sums_at[n % 2] + begin, shape, x, wide(x))
            for begin, shape, x in zip(begins, shapes, grads)
        )
        return k_sum, v_sum

    def _push(self, n: int) -> tuple[list[Any], list[Any]]:
        """The room of this rank's keys of a round, and what must be kept until others have theirs."""
        of, begin = self._moves[n], (n % 2) * self._size
        rooms, own, parts, kept = [], [], [], []
        for x, shape, at, sends in zip(self._kv, of.shapes, of.begins, of.sends):
            room = self._window.array(self._rank, begin + at, shape, x)
            own += [(room, (_ALL, slice(*here)), x, (_ALL, slice(*held), of.heads)) for held, here in of.own]
            rooms.append(room)
            for rank, there, from_room, first, held, count in sends:
                if from_room:
                    address = self._window.address(room) + first
                else:
                    kept.append(packed(x[:, slice(*held), of.heads]))
                    address = self._window.address(kept[-1]) + first
                parts.append((rank, begin + there, address, count))
        self._window.put(own)
        self._window.push(parts)
        return rooms, kept

    def _fetch(self) -> None:
        """Of the round before, whose gradients all ranks have written."""
        if self._given is None:
            return
        (n, own), self._given = self._given, None
        of = self._plan[n]
        parts: list[dict[int, list[tuple[Span, Any]]]] = [{}, {}]
        for m in of.receives:
            if m.source == self._rank:
                for some, x in zip(parts, own):
                    some[self._rank] = [(held, x[:, slice(*at)]) for held, at in zip(m.held, m.here)]
        for m in of.sends:
            shapes = [(s[0], m.length, *s[2:]) for s in self._moves[n].shapes]
            for some, x in zip(parts, self._sums(m.target, n, shapes)):
                some[m.target] = [(held, x[:, slice(*at)]) for held, at in zip(m.held, m.here)]
        for target, some in zip(self._grads, parts):
            write_sums(target[:, :, slice(*of.heads)], [part for r in sorted(some) for part in some[r]])


class _Moves(NamedTuple):
    """Of a round, K and V each."""

    heads: slice
    shapes: tuple[tuple[int, ...], ...]  # of what this rank then has
    begins: tuple[int, ...]  # byte at which any rank has it
    of_sums: tuple[int, ...]  # and the sums of its gradients
    own: tuple[tuple[Span, Span], ...]  # rows that this rank holds itself, and where they are to be
    # rank, byte there, whether it is taken from its own room, byte there or in these rows, bytes
    sends: tuple[tuple[tuple[int, int, bool, int, Span, int], ...], ...]
    sizes: tuple[int, int]  # bytes of keys, of sums, of the rank that has most


def _moves(of: Round, rank: int, k: Any, v: Any) -> _Moves:
    own = tuple(pair for m in of.receives if m.source == rank for pair in zip(m.held, m.here))
    heads = of.heads[1] - of.heads[0]
    shapes, sends, begins, of_sums = [], [], [0], [0]
    for x in (k, v):
        batch, dim = x.shape[0], x.shape[3]
        row, found = heads * dim * x.itemsize, []
        for m in of.sends:
            for held, at in zip(m.held, m.here):
                rooms = [c + held[0] - a for (a, b), (c, _) in own if a <= held[0] and held[1] <= b]
                first, count = (rooms[0], of.length) if rooms else (0, held[1] - held[0])
                for b in range(batch):
                    there, here = begins[-1] + (b * m.length + at[0]) * row, (b * count + first) * row
                    found.append((m.target, there, bool(rooms), here, held, (held[1] - held[0]) * row))
        shapes.append((batch, of.length, heads, dim))
        sends.append(tuple(found))
        begins.append(_after(begins[-1], batch * of.longest * row))
        of_sums.append(_after(of_sums[-1], batch * of.longest * heads * dim * (4 if wide(x) else x.itemsize)))
    return _Moves(
        slice(*of.heads), tuple(shapes), tuple(begins[:2]), tuple(of_sums[:2]), own, tuple(sends),
        (begins[2], of_sums[2]),
    )  # fmt: skip


def _after(begin: int, size: int) -> int:
    return begin + -(-size // ALIGNED) * ALIGNED


class NearHeads:
    """Arrays of which each rank of a team gets all rows of some heads, and results that go back where their rows are.

    some: which of the heads that a rank gets.
    """

    def __init__(
        self, window: Any, rank: int, arrays: Sequence[ByHeads], results: Sequence[ByHeads], some: Span
    ) -> None:
        self._window, self._rank, self._arrays, self._results, self._some = window, rank, arrays, results, some
        end, places, count = 0, [], some[1] - some[0]
        for array in (*arrays, *results):
            places.append((end, array.shape(count)))
            end = _after(end, array.nbytes(count))
        self._places = places
        self.may = window.begin(end)

    def there(self) -> list[Any]:
        """All rows of this rank's heads."""
        window, found, parts = self._window, [], []
        for array, (begin, shape) in zip(self._arrays, self._places):
            heads, rows = array.heads(self._some), array.deal.rows[self._rank]
            for r in self._ranks(len(heads)):
                target = window.array(r, begin, shape, array.x)
                parts += [
                    (target, (_ALL, slice(c, d)), array.x, (_ALL, slice(a, b), heads[r])) for (a, b), (c, d) in rows
                ]
            found.append(window.array(self._rank, begin, shape, array.x))
        window.put(parts)
        window.arrived()
        return found

    def rooms(self) -> list[Any]:
        """Where results of these are to be written."""
        return [
            self._window.array(self._rank, begin, shape, array.x)
            for array, (begin, shape) in zip(self._results, self._places[len(self._arrays) :])
        ]

    def back(self) -> None:
        """Results of this rank's rows, of all heads, from who computed them."""
        window, parts = self._window, []
        for array, (begin, shape) in zip(self._results, self._places[len(self._arrays) :]):
            heads, rows = array.heads(self._some), array.deal.rows[self._rank]
            for r in self._ranks(len(heads)):
                source = window.array(r, begin, shape, array.x)
                parts += [
                    (array.x, (_ALL, slice(a, b), heads[r]), source, (_ALL, slice(c, d))) for (a, b), (c, d) in rows
                ]
        window.arrived()
        window.put(parts)
        window.end()

    def _ranks(self, size: int) -> list[int]:
        """The next first, so that not all are at one rank."""
        return [(self._rank + 1 + n) % size for n in range(size)]
