"""Transfers among ranks that reach each other's memory, a window: keys are pushed while others are computed with, their
gradients are fetched, heads are put where they belong; there are no messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..gpu.copies import Copies, Piece, Side
from ..passes import PER_QUERY
from ..problem import contiguous
from .arrays import Place, beside, empty, place, put_sum, strides, taken, wide
from .rows import Span
from .steps import Round
from .transfers import ByHeads, among, parts_of

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
        self._addresses = window.address(k), window.address(v)
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

    def _push(self, n: int) -> tuple[list[Any], Any]:
        """The room of this rank's keys of a round, and what must be kept until others have theirs."""
        window, of, begin = self._window, self._moves[n], (n % 2) * self._size
        kept = empty((of.packed,), self._kv[0], "uint8") if of.packed else None
        addresses = (
            window.places[self._rank] + begin, 0 if kept is None else window.address(kept), *self._addresses,
        )  # fmt: skip
        window.put(of.own, addresses)
        window.push([(rank, begin + to, addresses[array] + at, count) for rank, to, array, at, count in of.sends])
        rooms = [window.array(self._rank, begin + at, shape, x) for x, shape, at in zip(self._kv, of.shapes, of.begins)]
        return rooms, kept

    def _fetch(self) -> None:
        """Of the round before, whose gradients all ranks have written."""
        if self._given is None:
            return
        (n, own), self._given = self._given, None
        of = self._moves[n]
        whose = {self._rank: own} | {rank: self._sums(rank, n, shapes) for rank, shapes in of.others}
        for i, target in enumerate(self._grads):
            for to, parts in of.added:
                put_sum(taken(target, to), [taken(whose[rank][i], at) for rank, at in parts])


# Where a sum goes, and which rows of which ranks it is.
_Added = tuple[Place | None, tuple[tuple[int, Place | None], ...]]


class _Moves(NamedTuple):
    """Of a round, K and V each."""

    shapes: tuple[tuple[int, ...], ...]  # of what this rank then has
    begins: tuple[int, ...]  # byte at which any rank has it
    of_sums: tuple[int, ...]  # and the sums of its gradients
    own: Copies  # of rows that this rank holds itself, to where they are computed with and to where they are sent from
    packed: int  # bytes of the latter
    sends: tuple[tuple[int, int, int, int, int], ...]  # rank, byte there, of which array here (_ROOM, ...), byte, bytes
    others: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]  # ranks with sums of rows held here, and their shapes
    added: tuple[_Added, ...]  # in this order
    sizes: tuple[int, int]  # bytes of keys, of sums, of the rank that has most


_ROOM, _PACKED, _GIVEN = range(3)  # where keys are computed with, rows that are not among them, K; V is behind


def _added(of: Round, rank: int, k: Any) -> list[_Added]:
    """Of gradients of a round's keys that a rank holds."""
    have = {m.target: (m.length, m.here) for m in of.sends} | {rank: (of.length, tuple(x for _, x in of.own(rank)))}
    found: list[_Added] = []
    for (a, b), parts in parts_of(of, rank):
        sources = []
        for x in parts:
            length, here = have[x.rank]
            first = here[x.piece][0] + x.at
            sources.append((x.rank, place(((first, first + b - a), length))))
        found.append((place(((a, b), k.shape[1]), (of.heads, k.shape[2])), tuple(sources)))
    return found


def _moves(of: Round, rank: int, k: Any, v: Any) -> _Moves:
    own, heads = of.own(rank), of.heads[1] - of.heads[0]
    pieces: list[Piece] = []
    shapes, sends, begins, of_sums = [], [], [0], [0]
    packed: dict[tuple[int, Span], Side] = {}
    end = 0  # of these
    for n, x in enumerate((k, v)):
        batch, dim, size = x.shape[0], x.shape[3], x.itemsize
        row = heads * dim * size
        room = Side(_ROOM, begins[-1], _inside((batch, of.length, heads, dim), size))
        given = Side(_GIVEN + n, 0, strides(x)).behind(0, 0, of.heads[0])
        for held, here in own:
            lengths = batch, held[1] - held[0], heads, dim
            pieces.append(Piece(room.behind(0, here[0]), given.behind(0, held[0]), lengths, size))
        for m in of.sends:
            there = Side(_ROOM, begins[-1], _inside((batch, m.length, heads, dim), size))
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
        begins.append(_after(begins[-1], batch * of.longest * row))
        of_sums.append(_after(of_sums[-1], batch * of.longest * heads * dim * (4 if wide(x) else size)))
    others = tuple((m.target, tuple((x[0], m.length, *x[2:]) for x in shapes)) for m in of.sends)
    return _Moves(
        tuple(shapes), tuple(begins[:2]), tuple(of_sums[:2]), Copies(pieces), end, tuple(sends), others,
        tuple(_added(of, rank, k)), (begins[2], of_sums[2]),
    )  # fmt: skip


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

    def there(self) -> dict[str, Any]:
        """All rows of this rank's heads, as `attention` takes them."""
        self._window.put(self._of.there, self._addresses(self._arrays))
        self._window.arrived()
        return self._own(self._arrays, self._of.arrays)

    def rooms(self) -> dict[str, Any]:
        """Where results of these are to be written."""
        return self._own(self._results, self._of.results)

    def back(self) -> None:
        """Results of this rank's rows, of all heads, from who computed them."""
        self._window.arrived()
        self._window.put(self._of.back, self._addresses(self._results))
        self._window.end()

    def _addresses(self, xs: dict[str, Any]) -> list[int]:
        return [*self._window.places, *map(self._window.address, xs.values())]

    def _own(self, xs: dict[str, Any], rooms: Sequence[_Room]) -> dict[str, Any]:
        array, rank = self._window.array, self._rank
        return {name: array(rank, begin, shape, x) for (name, x), (begin, shape) in zip(xs.items(), rooms)}


_Room = tuple[int, tuple[int, ...]]  # byte at which any rank has its heads, and their shape


class Handed(NamedTuple):
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
