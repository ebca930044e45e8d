"""Pieces of arrays copied to pieces of others, up to MOST of them in one launch (kernels_cu/copies/copies.cu)."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import alone
from .source import inlined

THREADS = 256
TILE = 1 << 14  # bytes that a block copies: with words of 16 bytes a thread has all of its own on their way at once
PLACES = 16  # of a launch's tiles, at which blocks are at once
NAME = "copy_pieces"
MOST = 46  # pieces of a launch, whose parameters are 4 KB
_AXES = 3  # of a piece, but for what lies side by side
_LONGEST = 2**32 - 1  # of an axis
_KEPT = 16  # sets of addresses whose parameters are kept


class Side(NamedTuple):
    """Where a piece is read, or where it is written."""

    array: int  # which of those whose addresses a call gives
    at: int  # byte behind that address
    strides: tuple[int, ...]  # bytes of each axis

    def behind(self, *place: int) -> Side:
        """The same from an element on."""
        return self._replace(at=self.at + sum(i * stride for i, stride in zip(place, self.strides)))


class Piece(NamedTuple):
    """What is copied: so many elements along each axis."""

    to: Side
    source: Side
    lengths: tuple[int, ...]
    itemsize: int


class Copies:
    """Of pieces of which none is written where another is read or written. All but addresses is prepared."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        plain = [y for x in pieces if 0 not in x.lengths for y in _plain(x)]
        self.launches = [_Launch.of(plain[n : n + MOST]) for n in range(0, len(plain), MOST)]
        self._params = functools.lru_cache(_KEPT)(self._packed)

    def launch(self, addresses: Sequence[int], ordinal: int, stream: int) -> None:
        """Make them, for the addresses of the arrays, on a stream of the GPU `ordinal`."""
        if self.launches:
            for params, grid in self._params(tuple(addresses)):
                alone.launch(_PROGRAM, NAME, params, grid, ordinal, stream)

    def _packed(self, addresses: tuple[int, ...]) -> list[tuple[bytes, tuple[int, int]]]:
        return [(x.params(addresses), (x.blocks, THREADS)) for x in self.launches]


class Program(NamedTuple):
    most: int
    tile: int
    threads: int
    places: int

    def source(self) -> str:
        names = f"MOST = {self.most}, TILE = {self.tile}, THREADS = {self.threads}, PLACES = {self.places}"
        return f"constexpr unsigned {names};\n" + inlined("copies/copies.cu")


_PROGRAM = Program(MOST, TILE, THREADS, PLACES)


class _Plain(NamedTuple):
    """A piece as the kernel has it: bytes that lie side by side, and up to _AXES axes of those."""

    to: tuple[int, int]  # array, byte
    source: tuple[int, int]
    axes: tuple[tuple[int, int, int], ...]  # length, stride of what is written, of what is read
    run: int

    @property
    def tiles(self) -> int:
        return -(-self.run * math.prod(n for n, _, _ in self.axes) // TILE)


class _Launch(NamedTuple):
    to: list[tuple[int, int]]
    source: list[tuple[int, int]]
    blocks: int
    behind: bytes  # what stands in its parameters behind the addresses

    @classmethod
    def of(cls, pieces: Sequence[_Plain]) -> _Launch:
        tiles, behind = 0, b""
        for x in pieces:
            axes = ((1, 0, 0),) * (_AXES - len(x.axes)) + x.axes
            lengths, to_strides, strides = zip(*axes)
            behind += struct.pack(f"<{2 * _AXES}qQ{_AXES + 1}I", *to_strides, *strides, x.run, *lengths, tiles)
            tiles += x.tiles
        size = struct.calcsize(f"<{2 * _AXES}qQ{_AXES + 1}I") * MOST
        behind = struct.pack(f"<{size}s2I", behind, len(pieces), tiles)
        return cls([x.to for x in pieces], [x.source for x in pieces], -(-tiles // PLACES) * PLACES, behind)

    def params(self, addresses: Sequence[int]) -> bytes:
        """The kernel's parameter."""
        found = []
        for some in (self.to, self.source):
            found += [addresses[array] + at for array, at in some] + [0] * (MOST - len(some))
        return struct.pack(f"<{len(found)}Q", *found) + self.behind


def _plain(piece: Piece) -> Iterator[_Plain]:
    """What the kernel makes of a copy: usually one. Axes along which both sides go on alike are one."""
    run, axes = piece.itemsize, list[tuple[int, int, int]]()
    every = [x for x in zip(piece.lengths, piece.to.strides, piece.source.strides) if x[0] > 1]
    for length, to, source in sorted(every, key=lambda x: (abs(x[1]), abs(x[2]))):  # the innermost first
        most, last_to, last_source = axes[-1] if axes else (1, 0, 0)
        if not axes and to == source == run:
            run *= length
        elif axes and (to, source) == (most * last_to, most * last_source) and most * length <= _LONGEST:
            axes[-1] = most * length, last_to, last_source
        else:
            axes.append((length, to, source))
    axes.reverse()
    outer, inner = axes[:-_AXES], tuple(axes[-_AXES:])
    for place in itertools.product(*(range(n) for n, _, _ in outer)):
        to_at = piece.to.at + sum(i * to for i, (_, to, _) in zip(place, outer))
        at = piece.source.at + sum(i * source for i, (_, _, source) in zip(place, outer))
        yield _Plain((piece.to.array, to_at), (piece.source.array, at), inner, run)
