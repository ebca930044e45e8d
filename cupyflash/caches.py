"""Rows of caches and of pools of pages: where new ones belong, and writing them there.

For any array library, and nothing here waits for a device: what must not be written is known there alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .lengths import check_values, holders
from .namespaces import arange, cast
from .problem import AttentionProblem

Array = Any


class Places(NamedTuple):
    """Of each new row: the entry of the cache's first axis (a sequence or a page), the row there, and whether it is to
    be written at all. Rows that are not have numbers of the cache too."""

    entry: Array
    row: Array
    real: Array


class Behind(NamedTuple):
    """New rows behind those that sequences have filled."""

    positions: Array  # of each new row in its sequence
    totals: Array  # lengths with the new rows
    places: Places


# ---- where rows belong ----------------------------------------------------------------------------------------------


def behind(xp: Any, problem: AttentionProblem, rows: int, lengths: dict[str, Array]) -> Behind:
    """Where `rows` new rows belong, (sequences, rows) or, packed, (rows,). Nonsense in lengths leads nowhere else."""
    filled, ends = _wide(xp, lengths["seqlens_k"]), lengths.get("cu_seqlens_q")
    number = arange(xp, rows, filled)
    if not problem.batch or not problem.seq_k:  # no place at all
        none = number if ends is not None else filled[:, None] + number[None]
        none = xp.zeros_like(none)
        return Behind(none, lengths["seqlens_k"], Places(none, none, none > 0))
    if ends is None:
        of = arange(xp, problem.batch, filled)[:, None]
        positions, new = filled[:, None] + number[None], rows
        real = (filled >= 0)[:, None] & (positions >= 0)
        of = of + xp.zeros_like(positions)
    else:
        ends = _wide(xp, ends)
        of = xp.clip(cast(xp.searchsorted(ends[1:], number, side="right"), filled.dtype), 0, problem.batch - 1)
        positions, new = filled[of] + number - ends[of], xp.clip(ends[1:] - ends[:-1], 0, rows)
        real = (number >= ends[of]) & (number < ends[of + 1]) & (filled[of] >= 0) & (positions >= 0)
    totals = xp.clip(xp.clip(filled, None, problem.seq_k) + new, None, problem.seq_k)
    totals = xp.where(filled < 0, xp.zeros_like(filled), totals)
    totals = totals if _of_jax(xp) else cast(totals, lengths["seqlens_k"].dtype)
    real = real & (positions < problem.seq_k)
    at = xp.clip(positions, 0, max(problem.seq_k - 1, 0))
    if problem.page is None:
        return Behind(positions, totals, Places(of, at, real))
    page = _wide(xp, lengths["page_table"])[of, at // problem.page]
    real = real & (page >= 0) & (page < problem.pages)
    return Behind(positions, totals, Places(xp.clip(page, 0, problem.pages - 1), at % problem.page, real))


def at_slots(xp: Any, slots: Array, entries: int, rows: int) -> Places:
    """Where rows belong that are told by their numbers among all rows of a cache; -1 is nowhere."""
    slots = _wide(xp, slots)
    at = xp.clip(slots, 0, entries * rows - 1)
    return Places(at // rows, at % rows, slots == at)


def _wide(xp: Any, x: Array) -> Array:
    """Integers in which sums of two of them do not wrap; JAX's are as wide as its numbers are."""
    return cast(x, xp.arange(0).dtype if _of_jax(xp) else xp.int64)


def _of_jax(xp: Any) -> bool:
    return bool(xp.__name__ == "jax.numpy")


def write(xp: Any, cache: Array, places: Places, new: Array) -> Array:
    """The cache (entries, rows, heads, dim) with `new` (..., heads, dim) in its places: itself, written to, but of JAX
    another."""
    entry, row, real = (x.reshape(-1) for x in places)
    if not len(real) or not cache.shape[0] * cache.shape[1]:
        return cache
    whole = cache
    if not _of_jax(xp):
        new, cache = _bits(xp, new), _bits(xp, cache)
    # Who must not write does what the first one does that must, so that no two differ in what a row becomes; where
    # nobody must, all write what is there.
    own = xp.where(real, arange(xp, len(real), entry), xp.argmax(cast(real, xp.int32)))
    entry, row = entry[own], row[own]
    rows = new.reshape(len(real), *new.shape[-2:])[own]
    rows = xp.where(xp.any(real), rows, cache[entry[:1], row[:1]])
    if _of_jax(xp):
        return cache.at[entry, row].set(rows)
    cache[entry, row] = rows
    return whole


