"""What a call over several ranks comes to, without making it: who computes what with whose keys, what is sent, and how
long that takes on paper."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

from ..passes import BACKWARD, FORWARD
from ..problem import FLOATS, ITEMSIZE, OPTIONS, check_layout, float_name
from ..scalars import whole_number
from .asked import EXCHANGES, parts
from .rows import Rows, Span, positive
from .steps import Band, Round, arriving, band_of, lighter, rounds, usual_groups

_CHECKS = {row.name: row.check for row in OPTIONS}


@dataclass(frozen=True)
class Machine:
    """What a reckoning rests on: what a GPU computes, and bytes a second of each GPU, both ways at once."""

    forward: float = 600e12  # FLOP/s
    backward: float = 500e12
    host: int = 8  # GPUs of one host
    inside: float = 350e9  # bytes/s, in a host
    between: float = 50e9  # and between hosts
    start: float = 15e-6  # seconds until a transfer has begun

    def __post_init__(self) -> None:
        positive("host", self.host)
        for name in (x.name for x in fields(self) if x.name != "host"):
            x, free = getattr(self, name), name == "start"  # a transfer may begin at once; the others are divided by
            real = isinstance(x, numbers.Real) and not isinstance(x, bool) and not math.isnan(x)
            if not real or x < 0 or (x == 0 and not free):
                raise ValueError(f"{name} is {x!r}; it must be a number {'of at least' if free else 'above'} 0")


@dataclass(frozen=True)
class Rank:
    """Of one rank, forward and backward, of all batch entries."""

    rows: int
    pairs: int  # of a head, that its rows see
    calls: int
    sent: int  # bytes
    memory: int  # bytes of keys beyond its own arrays: two groups
    computing: float  # seconds
    exposed: float  # of transfers, that computing does not hide


@dataclass(frozen=True)
class Explanation:
    exchange: str  # "keys" or "heads", or both: "keys forward and of heads backward"
    ranks: tuple[Rank, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(
    shape: tuple[int, int, int, int],
    *,
    rows: Rows,
    key_rows: Rows | None = None,
    heads_k: int | None = None,
    dtype: Any = "bfloat16",
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    exchange: str | None = None,
    groups: int | None = None,
    stretches: int | None = None,
    layout: str = "bshd",
    machine: Machine | None = None,
) -> Explanation:
    """Who computes what with whose keys, bytes that are sent, the work of each rank, and memory: `print` it.

    Parameters
    ----------
    shape : (B, S, Hq, D) of the whole q, or (B, Hq, S, D) with layout "bhsd"
    rows, key_rows, exchange, groups, stretches, causal, window : as of `parallel.attention`
    heads_k : int, optional
        Key heads; default: those of q.
    machine : parallel.Machine, optional
        What seconds are reckoned by; default: H100s, eight to a host. They are of paper, not measured.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be.
    """
    check_layout(layout)
    if not isinstance(machine, (Machine, type(None))):
        raise TypeError(f"machine is a {type(machine).__name__}; it must be a parallel.Machine or None")
    keys, m = rows if key_rows is None else key_rows, machine or Machine()
    for name, x in (("rows", rows), ("key_rows", keys)):
        if not isinstance(x, Rows):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a parallel.Rows")
    size = rows.size
    if keys.size != size:
        raise ValueError(f"key_rows is of {keys.size} ranks; it must be of {size}, as rows is")
    if not isinstance(shape, (tuple, list)) or len(shape) != 4:
        raise ValueError(f"shape is {shape!r}; it must be four lengths, (B, S, Hq, D), or with bhsd (B, Hq, S, D)")
    if any(whole_number(x) is None or x < 0 for x in shape):
        raise ValueError(f"shape is {shape!r}; it must be four lengths, whole numbers of at least 0")
    batch, length, heads, dim = shape if layout == "bshd" else (shape[0], shape[2], shape[1], shape[3])
    hk = heads if heads_k is None else positive("heads_k", heads_k)
    if length != rows.length:
        raise ValueError(f"shape is {shape}, with {length} rows; it must have those of rows, {rows.length}")
    if hk < 1 or heads % hk:
        raise ValueError(f"heads_k is {hk}, beside {heads} heads of q; these must be a multiple of it")
    if (called := float_name(dtype)) not in FLOATS:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(FLOATS)}")
    if exchange not in (None, *EXCHANGES):
        raise ValueError(f"exchange is {exchange!r}; it must be 'keys', 'heads' or None")
    if exchange == "heads" and hk % size:
        raise ValueError(f"heads_k is {hk}, which cannot be dealt out to {size} ranks; it must be a multiple of them")
    groups = parts("groups", groups, 0, hk // size if exchange == "heads" else hk)
    item = ITEMSIZE[str(called)]
    wide = max(item, 4)
    near, both = size <= m.host, hk % size == 0 and groups <= hk // size
    band, work = band_of(rows, keys, _CHECKS["window"](window), _CHECKS["causal"](causal)), 4 * batch * heads * dim
    kinds = [
        exchange or (lighter(rows, keys, band, heads, hk, of, wide // item, near=near) if both else "keys")
        for of in (FORWARD, BACKWARD)
    ]
    kv = arriving(rows, keys, band) * 2 * batch * hk * dim * item
    usual = usual_groups(rows, band, hk, batch * heads, work, kv) if "keys" in kinds else 1
    groups, stretches = groups or usual, parts("stretches", stretches, 1)
    plans = [rounds(rows, keys, band, r, hk, groups=groups, stretches=stretches, block=16) for r in range(size)]
    pairs = [sum(_pairs(band, span) for span in rows.chunks[r]) for r in range(size)]
    even = sum(pairs) // size
    found = []
    for r in range(size):
        own_q, own_k = rows.count(r) * heads, keys.count(r) * hk
        rest_q, rest_k = length * heads - own_q, keys.length * hk - own_k
        there, back = _sent(plans[r])
        steps, sent, computing, exposed = len(plans[r]), 0, 0.0, 0.0
        for backward, kind in enumerate(kinds):
            work = 4 * batch * heads * (even if kind == "heads" else pairs[r]) * dim
            takes = 2.5 * work / m.backward if backward else work / m.forward
            if kind == "heads":  # of own rows Q, K, V, and backward O, dO, lse; of all others O, lse, or dQ, dK, dV
                some = (size - 1) * ((1 + 2 * backward) * own_q + 2 * own_k) + rest_q + 2 * backward * rest_k
                of_lse = (size - 1) * own_q if backward else rest_q
                some = batch * (some * dim * item + of_lse * wide) // size
            else:
                some = batch * dim * hk // groups * (there * 2 * item + back * 2 * wide * backward)
            travelling = some / (m.inside if near else m.between)
            # All but the first group travel while others are computed, where computing takes as long.
            hides = kind == "keys"
            waits = max(travelling / steps, travelling - takes * (1 - 1 / steps)) if hides else travelling
            exposed += waits + m.start * ((steps if hides else 1) + 1)
            sent, computing = sent + some, computing + takes
        if kinds[0] == "heads":
            memory, number = batch * dim * item * (length * heads * 2 + keys.length * hk * 2) // size, 1
        else:
            memory = batch * dim * hk // groups * 2 * 2 * item * max((x.length for x in plans[r]), default=0)
            number = sum(len(x.steps) for x in plans[r])
        seen = even if kinds[0] == "heads" else pairs[r]
        found.append(Rank(rows.count(r), seen, number, sent, memory, computing, exposed if size > 1 else 0.0))
    kind = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} forward and of {kinds[1]} backward"
    return Explanation(kind, tuple(found), tuple(_lines(kind, rows, plans, found, groups, stretches, m)))


def _lines(
    kind: str, rows: Rows, plans: list[tuple[Round, ...]], found: list[Rank], groups: int, stretches: int, m: Machine
) -> list[str]:
    size = rows.size
    how = f", {groups} groups of key heads, {stretches} stretches" if "keys" in kind else ""
    lines = [f"{rows.length:,} rows over {size} ranks, exchange of {kind}{how}"]
    for r, x in enumerate(found[:16]):
        spans = [x for x, _ in rows.local(r)]
        chunks = ", ".join(f"{a:,} to {b:,}" for a, b in spans[:4]) + ", ..." * (len(spans) > 4)
        sources = sorted({y.source for of in plans[r] for y in of.receives} - {r}) if "keys" in kind else []
        whose = f"; keys of ranks {', '.join(map(str, sources[:8]))}{', ...' * (len(sources) > 8)}" if sources else ""
        lines.append(
            f"  rank {r}: rows {chunks}; {x.pairs:,} pairs a head in {x.calls} calls{whose}; sends "
            f"{x.sent / 1e6:,.1f} MB, {x.memory / 1e6:,.1f} MB of keys"
        )
    if size > 16:
        lines.append(f"  ... and {size - 16} more")
    mean = sum(x.pairs for x in found) / size
    computing, total = max(x.computing for x in found), max(x.computing + x.exposed for x in found)
    even = sum(x.computing for x in found) / size
    share = even / total if total else 1.0
    lines.append(f"The busiest rank has {max(x.pairs for x in found) / mean if mean else 1:.3f} times the mean work.")
    lines.append(
        f"On paper (forward and backward; {m.forward / 1e12:.0f} and {m.backward / 1e12:.0f} TFLOP/s, "
        f"{(m.inside if size <= m.host else m.between) / 1e9:.0f} GB/s): computing {computing * 1e3:.2f} ms, transfers "
        f"that are not hidden {(total - computing) * 1e3:.2f} ms, {share:.2f} of {size} times one GPU."
    )
    return lines


def _sent(plan: tuple[Round, ...]) -> tuple[int, int]:
    """Rows of K that a rank sends, and rows of gradients that it sends back."""
    there = sum(b - a for of in plan for x in of.sends for a, b in x.rows)
    back = sum(b - a for of in plan for x in of.receives if x.source != x.target for a, b in x.rows)
    return there, back


def _pairs(band: Band, rows: Span) -> int:
    """Of a head."""
    a, b = rows
    if band.left is None and band.right is None:
        return (b - a) * band.length
    n, total = 1 << 16, 0
    import numpy as np

    for first in range(a, b, n):
        i = np.arange(first, min(first + n, b)) + band.diagonal
        lo = np.zeros_like(i) if band.left is None else np.clip(i - band.left, 0, band.length)
        hi = np.full_like(i, band.length) if band.right is None else np.clip(i + band.right + 1, 0, band.length)
        total += int(np.maximum(hi - lo, 0).sum())
    return total
