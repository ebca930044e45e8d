"""Transfers among ranks that reach each other's memory, a window: keys are pushed while others are computed with, their
gradients are fetched, heads are put where they belong; there are no messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..gpu.copies import Copies, Piece, Side
from ..passes import PER_QUERY
from ..problem import ITEMSIZE, contiguous
from .arrays import alone, beside, dtype_name, empty, library, lying, strides, wide
from .rows import Span, common
from .steps import Round
from .transfers import ByHeads, Here, Numbers, Sums, among, parts_of

ALIGNED = 1024  # bytes at whose multiples arrays begin


class NearKeys:
    """K and V of each round of a call, and the gradients of them, as `transfers.SentKeys`.

    Two places for keys: while one is computed with, the other is written to. Backward two for gradients: while one is
    written by who computes, ranks fetch theirs from the other.
    """

    def __init__(
        self, window: Any, rank: int, plan: Sequence[Round], k: Any, v: Any, grads: Any, numbers: Numbers, memo: Any
    ) -> None:
        self._window, self._rank, self._plan, self._kv, self._grads = window, rank, plan, (k, v), grads
        self._numbers = numbers
        # (Numbers of heads that were handed over lie as the way had it by which these came.)
        key = "moves", k.shape[2], len(plan), *map(lying(library(k)), numbers.arrays.values())
        if key not in memo:
            memo[key] = _Moves(plan, rank, len(window.places), k, v, grads, numbers)
        self._moves: _Moves = memo[key]
        self._given: int | None = None
        self._late: list[Any] = []  # parts of calls that are still to be added
        self.may = window.begin(self._moves.size)

    def __iter__(self) -> Iterator[Here]:
        plan = self._plan
        self._views: list[_Views] = self._window.kept(self._moves, lambda: [self._seen(n) for n in range(len(plan))])
        self._push(0)
        for n, of in enumerate(plan):
            self._window.arrived()
            if n + 1 < len(plan):
                self._push(n + 1)
            self._fetch()
            self._at, views = n, self._views[n]
            yield Here(of, views.keys, [self._numbers.arrays | x for x in views.numbers])
        if self._given is not None:
            self._window.arrived()
            self._fetch()
        self._window.end()

    def room(self) -> Sums:
        """Where the gradients of a round's keys are to be written, in wide numbers."""
        found = self._views[self._at].sums
        assert found is not None
        return found

    def add(self, n: int, parts: Sequence[Any]) -> None:
        """What the n-th call of the round has written beside these."""
        window, added = self._window, self._moves.rounds[self._at].added
        assert added is not None
        if (copies := added.calls[n]) is None:
            self._late += parts
        else:
            window.put(copies, (window.places[self._rank], *map(window.address, parts)))

    def give(self, sums: Sums) -> None:
        """They are written: who holds the keys adds them to its own."""
        self._given = self._at

    def _push(self, n: int) -> None:
        """This rank's keys of a round to who computes with them."""
        window, of = self._window, self._moves.rounds[n]
        self._packed = empty((of.packed,), self._kv[0], "uint8") if of.packed else None  # until these have arrived
        own, given = window.places[self._rank], (*self._kv, *self._numbers.arrays.values())
        addresses = own, 0 if self._packed is None else window.address(self._packed), *map(window.address, given)
        window.put(of.own, addresses)
        parts = [(rank, to, addresses[array] + at, count) for rank, to, array, at, count in of.sends]
        window.push(parts, n > 0)  # beside the round before

    def _fetch(self) -> None:
        """Of the round before, whose gradients all ranks have written."""
        if self._given is None:
            return
        n, self._given = self._given, None
        window, arrays, self._late = self._window, (*self._grads, *self._late), []
        added = self._moves.rounds[n].added
        assert added is not None
        window.put(added.own, (*window.places, *map(window.address, arrays)))

    def _seen(self, n: int) -> _Views:
        array, of, moves = self._window.array, self._plan[n], self._moves.rounds[n]
        room = [array(at, shape, x) for at, shape, x in zip(moves.begins, moves.shapes, self._kv)]
        given = self._numbers.arrays
        numbers = [{name: array(*at, given[name]) for name, at in some.items()} for some in moves.numbers]
        keys = [[alone(x, at) for x in room] for at in of.places]
        if self._grads is None:
            return _Views(keys, numbers, None)
        every = [array(at, shape, x, wide(x)) for at, shape, x in zip(moves.of_sums, moves.shapes, self._grads)]
        return _Views(keys, numbers, Sums(every, [[alone(x, at) for x in every] for at in of.places]))


