"""What planners reckon with where lengths are data."""

from __future__ import annotations

from dataclasses import replace

from ...problem import ARRAY_RULES, AttentionProblem
from ..kernel_plan import ceil

BRIEF = 512  # packed queries on packed keys that no hint says are longer are as long as their mean


def as_dense(problem: AttentionProblem) -> AttentionProblem:
    """A problem like this one whose lengths are those of shapes: of what is packed the mean, or a hint that is far
    above it, where a few long sequences decide; else the one that is hinted at, or the most. Only what costs time may
    follow from it."""
    if not problem.ragged:
        return problem
    brief = BRIEF if problem.rows_q is not None and problem.rows_k is not None else 0
    seq_q = _length(problem.max_seqlen_q, problem.seq_q, problem.rows_q, problem.batch, brief)
    seq_k = _length(problem.max_seqlen_k, problem.seq_k, problem.rows_k, problem.batch, brief)
    batch = problem.batch
    if problem.rows_q is not None:  # no more rows than there are
        batch = max(1, min(batch, ceil(problem.rows_q, max(1, seq_q))))
    return replace(
        problem, batch=batch, seq_q=seq_q, seq_k=seq_k, rows_q=None, rows_k=None, cache=None, page=None, pages=0,
        max_seqlen_q=None, max_seqlen_k=None, diagonal=0 if problem.causal == "top_left" else seq_k - seq_q,
        given=tuple(x for x in problem.given if not ARRAY_RULES[x.name].ragged),
    )  # fmt: skip


def even(problem: AttentionProblem) -> bool:
    """Whether packed sequences are about as long as each other: a hint, which is a power of two, tells, else rows that
    are shared out evenly."""
    rows_q, batch = problem.rows_q, max(1, problem.batch)
    if rows_q is None:
        return False
    return rows_q % batch == 0 if problem.max_seqlen_q is None else problem.max_seqlen_q < 2 * ceil(rows_q, batch)


def _length(hint: int | None, most: int, packed: int | None, batch: int, brief: int) -> int:
    mean = None if packed is None else min(most, ceil(packed, max(1, batch)))
    if mean is not None and (hint is None or hint <= max(brief, 2 * mean - 1)):
        return mean if hint is None else min(mean, hint)
    return most if hint is None else min(most, hint)
