"""What planners reckon with where lengths are data."""

from __future__ import annotations

from dataclasses import replace

from ...problem import ARRAY_RULES, AttentionProblem
from ..kernel_plan import ceil


def as_dense(problem: AttentionProblem) -> AttentionProblem:
    """A problem like this one whose lengths are those of shapes: each the one that is hinted at, else the mean of what
    is packed, else the most. Only what costs time may follow from it."""
    if not problem.ragged:
        return problem
    seq_q = _length(problem.max_seqlen_q, problem.seq_q, problem.rows_q, problem.batch)
    seq_k = _length(problem.max_seqlen_k, problem.seq_k, problem.rows_k, problem.batch)
    batch = problem.batch
    if problem.rows_q is not None:  # no more rows than there are
        batch = max(1, min(batch, ceil(problem.rows_q, max(1, seq_q))))
    return replace(
        problem, batch=batch, seq_q=seq_q, seq_k=seq_k, rows_q=None, rows_k=None, cache=None, page=None, pages=0,
        max_seqlen_q=None, max_seqlen_k=None, diagonal=0 if problem.causal == "top_left" else seq_k - seq_q,
        given=tuple(x for x in problem.given if not ARRAY_RULES[x.name].ragged),
    )  # fmt: skip


def even(problem: AttentionProblem, likely: AttentionProblem) -> bool:
    """Whether packed sequences are about as long as each other, and so each as `likely` says: a hint tells, else rows
    that are shared out evenly."""
    rows_q, batch = problem.rows_q, problem.batch
    if rows_q is None:
        return False
    return rows_q % max(1, batch) == 0 if problem.max_seqlen_q is None else 2 * likely.batch > batch


def _length(hint: int | None, most: int, packed: int | None, batch: int) -> int:
    mean = None if packed is None else min(most, ceil(packed, max(1, batch)))
    if hint is not None:  # a power of two, so that a mean above its half says more
        return mean if mean is not None and hint < 2 * mean else min(most, hint)
    return most if mean is None else mean
