"""Calls of a kind that was checked before: on a GPU the host's time is what short calls wait for."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from .. import interop
from ..problem import ARRAY_RULES, ARRAYS
from .arrays import four, three
from .asked import Asked
from .groups import Alone, Group
from .masks import RowsMask

_PLAIN = (str, int, float, bool, type(None))
_ARRAYS = [row.name for row in ARRAYS if row.name != "seed"]
_KEPT = 256
_templates: OrderedDict[Kind, Asked] = OrderedDict()  # without their arrays and groups


class Kind:
    """What is asked but for the values of arrays, hashed once."""

    def __init__(self, *said: Any) -> None:
        self._said, self._hash = said, hash(said)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._said == other._said


def _typed(x: Any) -> Any:
    """A key for it that no other type has: 1 is taken where True is refused."""
    return (type(x), tuple(map(_typed, x)) if type(x) is tuple else x)


def kind_of(ranks: Sequence[Group], operands: dict[str, Any], options: dict[str, Any], *more: Any) -> Kind | None:
    """A key that says all that is asked but for the values of arrays; None where that cannot be said, or where ranks
    compare every call."""
    if any(x.eager for x in ranks):
        return None
    try:
        lib: Any = interop.library("q", operands["q"])
        signature = lib.signature
        # what groups of heads follow from, too
        moves = [(getattr(x, "window", None) is not None, getattr(x, "beside", True)) for x in ranks]
        key: list[Any] = [(x.rank, x.size, *how) for x, how in zip(ranks, moves)]
        for name, x in (*operands.items(), *options.items()):
            if type(x) in _PLAIN or (type(x) is tuple and all(type(y) in _PLAIN for y in x)):
                key.append((name, _typed(x)))
            elif isinstance(x, RowsMask):
                key.append((name, weakref.ref(x)))  # a mask is no longer kept than its owner keeps it
            elif (name in operands or (name in ARRAY_RULES and name != "seed")) and interop.library(name, x) is lib:
                key.append((name, signature(x)))
            else:
                return None
        return Kind(*key, *map(_typed, more))
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
    found, given = template.but(), iter(ranks)
    found.team, found.group = (next(given) if x is None else x for x in (found.team, found.group))
    found.arrays = {name: options[name] for name in _ARRAYS if options.get(name) is not None}
    found.mask = options.get("block_mask")
    found.operands = {
        name: three(x) if name in ("lse", "dlse") else four(x, found.layout)
        for name, x in operands.items()
        if x is not None
    }
    return found


def keep(kind: Kind | None, ranks: Sequence[Group], asked: Asked) -> None:
    """Of a call that all ranks agreed on."""
    if kind is None:
        return
    given: Any = None  # in place of groups: another may have such a rank
    team, group = (x if isinstance(x, Alone) else given for x in (asked.team, asked.group))
    _templates[kind] = asked.but(operands={}, arrays={}, mask=None, team=team, group=group)
    if len(_templates) > _KEPT:
        _templates.popitem(last=False)
    for x in ranks:
        x.known.add(kind)
