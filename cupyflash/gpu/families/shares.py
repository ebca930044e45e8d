"""Where query tiles of a forward leave multiprocessors idle, the keys of each are dealt out in shares
(kernels_cu/attention/shares.cuh)."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...problem import ITEMSIZE, AttentionProblem
from ..device import Arch
from ..kernel_plan import Launch, Workspace, allowed, ceil, query_numbers, room
from ..measured import number

COMBINE_SECONDS, SHARE_SECONDS = number("shares.combine"), number("shares.share")
LEFT_RATE, ENDS_SECONDS = number("shares.left"), number("shares.ends")
# They are, if that takes no more than GAIN of the time without.
GAIN, MOST, MOST_LEFT = 0.85, 128, 1 << 28
ROOM = 4  # times q's bytes that they leave in memory, where that is much
LONG_KEYS = 1024  # with fewer they are not
STRIP, SAMPLES = 64, 64
# Of a row that is combined a warp has 4 columns a lane, of so many lanes and every (32 / lanes)-th share: the fewer
# lanes, the more warps have a row. But no more than WARPS for each multiprocessor, and LEAST_SHARES for each lane.
LANES, WARPS, LEAST_SHARES = (4, 8, 16, 32), 16, 4
SPREAD = 2  # times as many blocks that combine as a multiprocessor would have if all were free
# Where lengths are data each sequence's are dealt out by its own length: where query tiles leave multiprocessors idle
# in shares of FEW_TILES key tiles at most; else in shares of LENGTH_TILES, if one may have more than LONG_TILES. In
# larger ones where they would leave too much in memory.
FEW_TILES, LENGTH_TILES, LONG_TILES = 16, 32, 64
FAR = 4  # times the mean of packed keys one may have, where no hint says how many


class Dealt(NamedTuple):
    number: int  # of shares that the keys of a query tile are dealt out in
    seconds: float  # what the call is reckoned to take


class Visit(NamedTuple):
    """What it takes to visit a tile of keys, in seconds."""

    seconds: float  # of all that a multiprocessor has
    least: float = 0.0  # of one thread block, however much of a multiprocessor it has
    crowding: float = 1.0  # n blocks of a multiprocessor together take `crowding` n times as long


class Tiles(NamedTuple):
    """What is there to do: so many query tiles, of rows which visit `keys` keys at a time."""

    number: int
    rows: int
    keys: int
    blocks: int  # of a multiprocessor, at most
    visit: Visit
    ends: float = ENDS_SECONDS  # seconds of a tile's begin and end


def shares(problem: AttentionProblem, tiles: Tiles, sms: int) -> Dealt:
    """In how many shares that is done soonest."""
    visits = _visits(problem, tiles.rows, tiles.keys)
    many = min(visits.most, MOST, most(problem)) if problem.seq_k >= LONG_KEYS else 1
    times = [_seconds(problem, tiles, visits, sms, n) for n in range(1, many + 1)]
    best = next(n for n, x in enumerate(times, 1) if x <= 1.02 * min(times))  # the fewest
    if times[best - 1] >= GAIN * times[0]:
        return Dealt(1, times[0])
    return Dealt(ceil(visits.most, ceil(visits.most, best)), times[best - 1])


def _seconds(problem: AttentionProblem, tiles: Tiles, visits: Visits, sms: int, n: int) -> float:
    number, slots, visit = tiles.number * n, tiles.blocks * sms, tiles.visit

    def tile(visits: float, together: int) -> float:
        return visits * max(visit.seconds * max(1, visit.crowding * together), visit.least) + tiles.ends

    def rounds(visits: float) -> float:  # of tiles that are alike
        full, rest = divmod(number, slots)
        return full * tile(visits, tiles.blocks) + (tile(visits, ceil(rest, sms)) if rest else 0)

    # The longest come first, and short ones fill up what is left.
    longest = tile(ceil(visits.most, n), min(tiles.blocks, ceil(number, sms)))
    seconds = max(longest, number / slots * tile(visits.mean / n, tiles.blocks), rounds(ceil(visits.least, n)))
    return seconds + combine_seconds(problem, n)


def combine_seconds(problem: AttentionProblem, n: int) -> float:
    """What it takes to make one result of n shares."""
    return COMBINE_SECONDS + n * (SHARE_SECONDS + 2 * _left(problem) / LEFT_RATE) if n > 1 else 0.0


def by_length(problem: AttentionProblem, likely: AttentionProblem, keys: int, parts: int) -> tuple[int, int]:
    """Where each sequence is cut by its own length: of how many tiles of `keys` keys a share is at most, and how many
    the longest has; 0 and `parts`, what a likely one is cut in, where all are cut in as many. For lengths of keys that
    are data, and one tile of queries of a head."""
    differ = (problem.has("seqlens_k") or problem.rows_k is not None) and problem.batch > 1
    no_hint = FAR * likely.seq_k if problem.rows_k is not None else problem.seq_k
    tiles, longest = ceil(problem.seq_k, keys), min(problem.seq_k, problem.max_seqlen_k or no_hint)
    if not differ or problem.left is not None or problem.block_mask is not None:
        return 0, parts
    if parts == 1 and ceil(longest, keys) <= LONG_TILES:
        return 0, 1
    size = min(FEW_TILES, ceil(ceil(likely.seq_k, keys), parts)) if parts > 1 else LENGTH_TILES
    while size < tiles and ceil(tiles, size) > most(problem):
        size *= 2
    return (size, ceil(tiles, size)) if size < ceil(longest, keys) else (0, parts)


def _left(problem: AttentionProblem) -> int:
    """Bytes of a share's results."""
    return 4 * problem.batch * problem.heads_q * problem.seq_q * problem.dim_v


