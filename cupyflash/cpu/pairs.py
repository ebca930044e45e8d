"""The seam: all that happens to a score between S = Q Kᵀ and P V. Forward and backward ask this one object."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..problem import ARRAY_RULES, AttentionProblem
from .dropout import kept
from .hiding import shared, silence
from .score import ScoreFunction

T = TypeVar("T")
OfPairs = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of the keys that queries stand on, and of keys
# Scores below are -inf, as in the kernels, which multiply them by log2(e).
LOWEST = {np.dtype(x): x(-np.finfo(x).max * math.log(2)) for x in (np.float32, np.float64)}


class Place(NamedTuple):
    """Where a tile of scores stands: queries `rows` of `heads`, and some of the keys that `Pairs.keys` leaves."""

    heads: slice
    rows: slice
    keys: slice


class Pairs:
    """The pairs of queries and keys of some batch entries. `given` holds the optional arrays, of shapes that broadcast,
    and perhaps a block mask. Tiles are (batches, heads, queries, keys)."""

    def __init__(self, problem: AttentionProblem, batches: slice, given: dict[str, np.ndarray]) -> None:
        self.problem, self.batches = problem, batches
        self.given: dict[str, np.ndarray] = {}
        self._terms, self._moving = list[str](), list[str]()
        for x in problem.given:
            rule = ARRAY_RULES[x.name]
            names = (x.name, f"t{x.name}") if problem.moves(x.name) else (x.name,)
            if rule.axes:
                self.given |= {name: np.broadcast_to(given[name], rule.shape(problem)) for name in names}
            if rule.adds:
                self._terms.append(x.name)
                self._moving += names[1:] and (x.name,)
        # Keys that nobody may see are dropped at once: no tile ever holds them.
        self.keys: Any = slice(problem.seq_k)
        self.positions = np.arange(problem.seq_k)
        if "key_mask" in self.given:
            self.keys = np.flatnonzero(self.given["key_mask"][batches.start])  # then there is one batch entry
            self.positions = self.positions[self.keys]
        self.blocks: Any = given.get("block_mask")
        self.factor_q, self.factor_k = _factors(problem.scale)
        self.first = problem.at or (0, 0, 0, 0)  # of a part: where its entries, heads, queries and keys begin
        self.kept = problem.kept  # the share of the probabilities that dropout keeps
        self.seed = int(np.asarray(given["seed"]).reshape(())) % 2**64 if problem.dropout else 0
        work = np.float64 if problem.dtype == "float64" else np.float32
        self._function = ScoreFunction(problem, given, work) if problem.score is not None else None
        self.scores_hide = self._function is not None or "bias" in self.given
        # Maxima and sums over keys are quick where the keys are rows in memory; arrays over pairs have them side by
        # side.
        self._keys_first = "bias" not in self.given and "mask" not in self.given

    def tile(self, stack: Sequence[int], queries: int, keys: int, work: Any) -> np.ndarray:
        """Room for scores, (batches, heads, queries, keys); `stack`: how many of the first two."""
        if self._keys_first:
            return np.empty((*stack, keys, queries), work).swapaxes(-1, -2)
        return np.empty((*stack, queries, keys), work)

    def score(self, s: np.ndarray, at: Place) -> None:
        """In place: from products of Q and K, which carry the factors, to scores."""
        if self.problem.softcap is not None:
            np.multiply(self._capped(s), s.dtype.type(self.problem.softcap), out=s)
        if self._function is not None:
            s[...] = self._function.new(s, self._place(at))
        for name in self._terms:
            # What a score function hides stays so, whatever is added there.
            where = s != -np.inf if self._function is not None else True
            np.add(s, self._added(name, self.given[name], at, s.dtype), out=s, where=where)

    def slope(self, s: np.ndarray, at: Place) -> np.ndarray | None:
        """Derivative of the scores with respect to the products s; None where it is 1."""
        if self._function is not None:
            return self._function.slope(s, self._place(at))
        if self.problem.softcap is None:
            return None
        capped = self._capped(s)
        return 1 - capped * capped

    def tangent(self, s: np.ndarray, ts: np.ndarray | None, at: Place) -> np.ndarray | None:
        """What the scores change by where the products s do by ts (None: 0), and what else is given by its tangent;
        None: 0."""
        if self._function is not None:
            found = self._function.tangent(s, ts, self._place(at))
        else:
            slope = self.slope(s, at)
            found = ts if slope is None or ts is None else slope * ts
        for name in self._moving:
            added = self._added(name, self.given[f"t{name}"], at, s.dtype)
            found = added if found is None else found + added
        return found

    def _added(self, name: str, x: np.ndarray, at: Place, work: Any) -> np.ndarray:
        """What an array adds to the scores of a tile, or its tangent to their tangents: sums are linear."""
        if name == "alibi_slopes":
            slopes = x[self.batches, at.heads, None, None].astype(work)
            return -slopes * self._distance(at).astype(work)
        if name == "bias":
            return self._tile(x, at).astype(work, copy=False)
        raise NotImplementedError(name)

    def bend(self, s: np.ndarray, ts: np.ndarray | None, at: Place) -> np.ndarray | None:
        """What `slope` changes by along the same tangents; None: 0."""
        if self._function is not None:
            return self._function.bend(s, ts, self._place(at))
        if self.problem.softcap is None or ts is None:
            return None
        capped = self._capped(s)
        return capped * (1 - capped * capped) * (ts * s.dtype.type(-2 / self.problem.softcap))

    def through(self, name: str, ds: np.ndarray, at: Place) -> np.ndarray:
        """From the gradient of each score to that of the element of the array `name` which it reads."""
        return -self._distance(at).astype(ds.dtype) * ds if name == "alibi_slopes" else ds

    def through_function(self, key: str, total: np.ndarray, ds: np.ndarray, s: np.ndarray, at: Place) -> None:
        """Add what the elements of an array that the score function reads get of the scores' gradients; s: the
        products."""
        assert self._function is not None
        self._function.add(key, total, ds, s, self._place(at))

    def through_tangent(
        self,
        key: str,
        total: np.ndarray,
        tds: np.ndarray,
        ds: np.ndarray | None,
        s: np.ndarray,
        ts: np.ndarray | None,
        at: Place,
    ) -> None:
        """The same for tangents: tds of the scores' gradients ds, ts of the products."""
        assert self._function is not None
        self._function.add(key, total, tds, s, self._place(at), ts, ds)

    def probabilities(self, s: np.ndarray, norm: np.ndarray, at: Place) -> tuple[np.ndarray, np.ndarray]:
        """In place, from products to probabilities, where `norm` is lse (infinite: of a row that sees no key); and
        where they are not 0. What is 0 adds nothing to tangents, whatever they hold there."""
        self.score(s, at)
        seen = self.visible(at)
        np.subtract(s, norm, out=s)
        p = np.exp(s, out=s)
        if seen is not None:
            silence(p, seen)
        return p, p != 0

    def visible(self, at: Place) -> np.ndarray | None:
        """Which of these pairs may meet, in a shape that broadcasts to the tile's; None where all may."""
        seen = self._band(at)
        if "mask" in self.given:
            own = self._tile(self.given["mask"], at)
            seen = own if seen is None else seen & own
        if self.blocks is not None:
            own = self._blocks(at)
            if own is not None:
                seen = own if seen is None else seen & own
        return seen

    def visible_by_score(self, seen: np.ndarray | None, s: np.ndarray) -> np.ndarray:
        """The same without those that a bias or a score function gave the score -inf: these are hidden, too."""
        own = ~(s < LOWEST[s.dtype])
        return own if seen is None else seen & own

    def _band(self, at: Place) -> np.ndarray | None:
        """What causal and window leave; None where they leave all."""
        left, right = self.problem.left, self.problem.right
        first, last = at.rows.start + self.problem.diagonal, at.rows.stop - 1 + self.problem.diagonal
        positions = self.positions[at.keys]
        right = None if right is None or positions[-1] <= first + right else right
        left = None if left is None or positions[0] >= last - left else left
        if left is None and right is None:
            return None
        if isinstance(self.keys, slice):
            return _inside(last + 1 - first, len(positions), int(first - positions[0]), left, right, self._keys_first)
        return self._over(at, _within(left, right))

    def empty(self, at: Place) -> bool:
        """Whether the block mask hides the whole tile."""
        return self._blocks(at) is False

    def keeps(self, at: Place) -> np.ndarray | None:
        """Which probabilities dropout keeps, or None where it keeps all."""
        if not self.problem.dropout:
            return None
        positions = self.positions[at.keys]
        first, end = int(positions[0]), int(positions[-1]) + 1
        batch, head, query, key = self.first
        rows, keys = (at.rows.start + query, at.rows.stop + query), (first + key, end + key)
        below = self.problem.dropped_below
        found = self._each(lambda b, h: kept(self.seed, batch + b, head + h, rows, keys, below), at)
        all_between = np.array(found)
        return all_between if len(positions) == end - first else all_between[..., positions - first]

    def dropped(self, dp: np.ndarray, keeps: np.ndarray | None) -> np.ndarray:
        """In place: gradients of probabilities from those of what dropout makes of them."""
        if keeps is not None:
            dp *= dp.dtype.type(1 / self.kept)
            silence(dp, keeps)
        return dp

    def sink(self, heads: slice) -> np.ndarray | None:
        """A score more in the denominator of every row of a head, where there is one."""
        return self._of_heads("sinks", heads)

    def tangent_of_sink(self, heads: slice) -> np.ndarray | None:
        return self._of_heads("tsinks", heads)

    def _of_heads(self, name: str, heads: slice) -> np.ndarray | None:
        return self.given[name][heads, None, None] if name in self.given else None

    def each(self, heads: slice) -> Iterator[tuple[int, int]]:
        """The batch entries and heads of a tile, by their numbers."""
        return itertools.product(_numbers(self.batches), _numbers(heads))

    def _each(self, what: Callable[[int, int], T], at: Place) -> list[list[T]]:
        return [[what(b, h) for h in _numbers(at.heads)] for b in _numbers(self.batches)]

    def _blocks(self, at: Place) -> Any:
        """As `BlockMask.pairs`, of all heads of a tile."""
        columns = self.columns(at)
        found = self._each(lambda b, h: self.blocks.pairs(b, h, at.rows, columns), at)
        flat = [x for row in found for x in row]
        if all(x is None for x in flat) or all(x is False for x in flat):
            return flat[0]
        shape = at.rows.stop - at.rows.start, at.keys.stop - at.keys.start
        return np.array([[np.broadcast_to(True if x is None else x, shape) for x in row] for row in found])

    def _place(self, at: Place) -> dict[str, np.ndarray]:
        """Batch entries, heads, queries and keys of a tile of pairs, as a score function knows them."""
        numbers = {
            "b": np.arange(self.batches.start, self.batches.stop)[:, None, None, None],
            "h": np.arange(at.heads.start, at.heads.stop)[:, None, None],
            "i": np.arange(at.rows.start, at.rows.stop)[:, None], "j": self.positions[at.keys][None, :],
        }  # fmt: skip
        return {name: np.asarray(x + first, np.int32) for (name, x), first in zip(numbers.items(), self.first)}

    def _capped(self, s: np.ndarray) -> np.ndarray:
        return np.tanh(s / s.dtype.type(self.problem.softcap))

    def _over(self, at: Place, what: OfPairs) -> np.ndarray:
        """What there is to say of the key that each query stands on and of each key, laid out as tiles are."""
        stands = np.arange(at.rows.start, at.rows.stop) + self.problem.diagonal
        return _laid_out(what, stands, self.positions[at.keys], self._keys_first)

    def _distance(self, at: Place) -> np.ndarray:
        return self._over(at, lambda stands, positions: np.abs(stands - positions))

    def columns(self, at: Place) -> Any:
        """Where the keys of a tile stand among all, as an index."""
        return at.keys if isinstance(self.keys, slice) else self.keys[at.keys]

    def _tile(self, x: np.ndarray, at: Place) -> np.ndarray:
        """The part of an array over pairs that a tile is about."""
        return x[self.batches, at.heads, at.rows][..., self.columns(at)]

    def walk(self, rows: slice) -> tuple[int, int]:
        """The first key and the last but one, among those left, that some query of `rows` may see."""
        first, last = rows.start + self.problem.diagonal, rows.stop - 1 + self.problem.diagonal
        left, right = self.problem.left, self.problem.right
        begin = 0 if left is None else int(np.searchsorted(self.positions, first - left))
        end = len(self.positions)
        return begin, end if right is None else int(np.searchsorted(self.positions, last + right, side="right"))


