"""The passes of attention, each with its arrays as rows: what it takes and what it gives.

Beside these a pass takes what `problem.ARRAYS` has. Whoever allocates, packs, copies or maps arrays goes over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# What no pass gives a derivative of.
TWICE = "attention can be differentiated twice, not three times"
FORWARD_TWICE = (
    "attention has no second derivative in forward mode alone; take one of them in reverse mode: jax.hessian and "
    "torch.func.hessian do"
)
BY_RESULTS = (
    "out and lse are what attention made of q, k, v and the optional arrays, but a derivative by them alone is wanted; "
    "take it by these"
)


@dataclass(frozen=True)
class Row:
    """An array of a pass."""

    name: str
    type: str  # of its elements, as kernels call it: In, Kept (of caches), Out or Accum
    result: bool = False
    per_query: bool = False  # one number for each query, (B, H, Sq), contiguous; else rows of elements, (B, S, H, D)
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Pass:
    """What is computed of a problem at once. There is one object of each: they are compared by identity."""

    name: str
    rows: tuple[Row, ...]
    inputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(x.name for x in self.rows if not x.result))

    def __reduce__(self) -> str:  # copied and pickled it stays the one
        return self.name.upper()

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def of_gradients(self) -> bool:
        """Whether it is about gradients, and so takes that of out."""
        return "dout" in self.inputs

    @cached_property
    def moved(self) -> bool:
        """Whether it takes tangents: that of an array x is called "t" + x."""
        return "tq" in self.inputs

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The results that have rows of elements: a call can say where to write them."""
        return tuple(x.name for x in self.rows if x.result and not x.per_query)


FORWARD = Pass("forward", (
    Row("q", "In"), Row("k", "Kept"), Row("v", "Kept"),
    Row("out", "Out", result=True), Row("lse", "Accum", result=True, per_query=True),
))  # fmt: skip
BACKWARD = Pass("backward", (
    Row("q", "In"), Row("k", "In"), Row("v", "In"), Row("out", "In"), Row("lse", "Accum", per_query=True),
    Row("dout", "In"), Row("dlse", "Accum", per_query=True, optional=True),
    Row("dq", "OutQ", result=True), Row("dk", "Out", result=True), Row("dv", "Out", result=True),
))  # fmt: skip
_TANGENTS = (Row("tq", "In", optional=True), Row("tk", "In", optional=True), Row("tv", "In", optional=True))
JVP = Pass("jvp", (  # the tangents of a forward's results
    Row("q", "In"), Row("k", "In"), Row("v", "In"), Row("out", "In"), Row("lse", "Accum", per_query=True),
    *_TANGENTS,
    Row("tout", "Out", result=True), Row("tlse", "Accum", result=True, per_query=True),
))  # fmt: skip
BACKWARD_JVP = Pass("backward_jvp", (  # those of a backward's, which take what a jvp gave
    Row("q", "In"), Row("k", "In"), Row("v", "In"), Row("out", "In"), Row("lse", "Accum", per_query=True),
    Row("dout", "In"), Row("dlse", "Accum", per_query=True, optional=True),
    *_TANGENTS, Row("tdout", "In", optional=True), Row("tdlse", "Accum", per_query=True, optional=True),
    Row("tout", "In"), Row("tlse", "Accum", per_query=True),
    Row("tdq", "Out", result=True), Row("tdk", "Out", result=True), Row("tdv", "Out", result=True),
))  # fmt: skip
PASSES = {x.name: x for x in (FORWARD, BACKWARD, JVP, BACKWARD_JVP)}
PER_QUERY = frozenset(row.name for x in PASSES.values() for row in x.rows if row.per_query)
BY_ROWS = tuple(dict.fromkeys(row.name for x in PASSES.values() for row in x.rows if not row.per_query))


def pass_named(of: Any, among: Sequence[Pass] = tuple(PASSES.values())) -> Pass:
    """The pass that `of=` asks for by name. ValueError where it is none of these."""
    found = next((x for x in among if isinstance(of, str) and x.name == of), None)
    if found is None:
        raise ValueError(f"of is {of!r}; it must be one of {', '.join(repr(x.name) for x in among)}")
    return found
