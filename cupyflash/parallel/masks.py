"""Block masks of which each rank has the blocks of its own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..api import block_mask as _block_mask
from ..blockmask.blocks import check_block
from ..namespaces import namespace
from .adapters import named, of
from .agree import agree
from .arrays import library
from .rows import Rows, Span


@dataclass(frozen=True, eq=False)
class RowsMask:
    """What `parallel.block_mask` makes: the blocks of this rank's rows, and of all ranks' rows what is to be planned
    by."""

    rows: Rows
    key_rows: Rows
    own: Any  # a BlockMask of (batch, heads, this rank's rows, all keys)
    hulls: tuple[Span, ...]  # for each block of all rows, the first key and the last but one that it leaves
    pairs: tuple[int, ...]  # and how many pairs, of all heads and batch entries
    _parts: dict[Any, Any] = field(default_factory=dict, repr=False)

    def part(self, rows: Span, keys: Span, heads: Span) -> Any:
        """The BlockMask of some of this rank's rows: one for all calls, as lists of its tiles are made once."""
        key = rows, keys, heads if self.own.shape[1] > 1 else None
        if key not in self._parts:
            self._parts[key] = self.own.part(*key)
        return self._parts[key]

    def pairs_of_rows(self) -> np.ndarray:
        """How many keys each row sees, on average over its block: for `Rows.balanced`."""
        size, length = self.own.block[0], self.rows.length
        sizes = [min(length, n + size) - n for n in range(0, length, size)]
        return np.repeat(np.array(self.pairs) / np.maximum(sizes, 1), sizes)


def block_mask(
    source: Callable[[Any, Any, Any, Any], Any],
    rows: Rows,
    group: Any,
    *,
    key_rows: Rows | None = None,
    batch: int = 1,
    heads: int = 1,
    block: int | tuple[int, int] = 128,
    like: Any = None,
) -> RowsMask:
    """A mask that is applied in blocks, of a sequence that several ranks share.

    Parameters
    ----------
    source : function of (b, h, i, j)
        As that of `cupyflash.block_mask`; asked for the rows of this rank alone. i and j are numbers in the whole.
    rows, key_rows : Rows
        Who holds which queries, and keys (default: the same). Chunks of rows begin at multiples of the block's.
    group : as for `parallel.attention`
        Each rank tells the others how many pairs its blocks have, and from which key to which.
    batch, heads : int
        1 where all share a pattern.
    block, like : as for `cupyflash.block_mask`

    Returns
    -------
    For `parallel.attention(..., block_mask=)`; and for `Rows.balanced`, which wants to know where the work is: make one
    of contiguous rows first.
    """
    found, error, ranks = None, None, of(named(group, None if like is None else library(like)))
    keys = rows if key_rows is None else key_rows
    try:
        found = _own(source, rows, keys, ranks, batch, heads, block, like)
    except Exception as wrong:  # noqa: BLE001 - raised on all ranks
        error = wrong
    said = {} if error is not None else {"rows": rows.digest(), "key_rows": keys.digest(), "block": repr(block)}
    agree([ranks], said, error)
    assert found is not None
    size = found.block[0]
    blocks = -(-rows.length // size)
    table = np.zeros((blocks, 3), np.int64)
    for (a, b), (c, _) in rows.local(ranks.rank):
        for n in range(a // size, -(-b // size)):
            at = c + n * size - a
            part = found.part((at, min(at + size, found.shape[2])), (0, keys.length))
            table[n] = *part.hull(), round(part.share() * np.prod(part.shape))
    total = ranks.all_gather(table.reshape(-1).view(np.uint8)).view(np.int64).reshape(ranks.size, blocks, 3).sum(0)
    hulls = tuple((int(a), int(b)) for a, b, _ in total)
    return RowsMask(rows, keys, found, hulls, tuple(int(n) for _, _, n in total))


def _own(source: Any, rows: Rows, keys: Rows, ranks: Any, batch: int, heads: int, block: Any, like: Any) -> Any:
    if not callable(source):
        raise TypeError(f"source is a {type(source).__name__}; it must be a function of (b, h, i, j)")
    for name, x in (("rows", rows), ("key_rows", keys)):
        if not isinstance(x, Rows):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a parallel.Rows")
    if rows.size != ranks.size:
        raise ValueError(f"rows is of {rows.size} ranks; it must be of {ranks.size}, as the group is")
    size, _ = check_block(block)
    for a, b in rows.chunks[ranks.rank]:
        if b > a and a % size:
            raise ValueError(f"rows begins a chunk at {a}; with blocks of {size} it must be a multiple of that")
    where = rows.positions(ranks.rank)

    def function(b: Any, h: Any, i: Any, j: Any) -> Any:
        return source(b, h, _as(where, i), j)

    return _block_mask(function, shape=(batch, heads, len(where), keys.length), block=block, like=like)


def _as(where: np.ndarray, i: Any) -> Any:
    """Numbers in the whole of those in this rank's array, of the same library."""
    if isinstance(i, np.ndarray):
        return where[i]
    if (kind := library(i)) == "torch":
        return namespace(kind).as_tensor(where, device=i.device)[i]
    if kind == "cupy":
        return namespace(kind).asarray(where)[i]
    raise TypeError(
        "like is of a library whose masks are not shared out; it must be an array of NumPy or CuPy, or a tensor"
    )
