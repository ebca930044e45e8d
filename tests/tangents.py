"""Both passes of tangents on a backend, judged against the reference: what `semantics.check` asks of problems that are
not large."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from typing import Any

import numpy as np
from criterion import as_good_as_rounding, assert_as_good
from reference import visible
from reference_tangents import Tangents, tangents

from cupyflash import attention_backward_jvp, attention_jvp
from cupyflash.problem import ARRAYS, AttentionProblem
from cupyflash.score.graph import name_of

MOST = 1 << 22  # multiplications of a product of Q and K, and of P and V: more takes the reference too long


def are_asked(problem: AttentionProblem) -> bool:
    """Whether a problem is small enough."""
    pairs = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    return pairs * (problem.dim + problem.dim_v) <= MOST


def can_move(problem: AttentionProblem, given: Collection[str]) -> list[str]:
    """The arrays of a problem that may have tangents."""
    read = [x.key for x in problem.score.arrays if x.kind == "float"] if problem.score else []
    return ["q", "k", "v", *(row.name for row in ARRAYS if row.gradient and row.name in given), *read, "dout", "dlse"]


def draw_tangents(rng: np.random.Generator, arrays: dict[str, np.ndarray], names: Collection[str]) -> dict[str, Any]:
    """Of these of `arrays`, in the shapes of the reference; lse's gradient may have one where it is not given
    itself."""
    return {name: rng.standard_normal(arrays[name].shape).astype(arrays[name].dtype) for name in names}


class Moving:
    """The reference of a problem along some tangents."""

    def __init__(self, problem: AttentionProblem, arrays: dict[str, Any], moved: dict[str, np.ndarray]) -> None:
        self.problem, self.arrays, self.moved = problem, arrays, moved

    @functools.cached_property
    def exact(self) -> Tangents:
        return tangents(self.problem, self.arrays, self.moved)

    @functools.cached_property
    def own(self) -> Tangents:
        if self.problem.dtype == "float64":
            return self.exact
        return tangents(self.problem, self.arrays, self.moved, own=True)

    @functools.cached_property
    def published(self) -> Tangents:
        """By FlashAttention-2's row sums, in own precision."""
        return tangents(self.problem, self.arrays, self.moved, own=True, by_out=True)

    def judge(self, name: str, actual: np.ndarray) -> None:
        """`criterion`; as `semantics.Judge`."""
        exact = self.exact[name]
        actual, named = actual.reshape(exact.shape), f"{name} along {[*self.moved]}"
        if as_good_as_rounding(actual, exact):
            return
        with contextlib.suppress(AssertionError):
            return assert_as_good(actual, exact, self.own[name], named, luck=False)
        if name not in ("tout", "tlse", "tdv"):
            with contextlib.suppress(AssertionError):
                return assert_as_good(actual, exact, self.published[name], named, luck=False)
        assert_as_good(actual, exact, self.own[name], named, self.exact.unit(name))


def hidden(problem: AttentionProblem, given: dict[str, np.ndarray], key_mask: np.ndarray | None) -> np.ndarray:
    """Pairs that nobody sees by position and masks, (B, Hq, Sq, Sk)."""
    shape = problem.batch, problem.heads_q, problem.seq_q, problem.seq_k
    return ~np.broadcast_to(visible(problem, key_mask, given.get("mask")), shape)


def call(
    moved: dict[str, Any],
    dout: Any,
    qkv: list[Any],
    out: Any,
    lse: Any,
    options: dict[str, Any],
    wrt: list[str],
    grads: Any = None,
) -> dict[str, Any]:
    """What both passes give, by the names of the reference. `moved`: tangents as a caller has them."""
    told = {name_of(name) or name: x for name, x in moved.items()}
    of_inputs = {name: x for name, x in told.items() if name not in ("dout", "dlse")}
    of_jvp = {name: x for name, x in options.items() if name not in ("dlse", "deterministic")}
    found: dict[str, Any] = {}
    jvp = None
    if of_inputs:
        jvp = found["tout"], found["tlse"] = attention_jvp(of_inputs, *qkv, out, lse, **of_jvp)
    results = attention_backward_jvp(told, dout, *qkv, out, lse, jvp=jvp, wrt=wrt, grads=grads, **options)
    found |= {f"t{name}": x for name, x in results._asdict().items()}
    return found | {f"td{name}": x for name, x in results.of_arrays.items()}