class _Views(NamedTuple):
    """Of the window, in a round."""

    keys: list[list[Any]]  # K and V of each call
    numbers: list[dict[str, Any]]  # of each call, those that do not lie side by side where they are given
    sums: Sums | None


class _Moves:
    """Of all rounds, as all calls of a kind make them. At the beginning of the window are numbers, then keys, then sums
    of gradients: at the same bytes of each rank's."""

    def __init__(
        self, plan: Sequence[Round], rank: int, size: int, k: Any, v: Any, grads: Any, numbers: Numbers
    ) -> None:
        pieces, of_numbers, first = _of_numbers(plan, numbers)
        ends = [[_ends(of, (k, v), as_wide) for of in plan] for as_wide in (False, True)]
        keys, sums = (max((x[2] for x in some), default=0) for some in ends)
        self.size = first + 2 * keys + (2 * sums if grads is not None else 0)
        self.rounds = []
        for n, of in enumerate(plan):
            begins = [first + n % 2 * keys + x for x in ends[0][n][:2]]
            of_sums = [first + 2 * keys + n % 2 * sums + x for x in ends[1][n][:2]]
            added = None if grads is None else _added(of, rank, size, grads, of_sums)
            self.rounds.append(_moves(of, rank, k, v, begins, of_sums, [] if n else pieces, of_numbers[n], added))


def _ends(of: Round, xs: Sequence[Any], as_wide: bool) -> list[int]:
    """Where the keys of a round begin, of the rank that has most, and where they end: as they are, or in wide
    numbers."""
    found, heads = [0], of.heads[1] - of.heads[0]
    for x in xs:
        size = 4 if as_wide and wide(x) else x.itemsize
        found.append(_after(found[-1], x.shape[0] * of.longest * heads * x.shape[3] * size))
    return found


def _of_numbers(plan: Sequence[Round], of: Numbers) -> tuple[list[Piece], list[list[dict[str, _Room]]], int]:
    """What is copied for all rounds at once; where each of their calls has it; bytes of the rank that has most."""
    pieces: list[Piece] = []
    found: dict[Any, _Room] = {}
    every, end = [], 0
    for some in of.places:
        every.append([dict[str, _Room]() for _ in some])
        for one, at in zip(every[-1], some):
            for n, (name, x) in enumerate(of.arrays.items()):
                if at is None and beside(x):
                    continue
                spans = dict(() if at is None else at.spans)
                if (key := (name, *spans.items())) not in found:
                    every_axis = [spans.get(axis, (0, count)) for axis, count in enumerate(x.shape)]
                    lengths = tuple(b - a for a, b in every_axis)
                    source = Side(_GIVEN + 2 + n, 0, strides(x)).behind(*(a for a, _ in every_axis))
                    pieces.append(Piece(Side(_OWN, end, _inside(lengths, x.itemsize)), source, lengths, x.itemsize))
                    found[key], end = (end, lengths), _after(end, math.prod(lengths) * x.itemsize)
                one[name] = found[key]
    calls = of.calls * len({x.heads for x in plan})
    most = sum(
        _after(0, math.prod(x.shape[:2]) * of.longest * x.itemsize) + calls * ALIGNED for x in of.arrays.values()
    )
    return pieces, every, most


class _Added(NamedTuple):
    """Sums of gradients, of K and of V."""

    own: Copies  # of keys that this rank holds: arrays are the ranks' windows, dk, dv, and parts of calls
    calls: list[Copies | None]  # a call's part, to this rank's sums; None: it is written there, or among those of `own`


