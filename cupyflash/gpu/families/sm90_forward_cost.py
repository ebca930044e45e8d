"""What tiles of the Hopper forward cost: in how many shares their keys are dealt out, and which come first."""

from __future__ import annotations

from ...problem import FLOAT8, AttentionProblem
from ..device import Arch
from ..kernel_plan import ceil, pad
from ..measured import number
from . import shares
from .likely import BRIEF, even
from .sm90_forward_tiles import NARROW, PACKED, PACKS, SMALL, TWO_BLOCKS, ForwardTile, busy, choices, pack_of, tiles_of
from .sm90_memory import padded, paired, value_parts

RATE, SCORE_SECONDS, LEAST_SECONDS = (
    number("sm90_forward.rate"),
    number("sm90_forward.score"),
    number("sm90_forward.visit"),
)
ENDS_SECONDS, WARPGROUP_SECONDS = number("sm90_forward.ends"), number("sm90_forward.warpgroup")
# Times the least that a multiprocessor may have to compute: up to that they are taken in their order.
NARROW_OVERLOAD, OVERLOAD = 1.25, 1.03
TIMED_OVERLOAD = 1.08  # where it is reckoned in seconds, which are right within 10 %
# Of `seconds`
PRODUCTS, COPIES, BYTES = number("sm90_forward.products"), number("sm90_forward.copies"), number("sm90_forward.bytes")
WAIT_SECONDS, WAIT_KEY, ALONE_SECONDS = (
    number("sm90_forward.wait"),
    number("sm90_forward.wait_key"),
    number("sm90_forward.alone"),
)
PACK_COST = number("sm90_forward.pack")
LINE = 128  # bytes of memory that come together
LISTED_TILES = 4  # of each thread block, at least: a list takes as long as looking for so many
MIXED_GAIN = 1.06  # what tiles of several heads must save in number
FEW_QUERIES, MOST_QUERIES, MOST_KEYS = 16, 2048, 512  # what `by_seconds` is for


