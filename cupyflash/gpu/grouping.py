"""A single query on caches of 8 bits: the heads that share a head of k are its rows, so that each number of the cache
is read, and widened, once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..problem import ARRAY_RULES, AttentionProblem

_FOR_ALL = ("key_mask", "k_descale", "v_descale")  # arrays that say the same to all heads that share one of k


def grouped(problem: AttentionProblem) -> AttentionProblem | None:
    """The same with these heads as queries; None where they differ in more than q, or there is nothing to group."""
    if problem.cache_dtype is None or problem.seq_q != 1 or problem.rows_q is not None or problem.group == 1:
        return None
    others = [x.name for x in problem.given if x.name not in _FOR_ALL and not ARRAY_RULES[x.name].ragged]
    unlike = others or problem.score or problem.block_mask or problem.dropout or problem.at
    right = problem.right if problem.causal == "top_left" else None  # the last query sees the last key
    if unlike or problem.left is not None or right is not None or (problem.right or 0) < 0:
        return None
    return replace(
        problem, seq_q=problem.group, heads_q=problem.heads_k, causal=None, right=None, diagonal=0,
    )  # fmt: skip


def strides(group: int, own: Sequence[int]) -> tuple[int, int, int]:
    """Of (batch, row, head) of q or out as the grouped problem has them."""
    batch, _, head = own
    return batch, head, group * head
