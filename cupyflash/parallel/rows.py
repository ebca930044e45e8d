"""Who holds which rows of a sequence: plain data, which data loaders need and plans are made of."""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import numbers
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blockmask.blocks import BlockMask
from ..scalars import whole_number
from .seen import keys_of_rows

Span = tuple[int, int]  # [begin, end) of a whole sequence
CHUNKS = (1, 2, 4, 8)  # of a rank, that `Rows.balanced` may deal out: where all may have as many rows, all have
CLOSE, OF_A_CALL = 1.05, 0.03  # what the busiest rank may have to do beside the mean; what a call more costs
MULTIPLE = 128  # rows at whose multiples chunks begin: tiles, blocks of masks and dropout are then whole


@dataclass(frozen=True)
class Rows:
    """For each rank the rows that it holds, as spans of the sequence, in the order in which they lie in its arrays.

    Made by `contiguous`, `zigzag` or `balanced`, or by hand: `Rows(8, (((0, 2), (6, 8)), ((2, 6),)))`. Every row is
    held once, and a rank's spans rise.
    """

    length: int
    chunks: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", *_checked(self.length))
        try:
            chunks = tuple(tuple((operator.index(a), operator.index(b)) for a, b in spans) for spans in self.chunks)
        except (TypeError, ValueError):
            raise TypeError(
                f"chunks is {self.chunks!r}; it must hold, for each rank, (begin, end) of rows, integers"
            ) from None
        object.__setattr__(self, "chunks", chunks)
        for rank, spans in enumerate(self.chunks):
            if any(x > y for x, y in spans) or any(y > z for (_, y), (z, _) in itertools.pairwise(spans)):
                raise ValueError(f"chunks of rank {rank} are {spans}; they must rise: (begin, end) of rows")
        held = joined(x for spans in self.chunks for x in spans)
        if held != ([(0, self.length)] if self.length else []) or self.length != sum(map(self.count, range(self.size))):
            raise ValueError(f"chunks hold {held}; they must hold each of {self.length} rows once")

    def digest(self) -> str:
        """What ranks tell each other of them."""
        return f"{self.length} rows ({hashlib.sha256(repr(self.chunks).encode()).hexdigest()[:12]})"

    def __hash__(self) -> int:  # every call asks, of all chunks
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.length, self.chunks))

    @classmethod
    def contiguous(cls, length: int, size: int, *, multiple: int = MULTIPLE) -> Rows:
        """Rank r holds the r-th part, as equal as multiples of `multiple` allow."""
        return cls(*_checked(length), tuple((x,) for x in cut(length, positive("size", size), multiple)))

    @classmethod
    def zigzag(cls, length: int, size: int, *, multiple: int = MULTIPLE) -> Rows:
        """Rank r holds parts r and 2n - 1 - r of 2n: under a causal mask all have as much to do.

        PyTorch's head-tail order and Transformer Engine's dual chunk swap, row for row, where these take the length and
        parts are multiples of 128; of other parts with multiple=1.
        """
        whole = _checked(length)
        parts = cut(length, 2 * positive("size", size), multiple)
        return cls(*whole, tuple((parts[r], parts[2 * size - 1 - r]) for r in range(size)))

    @classmethod
    def balanced(
        cls, length: int, size: int, mask: Any, *, chunks: int | None = None, multiple: int = MULTIPLE
    ) -> Rows:
        """Parts dealt out by the pairs that a mask leaves: the heaviest first, to whom has least work of those with
        room, until no exchange of two parts makes the busiest rank's work less.

        mask: a `BlockMask` of the whole (of all its heads and batch entries), what `parallel.block_mask` made, or a
        number for each row: how many keys it sees. chunks: how many parts a rank gets; None: 1, 2, 4 or 8, what leaves
        the busiest rank within 5 % of the mean and has no more calls than pay.
        """
        asked = CHUNKS if chunks is None else (positive("chunks", chunks),)
        work = np.concatenate([[0.0], np.cumsum(_work(mask, *_checked(length)))])
        found = []
        for count in asked:
            parts = cut(length, positive("size", size) * count, multiple)
            dealt = [joined(x) for x in _dealt(parts, [float(work[b] - work[a]) for a, b in parts], size)]
            busiest = max(sum(float(work[b] - work[a]) for a, b in x) for x in dealt)
            uneven = busiest * size / float(work[-1]) if work[-1] else 1.0
            calls = max(map(len, dealt))
            found.append(((uneven > CLOSE, uneven * (1 + OF_A_CALL * calls)), dealt))
        _, dealt = min(found, key=operator.itemgetter(0))
        return cls(length, tuple(map(tuple, dealt)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.chunks)

    def count(self, rank: int) -> int:
        """How many rows a rank holds."""
        return sum(b - a for a, b in self._spans(rank))

    def local(self, rank: int) -> list[tuple[Span, Span]]:
        """Where a rank's rows lie, in the whole and in the rank's arrays: chunks that touch are one."""
        found, at = [], 0
        for a, b in joined(self._spans(rank)):
            found.append(((a, b), (at, at + b - a)))
            at += b - a
        return found

    def positions(self, rank: int) -> np.ndarray:
        """The numbers of a rank's rows in the whole, int64: for rotary embeddings and labels."""
        return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in self._spans(rank))])

    def take(self, x: Any, rank: int, axis: int = 1) -> Any:
        """The rows of a rank of a whole array of any library, along `axis`: a copy."""
        axis = _axis("x", x, axis)
        if x.shape[axis] != self.length:
            raise ValueError(
                f"x has {x.shape[axis]} rows along axis {axis}, shape {tuple(x.shape)}; it must have {self.length}"
            )
        before = (slice(None),) * axis
        return concatenate([x[(*before, slice(a, b))] for a, b in self._spans(rank)] or [x[(*before, slice(0))]], axis)

    def _spans(self, rank: int) -> tuple[Span, ...]:
        if not isinstance(rank, numbers.Integral):
            raise TypeError(f"rank is {rank!r}; it must be an integer")
        if not 0 <= rank < self.size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {self.size - 1}")
        return self.chunks[rank]

    def join(self, parts: Sequence[Any], axis: int = 1) -> Any:
        """The whole, of what each rank has: the inverse of `take`."""
        if not hasattr(parts, "__len__"):
            raise TypeError(f"parts is a {type(parts).__name__}; it must hold an array for each of {self.size} ranks")
        if len(parts) != self.size:
            raise ValueError(f"parts holds {len(parts)} arrays; it must hold one for each of {self.size} ranks")
        found = []
        for rank, x in enumerate(parts):
            at = _axis(f"parts[{rank}]", x, axis)
            if x.shape[at] != self.count(rank):
                raise ValueError(f"parts[{rank}] has {x.shape[at]} rows; it must have {self.count(rank)}")
            found += [(span, x[(*(slice(None),) * at, slice(*own))]) for span, own in self.local(rank)]
        return concatenate([x for _, x in sorted(found, key=lambda y: y[0])] or [parts[0]], int(axis))

    def together(self, ranks: int) -> Rows:
        """Of groups of so many neighbouring ranks, as one rank each: rows in their order."""
        groups = [self.chunks[n : n + ranks] for n in range(0, self.size, ranks)]
        return Rows(self.length, tuple(tuple(joined(x for spans in some for x in spans)) for some in groups))


