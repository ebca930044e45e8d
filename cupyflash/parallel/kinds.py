"""Calls of a kind that was checked before: on a GPU the host's time is what short calls wait for."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import interop
from ..problem import ARRAYS
from .arrays import four, three
from .asked import Asked
from .groups import Alone, Group
from .masks import RowsMask

_PLAIN = (str, int, float, bool, type(None))
_ARRAYS = {row.name for row in ARRAYS if row.name != "seed"}
_KEPT = 256
Kind = tuple[Any, ...]  # what is asked but for the values of arrays
_templates: OrderedDict[Kind, _Template] = OrderedDict()


class _Template(NamedTuple):
    asked: Asked  # without arrays and groups: another may have such a rank
    agreed: object  # known to groups whose ranks agreed on such a call
    views: tuple[str, ...]  # operands that are not taken as they are


def kind_of(ranks: Sequence[Group], operands: dict[str, Any], options: dict[str, Any], *more: Any) -> Kind | None:
    """A key that says all that is asked but for the values of arrays; None where that cannot be said, or where ranks
    compare every call. Of `more` the first is the function, whose operands have names of their own.

    It holds types, too: 1 is taken where True is refused.
    """
    try:
        lib: Any = interop.library("q", operands["q"])
        library, signature = interop.library, lib.signature
        key: list[Any] = [*more, *map(type, more)]
        for of in ranks:  # what groups of heads follow from, too
            if of.eager:
                return None
            key += of.rank, of.size, getattr(of, "window", None) is not None, getattr(of, "beside", True)
        if len({*map(type, operands.values())}) > 1 and any(library(*x) is not lib for x in operands.items()):
            return None
        key += operands
        key += map(signature, operands.values())
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
        kind = tuple(key)
        hash(kind)
        return kind
    except Exception:  # noqa: BLE001 - `check` says what is wrong
        return None


def recalled(
    kind: Kind | None, ranks: Sequence[Group], operands: dict[str, Any], options: dict[str, Any]
) -> Asked | None:
    """What `check` made of such a call, with these arrays and groups; None where it did not yet."""
    if kind is None or (found := _templates.get(kind)) is None:
        return None
    asked, agreed, views = found
    for of in ranks:
        if agreed not in of.known:
            return None
    if len(_templates) > _KEPT // 2:  # else none is dropped so soon
        try:
            _templates.move_to_end(kind)
        except KeyError:  # another thread's call dropped it
            pass
    if views:
        operands = operands.copy()
        for name in views:
            x = operands[name]
            operands[name] = three(x) if name in ("lse", "dlse") else four(x, asked.layout)
    return asked.but(
        team=asked.team or ranks[0],
        group=asked.group or ranks[-1],
        arrays={name: x for name, x in options.items() if name in _ARRAYS and x is not None},
        mask=options.get("block_mask"),
        operands=operands,
    )


def keep(kind: Kind | None, ranks: Sequence[Group], asked: Asked, operands: dict[str, Any]) -> None:
    """Of a call that all ranks agreed on."""
    if kind is None:
        return
    asked.lasts = True
    if (template := _templates.get(kind)) is None:
        given: Any = None
        team, group = (x if isinstance(x, Alone) else given for x in (asked.team, asked.group))
        views = tuple(name for name, x in asked.operands.items() if x is not operands[name])
        template = _Template(asked.but(operands={}, arrays={}, mask=None, team=team, group=group), object(), views)
        _templates[kind] = template
        if len(_templates) > _KEPT:
            _templates.popitem(last=False)
    for x in ranks:
        x.known.add(template.agreed)