def most(problem: AttentionProblem) -> int:
    """Of how many shares the results have room in memory: of all rows, of which hints may say that few are filled."""
    share = ITEMSIZE[problem.lse_dtype] * math.prod(query_numbers(problem)) * problem.dim_v
    return max(1, min(MOST_LEFT, allowed(problem, ROOM)) // max(1, share))


class Visits(NamedTuple):
    """Tiles of keys that a query tile visits."""

    most: int
    mean: float
    least: int


def _visits(problem: AttentionProblem, rows: int, keys: int) -> Visits:
    """The mean is that of STRIP rows: warps pass over tiles that they do not see."""
    whole, strips = seen(problem, rows, keys), seen(problem, STRIP, keys)
    return Visits(max(whole), min(max(whole), sum(strips) / len(strips)), min(whole))


def seen(problem: AttentionProblem, rows: int, keys: int) -> list[int]:
    """How many tiles of keys each tile of a head's queries visits; of a long sequence not all, but the last one."""
    if problem.right is None and problem.left is None:
        return [max(1, ceil(problem.seq_k, keys))]

    def visits(first: int) -> int:
        last = min(first + rows, problem.seq_q) - 1
        end = (
            problem.seq_k if problem.right is None else min(problem.seq_k, problem.diagonal + last + problem.right + 1)
        )
        start = 0 if problem.left is None else max(0, problem.diagonal + first - problem.left)
        return max(1, ceil(end, keys) - start // keys)

    tiles = ceil(problem.seq_q, rows)
    return [visits(n * rows) for n in range(tiles - 1, -1, -max(1, tiles // SAMPLES))]


def left(problem: AttentionProblem, n: int, dim_v: int) -> tuple[Workspace, ...]:
    """What n shares leave in memory."""
    rows = n * math.prod(query_numbers(problem)) if n > 1 else 0
    return (
        Workspace("share_out", problem.lse_dtype, (rows, dim_v)),
        Workspace("share_lse", problem.lse_dtype, (rows,)),
    )


class Combined(NamedTuple):
    """How one result is made of shares."""

    lanes: int  # of a warp, along columns
    warps: int  # in all


def combined(problem: AttentionProblem, n: int, columns: int, sms: int) -> Combined:
    """Of n shares, whose rows have so many columns."""
    rows = math.prod(query_numbers(problem))
    fit = [x for x in LANES if x == LANES[0] or 2 * x < columns]
    found = [Combined(lanes, rows * ceil(columns, 4 * lanes)) for lanes in fit]
    return next((x for x in found if x.warps <= WARPS * sms and n * x.lanes >= 32 * LEAST_SHARES), found[-1])


def combine(of: Combined, n: int, arch: Arch, waits: bool) -> tuple[Launch, ...]:
    """The launch that does it. Where it may start early few multiprocessors may be free, and with so much shared memory
    for each block they do not get all."""
    if n <= 1:
        return ()
    blocks = ceil(of.warps, 4)
    spread = waits and blocks <= SPREAD * arch.sms
    apart = spread * room(arch, SPREAD * ceil(blocks, arch.sms))
    return (Launch("attention_combine", blocks, 128, apart, waits=waits),)
