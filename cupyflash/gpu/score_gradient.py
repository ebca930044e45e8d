"""Launches of the kernels that sum the gradients of arrays that a score function reads
(kernels_cu/attention/score_gradient.cuh)."""

from __future__ import annotations

import math

from ..problem import AttentionProblem
from .array_gradient import Lengths, Work
from .kernel_plan import Launch, Workspace, ceil
from .score import Read, reads_of

THREADS = 128  # of the blocks that clear and finish sums
WAVES = 2  # blocks for each multiprocessor, where tiles are too few and are shared
EVEN = 6  # the longest diagonal is shared so that no block has more than this part of a multiprocessor's work


def score_work(
    problem: AttentionProblem, lengths: Lengths, rows: int, keys: int, threads: int, shared_memory: int, sms: int
) -> Work:
    """For tiles of `rows` queries by `keys` keys; what `work` has of other arrays comes beside it."""
    wanted = [name for name in lengths if problem.reads(name)]
    deterministic = problem.deterministic and bool(wanted)
    extents = (problem.batch, problem.heads_q, ceil(problem.seq_q, rows), ceil(problem.seq_k, keys))
    reads = reads_of(problem.score, wanted) if problem.score else ()
    shares = [_shares(read, extents, read.diagonal and rows == keys, sms) for read in reads]
    blocks = sum(own * splits for own, splits in shares)
    elements = sum(math.prod(lengths[name]) for name in wanted)
    launches = (
        Launch("attention_backward_score_clear", ceil(elements, THREADS), THREADS),
        Launch("attention_backward_score_largest", blocks if deterministic else 0, threads, shared_memory),
        Launch("attention_backward_score", blocks, threads, shared_memory),
        Launch("attention_backward_score_finish", ceil(elements, THREADS), THREADS),
    )
    workspace = (
        Workspace("score_sums", "uint64" if problem.deterministic else problem.lse_dtype, (elements,)),
        Workspace("score_largest", "uint64", (int(deterministic),)),
    )
    added = sum(own * splits * _sums(read, rows, keys) for read, (own, splits) in zip(reads, shares))
    scalars = [("score_bits", min(60, added.bit_length()))]  # of how often an element may be added to
    for n, (own, splits) in enumerate(shares):
        scalars += [(f"score_splits_{n}", splits), (f"score_blocks_{n}", own * splits)]
    constants = (("D_SCORE", bool(wanted)), ("DETERMINISTIC", problem.deterministic))
    return Work(tuple(x for x in launches if x.grid), workspace, tuple(scalars), constants)


def _sums(read: Read, rows: int, keys: int) -> int:
    """How many sums a block adds, for its tile: of pairs, or of its diagonals, columns or rows."""
    if read.diagonal:
        return rows + keys - 1
    return rows * keys if read.by_query and read.by_key else keys if read.by_key else rows


def _shares(read: Read, extents: tuple[int, int, int, int], diagonal: bool, sms: int) -> tuple[int, int]:
    """How many tiles of sums there are (or diagonals of tiles), and how many blocks share what one sums."""
    by = (read.by_batch, read.by_head, read.by_query, read.by_key)
    own = math.prod(n for n, differ in zip(extents, by) if differ)
    longest = math.prod(n for n, differ in zip(extents, by) if not differ)
    total, even = own * longest, WAVES
    if diagonal:
        _, _, tiles_q, tiles_k = extents
        own, longest, even = own // (tiles_q * tiles_k) * (tiles_q + tiles_k - 1), longest * min(tiles_q, tiles_k), EVEN
    return own, max(1, min(longest, ceil(even * longest * sms, max(1, total))))
