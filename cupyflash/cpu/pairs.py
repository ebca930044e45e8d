"""The seam: all that happens to a score between S = Q Kᵀ and P V. Forward and backward ask this one object."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..problem import ARRAYS, AttentionProblem
from .dropout import kept
from .score import ScoreFunction


class Place(NamedTuple):
    """Where a tile of scores stands: queries `rows` of head `head`, and some of the keys that `Pairs.keys` leaves."""

    head: int
    rows: slice
    keys: slice


class Pairs:
    """The pairs of queries and keys of one batch entry. `given` holds the optional arrays, of shapes that broadcast, and
    perhaps a block mask."""

    def __init__(self, problem: AttentionProblem, b: int, given: dict[str, np.ndarray]) -> None:
        self.problem, self.batch = problem, b
        rules = [rule for rule in ARRAYS if rule.axes and problem.has(rule.name)]
        self.given = {rule.name: np.broadcast_to(given[rule.name], rule.shape(problem)) for rule in rules}
        # Keys that nobody may see are dropped at once: no tile ever holds them.
        self.keys: Any = slice(problem.seq_k)
        if problem.has("key_mask"):
            self.keys = np.flatnonzero(self.given["key_mask"][b])
        self.blocks: Any = given.get("block_mask")
        self.positions = np.arange(problem.seq_k)[self.keys]
        self.factor_q, self.factor_k = _factors(problem.scale)
        self.kept = problem.kept  # the share of the probabilities that dropout keeps
        self.seed = int(np.asarray(given["seed"]).reshape(())) % 2**64 if problem.dropout else 0
        work = np.float64 if problem.dtype == "float64" else np.float32
        self._function = ScoreFunction(problem, given, work) if problem.score is not None else None

    def score(self, s: np.ndarray, at: Place) -> None:
        """In place: from products of Q and K, which carry the factors, to scores."""
        if self.problem.softcap is not None:
            np.multiply(self._capped(s), s.dtype.type(self.problem.softcap), out=s)
        if self._function is not None:
            s[...] = self._function.new(s, self._place(at))
        if self.problem.has("alibi_slopes"):
            s -= s.dtype.type(self.given["alibi_slopes"][self.batch, at.head]) * self._distance(at).astype(s.dtype)
        if self.problem.has("bias"):
            # What a score function hides stays so, whatever the bias is there.
            where = s != -np.inf if self._function is not None else True
            np.add(s, self._tile("bias", at).astype(s.dtype), out=s, where=where)

    def slope(self, s: np.ndarray, at: Place) -> np.ndarray | None:
        """Derivative of the scores with respect to the products s; None where it is 1."""
        if self._function is not None:
            return self._function.slope(s, self._place(at))
        if self.problem.softcap is None:
            return None
        capped = self._capped(s)
        return 1 - capped * capped

    def through(self, name: str, ds: np.ndarray, at: Place) -> np.ndarray:
        """From the gradient of each score to that of the element of the array `name` which it reads."""
        return -self._distance(at).astype(ds.dtype) * ds if name == "alibi_slopes" else ds

    def through_function(self, key: str, total: np.ndarray, ds: np.ndarray, s: np.ndarray, at: Place) -> None:
        """Add what the elements of an array that the score function reads get of the scores' gradients; s: the products."""
        assert self._function is not None
        self._function.add(key, total, ds, s, self._place(at))

    def visible(self, at: Place) -> np.ndarray | None:
        """Which of these pairs may meet: (queries, keys), or None where all may."""
        stands = self._stands(at)
        left, right = self.problem.left, self.problem.right
        positions = self.positions[at.keys]
        seen = None
        if right is not None and positions[-1] > stands[0, 0] + right:
            seen = positions <= stands + right
        if left is not None and positions[0] < stands[-1, 0] - left:
            inside = positions >= stands - left
            seen = inside if seen is None else seen & inside
        if self.problem.has("mask"):
            own = self._tile("mask", at)
            seen = own if seen is None else seen & own
        if self.blocks is not None:
            own = self.blocks.pairs(self.batch, at.head, at.rows, self.columns(at))
            if own is not None:
                seen = own if seen is None else seen & own
        return seen

    def empty(self, at: Place) -> bool:
        """Whether a block mask hides the whole tile."""
        return self.blocks is not None and self.blocks.pairs(self.batch, at.head, at.rows, self.columns(at)) is False

    def keeps(self, at: Place) -> np.ndarray | None:
        """Which probabilities dropout keeps: (queries, keys), or None where it keeps all."""
        if not self.problem.dropout:
            return None
        positions = self.positions[at.keys]
        first, end = int(positions[0]), int(positions[-1]) + 1
        rows = at.rows.start, at.rows.stop
        all_between = kept(self.seed, self.batch, at.head, rows, (first, end), self.problem.dropped_below)
        return all_between if len(positions) == end - first else all_between[:, positions - first]

    def sink(self, head: int) -> float | None:
        """A score more in the denominator of every row of a head, where there is one."""
        return float(self.given["sinks"][head]) if self.problem.has("sinks") else None

    def _place(self, at: Place) -> dict[str, np.ndarray]:
        """Batch entry, head, query and key of a tile of pairs, as a score function knows them."""
        numbers = {
            "b": self.batch, "h": at.head, "i": np.arange(at.rows.start, at.rows.stop)[:, None],
            "j": self.positions[at.keys][None, :],
        }  # fmt: skip
        return {name: np.asarray(x, np.int32) for name, x in numbers.items()}

    def _capped(self, s: np.ndarray) -> np.ndarray:
        return np.tanh(s / s.dtype.type(self.problem.softcap))

    def _stands(self, at: Place) -> np.ndarray:
        """The key that each query stands on, as a column."""
        return np.arange(at.rows.start, at.rows.stop)[:, None] + self.problem.diagonal

    def _distance(self, at: Place) -> np.ndarray:
        return np.abs(self._stands(at) - self.positions[at.keys])

    def columns(self, at: Place) -> Any:
        """Where the keys of a tile stand among all, as an index."""
        return at.keys if isinstance(self.keys, slice) else self.keys[at.keys]

    def _tile(self, name: str, at: Place) -> np.ndarray:
        """The part of an array over pairs that a tile is about."""
        return self.given[name][self.batch, at.head, at.rows][:, self.columns(at)]

    def walk(self, rows: slice) -> tuple[int, int]:
        """The first key and the last but one, among those left, that some query of `rows` may see."""
        first, last = rows.start + self.problem.diagonal, rows.stop - 1 + self.problem.diagonal
        left, right = self.problem.left, self.problem.right
        begin = 0 if left is None else int(np.searchsorted(self.positions, first - left))
        end = len(self.positions)
        return begin, end if right is None else int(np.searchsorted(self.positions, last + right, side="right"))


def _factors(scale: float) -> tuple[float, float]:
    """What Q and what K is multiplied by. A scale far from 1 is shared between them, so that neither leaves its range."""
    if scale == 0 or 2.0**-20 <= abs(scale) <= 2.0**20:
        return scale, 1.0
    half = 2.0 ** (math.frexp(scale)[1] // 2)
    return scale / half, half
