"""Calls of a kind that was checked before: on a GPU the host's time is what short calls wait for."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from .. import interop
from ..problem import ARRAYS
from .arrays import four, three
from .asked import Asked
from .groups import Alone, Group
from .masks import RowsMask

_PLAIN = (str, int, float, bool, type(None))
_ARRAYS = {row.name for row in ARRAYS if row.name != "seed"}
_KEPT = 256
_templates: OrderedDict[Kind, Asked] = OrderedDict()  # without their arrays and groups; operands taken as they are


class Kind:
    """What is asked but for the values of arrays, hashed once."""

    def __init__(self, *said: Any) -> None:
        self._said, self._hash = said, hash(said)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._said == other._said


def kind_of(ranks: Sequence[Group], operands: dict[str, Any], options: dict[str, Any], *more: Any) -> Kind | None:
    """A key that says all that is asked but for the values of arrays; None where that cannot be said, or where ranks
    compare every call. Of `more` the first is the function, whose operands have names of their own.

    It holds types, too: 1 is taken where True is refused.
    """
    try:
        lib: Any = interop.library("q", operands["q"])
        library, signature = interop.library, lib.signature
        key: list[Any] = [*more, *map(type, more)]
        for x in ranks:  # what groups of heads follow from, too
            if x.eager:
                return None
            key += x.rank, x.size, getattr(x, "window", None) is not None, getattr(x, "beside", True)
        for name, x in operands.items():
            if x is not None and library(name, x) is not lib:
                return None
            key.append(None if x is None else signature(x))
        for name, x in sorted(options.items()):  # in whatever order a caller names them
            if type(x) in _PLAIN:
                key += name, type(x), x
            elif type(x) is tuple and all(type(y) in _PLAIN for y in x):
                key += name, (*map(type, x),), x
            elif isinstance(x, RowsMask):
                key += name, weakref.ref(x)  # a mask is no longer kept than its owner keeps it
            elif name in _ARRAYS and library(name, x) is lib:
                key += name, signature(x)
            else:
                return None
        return Kind(*key)
    except Exception:  # noqa: BLE001 - `check` says what is wrong
        return None


def recalled(
    kind: Kind | None, ranks: Sequence[Group], operands: dict[str, Any], options: dict[str, Any]
) -> Asked | None:
    """What `check` made of such a call, with these arrays and groups; None where it did not yet."""
    if kind is None or (template := _templates.get(kind)) is None or not all(kind in x.known for x in ranks):
        return None
    try:
        _templates.move_to_end(kind)
    except KeyError:  # another thread's call dropped it
        pass
    given = iter(ranks)
    return template.but(
        team=template.team or next(given),
        group=template.group or next(given),
        arrays={name: x for name, x in options.items() if name in _ARRAYS and x is not None},
        mask=options.get("block_mask"),
        operands={
            name: x if name in template.operands else three(x) if name in ("lse", "dlse") else four(x, template.layout)
            for name, x in operands.items()
            if x is not None
        },
    )


def keep(kind: Kind | None, ranks: Sequence[Group], asked: Asked, operands: dict[str, Any]) -> None:
    """Of a call that all ranks agreed on."""
    if kind is None:
        return
    given: Any = None  # in place of groups: another may have such a rank
    team, group = (x if isinstance(x, Alone) else given for x in (asked.team, asked.group))
    as_given = {name: None for name, x in asked.operands.items() if x is operands[name]}
    _templates[kind] = asked.but(operands=as_given, arrays={}, mask=None, team=team, group=group)
    if len(_templates) > _KEPT:
        _templates.popitem(last=False)
    for x in ranks:
        x.known.add(kind)
