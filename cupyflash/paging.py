"""Pages without a serving engine: which pages of a pool are whose, counted on the host.

Kernels know nothing of it: they get a table and lengths, as from any other owner of a pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import interop
from .namespaces import namespace
from .problem import check_layout, to_bshd
from .scalars import integer, whole_number

Array = Any


class Room(NamedTuple):
    """What a call needs to be told of sequences that rows are appended to; on the device of the pools."""

    seqlens_k: Array  # (N,) int32: rows before those that come
    page_table: Array  # (N, P) int32, with the pages of those that come; -1 where there is none


class OutOfPages(MemoryError):
    """More pages are asked for than are left. Nothing has been changed."""


class Pages:
    """Pages of pools that sequences share out: each has its own, or shares some with others, which are counted.

    All pools have the same pages: K and V of every layer of a model. What is counted is on the host; pools are written
    to only where a page that several sequences share is about to be written (`append`).

    Parameters
    ----------
    pools : sequence of (pages, page, heads, dim), and of (pages, page, heads) behind the first
        NumPy, CuPy, PyTorch or JAX arrays on one device, or others that speak DLPack, whose memory `pools` of this
        object has as NumPy's or CuPy's. They must be writable. Those without `dim` are the scales of rows of 8 bits,
        which are copied with their rows. JAX's are immutable: `pools` of this object has those of the last copy, and is
        to be set to what `attention_append` returned.
    layout : "bshd" or "bhsd"
        Of pools: (pages, heads, page, dim), and (pages, heads, page), for the latter.
    """

    def __init__(self, pools: Sequence[Array], *, layout: str = "bshd") -> None:
        check_layout(layout)
        if not isinstance(pools, (list, tuple)) or not pools:
            what = "is empty" if isinstance(pools, (list, tuple)) else f"is a {type(pools).__name__}"
            raise TypeError(
                f"pools {what}; it must be a list of arrays (pages, page, heads, dim), K and V of each layer"
            )
        lib = interop.library("pools[0]", pools[0])
        taken: list[Array] = []
        first: tuple[int, ...] | None = None
        for i, x in enumerate(pools):
            name = f"pools[{i}]"
            if interop.library(name, x) is not lib:
                raise TypeError(f"{name} is no {lib.kind} array, but pools[0] is; all must come from one library")
            taken += interop.adopted(lib, {name: x}).values()
            shape = interop.view(lib, name, taken[i]).shape
            found = to_bshd((*shape, 1)[:4], layout)[:2] if len(shape) in ((3, 4) if i else (4,)) else (0, 0)
            if 0 in found:
                axes = "pages, page, heads" if layout == "bshd" else "pages, heads, page"
                also = f", or ({axes}) for scales of rows" if i else ""
                raise ValueError(
                    f"{name} has shape {shape}; it must be ({axes}, dim){also}, with 1 or more pages of 1 or more rows"
                )
            first = found if first is None else first
            if found != first:
                raise ValueError(
                    f"{name} has {found[0]} pages of {found[1]} rows; it must have {first[0]} of {first[1]}, as "
                    "pools[0]"
                )
        assert first is not None
        self.pools, self.count, self.page = taken, *first
        self._lib, self._free = lib, list(range(first[0]))[::-1]
        self._owners = [0] * first[0]
        self._pages: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._next = 0
        self._check_writable()

    def __repr__(self) -> str:
        return f"<Pages: {self.left} of {self.count} left, {self.page} rows each, {len(self._pages)} sequences>"

    @property
    def left(self) -> int:
        """Pages that are nobody's."""
        return len(self._free)

    def allocate(self) -> int:
        """A new sequence, without rows: the number by which it is called here."""
        self._next += 1
        self._pages[self._next], self._rows[self._next] = [], 0
        return self._next

    def rows(self, sequence: int) -> int:
        """How many it has."""
        self._known(sequence)
        return self._rows[sequence]

    def fork(self, sequence: int, rows: int | None = None) -> int:
        """A new sequence that begins with the first `rows` rows of another (default: all), and shares their pages."""
        self._known(sequence)
        rows = self._rows[sequence] if rows is None else integer("rows", rows)
        if not 0 <= rows <= self._rows[sequence]:
            raise ValueError(f"rows is {rows}; it must be 0 to {self._rows[sequence]}, those of sequence {sequence}")
        forked = self.allocate()
        shared = self._pages[sequence][: -(-rows // self.page)]
        for page in shared:
            self._owners[page] += 1
        self._pages[forked], self._rows[forked] = list(shared), rows
        return forked

    def free(self, sequence: int) -> None:
        """It is gone; pages that nobody else has are left for others."""
        self._known(sequence)
        for page in reversed(self._pages.pop(sequence)):
            self._release(page)
        del self._rows[sequence]

    def needed(self, sequences: Iterable[int], rows: Iterable[int]) -> int:
        """How many pages must be left for `append`."""
        return self._needed(self._grown(self._paired(sequences, rows)))

    def append(self, sequences: Iterable[int], rows: Iterable[int], *, width: int | None = None) -> Room:
        """Room for `rows` new rows of each of these sequences, which count as theirs from here on: what
        `attention_append` is to be told. A page to be written that others share is copied first.

        `width`: how many pages a row of the table has (default: the most that one of them has), for who calls again
        and again with arrays of one shape. `OutOfPages` where there are not enough; nothing is changed then, nor by
        any other error.
        """
        paired = self._paired(sequences, rows)
        grown = self._grown(paired)
        needed = self._needed(grown)
        if needed > self.left:
            raise OutOfPages(f"{needed} pages are needed, and {self.left} of {self.count} are left")
        taken = self._free[self.left - needed :]
        news = reversed(taken)
        copies: dict[int, int] = {}
        after: dict[int, list[int]] = {}
        for sequence, shared, end in grown:
            after[sequence] = pages = list(self._pages[sequence])
            for at in shared:
                copies[new := next(news)] = pages[at]
                pages[at] = new
            pages += [next(news) for _ in range(end - len(pages))]
        before = [self._rows[sequence] for sequence in after]
        room = Room(self._array(np.array(before, np.int32)), self._table([*after.values()], width))
        self._copy(copies)
        # Nothing fails from here on.
        del self._free[self.left - needed :]
        for page in copies.values():
            self._owners[page] -= 1
        for page in taken:
            self._owners[page] = 1
        self._pages |= after
        for sequence, n in paired:
            self._rows[sequence] += n
        return room

    def told(self, sequences: Iterable[int], *, width: int | None = None) -> Room:
        """All rows of these sequences, and their pages: what `attention` is to be told."""
        names = _integers("sequences", sequences)
        for sequence in names:
            self._known(sequence)
        rows = np.array([self._rows[x] for x in names], np.int32)
        return Room(self._array(rows), self._table([self._pages[x] for x in names], width))

    def _grown(self, paired: list[tuple[int, int]]) -> list[tuple[int, list[int], int]]:
        """Of each sequence: where in it pages are that are to be written and that others have as well, and how many it
        has then."""
        given_up: Counter[int] = Counter()  # by this very append
        found = []
        for sequence, new in paired:
            pages, filled = self._pages[sequence], self._rows[sequence]
            end, shared = -(-(filled + new) // self.page), []
            for at in range(filled // self.page, min(end, len(pages)) if new else 0):
                if self._owners[pages[at]] - given_up[pages[at]] > 1:
                    given_up[pages[at]] += 1
                    shared.append(at)
            found.append((sequence, shared, end))
        return found

    def _needed(self, grown: list[tuple[int, list[int], int]]) -> int:
        return sum(len(shared) + end - len(self._pages[sequence]) for sequence, shared, end in grown)

    def _paired(self, sequences: Iterable[int], rows: Iterable[int]) -> list[tuple[int, int]]:
        names, new = _integers("sequences", sequences), _integers("rows", rows)
        if len(names) != len(new):
            raise ValueError(f"rows has {len(new)} numbers; it must have one for each of the {len(names)} sequences")
        if len({*names}) != len(names):
            raise ValueError(f"sequences is {names}; it must name each sequence once")
        for sequence, n in zip(names, new):
            self._known(sequence)
            if n < 0:
                raise ValueError(f"rows has {n} for sequence {sequence}; it must be 0 or more")
        return list(zip(names, new))

    def _known(self, sequence: int) -> None:
        if whole_number(sequence) not in self._pages:
            raise KeyError(f"{sequence!r} is no sequence that has been allocated and not freed")

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

    def _copy(self, copies: dict[int, int]) -> None:
        """Pages by the numbers of those that they are copies of; all pools."""
        if not copies:
            return
        self._check_writable()
        to, of = (self._array(np.array(x, np.int64)) for x in (list(copies), list(copies.values())))
        for i, pool in enumerate(self.pools):
            if self._lib.kind == "jax":
                self.pools[i] = pool.at[to].set(pool[of])
            else:
                pool[to] = pool[of]

    def _check_writable(self) -> None:
        if self._lib.kind != "jax":  # whose arrays are not written to
            for i, pool in enumerate(self.pools):
                self._lib.check_target(f"pools[{i}]", pool)

    def _table(self, own: list[list[int]], width: int | None) -> Array:
        most = max(map(len, own), default=0)
        if width is not None and integer("width", width) < most:
            raise ValueError(f"width is {width}; it must be {most}, the pages of the longest of these, or more")
        table = np.full((len(own), most if width is None else width), -1, np.int32)
        for row, pages in zip(table, own):
            row[: len(pages)] = pages
        return self._array(table)

    def _array(self, x: np.ndarray) -> Array:
        """On the device of the pools."""
        xp, pool = namespace(self._lib.kind), self.pools[0]
        if self._lib.kind == "numpy":
            return x
        if self._lib.kind == "cupy":
            with pool.device:
                return xp.asarray(x)
        return xp.asarray(x, device=next(iter(pool.devices())) if self._lib.kind == "jax" else pool.device)


def _integers(name: str, x: Iterable[int]) -> list[int]:
    if not isinstance(x, Iterable) or isinstance(x, str):
        raise TypeError(f"{name} is {x!r}; it must be a list of integers, one for each sequence")
    return [integer(f"{name}[{i}]", n) for i, n in enumerate(x)]
