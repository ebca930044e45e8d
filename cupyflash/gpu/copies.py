"""Pieces of arrays copied to pieces of others, or sums of such: up to MOST in one launch (copies/copies.cu)."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..problem import ITEMSIZE
from . import alone
from .params import TYPES
from .source import FORMATS, inlined

THREADS = 256
TILE = 1 << 14  # bytes that a block copies: with words of 16 bytes a thread has all of its own on their way at once
PLACES = 16  # of a launch's tiles, at which blocks are at once
NAME = "copy_pieces"
MOST = 45  # pieces of a launch, and sources of these: its parameters are 4 KB
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
    """What is copied: so many elements along each axis. Or a sum, of all that is `added`, in this order."""

    to: Side
    source: Side
    lengths: tuple[int, ...]
    itemsize: int  # of what is read
    added: tuple[Side, ...] = ()


class Copies:
    """Of pieces of which none is written where another is read or written. All but addresses is prepared.

    dtypes: of what sums are of, float32 or float64, and of what they are rounded to; None: bytes are copied. Of more
    than MOST sources the first is written to.
    """

    def __init__(self, pieces: Sequence[Piece], dtypes: tuple[str, str] | None = None) -> None:
        self.pieces, self.dtypes = tuple(pieces), dtypes
        given, written = dtypes or ("", "")
        program, plain = _PROGRAM._replace(given=given, written=written), list[tuple[Program, _Plain]]()
        for x in pieces:
            if 0 in x.lengths:
                continue
            while len(x.added) >= MOST:
                first = x._replace(to=x.source, added=x.added[: MOST - 1])
                plain += [(program._replace(written=given), y) for y in _plain(first, x.itemsize)]
                x = x._replace(added=x.added[MOST - 1 :])
            plain += [(program, y) for y in _plain(x, ITEMSIZE.get(written, x.itemsize))]
        self.launches = [_Launch.of(*some) for some in _together(plain)]
        self._params = functools.lru_cache(_KEPT)(self._packed)

    def launch(self, addresses: Sequence[int], ordinal: int, stream: int) -> None:
        """Make them, for the addresses of the arrays, on a stream of the GPU `ordinal`."""
        if self.launches:
            for program, params, grid in self._params(tuple(addresses)):
                alone.launch(program, NAME, params, grid, ordinal, stream)

    def _packed(self, addresses: tuple[int, ...]) -> list[tuple[Program, bytes, tuple[int, int]]]:
        return [(x.program, x.params(addresses), (x.blocks, THREADS)) for x in self.launches]


class Program(NamedTuple):
    most: int
    tile: int
    threads: int
    places: int
    given: str = ""  # dtype of what sums are of; "": bytes are copied
    written: str = ""

    def source(self) -> str:
        names = f"MOST = {self.most}, TILE = {self.tile}, THREADS = {self.threads}, PLACES = {self.places}"
        given, written = (TYPES[x][2] if x else "unsigned char" for x in (self.given, self.written))
        lines = [
            *FORMATS,
            f"constexpr unsigned {names};",
            f"constexpr bool SUMS = {str(bool(self.given)).lower()};",
            f"using In = {given};",
            f"using Out = {written};",
        ]
        return "\n".join(lines) + "\n" + inlined("copies/copies.cu")


_PROGRAM = Program(MOST, TILE, THREADS, PLACES)


class _Plain(NamedTuple):
    """A piece as the kernel has it: bytes that lie side by side, and up to _AXES axes of those."""

    to: tuple[int, int]  # array, byte
    sources: tuple[tuple[int, int], ...]
    axes: tuple[tuple[int, tuple[int, ...]], ...]  # length, strides of what is written, of each that is read
    run: int  # bytes of what is read

    @property
    def tiles(self) -> int:
        return -(-self.run * math.prod(n for n, _ in self.axes) // TILE)


class _Launch(NamedTuple):
    program: Program
    to: list[tuple[int, int]]
    sources: list[tuple[int, int]]
    blocks: int
    behind: bytes  # what stands in its parameters behind the addresses

    @classmethod
    def of(cls, program: Program, pieces: Sequence[_Plain]) -> _Launch:
        tiles, behind, of_sources, begins = 0, b"", b"", [0]
        for x in pieces:
            lengths, strides = zip(*((1, (0,) * (1 + len(x.sources))),) * (_AXES - len(x.axes)) + x.axes)
            to, *read = zip(*strides)
            behind += struct.pack(f"<{_AXES}qQ{_AXES + 1}I", *to, x.run, *lengths, tiles)
            of_sources += struct.pack(f"<{_AXES * len(read)}q", *itertools.chain(*read))
            begins.append(begins[-1] + len(read))
            tiles += x.tiles
        sizes = f"{struct.calcsize(f'<{_AXES}qQ{_AXES + 1}I') * MOST}s{8 * _AXES * MOST}s{2 * (MOST + 1)}s"
        counts = struct.pack(f"<{len(begins)}H", *begins)
        behind = struct.pack(f"@{sizes}2I0Q", behind, of_sources, counts, len(pieces), tiles)
        sources = [y for x in pieces for y in x.sources]
        return cls(program, [x.to for x in pieces], sources, -(-tiles // PLACES) * PLACES, behind)

    def params(self, addresses: Sequence[int]) -> bytes:
        """The kernel's parameter."""
        found = []
        for some in (self.to, self.sources):
            found += [addresses[array] + at for array, at in some] + [0] * (MOST - len(some))
        return struct.pack(f"<{len(found)}Q", *found) + self.behind


def _together(plain: Sequence[tuple[Program, _Plain]]) -> Iterator[tuple[Program, list[_Plain]]]:
    """Those of each launch."""
    some, sources = list[_Plain](), 0
    for n, (program, x) in enumerate(plain):
        some.append(x)
        sources += len(x.sources)
        following = plain[n + 1] if n + 1 < len(plain) else None
        if following is None or following[0] != program or sources + len(following[1].sources) > MOST:
            yield program, some
            some, sources = [], 0


def _plain(piece: Piece, written: int) -> Iterator[_Plain]:
    """What the kernel makes of a piece, whose elements are written as so many bytes: usually one. Axes along which all
    sides go on alike are one."""
    sources, size = (piece.source, *piece.added), piece.itemsize
    run, axes = 1, list[tuple[int, tuple[int, ...]]]()
    every = zip(piece.lengths, zip(piece.to.strides, *(x.strides for x in sources)))
    for length, strides in sorted((x for x in every if x[0] != 1), key=lambda x: [*map(abs, x[1])]):  # innermost first
        most, last = axes[-1] if axes else (1, ())
        if not axes and strides == (run * written, *(run * size,) * len(sources)):
            run *= length
        elif axes and strides == tuple(most * x for x in last) and most * length <= _LONGEST:
            axes[-1] = most * length, last
        else:
            axes.append((length, strides))
    axes.reverse()
    outer, inner = axes[:-_AXES], tuple(axes[-_AXES:])
    for place in itertools.product(*(range(n) for n, _ in outer)):
        to, *read = (
            (side.array, side.at + sum(i * strides[n] for i, (_, strides) in zip(place, outer)))
            for n, side in enumerate((piece.to, *sources))
        )
        yield _Plain(to, tuple(read), inner, run * size)