def _bits(xp: Any, x: Array) -> Array:
    """Numbers of NumPy and CuPy that are moved, not computed with, as integers; of PyTorch those of 8 bits."""
    if xp.__name__ == "torch":
        return x.view(xp.uint8) if x.dtype.itemsize == 1 else x
    return x.view(f"uint{8 * x.dtype.itemsize}")


# ---- values, where they can be read ---------------------------------------------------------------------------------


def check_behind(problem: AttentionProblem, arrays: dict[str, np.ndarray], rows: int, turned: int | None) -> None:
    """ValueError, naming the place, where new rows have none. Arrays of int64 on the host; `turned`: the positions that
    rotary has."""
    check_values(problem, arrays)
    filled, ends = arrays["seqlens_k"], arrays.get("cu_seqlens_q")
    new = np.full(len(filled), rows) if ends is None else ends[1:] - ends[:-1]
    totals = filled + new
    room, others = problem.seq_k, holders(problem, "k")
    if others:  # which may be shorter than a cache
        room = problem.cache or 0 if problem.page is None else arrays["page_table"].shape[1] * problem.page
    limits = (
        (room, f"k_cache has room for {room}"), (turned, f"rotary has angles for {turned}"),
        (problem.seq_k, f"{others} is for {problem.seq_k} keys"),
    )  # fmt: skip
    for most, what in limits:
        if most is not None and (totals > most).any():
            n = int((totals > most).argmax())
            raise ValueError(f"seqlens_k[{n}] is {filled[n]}, and {new[n]} rows come behind these; {what}")
    if problem.page is not None:
        _check_pages(problem, arrays["page_table"], filled, totals)


def _check_pages(problem: AttentionProblem, table: np.ndarray, filled: np.ndarray, totals: np.ndarray) -> None:
    assert problem.page is not None
    size = problem.page
    writers: dict[int, tuple[int, int]] = {}  # the last place of the table at which a page is written
    for n in map(int, np.flatnonzero(totals > filled)):
        for at in range(filled[n] // size, -(-totals[n] // size)):
            page = int(table[n, at])
            if not 0 <= page < problem.pages:
                raise ValueError(
                    f"page_table[{n}, {at}] is {page}; it must be a page of k_cache, 0 to {problem.pages - 1}: the "
                    f"rows that come behind seqlens_k[{n}], {filled[n]}, reach it"
                )
            other, before = writers.get(page, (n, at))
            if other != n:
                raise ValueError(
                    f"page_table[{n}, {at}] is {page}, a page that rows of sequence {other} are written to as well; "
                    "sequences that write must have pages of their own there"
                )
            # Rows from the first on are written here; there, up to the last one.
            if before < at and filled[n] - before * size < totals[n] - at * size:
                raise ValueError(
                    f"page_table[{n}, {at}] is {page}, as page_table[{n}, {before}] is, so that of the rows that come "
                    f"behind seqlens_k[{n}], {filled[n]}, two would have one place; it must be a page of its own"
                )
            writers[page] = n, at


def check_slots(arrays: dict[str, np.ndarray], most: int) -> None:
    """ValueError, naming the place, where one of the slots is no row of the cache, or that of two new rows."""
    slots = arrays["slots"]
    wrong = (slots < -1) | (slots >= most)
    if wrong.any():
        place = _place(slots, int(wrong.argmax()))
        raise ValueError(f"slots{place[0]} is {place[1]}; it must be a row of k_cache, 0 to {most - 1}, or -1 for none")
    flat = slots.ravel()
    order = np.argsort(flat, kind="stable")
    twice = (flat[order][1:] == flat[order][:-1]) & (flat[order][1:] >= 0)
    if twice.any():
        place = _place(slots, int(order[1:][twice].min()))
        raise ValueError(f"slots{place[0]} is {place[1]}, as another is; each must be a row of its own, or -1 for none")


def _place(x: np.ndarray, flat: int) -> tuple[str, int]:
    index = [int(i) for i in np.unravel_index(flat, x.shape)]
    return str(index), int(x[tuple(index)])
