"""The tiles of the Hopper forward: tables, what `tune` may try, and which rows are for which problem. Their cost is
beside (sm90_forward_cost)."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ..kernel_plan import Tiles, ceil, query_tiles, scored
from ..measured import number
from ..score import light
from .sm90_memory import PART, WIDEST, padded, paired, value_parts


@dataclass(frozen=True)
class ForwardTile:
    """A thread block has one warpgroup that loads and `warpgroups` that own 64 queries each; it visits `keys` keys at a
    time."""

    warpgroups: int
    keys: int
    stages: int  # K and V tiles in flight
    blocks: int = 1  # thread blocks of a multiprocessor
    spills: int = 0
    dim: int = WIDEST[0]  # for head dimensions up to this (of V, those of a part)
    banded: bool | None = None  # causal or a window; None: either
    scored: bool | None = None  # more than the scaled product, or dropout, which ask for registers; None: either
    crowded: bool | None = None  # as the function of that name says; None: either
    cost: float = 1.0  # of a row, beside those of its table

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def start_registers(self) -> int:
        """Of every thread, when a block starts."""
        return 65536 // (128 * (self.warpgroups + 1) * self.blocks) // 8 * 8

    @property
    def registers(self) -> int:
        """Of a thread that computes, as kernels_cu/sm90/forward.cu shares them out."""
        producer = 40 if self.warpgroups * self.blocks < 3 else 32
        return ((self.warpgroups + 1) * self.start_registers - producer) // self.warpgroups // 8 * 8


FORWARD_TILES = (
    # Addresses, once per tile: 24 bytes of a plain kernel; with slopes under a causal mask 208, which is faster by 9 %
    # than two warpgroups that spill none; with a soft cap, too, 376.
    ForwardTile(3, 128, 3, spills=400, dim=64, crowded=False),
    ForwardTile(2, 128, 2, dim=128, scored=False),
    # Addresses of the tile before, under a causal mask with slopes; with dropout, whose seed is in memory, words of its
    # numbers.
    ForwardTile(2, 128, 2, spills=240, dim=128),
    ForwardTile(2, 128, 2, dim=192, scored=False),
    ForwardTile(2, 128, 2, spills=96, dim=192),
    ForwardTile(2, 96, 2, dim=192, scored=False),
    ForwardTile(2, 96, 2, spills=144, dim=192),
    ForwardTile(2, 64, 2, spills=64, dim=PART, banded=True, scored=False),  # with a window and a key mask; else none
    ForwardTile(2, 64, 2, spills=208, dim=PART, banded=True),
    ForwardTile(2, 80, 2, spills=64, dim=PART, scored=False),  # where Q and K are narrow and V is not; else none
    ForwardTile(2, 80, 2, spills=64, dim=PART),
    # Where a mask or a bias leaves less room, or heads are wide.
    ForwardTile(2, 64, 2, spills=168),
    ForwardTile(2, 48, 2, spills=168),
    # Wide heads: reckoned, not timed (docs/notes/wide-heads.md).
    ForwardTile(2, 64, 1, spills=168),
    ForwardTile(2, 48, 1, spills=168),
    ForwardTile(2, 32, 1, spills=168),
)
# Up to 32, those that are tried first, the cheapest in front (`weighed`): four warpgroups with 64 keys at a time hide
# the exponentials, too. With a bias they alone: beside its tiles for 128 keys there would be no room for the next
# tile's Q. What is spilled are addresses, with mask and bias the producer's.
NARROW = (
    ForwardTile(3, 128, 3, spills=56, dim=32, scored=False, crowded=False),
    ForwardTile(4, 64, 4, spills=128, dim=32),
    ForwardTile(2, 64, 3, 2, spills=160, dim=32),
)
# Up to 64, so too: short sequences leave most of a large tile empty, and few tiles most multiprocessors.
SMALL = ForwardTile(1, 64, 3, 3, spills=32, dim=64, scored=False, cost=number("sm90_forward.small"))
MIDDLE = (
    FORWARD_TILES[0],
    ForwardTile(4, 64, 3, spills=128, dim=64, scored=False, cost=number("sm90_forward.middle")),
    SMALL,
)
# Up to 96, where every key is seen.
WIDER = (
    ForwardTile(2, 128, 2, dim=96, banded=False, scored=False),
    ForwardTile(3, 96, 2, spills=32, dim=96, banded=False, scored=False, cost=number("sm90_forward.wider")),
)
# Where one tile has all keys and they are few, for many queries (cross-attention on 77 tokens): no more than it needs.
FEW_KEYS = (
    *(ForwardTile(3, n, 3, spills=32, dim=64, banded=False, scored=False) for n in (64, 80, 96)),
    *(ForwardTile(3, n, 2, spills=128, dim=128, banded=False, scored=False) for n in (64, 80)),
    *(
        ForwardTile(2, n, 2, spills=32, dim=192, banded=False, scored=False, cost=number("sm90_forward.few_keys"))
        for n in (64, 80, 96)
    ),
)
# Where heads share K and V and queries are few, a tile takes all queries of as many heads as it holds. Not of every
# number: each is a kernel to compile. The rows are tried first there: three warpgroups would spill, and under a window
# with key_mask two do, once per tile.
PACKS = (64, 16, 8, 4, 2)
PACKED = (
    ForwardTile(2, 128, 4, dim=64),
    ForwardTile(2, 128, 2, spills=192, dim=128),
)
# And where all of those queries have room in half of it: two blocks of a multiprocessor wait for bytes in turn.
TWO_BLOCKS = ForwardTile(1, 64, 3, 2, dim=128)
# Of short sequences, of which `choices` are judged by what they are reckoned to take: tiles of few rows or keys leave
# less of them in vain. Of plain ones; with scores or dropout they would spill.
BRIEF = {
    64: (
        FORWARD_TILES[0],
        MIDDLE[1],
        SMALL,
        PACKED[0],
        ForwardTile(1, 64, 4, 2, dim=64),
    ),
    96: (FORWARD_TILES[1], ForwardTile(3, 96, 2, spills=16, dim=96), ForwardTile(2, 96, 3, dim=96)),
    128: (FORWARD_TILES[1], ForwardTile(1, 64, 2, 2, dim=128), ForwardTile(2, 96, 2, dim=128)),
    192: (FORWARD_TILES[3], FORWARD_TILES[5], *(ForwardTile(2, n, 2, spills=16, dim=192) for n in (80, 64))),
}
# and of few keys
BRIEF_KEYS = {
    64: (
        *(ForwardTile(3, n, 3, spills=16, dim=64) for n in (80, 96)),
        *(ForwardTile(2, n, 3, dim=64) for n in (80, 96)),
    ),
    96: (ForwardTile(3, 80, 2, spills=16, dim=96), ForwardTile(2, 80, 2, dim=96)),
    128: (*(ForwardTile(3, n, 2, spills=32, dim=128) for n in (64, 80)), ForwardTile(2, 80, 2, dim=128)),
}
BRIEF_MOST_KEYS = 400
BRIEF_PACKS, BRIEF_PACKED = (2, 4, 8), 1024  # heads that share K and V may share a tile of so many queries
# Of 8 bits. Where keys or columns are no more than 64, the upper half of a row of shared memory is empty.
EIGHT = (
    ForwardTile(3, 128, 3, spills=400, dim=64, crowded=False),
    ForwardTile(2, 128, 3, spills=240, dim=64),
    ForwardTile(2, 192, 2, spills=320, dim=128, banded=True, scored=False),  # with scales of blocks; else none
    # With a mask and scales of blocks; else none.
    ForwardTile(3, 96, 2, spills=96, dim=128, banded=False, scored=False),
    ForwardTile(2, 128, 2, spills=320, dim=192),
    ForwardTile(2, 96, 2, spills=400),
    ForwardTile(2, 64, 2, spills=240),
    ForwardTile(2, 64, 1, spills=240),  # beside sums, mask and bias
)
# With a block mask first those whose 128 queries are a block of most masks.
LISTED = (
    ForwardTile(2, 128, 4, dim=64, scored=False),
    ForwardTile(2, 128, 2, spills=16, dim=128, scored=False),
    ForwardTile(2, 64, 3, 2, spills=160, dim=32),
)
# Where they do not, and keys are few too, two or three warpgroups would have rows that nobody asked for.
SHORT = (
    SMALL,
    ForwardTile(1, 64, 4, 2, spills=24, dim=64),
    ForwardTile(1, 64, 2, 2, spills=16, dim=128),  # with everything at once
)


def crowded(problem: AttentionProblem) -> bool:
    """Whether three warpgroups have too few registers in the forward: for the words of dropout (two are faster, 258 to
    236 TFLOP/s under a causal mask), for addresses with slopes under a window (650 bytes would be spilled), or for a
    large score function.
    """
    windowed = problem.left is not None or (problem.right is not None and problem.causal is None)
    heavy = problem.score is not None and not light(problem.score)
    return problem.dropout > 0 or (windowed and problem.has("alibi_slopes")) or heavy


def busy(problem: AttentionProblem) -> bool:
    return scored(problem) or problem.dropout > 0


def _possible(t: ForwardTile, problem: AttentionProblem) -> bool:
    """Have scores, their copy in the inputs' bits and the output room in what the kernel gives a thread that computes,
    and the sums of one product in what it starts with, which is what ptxas asks of an instruction? And of 8 bits a
    product takes 32 keys at once, and makes scores of 64 or more."""
    if problem.dtype == FLOAT8 and (t.keys % 32 or t.keys < 64):
        return False
    scores, output = t.keys // 2, padded(problem)[1] // 2
    copy = t.keys * ITEMSIZE[problem.dtype] // 8
    return (
        t.registers <= 256
        and scores + copy + output <= t.registers - 32
        and max(scores, output) + 30 <= t.start_registers
    )


TILES = Tiles(FORWARD_TILES, {
    "warpgroups": (1, 2, 3, 4), "keys": (48, 64, 80, 96, 128, 192), "stages": (1, 2, 3, 4), "blocks": (1, 2, 3, 4),
    "spills": (0,),
}, _possible)  # fmt: skip


def weighed(problem: AttentionProblem) -> tuple[ForwardTile, ...]:
    """Those of which the cheapest are tried first; () where there are none."""
    dim = max(padded(problem))
    if dim <= 32:
        return NARROW
    if paired(problem):  # for a mask there is little room beside small tiles
        return ()
    if problem.seq_k <= 96 and (dim > 64 or problem.seq_q > 192):
        rows = tuple(t for t in FEW_KEYS if t.keys >= problem.seq_k and t.dim >= dim)
        return tuple(t for t in rows if t.keys == rows[0].keys) if rows else ()
    return MIDDLE if dim <= 64 else WIDER


def choices(problem: AttentionProblem) -> tuple[tuple[ForwardTile, int], ...]:
    """Tiles of a short plain problem, and of how many heads that share K and V each has rows; () where it has none."""
    dim = next((n for n in BRIEF if max(padded(problem)) <= n), 0)
    plain = not (
        busy(problem) or paired(problem) or problem.block_mask is not None or problem.ragged or problem.dtype == FLOAT8
    )
    if not dim or not plain or max(padded(problem)) <= NARROW[0].dim:
        return ()
    found = BRIEF[dim] + (BRIEF_KEYS.get(dim, ()) if problem.seq_k <= BRIEF_MOST_KEYS else ())
    packs = [n for n in BRIEF_PACKS if n <= problem.group] if dim <= 128 and problem.seq_q <= BRIEF_PACKED else []
    return (
        *((t, 1) for t in found),
        *((t, n) for n in packs for t in found if (t.warpgroups, t.keys) == (2, 128) or t.warpgroups == 1 and n < 8),
    )


def pack_of(problem: AttentionProblem, t: ForwardTile) -> int:
    """How many heads that share keys have room in a tile with all of their queries; 1: no two."""
    return next((n for n in PACKS if t.rows // n >= problem.seq_q), 1)


def tiles_of(problem: AttentionProblem, t: ForwardTile, pack: int) -> int:
    """How many tiles there are, of so many heads and a part of the columns of V each."""
    packs = problem.heads_k * ceil(problem.group, pack)
    return value_parts(problem) * packs * (query_tiles(problem, t.rows // pack) // problem.heads_q)