def _added(of: Round, rank: int, size: int, grads: Sequence[Any], of_sums: list[int]) -> _Added:
    given, written = wide(grads[0]) or dtype_name(grads[0].dtype), dtype_name(grads[0].dtype)
    heads, itemsize = of.heads[1] - of.heads[0], ITEMSIZE[given]

    def side(n: int, array: int, at: int, length: int, row: int) -> Side:
        """From a row of so many on, of wide numbers that lie side by side."""
        batch, _, _, dim = grads[n].shape
        return Side(array, at, _inside((batch, length, heads, dim), itemsize)).behind(0, row)

    def piece(n: int, to: Side, sources: Sequence[Side], rows: Span) -> Piece:
        batch, _, _, dim = grads[n].shape
        return Piece(to, sources[0], (batch, rows[1] - rows[0], heads, dim), itemsize, tuple(sources[1:]))

    own, calls = of.own(rank), list[Any]()
    late: list[tuple[Span, int, int, int]] = []  # rows held, whose parts are those of a call from a row of so many on
    parts = 0
    for number, (step, begun) in enumerate(zip(of.steps, of.begun)):
        calls.append(None)
        if begun is None:
            continue
        first, end = step.here
        every = [(held[0] - here[0], common(here, step.here)) for held, here in own]
        if not begun and sum(b - a for _, (a, b) in every) == end - first:  # nobody else waits for them
            late += [((a + x, b + x), parts, a - first, end - first) for x, (a, b) in every if b > a]
            parts += 1
            continue
        pieces = []
        for (a, b), was in of.added(number):
            for n in range(2):
                to, more = side(n, 0, of_sums[n], of.length, a), side(n, 1 + n, 0, end - first, a - first)
                pieces.append(piece(n, to, [to, more] if was else [more], (a, b)))
        calls[-1] = Copies(pieces, (given, given))
    have = {m.target: (m.length, m.here) for m in of.sends} | {rank: (of.length, tuple(x for _, x in own))}
    pieces = []
    for rows, found in parts_of(of, rank, [span for span, *_ in late]):
        for n, x in enumerate(grads):
            sources = []
            for part in found:
                length, here = have[part.rank]
                if part.piece < len(here):
                    sources.append(side(n, part.rank, of_sums[n], length, here[part.piece][0] + part.at))
                else:
                    _, which, at, length = late[part.piece - len(here)]
                    sources.append(side(n, size + 2 + 2 * which + n, 0, length, at + part.at))
            pieces.append(piece(n, Side(size + n, 0, strides(x)).behind(0, rows[0], of.heads[0]), sources, rows))
    return _Added(Copies(pieces, (given, written)), calls)


class _Round(NamedTuple):
    """Of K and V each."""

    shapes: list[tuple[int, ...]]  # of what this rank then has
    begins: list[int]  # byte at which any rank has it
    of_sums: list[int]  # and the sums of its gradients
    own: Copies  # of rows that this rank holds itself, to where they are computed with and to where they are sent from
    packed: int  # bytes of the latter
    sends: list[tuple[int, int, int, int, int]]  # rank, byte there, of which array here (_OWN, ...), byte, bytes
    numbers: list[dict[str, _Room]]  # of each call
    added: _Added | None  # backward


_OWN, _PACKED, _GIVEN = range(3)  # this rank's window, rows that are not among its keys, K; V and numbers are behind


def _moves(
    of: Round, rank: int, k: Any, v: Any, begins: list[int], of_sums: list[int], pieces: list[Piece],
    numbers: list[dict[str, _Room]], added: _Added | None,
) -> _Round:  # fmt: skip
    """Copies of a round beside `pieces`, and what is sent."""
    own, heads = of.own(rank), of.heads[1] - of.heads[0]
    shapes: list[tuple[int, ...]] = []
    sends: list[tuple[int, int, int, int, int]] = []
    packed: dict[tuple[int, Span], Side] = {}
    end = 0  # of these
    for n, x in enumerate((k, v)):
        batch, dim, size = x.shape[0], x.shape[3], x.itemsize
        row = heads * dim * size
        room = Side(_OWN, begins[n], _inside((batch, of.length, heads, dim), size))
        given = Side(_GIVEN + n, 0, strides(x)).behind(0, 0, of.heads[0])
        for held, here in own:
            lengths = batch, held[1] - held[0], heads, dim
            pieces.append(Piece(room.behind(0, here[0]), given.behind(0, held[0]), lengths, size))
        for m in of.sends:
            there = Side(_OWN, begins[n], _inside((batch, m.length, heads, dim), size))
            for held, here in zip(m.held, m.here):
                lengths = batch, held[1] - held[0], heads, dim
                if (place := among(own, held)) is not None:
                    source = room.behind(0, place)
                elif beside(x[:1, slice(*held), slice(*of.heads)]):
                    source = given.behind(0, held[0])
                else:
                    if (n, held) not in packed:
                        packed[n, held] = Side(_PACKED, end, _inside(lengths, size))
                        pieces.append(Piece(packed[n, held], given.behind(0, held[0]), lengths, size))
                        end = _after(end, math.prod(lengths) * size)
                    source = packed[n, held]
                for b in range(batch):
                    to, at = there.behind(b, here[0]).at, source.behind(b).at
                    sends.append((m.target, to, source.array, at, lengths[1] * row))
        shapes.append((batch, of.length, heads, dim))
    return _Round(shapes, begins, of_sums, Copies(pieces), end, sends, numbers, added)


