"""Pages without a serving engine: which pages of a pool are whose, counted on the host.

Kernels know nothing of it: they get a table and lengths, as from any other owner of a pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import interop
from .namespaces import namespace
from .problem import check_layout, to_bshd
from .scalars import whole_number

Array = Any


class Room(NamedTuple):
    """What a call needs to be told of sequences that rows are appended to; on the device of the pools."""

    seqlens_k: Array  # (N,) int32: rows before those that come
    page_table: Array  # (N, P) int32, with the pages of those that come; -1 where there is none


def _whole(name: str, n: Any) -> int:
    number = whole_number(n)
    if number is None:
        raise TypeError(f"{name} is {n!r}; it must be an integer")
    return number


class OutOfPages(MemoryError):
    """More pages are asked for than are left. Nothing has been changed."""


class Pages:
    """Pages of pools that sequences share out: each has its own, or shares some with others, which are counted.

    All pools have the same pages: K and V of every layer of a model. What is counted is on the host; pools are written
    to only where a page that several sequences share is about to be written (`append`).

    Parameters
    ----------
    pools : sequence of (pages, page, heads, dim), and of (pages, page, heads) behind the first
        NumPy, CuPy, PyTorch or JAX arrays on one device; those without `dim` are the scales of rows of 8 bits, which
        are copied with their rows. JAX's are immutable: `pools` of this object has those of the last copy, and is to be
        set to what `attention_append` returned.
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
        first: tuple[int, ...] | None = None
        for i, x in enumerate(pools):
            name = f"pools[{i}]"
            if interop.library(name, x) is not lib:
                raise TypeError(f"{name} is no {lib.kind} array, but pools[0] is; all must come from one library")
            shape = interop.view(lib, name, x).shape
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
        self.pools, self.count, self.page = list(pools), *first
        self._lib, self._free = lib, list(range(first[0]))[::-1]
        self._owners = [0] * first[0]
        self._pages: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._next = 0

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
        rows = self._rows[sequence] if rows is None else _whole("rows", rows)
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
        shares: Counter[int] = Counter()  # that this very append gives up
        needed = 0
        for sequence, new in self._paired(sequences, rows):
            pages, filled = self._pages[sequence], self._rows[sequence]
            written = pages[filled // self.page : -(-(filled + new) // self.page)] if new else []
            for page in written:
                if self._owners[page] - shares[page] > 1:
                    shares[page] += 1
                    needed += 1
            needed += max(0, -(-(filled + new) // self.page) - len(pages))
        return needed

    def append(self, sequences: Iterable[int], rows: Iterable[int], *, width: int | None = None) -> Room:
        """Room for `rows` new rows of each of these sequences, which count as theirs from here on: what
        `attention_append` is to be told. A page to be written that others share is copied first.

        `width`: how many pages a row of the table has (default: the most that one of them has), for who calls again
        and again with arrays of one shape. `OutOfPages` where there are not enough; nothing is changed then.
        """
        paired = self._paired(sequences, rows)
        names = [sequence for sequence, _ in paired]
        needed = self.needed(names, [new for _, new in paired])
        if needed > self.left:
            raise OutOfPages(f"{needed} pages are needed, and {self.left} of {self.count} are left")
        most = max((-(-(self._rows[s] + new) // self.page) for s, new in paired), default=0)
        if width is not None and width < most:
            raise ValueError(f"width is {width}; it must be {most}, the pages of the longest of these, or more")
        before = [self._rows[sequence] for sequence in names]
        copies: dict[int, int] = {}
        for sequence, new in paired:
            pages, end = self._pages[sequence], -(-(self._rows[sequence] + new) // self.page)
            for at in range(self._rows[sequence] // self.page, min(end, len(pages)) if new else 0):
                if self._owners[pages[at]] > 1:
                    copies[taken := self._take()] = pages[at]
                    self._owners[pages[at]] -= 1
                    pages[at] = taken
            pages += [self._take() for _ in range(end - len(pages))]
            self._rows[sequence] += new
        self._copy(copies)
        return Room(self._array(np.array(before, np.int32)), self._table(names, width))

    def told(self, sequences: Iterable[int], *, width: int | None = None) -> Room:
        """All rows of these sequences, and their pages: what `attention` is to be told."""
        names = list(sequences)
        for sequence in names:
            self._known(sequence)
        return Room(self._array(np.array([self._rows[x] for x in names], np.int32)), self._table(names, width))

    def _paired(self, sequences: Iterable[int], rows: Iterable[int]) -> list[tuple[int, int]]:
        given = {"sequences": sequences, "rows": rows}
        for name, x in given.items():
            if not isinstance(x, Iterable) or isinstance(x, str):
                raise TypeError(f"{name} is {x!r}; it must be a list of integers, one for each sequence")
        names, new = (([_whole(f"{name}[{i}]", n) for i, n in enumerate(x)]) for name, x in given.items())
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
        if not isinstance(sequence, Hashable) or sequence not in self._pages:
            raise KeyError(f"{sequence!r} is no sequence that has been allocated and not freed")

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

    def _copy(self, copies: dict[int, int]) -> None:
        """Pages by the numbers of those that they are copies of; all pools."""
        if not copies:
            return
        to, of = (self._array(np.array(x, np.int64)) for x in (list(copies), list(copies.values())))
        for i, pool in enumerate(self.pools):
            if self._lib.kind == "jax":
                self.pools[i] = pool.at[to].set(pool[of])
            else:
                pool[to] = pool[of]

    def _table(self, names: list[int], width: int | None) -> Array:
        own = [self._pages[sequence] for sequence in names]
        table = np.full((len(own), width or max(map(len, own), default=0)), -1, np.int32)
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
