"""Where query tiles of a forward leave multiprocessors idle, the keys of each are dealt out in shares (kernels_cu/attention/shares.cuh)."""

from __future__ import annotations

from ...problem import AttentionProblem
from ..kernel_plan import Launch, Workspace, ceil

# They are, if that takes no more than GAIN of the time without. Measured on an H200: seconds of a tile's begin and end, of the kernel
# that combines shares, and of each share there; bytes per second of what they leave in memory.
TILE_SECONDS, COMBINE_SECONDS, SHARE_SECONDS, LEFT_RATE = 3e-6, 3e-6, 1e-7, 3e12
GAIN, MOST = 0.85, 128
LONG_KEYS = 1024  # with fewer they are not
ROWS = 4  # of a block that combines


def shares(problem: AttentionProblem, tiles: int, rows: int, keys: int, slots: int, visit: float) -> int:
    """In how many shares the keys of each of `tiles` query tiles of so many rows are dealt out to `slots` thread blocks at a
    time, which visit `keys` keys in `visit` seconds."""
    if problem.seq_k < LONG_KEYS:
        return 1
    seen = problem.seq_k
    if problem.left is not None:
        right = problem.seq_k if problem.right is None else problem.right
        seen = min(seen, max(0, problem.left + right) + min(rows, problem.seq_q))
    visits = ceil(seen, keys)
    left = 8 * problem.batch * problem.heads_q * problem.seq_q * problem.dim_v  # bytes of a share: written and read

    def time(n: int) -> float:
        combine = COMBINE_SECONDS + n * (SHARE_SECONDS + left / LEFT_RATE) if n > 1 else 0
        return ceil(tiles * n, slots) * (ceil(visits, n) * visit + TILE_SECONDS) + combine

    best = min(range(1, min(visits, MOST) + 1), key=time)
    return ceil(visits, ceil(visits, best)) if time(best) < GAIN * time(1) else 1


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