def dealt(problem: AttentionProblem, t: ForwardTile, pack: int, arch: Arch) -> shares.Dealt:
    """In how many shares the keys of a tile with so many heads are dealt out."""
    asked = min(problem.seq_q, t.rows // pack) * min(problem.group, pack)  # rows of a tile
    score = max(2 * (problem.dim + problem.dim_v / value_parts(problem)) / RATE, SCORE_SECONDS)
    visit = shares.Visit(pad(asked, 64) * t.keys * score, LEAST_SECONDS * t.keys / 64)
    ends = ENDS_SECONDS + t.warpgroups * WARPGROUP_SECONDS
    tiles = shares.Tiles(tiles_of(problem, t, pack), t.rows, t.keys, t.blocks, visit, ends)
    found = shares.shares(problem, tiles, arch.sms)
    return found if problem.dtype != FLOAT8 else found._replace(number=1)


def shared_when_packed(problem: AttentionProblem, arch: Arch) -> bool:
    t = next((t for t in PACKED if max(padded(problem)) <= t.dim), PACKED[-1])
    return dealt(problem, t, pack_of(problem, t), arch).number > 1


def two_blocks(problem: AttentionProblem, likely: AttentionProblem, arch: Arch) -> bool:
    """Whether tiles of which a multiprocessor has two come first, where heads share a tile with all of their queries:
    if they have room, and keys are dealt out, or lengths differ and tiles are many."""
    large = next((t for t in PACKED if max(padded(problem)) <= t.dim), PACKED[-1])
    pack = pack_of(likely, large)
    even = not problem.ragged or tiles_of(likely, large, pack) <= arch.sms
    whole = even and dealt(likely, large, pack, arch).number == 1
    return likely.seq_q * problem.group <= TWO_BLOCKS.rows and not whole


def mixed(problem: AttentionProblem, arch: Arch) -> int:
    """Of how many heads that share K and V a tile has rows, where queries are packed and sequences differ, as a prompt
    beside tokens. The last tile of each is half empty in the mean, and the fewer of its rows are of one head, the fewer
    are in vain. 1: of one head, or of as many as `pack_of` says."""
    rows_q, batch = problem.rows_q, max(1, problem.batch)
    if rows_q is None or problem.dtype == FLOAT8 or paired(problem) or problem.block_mask is not None:
        return 1
    pack = next((n for n in PACKS if problem.group % n == 0), 1)
    longest = min(problem.seq_q, problem.max_seqlen_q or problem.seq_q)
    # As long as each other, most likely: rows are shared out evenly, and the hint, a power of two, is the next one.
    alike = rows_q % batch == 0 and (problem.max_seqlen_q is None or longest * batch < 2 * rows_q)
    if problem.dropout or longest * pack <= TWO_BLOCKS.rows or alike:
        return 1
    rows = SMALL.rows if max(padded(problem)) <= SMALL.dim and not busy(problem) else PACKED[0].rows
    mean, heads = rows_q / batch / rows, batch * problem.heads_q
    many = heads * (mean + 0.5 / pack) >= arch.sms
    return pack if many and mean + 0.5 >= MIXED_GAIN * (mean + 0.5 / pack) else 1


def longest_q(problem: AttentionProblem) -> int:
    """Queries that a sequence has at most, most likely: as a hint says, else as all have where packed rows are shared
    out evenly."""
    most = problem.max_seqlen_q
    if most is None and problem.rows_q is not None and problem.rows_q % max(1, problem.batch) == 0:
        most = problem.rows_q // max(1, problem.batch)
    return problem.seq_q if most is None else min(problem.seq_q, most)


def ordered(problem: AttentionProblem, span: int, pack: int, each: float) -> bool:
    """Whether tiles of packed sequences, `span` queries each and so many of each thread block, are listed by their keys
    before the forward: where sequences have tiles of very different lengths, or so few each that looking for them costs
    more than a list. Few are a tile in the mean, or without the longest, where a hint says how long that is. (Long
    sequences in turn find K and V in the L2 cache, where tiles of all by length do not.)"""
    if problem.rows_q is None or problem.block_mask is not None or each < LISTED_TILES:
        return False
    few = problem.rows_q <= problem.batch * span
    if problem.max_seqlen_q is not None and not even(problem):  # of few, the hint may be above all
        few |= problem.rows_q - problem.max_seqlen_q <= (problem.batch - 1) * span
    return pack > 1 or few


def by_visits(problem: AttentionProblem) -> bool:
    """Whether listed tiles start with those of most keys. Short packed sequences, which differ by few, come as they
    lie."""
    return problem.rows_k is None or min(problem.max_seqlen_k or problem.rows_k, problem.rows_k) > BRIEF


def packed_tiles(problem: AttentionProblem, pack: int) -> int:
    """Of packed queries, one tile for each sequence: so many there are at least, most likely."""
    return min(problem.batch, problem.rows_q or 0) * problem.heads_k * ceil(problem.group, pack)


def by_seconds(problem: AttentionProblem, arch: Arch) -> tuple[tuple[ForwardTile, int], ...]:
    """Tiles, and of how many heads that share K and V each has rows, the fastest first; () of few queries, and of long
    sequences, whose tiles are alike."""
    keys = problem.seq_k
    if problem.left is not None and problem.right is not None:
        keys = min(keys, problem.left + problem.right + 1)
    if problem.seq_q <= FEW_QUERIES or problem.seq_q > MOST_QUERIES and keys > MOST_KEYS:
        return ()
    return tuple(sorted(choices(problem), key=lambda x: seconds(problem, x[0], x[1], arch)))


def seconds(problem: AttentionProblem, t: ForwardTile, pack: int, arch: Arch) -> float:
    """What a forward takes, each of whose tiles has rows of `pack` heads. Each multiprocessor has so many tiles at a
    time; a visit of keys is bound by products, by what must come before what, or by copies; begin and end of a tile
    are seen of the first alone, since the next one's keys come meanwhile."""
    seen, tiles = shares.seen(problem, t.rows // pack, t.keys), tiles_of(problem, t, pack)
    few = tiles < t.blocks * arch.sms and problem.seq_k >= shares.LONG_KEYS
    parts = dealt(problem, t, pack, arch).number if few else 1
    number, slots = tiles * parts, t.blocks * arch.sms
    row = LINE * (_lines(2 * problem.dim) + _lines(2 * problem.dim_v))  # bytes of K and V, or of Q and O
    product = 2 * (pad(problem.dim, 16) + padded(problem)[1]) * t.keys * t.rows / PRODUCTS
    alone = ALONE_SECONDS * (1 + PACK_COST * (pack > 1))

    def tile(visits: float, together: int) -> float:
        visit = max(together * product, WAIT_SECONDS + WAIT_KEY * t.keys, together * t.keys * row / COPIES)
        return visits * visit + together * t.rows * row / COPIES

    full, rest = divmod(number, slots)
    mean, most = sum(seen) / len(seen) / parts, ceil(max(seen), parts)
    time = full * tile(mean, t.blocks) + (tile(mean, ceil(rest, arch.sms)) if rest else 0)
    time = max(time, tile(most, min(t.blocks, ceil(number, arch.sms))))
    all_rows = problem.heads_q * problem.seq_q + problem.heads_k * problem.seq_k
    time += problem.batch * all_rows * 2 * (problem.dim + problem.dim_v) / BYTES
    return time + alone + shares.combine_seconds(problem, parts)


def _lines(size: int) -> float:
    """Lines of memory that a row of so many bytes takes in the mean, in pieces of a line each; rows lie one behind the
    other, each at a multiple of 16 bytes."""
    whole, rest = divmod(size, LINE)
    if not rest:
        return whole
    return whole * (2 - 16 / LINE) + 1 + (rest - 16) / LINE


def by_load(problem: AttentionProblem, arch: Arch, rows: tuple[ForwardTile, ...]) -> tuple[ForwardTile, ...]:
    """These rows, last those that give some multiprocessor too much to do."""
    if not rows:
        return ()

    def load(t: ForwardTile) -> float:  # rows of its tiles, also those in vain
        tiles = problem.batch * problem.heads_q * ceil(problem.seq_q, t.rows)
        return ceil(tiles, arch.sms) * t.rows * t.cost

    found = [dealt(problem, t, 1, arch) for t in rows]
    few = tiles_of(problem, rows[0], 1) <= 2 * arch.sms and problem.seq_k >= shares.LONG_KEYS
    uneven = (
        problem.right is not None and problem.left is None
    )  # so that the first tiles count more, the more there are
    timed = few and uneven or any(x.number > 1 for x in found)
    loads = [x.seconds * t.cost if timed else load(t) for x, t in zip(found, rows)]
    most = NARROW_OVERLOAD if rows is NARROW else OVERLOAD
    most = max(most, TIMED_OVERLOAD) if timed else most
    return tuple(t for _, t in sorted(zip(loads, rows), key=lambda x: x[0] > most * min(loads)))
