"""Where query tiles of a forward leave multiprocessors idle, the keys of each are dealt out in shares (kernels_cu/attention/shares.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from ...problem import AttentionProblem
from ..kernel_plan import Launch, Workspace, ceil

# They are, if that takes no more than GAIN of the time without. Measured on an H200: seconds of a tile's begin and end, of the kernel
# that combines shares, and of each share there; bytes per second of what they leave in memory.
TILE_SECONDS, COMBINE_SECONDS, SHARE_SECONDS, LEFT_RATE = 3e-6, 3e-6, 1e-7, 3e12
GAIN, MOST, MOST_LEFT = 0.85, 128, 1 << 28
LONG_KEYS = 1024  # with fewer they are not
ROWS = 4  # of a block that combines


class Dealt(NamedTuple):
    number: int  # of shares that the keys of a query tile are dealt out in
    seconds: float  # what the call is reckoned to take


def shares(
    problem: AttentionProblem,
    tiles: int,
    rows: int,
    keys: int,
    blocks: int,
    sms: int,
    visit: float,
    crowding: float = 1.0,
) -> Dealt:
    """For so many query tiles of so many rows, which visit `keys` keys in `visit` seconds; a multiprocessor has up to `blocks`
    of them at a time, and n together take `crowding` n times as long."""
    seen = problem.seq_k
    if problem.right is not None:
        seen = min(seen, problem.diagonal + problem.seq_q + problem.right)
        if problem.left is not None:
            seen = min(seen, problem.left + problem.right + min(rows, problem.seq_q))
    visits = max(1, ceil(seen, keys))
    left = 4 * problem.batch * problem.heads_q * problem.seq_q * problem.dim_v  # bytes of a share

    def time(n: int) -> float:
        combine = COMBINE_SECONDS + n * (SHARE_SECONDS + 2 * left / LEFT_RATE) if n > 1 else 0
        together = min(blocks, ceil(tiles * n, sms))
        return (
            ceil(tiles * n, blocks * sms) * (ceil(visits, n) * visit * max(1, crowding * together) + TILE_SECONDS)
            + combine
        )

    most = min(visits, MOST, max(1, MOST_LEFT // max(1, left))) if problem.seq_k >= LONG_KEYS else 1
    times = [time(n) for n in range(1, most + 1)]
    best = next(n for n, x in enumerate(times, 1) if x <= 1.02 * min(times))  # the fewest
    if times[best - 1] >= GAIN * times[0]:
        return Dealt(1, times[0])
    return Dealt(ceil(visits, ceil(visits, best)), times[best - 1])


def left(problem: AttentionProblem, n: int, dim_v: int) -> tuple[Workspace, ...]:
    """What n shares leave in memory."""
    rows = n * problem.batch * problem.heads_q * problem.seq_q if n > 1 else 0
    return (
        Workspace("share_out", problem.lse_dtype, (rows, dim_v)),
        Workspace("share_lse", problem.lse_dtype, (rows,)),
    )


def combine(problem: AttentionProblem, n: int) -> tuple[Launch, ...]:
    """The launch that makes one result of n shares."""
    rows = problem.batch * problem.heads_q * problem.seq_q
    return (Launch("attention_combine", ceil(rows, ROWS), 32 * ROWS),) if n > 1 else ()