def _inside(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Bytes of each axis, of an array whose elements lie side by side."""
    return tuple(n * size for n in contiguous(shape))


def _after(begin: int, size: int) -> int:
    return begin + -(-size // ALIGNED) * ALIGNED


class NearHeads:
    """Arrays of which each rank of a team gets all rows of some heads, and results that go back to their rows."""

    def __init__(self, window: Any, rank: int, of: Handed, arrays: dict[str, Any], results: dict[str, Any]) -> None:
        self._window, self._rank, self._of, self._arrays, self._results = window, rank, of, arrays, results
        self.may = window.begin(of.size)

    def there(self) -> list[dict[str, Any]]:
        """All rows of this rank's heads, as `attention` takes them; and where results of these are to be written."""
        self._window.put(self._of.there, self._addresses(self._arrays))
        self._window.arrived()
        found: list[dict[str, Any]] = self._window.kept(self._of, self._views)
        return found

    def back(self) -> None:
        """Results of this rank's rows, of all heads, from who computed them."""
        self._window.arrived()
        self._window.put(self._of.back, self._addresses(self._results))
        self._window.end()

    def _addresses(self, xs: dict[str, Any]) -> list[int]:
        return [*self._window.places, *map(self._window.address, xs.values())]

    def _views(self) -> list[dict[str, Any]]:
        array, every = self._window.array, ((self._arrays, self._of.arrays), (self._results, self._of.results))
        return [{name: array(at, shape, x) for (name, x), (at, shape) in zip(xs.items(), rooms)} for xs, rooms in every]


_Room = tuple[int, tuple[int, ...]]  # byte of a window at which an array begins, and its shape


@dataclass(eq=False)
class Handed:
    """Heads that are handed over, as all calls of a kind do it."""

    arrays: list[_Room]
    results: list[_Room]
    size: int
    there: Copies
    back: Copies


def handed(rank: int, arrays: dict[str, ByHeads], results: dict[str, ByHeads], some: Span) -> Handed:
    """Of this rank's rows to the `some` of heads that any rank gets, and of these back. Addresses are those of ranks'
    windows, then of arrays in their order."""
    end, count = 0, some[1] - some[0]
    rooms: tuple[list[_Room], list[_Room]] = [], []
    pieces: tuple[list[Piece], list[Piece]] = [], []
    for number, xs in enumerate((arrays, results)):
        for n, (name, array) in enumerate(xs.items()):
            b, s, h, d = array.shape(count)
            of_query, size = name in PER_QUERY, array.x.itemsize
            shape = (b, h, s) if of_query else (b, s, h, d)  # as kernels take them
            inside = _inside(shape, size)
            room = Side(0, end, (inside[0], inside[2], inside[1], size) if of_query else inside)
            own, heads = Side(len(array.deal.heads) + n, 0, strides(array.x)), array.heads(some)
            for r in (*range(rank + 1, len(heads)), *range(rank + 1)):  # the next first: not all are at one rank
                for held, at in array.deal.rows[rank]:
                    sides = room._replace(array=r).behind(0, at[0]), own.behind(0, held[0], heads[r].start)
                    to, source = sides[::-1] if number else sides
                    pieces[number].append(Piece(to, source, (b, held[1] - held[0], h, d), size))
            rooms[number].append((end, shape))
            end = _after(end, array.nbytes(count))
    return Handed(*rooms, end, *map(Copies, pieces))