def _axis(name: str, x: Any, axis: Any) -> int:
    """The number of an axis of x, from 0."""
    if not hasattr(x, "shape"):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be an array")
    rank, number = len(x.shape), whole_number(axis)
    if number is None:
        raise TypeError(f"axis is {axis!r}; it must be an integer, one of the {rank} axes of {name}")
    if not -rank <= number < rank:
        raise ValueError(f"axis is {axis}; it must be one of the {rank} axes of {name}, shape {tuple(x.shape)}")
    return number % rank


def cut(length: int, parts: int, multiple: int = 1) -> list[Span]:
    """As equal as multiples allow; every boundary but the last is a multiple. Parts may be empty."""
    units = -(-length // positive("multiple", multiple))
    ends = [min(length, (units * (n + 1) // parts) * multiple) for n in range(parts)]
    return list(zip([0, *ends[:-1]], ends))


def joined(spans: Iterable[Span]) -> list[Span]:
    """Sorted, without what is empty; such as touch or overlap are one."""
    found: list[Span] = []
    for a, b in sorted(x for x in spans if x[1] > x[0]):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return found


def without(span: Span, others: Iterable[Span]) -> list[Span]:
    """What of a span is in none of others."""
    found, (at, end) = [], span
    for a, b in joined(common(span, x) for x in others):
        found.append((at, a))
        at = b
    return joined([*found, (at, end)])


def common(x: Span, y: Span) -> Span:
    """What two spans share; perhaps empty."""
    begin = max(x[0], y[0])
    return begin, max(begin, min(x[1], y[1]))


def concatenate(parts: list[Any], axis: int) -> Any:
    module = type(parts[0]).__module__.partition(".")[0]
    if module == "torch":
        import torch

        return torch.cat(parts, axis)
    if module in ("jax", "jaxlib"):
        import jax

        return jax.numpy.concatenate(parts, axis)
    if module == "cupy":
        import cupy

        return cupy.concatenate(parts, axis)
    return np.concatenate(parts, axis)


def _dealt(parts: list[Span], work: list[float], size: int) -> list[list[Span]]:
    count = len(parts) // size
    heap, dealt = [(0.0, r) for r in range(size)], [[] for _ in range(size)]  # type: ignore[var-annotated]
    for n in sorted(range(len(parts)), key=lambda n: (-work[n], n)):
        total, r = heapq.heappop(heap)
        dealt[r].append(n)
        if len(dealt[r]) < count:
            heapq.heappush(heap, (total + work[n], r))
    totals = [sum(work[n] for n in some) for some in dealt]
    while size > 1:  # each round lessens the busiest rank's work, or its number of equals
        most = max(range(size), key=totals.__getitem__)
        swaps = [
            (max(totals[most] - work[x] + work[y], totals[r] + work[x] - work[y]), x, y, r)
            for r in range(size) if r != most for x in dealt[most] for y in dealt[r]
        ]  # fmt: skip
        best, x, y, r = min(swaps)
        if best >= totals[most] * (1 - 1e-9):
            break
        dealt[most][dealt[most].index(x)], dealt[r][dealt[r].index(y)] = y, x
        totals[most], totals[r] = (sum(work[n] for n in dealt[z]) for z in (most, r))
    return [[parts[n] for n in some] for some in dealt]


def _work(mask: Any, length: int) -> np.ndarray:
    """How many keys each row sees, in all heads, or as many as its block does on average."""
    if hasattr(mask, "pairs_of_rows"):
        found = np.asarray(mask.pairs_of_rows(), float)
    elif isinstance(mask, BlockMask):
        found = keys_of_rows(mask)
    else:
        try:
            found = np.asarray(mask, float)
        except (TypeError, ValueError):
            # By its full name: PyTorch has a BlockMask, too.
            name = f"{type(mask).__module__}.{type(mask).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"mask is a {name}; it must be a block mask, or hold how many keys each row sees") from None
    if found.shape != (length,):
        raise ValueError(f"mask is about shape {found.shape}; it must be about {length} rows")
    if not np.all(right := (found >= 0) & np.isfinite(found)):
        raise ValueError(f"mask says {found[~right][0]} of a row; it must say how many keys it sees, 0 or more")
    return found


def _checked(length: int) -> tuple[int]:
    return (_whole("length", length, 0),)


def positive(name: str, n: int) -> int:
    return _whole(name, n, 1)


def _whole(name: str, n: Any, least: int) -> int:
    number = whole_number(n)
    if number is None or number < least:
        raise ValueError(f"{name} is {n!r}; it must be {least} or more, an integer")
    return number