def _laid_out(what: OfPairs, stands: np.ndarray, positions: np.ndarray, keys_first: bool) -> np.ndarray:
    """(queries, keys), with the keys as rows in memory, or side by side."""
    return what(stands, positions[:, None]).T if keys_first else what(stands[:, None], positions)


@functools.lru_cache(maxsize=16)  # along the diagonal all tiles are alike
def _inside(queries: int, keys: int, offset: int, left: int | None, right: int | None, keys_first: bool) -> np.ndarray:
    """Pairs inside a band, of as many queries, of which the first stands on the key `offset`, and keys from 0 on."""
    return shared(_laid_out(_within(left, right), np.arange(queries) + offset, np.arange(keys), keys_first))


def _within(left: int | None, right: int | None) -> OfPairs:
    """Whether a key is inside the band of the query that stands on another; at least one side is bounded."""

    def test(stands: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if left is None:
            return positions <= stands + right
        after = positions >= stands - left
        return after if right is None else after & (positions <= stands + right)

    return test


def _numbers(x: slice) -> range:
    return range(x.start, x.stop)


def _factors(scale: float) -> tuple[float, float]:
    """What Q and what K is multiplied by. A scale far from 1 is shared between them, so that neither leaves its
    range."""
    if scale == 0 or 2.0**-20 <= abs(scale) <= 2.0**20:
        return scale, 1.0
    half = 2.0 ** (math.frexp(scale)[1] // 2)
    return scale / half, half
