"""Some batch entries, that a task takes together: their pairs of queries and keys, and K and V as BLAS takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..problem import AttentionProblem
from .pairs import Pairs
from .tiles import Tiling, group_of, operand, pieces, query_tiles, work_dtype


class Entries:
    """`batches` of K (B, Sk, Hk, D) and V (B, Sk, Hk, Dv), of any strides, without the keys that nobody may see."""

    def __init__(
        self, problem: AttentionProblem, batches: slice, k: np.ndarray, v: np.ndarray, given: dict[str, Any]
    ) -> None:
        work = work_dtype(problem)
        self.pairs = Pairs(problem, batches, given)
        keys, values = (self._operand(x, work) for x in (k, v))
        self._keys = keys if self.pairs.factor_k == 1 else keys * work(self.pairs.factor_k)
        self._values, self._group = values, group_of(problem)
        tk, tv = (self._operand(given[name], work) if name in given else None for name in ("tk", "tv"))
        self._tangents = tk if tk is None or self.pairs.factor_k == 1 else tk * work(self.pairs.factor_k), tv
        # Whether what a score of -inf hides may be multiplied by 0.
        self.finite = not self.pairs.scores_hide or all(bool(np.isfinite(x).all()) for x in (keys, values))

    def _operand(self, x: np.ndarray, work: Any) -> np.ndarray:
        return operand(x[self.pairs.batches, self.pairs.keys].transpose(0, 2, 1, 3), work)

    def of_heads(self, heads: slice) -> tuple[np.ndarray, np.ndarray]:
        """K and V, (batches, heads_k, keys, ...), for the query heads `heads`: whole groups, or a part of one."""
        own = self._own(heads)
        return self._keys[:, own], self._values[:, own]

    def tangents_of_heads(self, heads: slice) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The same of their tangents; None where there is none."""
        own = self._own(heads)
        tk, tv = (None if x is None else x[:, own] for x in self._tangents)
        return tk, tv

    def _own(self, heads: slice) -> slice:
        return slice(heads.start // self._group, -(-heads.stop // self._group))


def all_entries(
    problem: AttentionProblem, size: int, k: np.ndarray, v: np.ndarray, given: dict[str, Any]
) -> list[Entries]:
    """The whole batch, `size` of it together."""
    return [Entries(problem, batches, k, v, given) for batches in pieces(problem.batch, size)]


def of_queries(
    problem: AttentionProblem, tiling: Tiling, k: np.ndarray, v: np.ndarray, given: dict[str, Any]
) -> Iterator[tuple[Entries, slice, slice]]:
    """The tasks of a pass that owns queries: batch entries, heads of Q and rows."""
    return (
        (of, heads, rows)
        for of in all_entries(problem, tiling.batches, k, v, given)
        for heads in pieces(problem.heads_q, tiling.heads)
        for rows in query_tiles(problem, tiling)
    )
