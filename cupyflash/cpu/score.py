"""A score function on NumPy arrays: a whole tile of scores at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..problem import AttentionProblem
from ..score.derivative import moved, reads, slope
from ..score.graph import TANGENT, Node

_KINDS = {"bool": np.bool_, "int": np.int32, "long": np.int64}
_ERF = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has none
_OPERATIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power, "neg": np.negative,
    "abs": np.abs, "minimum": np.minimum, "maximum": np.maximum, "floordiv": np.floor_divide, "mod": np.remainder,
    "truncdiv": lambda x, y: np.where(y == 0, 0, (x - np.fmod(x, y)) // np.where(y == 0, 1, y)), "truncmod": np.fmod,
    "shl": np.left_shift, "shr": np.right_shift, "exp": np.exp, "log": np.log, "log2": np.log2, "sqrt": np.sqrt,
    "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sin": np.sin, "cos": np.cos, "floor": np.floor,
    "erf": lambda x: _ERF(x).astype(np.asarray(x).dtype), "atan2": np.arctan2,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "lt": np.less,
    "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "where": np.where,
}  # fmt: skip


class ScoreFunction:
    """The score function of a problem, its derivatives, and the arrays that it reads, by what they are called in a
    call."""

    def __init__(self, problem: AttentionProblem, given: dict[str, np.ndarray], work: Any) -> None:
        score = problem.score
        assert score is not None
        self.score, self._work = score, work
        moves = ("s",) * problem.moves("q", "k") + tuple(x for x in score.keys if problem.moves(x))
        self._arrays: list[Any] = [given[x.key] for x in score.arrays] + [given.get(f"t{x.key}") for x in score.arrays]
        self._slope = slope(score)
        self._moved = moved(score, moves)
        self._reads = {x.key: reads(score, n, moves) for n, x in enumerate(score.arrays) if x.kind == "float"}

    def new(self, s: np.ndarray, place: dict[str, np.ndarray]) -> np.ndarray:
        """Scores from the scaled products s; `place`: b, h, i and j, of shapes that broadcast."""
        return self._compute(self.score.nodes, (self.score.root,), s, place)[0]

    def slope(self, s: np.ndarray, place: dict[str, np.ndarray]) -> np.ndarray:
        """d score / d s, shaped like s."""
        found = (0.0,) if self._slope is None else self._compute(self._slope[0], (self._slope[1],), s, place)
        return np.broadcast_to(np.asarray(found[0], self._work), s.shape)

    def tangent(self, s: np.ndarray, ts: np.ndarray | None, place: dict[str, np.ndarray]) -> np.ndarray | None:
        """What the scores change by where the products do by ts, and the arrays by their tangents; None where that is
        0."""
        return self._of_moved(self._moved.tangent, s, ts, place)

    def bend(self, s: np.ndarray, ts: np.ndarray | None, place: dict[str, np.ndarray]) -> np.ndarray | None:
        """What `slope` changes by."""
        return self._of_moved(self._moved.bend, s, ts, place)

    def _of_moved(
        self, n: int | None, s: np.ndarray, ts: np.ndarray | None, place: dict[str, np.ndarray]
    ) -> np.ndarray | None:
        if n is None:
            return None
        return np.broadcast_to(self._compute(self._moved.nodes, (n,), s, place, ts)[0], s.shape)

    def add(
        self,
        key: str,
        total: np.ndarray,
        ds: np.ndarray,
        s: np.ndarray,
        place: dict[str, np.ndarray],
        ts: np.ndarray | None = None,
        before: np.ndarray | None = None,
    ) -> None:
        """Add what the elements of an array get of the scores' gradients to `total`, which is flat. Where ds is the
        tangent of gradients, these are `before`, and ts is that of the products s."""
        shape = self._arrays[[x.key for x in self.score.arrays].index(key)].shape
        for nodes, change, index, bend in self._reads[key]:
            wanted = (change, *index) if bend is None else (change, *index, bend)
            found = self._compute(nodes, wanted, s, place, ts)
            values = np.where(ds == 0, 0, ds * found[0])  # hidden pairs add nothing, whatever the derivative is there
            if bend is not None and before is not None:
                values = values + np.where(before == 0, 0, before * found[-1])
            at = found[1 : len(index) + 1]
            flat = np.ravel_multi_index(tuple(np.broadcast_arrays(*_clipped(at, shape))), shape)
            # Along an axis on which the index does not depend, values are summed first.
            flat = flat.reshape((1,) * (values.ndim - flat.ndim) + flat.shape)
            over = tuple(axis for axis in range(values.ndim) if flat.shape[axis] == 1)
            values = values.sum(axis=over, keepdims=True, dtype=np.float64) if over else values
            flat = np.broadcast_to(flat, values.shape).ravel()
            if total.size <= 4 * flat.size:
                total += np.bincount(flat, values.ravel(), total.size)
            else:
                np.add.at(total, flat, values.ravel())

    def _compute(
        self,
        nodes: tuple[Node, ...],
        wanted: Sequence[int],
        s: np.ndarray,
        place: dict[str, np.ndarray],
        ts: np.ndarray | None = None,
    ) -> list[Any]:
        return compute(nodes, wanted, {"s": s, TANGENT: ts, **place}, self._arrays, self._work)


def compute(
    nodes: tuple[Node, ...], wanted: Sequence[int], variables: dict[str, Any], arrays: Sequence[np.ndarray], work: Any
) -> list[Any]:
    """The nodes that are wanted; floats are of dtype `work`."""
    found: list[Any] = []
    for op, kind, args, value in nodes:
        x = [found[n] for n in args]
        if op in variables:
            found.append(variables[op])
        elif op == "const":
            found.append(
                _to(kind, value == "True" if kind == "bool" else float(value) if kind == "float" else int(value), work)
            )
        elif op == "read":
            array = arrays[int(value)]
            found.append(_to(kind, array[_clipped(x, array.shape)], work))
        elif op == "to":
            found.append(_to(kind, x[0], work))
        else:
            found.append(_OPERATIONS[op](*x))
    return [found[n] for n in wanted]


def _to(kind: str, x: Any, work: Any) -> Any:
    """As the kernels do: of float to integers NaN is 0, and what is too large the largest."""
    x = np.asarray(x)
    if kind in ("int", "long") and x.dtype.kind == "f":
        limits = np.iinfo(_KINDS[kind])
        high = np.nextafter(work(2.0 ** (limits.bits - 1)), work(0))
        x = np.clip(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf), work(limits.min), high)
    return x.astype(_KINDS.get(kind, work))[()]


def _clipped(index: Sequence[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(np.clip(x, 0, n - 1) for x, n in zip(index, shape))
