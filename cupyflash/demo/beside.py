"""Attention beside others that compute the same: time, memory and results for more and more rows."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cupyflash import attention

from .places import Array, CupyPlace, NumpyPlace, Place, TorchPlace

FEWEST, MOST, FARTHEST = 512, 16_384, 131_072  # rows; the farthest only while there is time and plain attention runs
ENOUGH = 0.2  # seconds of repeated runs after which the fastest is taken


@dataclass(frozen=True)
class Way:
    """Causal attention of q, k and v, (B, S, H, D), in one way; `needs`: its least bytes for so many rows and heads."""

    name: str
    run: Callable[[Array, Array, Array], Array]
    needs: Callable[[int, int], int] = lambda rows, heads: 0


@dataclass(frozen=True)
class Cell:
    """What one way took for so many rows. Without seconds: why it was not run, and the bytes that it needs."""

    seconds: float | None
    nbytes: int | None = None  # most at a time, beside q, k and v
    difference: float = 0.0  # the largest, from what the first way computed
    why: str = ""

    @property
    def ran_out(self) -> bool:
        """Whether it needs more memory than there is."""
        return self.why.startswith("out of memory")


@dataclass(frozen=True)
class Row:
    """Cells of as many rows, one for each way."""

    rows: int
    cells: tuple[Cell, ...]


def ours_and_plain(place: NumpyPlace | CupyPlace) -> list[Way]:
    """This package, and attention by its definition in the same library."""
    size = place.itemsize
    return [
        Way("cupyflash", lambda q, k, v: attention(q, k, v, causal=True)),
        Way(
            f"plain {place.library}", lambda q, k, v: plain(place.xp, q, k, v),
            lambda rows, heads: rows * rows * (size * heads + 1),
        ),
    ]  # fmt: skip


def plain(xp: Any, q: Array, k: Array, v: Array) -> Array:
    """Causal attention by its definition, with one array of scores, which it changes in place."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3)
    scores *= q.dtype.type(q.shape[-1] ** -0.5)
    xp.copyto(scores, q.dtype.type(-math.inf), where=~xp.tri(q.shape[2], dtype=bool))
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return (scores @ v).swapaxes(1, 2)


def of_pytorch(place: TorchPlace) -> list[Way]:
    """This package on PyTorch's tensors, and those backends of PyTorch's attention that run there."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: Any) -> Way:
        def run(q: Array, k: Array, v: Array) -> Array:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2)

        of_scores = (lambda rows, heads: 2 * rows * rows * heads) if backend is SDPBackend.MATH else lambda *_: 0
        return Way(_CALLED[backend.name], run, of_scores)

    ways = [Way("cupyflash", lambda q, k, v: attention(q, k, v, causal=True))]
    for name in _CALLED:
        if name in SDPBackend.__members__:
            way = by(SDPBackend.__members__[name])
            with (
                contextlib.suppress(RuntimeError),
                warnings.catch_warnings(),
            ):  # one that is not there warns, then raises
                warnings.simplefilter("ignore")
                _run(place, way, place.make(FEWEST))
                ways.append(way)
    return ways


_CALLED = {"FLASH_ATTENTION": "flash", "CUDNN_ATTENTION": "cuDNN", "EFFICIENT_ATTENTION": "efficient", "MATH": "math"}


def measure(place: Place, ways: Sequence[Way], seconds: float) -> Iterator[tuple[int, Cell]]:
    """Cells row by row as (rows, cell), those of a row in the order of `ways`, in about so many seconds.

    Rows are doubled up to MOST, and on while every way runs. A way is not run where it would take too long, as four
    times the seconds of half the rows say, or more memory than is free.
    """
    before = [0.0] * len(ways)  # seconds for half as many rows
    for way in ways:
        _run(place, way, place.make(FEWEST))  # what only a first call does
    end = time.perf_counter() + seconds
    rows, all_ran = FEWEST, True
    while rows <= MOST or (all_ran and rows <= FARTHEST and time.perf_counter() + 4 * sum(before) < end):
        given = place.make(rows)
        expected = None
        for i, way in enumerate(ways):
            needs, free = way.needs(rows, place.heads), place.free()
            left = end - time.perf_counter()
            before[i] *= 4  # what it will take
            if free is not None and needs > free:
                cell = Cell(None, needs, why=f"out of memory: {size(free)} free")
            elif before[i] > max(left, 0.0) and rows > FEWEST:
                cell = Cell(None, needs or None, why=f"{way.name} would take {duration(before[i])}")
            else:
                cell, out = _measured(place, way, given, expected)
                expected = out if expected is None else expected
                before[i] = cell.seconds or before[i]
            all_ran = all_ran and cell.seconds is not None
            yield rows, cell
        rows *= 2


def runs_out(place: Place, way: Way, beyond: int) -> tuple[int, int, int] | None:
    """The first doubling of rows, more than `beyond`, at which a way needs more bytes than are free: (rows, bytes,
    those that are free). None where nobody knows what is free, or it needs none."""
    free, rows = place.free(), beyond
    if free is None or not way.needs(rows, place.heads):
        return None
    while way.needs(rows := 2 * rows, place.heads) <= free:
        pass
    return rows, way.needs(rows, place.heads), free


def table(measured: Iterator[tuple[int, Cell]], ways: int) -> Iterator[Row]:
    """The same, by rows."""
    while cells := [found for _, found in zip(range(ways), measured)]:
        yield Row(cells[0][0], tuple(cell for _, cell in cells))


def _measured(place: Place, way: Way, given: Any, expected: Array | None) -> tuple[Cell, Array | None]:
    try:
        start = time.perf_counter()
        with place.peak() as peak:
            out = _run(place, way, given)
        once = time.perf_counter() - start
        again: list[float] = []  # the first one was watched or compiled, which tells in a short one
        while (place.warms or once < ENOUGH) and sum(again) < ENOUGH:
            start = time.perf_counter()
            _run(place, way, given)
            again.append(time.perf_counter() - start)
    except (MemoryError, place.out_of_memory):
        return Cell(None, way.needs(given[0].shape[1], place.heads), why="out of memory"), None
    return Cell(
        min(again, default=once), peak.nbytes, 0.0 if expected is None else place.difference(out, expected)
    ), out


def _run(place: Place, way: Way, given: Any) -> Array:
    out = way.run(*given)
    place.wait()
    return out


def size(nbytes: float) -> str:
    """In three digits, and KiB, MiB or GiB."""
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1000 or unit == "GiB":
            break
    return f"{nbytes:.3g} {unit}"


def duration(seconds: float) -> str:
    """In three digits, and microseconds, milliseconds or seconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def times(ratio: float) -> str:
    """How many times, in two digits or whole."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:,.0f}x"
