"""The tiles of the Hopper backward: the table, and what `tune` may try. Their cost is beside (sm90_backward_cost)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...problem import AttentionProblem
from ..kernel_plan import Tiles, ceil, pad
from ..measured import number
from .likely import as_dense
from .sm90_memory import PART


@dataclass(frozen=True)
class BackwardTile:
    """A thread block has one warpgroup that moves data and `warpgroups` that compute; it owns `keys` keys and visits
    `rows` queries at a time. The blocks of a cluster visit the same queries, and add to dQ once for all their keys.
    """

    rows: int
    keys: int
    warpgroups: int
    stages: int  # Q tiles in flight
    do_stages: int  # dO tiles in flight
    spills: int = 0
    dim: int = PART  # for as many columns of a thread block
    scored: bool | None = None  # as of the forward, and a mask
    cost: float = 1.0  # of a pair of a query and a key, beside those that it is weighed with

    @property
    def wide(self) -> bool:
        """Whether warpgroups share out the columns of dK and dV (and P goes through shared memory too), not the
        keys."""
        return self.keys < 64 * self.warpgroups

    @property
    def clustered(self) -> bool:
        """Where two warpgroups share out the columns, what they add to dQ is what binds: half of it with twice the
        keys."""
        return self.wide and self.warpgroups == 2

    @property
    def blocks(self) -> int:
        """Thread blocks of a multiprocessor. One warpgroup that computes alone would leave it idle between two
        tiles."""
        return 2 if self.warpgroups == 1 else 1

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return 2 if self.clustered else 1

    def shares_rows(self, dim: int) -> bool:
        """Whether warpgroups share out the rows of dQ; else its columns."""
        return not self.wide and dim <= 64

    def part_rows(self, dim: int) -> int:
        """Rows of a warpgroup's part of dQ."""
        return self.rows // self.warpgroups if self.shares_rows(dim) else self.rows

    def rest(self, dim: int) -> int:
        """Columns of dQ that are left where each warpgroup has 64: these are shared out by rows."""
        return 0 if self.wide else max(0, pad(dim, 32) - 64 * self.warpgroups)

    def sums(self, dim: int, dim_v: int) -> int:
        """Sums of dK and dV that a thread holds."""
        if not self.wide:
            return (dim + dim_v) // 2
        return sum(ceil(ceil(n, 64), self.warpgroups) for n in (dim, dim_v)) * self.keys // 2


# What may be spilled are addresses: the producer warps', and a consumer's, once a tile or where it adds to dQ in turn.
# The last that has keys of its own for each warpgroup: up to 160 columns, or 192 of K and 128 of V. (Of shares it
# spills most.)
REST_BACKWARD = BackwardTile(48, 128, 2, 2, 2, spills=296, dim=160, scored=False, cost=number("sm90_backward.rest"))
BACKWARD_TILES = (
    BackwardTile(128, 128, 2, 2, 2, spills=200, dim=64, scored=False),
    BackwardTile(64, 128, 2, 2, 2, spills=32, dim=64, cost=number("sm90_backward.few_rows")),
    BackwardTile(64, 128, 2, 2, 2, dim=128, scored=False),
    BackwardTile(64, 128, 2, 2, 2, spills=352, dim=128),  # with everything at once; a soft cap or a bias alone 64
    REST_BACKWARD,
    BackwardTile(48, 128, 2, 2, 2, spills=296, dim=192, scored=False, cost=number("sm90_backward.rest_192")),
    BackwardTile(64, 96, 3, 2, 1, spills=32, dim=192, scored=False),
    BackwardTile(64, 96, 3, 2, 1, spills=272, dim=192),
    BackwardTile(64, 64, 2, 2, 1, spills=32, scored=False, cost=number("sm90_backward.few_keys")),
    BackwardTile(64, 64, 2, 2, 1, spills=208),
)
# Of short sequences, where a head is one tile: two warpgroups of 128 queries and keys would have three quarters of it
# in vain.
SHORT_BACKWARD = (BackwardTile(64, 64, 1, 2, 2, dim=64),)

# Weighed with each other, for head dimensions up to these: tiles of few rows or keys leave less of them in vain. Of few
# keys dQ is soon to be finished: there is more room for that with one tile of dO in flight.
FEW_KEYS = 704
FEW_REST = dataclasses.replace(REST_BACKWARD, do_stages=1)
WEIGHED = {64: BACKWARD_TILES[:2], 192: BACKWARD_TILES[4:7]}
WEIGHED_FEW = {64: BACKWARD_TILES[:2], 192: (FEW_REST, *BACKWARD_TILES[5:7], BACKWARD_TILES[8])}


def weighed(problem: AttentionProblem, dim: int) -> tuple[BackwardTile, ...]:
    """Those of which the one that takes least is tried first; () where the table's order holds."""
    least = {64: 0, 192: 128}
    found = next((n for n in WEIGHED if least[n] < dim <= n), 0)
    if not found or problem.ragged or problem.block_mask is not None:
        return ()
    return (WEIGHED_FEW if problem.seq_k <= FEW_KEYS else WEIGHED)[found]


def _possible(t: BackwardTile, problem: AttentionProblem) -> bool:
    """How the warpgroups share out the keys is in the table."""
    return (t.keys, t.warpgroups) in {(row.keys, row.warpgroups) for row in BACKWARD_TILES}


TILES = Tiles(BACKWARD_TILES, {
    "rows": (48, 64, 80, 96, 128), "keys": (64, 80, 96, 128), "warpgroups": (2, 3), "stages": (1, 2),
    "do_stages": (1, 2), "spills": (0,),
}, _possible)  # fmt: skip


# Of narrow warpgroups that round dQ: with more, ptxas puts products in series.
WHOLE_SUMS = 200


def column_parts(problem: AttentionProblem) -> int:
    """In how many parts the columns are shared out over the thread blocks of a cluster."""
    return max(1, ceil(max(problem.dim, problem.dim_v), PART))


def cluster_keys(problem: AttentionProblem, t: BackwardTile) -> int:
    """Keys of a cluster, whose blocks have keys of their own, or columns."""
    return t.keys * (t.cluster if column_parts(problem) == 1 else 1)


def has_all_keys(problem: AttentionProblem, t: BackwardTile) -> bool:
    """Whether a tile has all keys of a head: then its part of dQ is all of it, and leaves, rounded, without float32
    sums."""
    sums = t.rows + (pad(problem.dim, 16) + pad(problem.dim_v, 16)) // 2
    free = t.wide or sums <= WHOLE_SUMS
    return not problem.ragged and 0 < problem.seq_k <= cluster_keys(problem, t) and free and _leaves_whole(problem)


def some_have_all_keys(problem: AttentionProblem, t: BackwardTile) -> bool:
    """Whether that is asked of each sequence: where they are packed, and in the mean no longer than a tile."""
    if problem.rows_k is None:
        return False
    likely = min(as_dense(problem).seq_k, ceil(problem.rows_k, max(1, problem.batch)))  # (a hint is of the longest)
    return likely <= t.keys and not t.wide and _leaves_whole(problem)


def _leaves_whole(problem: AttentionProblem) -> bool:
    return not (problem.widened or problem.add or problem.block_mask is not None)
