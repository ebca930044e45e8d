"""Gradients of a call: what holds them, and the optional arrays of which there shall be some (`wrt`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .problem import ARRAY_RULES, ARRAYS, View
from .score import Score
from .score.graph import name_of

if TYPE_CHECKING:
    from typing_extensions import Self


class _OfQKV(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_OfQKV):
    """What `attention_backward` returns, each shaped and typed like its input: (dq, dk, dv), and more by name.

    One for each row of ARRAYS that has a gradient; None where `wrt` did not ask for it.
    """

    of_arrays: dict[str, Any]  # of those that `wrt` asks for, by their names among the arrays of the call

    def __new__(cls, dq: Any, dk: Any, dv: Any, of_arrays: dict[str, Any] | None = None) -> Self:
        grads = super().__new__(cls, dq, dk, dv)
        grads.of_arrays = of_arrays or {}
        return grads

    def __getattr__(self, name: str) -> Any:
        """dbias, dalibi_slopes, dsinks: d and the name of a row that has a gradient."""
        row = ARRAY_RULES.get(name[1:]) if name.startswith("d") else None
        if row is None or not row.gradient:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return self.of_arrays.get(row.name)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *(f"d{row.name}" for row in ARRAYS if row.gradient)]

    @property
    def dscore_arrays(self) -> dict[str, Any]:
        """Those of the arrays that a score function reads, by their names."""
        named = ((name_of(key), x) for key, x in self.of_arrays.items())
        return {name: x for name, x in named if name is not None}

    def of_call(self, name: str) -> Any:
        """That of any array of the call, q, k and v too; None for one that has none."""
        return getattr(self, f"d{name}") if name in ("q", "k", "v") else self.of_arrays.get(name)


def check_wrt(wrt: Any, arrays: dict[str, Any], score: Score | None = None) -> tuple[str, ...]:
    """The optional arrays whose gradients are asked for, by what they are called among the `arrays` of the call: in the
    order of ARRAYS, then of those that its score function reads.
    """
    if isinstance(wrt, tuple) and not wrt:
        return ()
    reads = [x.name for x in score.arrays] if score else []
    # (torch.compile, which reads this, knows score.keys; a property of an array would be none of its constants.)
    floats = [(x.name, key) for x, key in zip(score.arrays, score.keys) if x.kind == "float"] if score else []
    keys = [(row.name, row.name) for row in ARRAYS if row.gradient and arrays.get(row.name) is not None] + floats
    can = list(dict.fromkeys([*(row.name for row in ARRAYS if row.gradient), *(name for name, _ in floats)]))
    must = f"it must hold names of optional arrays that are given, of {', '.join(map(repr, can))}"
    try:
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    except TypeError:
        raise TypeError(f"wrt is {wrt!r}; {must}") from None
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"wrt holds {name!r}; {must}")
        if name in ("q", "k", "v"):
            raise ValueError(f"wrt holds {name!r}, whose gradient comes anyway; {must}")
        if name not in can:
            why = ", which has no gradient" if name in [*(row.name for row in ARRAYS), *reads] else ""
            raise ValueError(f"wrt holds {name!r}{why}; {must}")
        if name not in reads and arrays.get(name) is None:
            raise ValueError(f"wrt holds {name!r}, but {name} is not given; {must}")
    return tuple([key for name, key in keys if name in names])


def check_wanted(wrt: Iterable[str], arrays: dict[str, Any], score: Score | None) -> tuple[str, ...]:
    """What `check_wrt` gives, where it comes from elsewhere: gradients have memory by it."""
    names = tuple(wrt)
    can = [row.name for row in ARRAYS if row.gradient] + [
        x.key for x in (score.arrays if score else ()) if x.kind == "float"
    ]
    if names != tuple([name for name in can if name in names and arrays.get(name) is not None]):
        raise ValueError(
            f"wrt is {names}; it must hold names of arrays that are given, of {', '.join(can)}, in this order"
        )
    return names


def apart(wrt: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The names of one run of kernels each, in the same order: the optional arrays, and those that a score function
    reads."""
    named = tuple([name for name in wrt if name in ARRAY_RULES])
    read = wrt[len(named) :]
    assert not any(name in ARRAY_RULES for name in read), wrt  # else results would go to each other's memory
    return [names for names in (named, read) if names]


def lengths_of(wrt: tuple[str, ...], views: dict[str, View]) -> dict[str, tuple[int, ...]]:
    """What a plan for their gradients asks of them: along AXES; of arrays that a score function reads, along
    their own."""
    rules = {name: ARRAY_RULES.get(name) for name in wrt}
    return {name: rule.lengths(views[name].shape) if rule else views[name].shape for name, rule in rules.items()}
