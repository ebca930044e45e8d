"""A call on JAX arrays as an operation of JAX's own: under jit, grad, jvp, vmap, scan, remat and shard_map.

What is wrong with a call is said while it is traced. `jax_passes` has the operations, `jax_call` what XLA runs.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import numpy as np

from .. import dispatch, interop, lengths, places, rules
from ..call import Arrays, Call
from ..passes import FORWARD
from ..problem import OPTIONS, mask_kind
from .jax_call import How, made, out_of, refuse_check
from .jax_passes import PRIMITIVES, bind, gradients
from .protocol import Library


def run(call: Call) -> Any:
    """As `dispatch.run`, differentiable."""
    arrays, how = _checked(call)
    if _traced(arrays):
        found = bind(PRIMITIVES[how.of], arrays, how._replace(own=how.of is FORWARD))
    elif how.of is FORWARD and not call.return_lse:
        return out_of(how)(arrays), None
    else:
        found = made(how)(arrays)
    return gradients(found, how.wrt) if how.of.of_gradients else tuple(found)


def _checked(call: Call) -> tuple[Arrays, How]:
    lib, options = call.lib, call.options
    arrays, _ = interop.adopt(lib, call.arrays, call.targets)
    stated = _stated(options)
    place = None if _traced(arrays) else _place(lib, arrays)
    if call.seed is not None:  # as an array it may be another in each call without compiling anew
        number = np.full(1, call.seed % 2**64, np.uint64)
        arrays = arrays | {"seed": lib.constant(number, arrays["q"])}
    how = How(call.of, stated, call.family, call.wrt)
    if names := [*lengths.stated(arrays), *(x for x in ("at",) if x in arrays and call.check)]:
        _check_lengths(call.but(arrays=arrays), names, place)
    if place is not None:
        mask = mask_kind(options["block_mask"])
        if mask is not None and mask.device != place:
            raise ValueError(f"block_mask is on {mask.device} but q is on {place}; make it with like=q")
        if call.family is not None and place == "cpu":
            dispatch.refuse_family(call.family, "jax")
    return arrays, how


def _check_lengths(call: Call, names: list[str], place: str | None) -> None:
    """ValueError where lengths, offsets, pages or places are not what they must be. What is traced is looked at when it
    runs, on a CPU."""
    if place is None:
        refuse_check(call.check, names[0])
    if place == "cpu" or (place is not None and call.check):
        views = {name: interop.view(call.lib, name, x) for name, x in call.arrays.items()}
        problem, _ = rules.state(views, {}, call.options, call.of)
        found = {name: np.asarray(call.arrays[name]).astype(np.int64) for name in names}
        lengths.check_values(problem, found)
        places.check_values(problem, found)


def _stated(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Every option as the rules take it; those of before are known."""
    if options["block_mask"] is None:
        try:
            return _known(*((name, _kind(x), x) for name, x in options.items()))
        except TypeError:  # a number in an array, which is no key, or nonsense, which is named here
            pass
    return _as_the_rules_have_them(*options.items())


def _as_the_rules_have_them(*options: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    given = dict(options)
    values = {row.name: row.check(given.get(row.name, row.default)) for row in OPTIONS}
    values["block_mask"] = given["block_mask"]
    values["causal"] = values["causal"] or False  # as options have it
    return tuple(values.items())


@functools.lru_cache(1024)
def _known(*options: tuple[str, Any, Any]) -> tuple[tuple[str, Any], ...]:
    return _as_the_rules_have_them(*((name, x) for name, _, x in options))


def _kind(x: Any) -> Any:
    """True and 1 are the same key, but not the same option."""
    return (tuple, *map(type, x)) if type(x) is tuple else type(x)


def _place(lib: Library, arrays: Arrays) -> str:
    """Where arrays are that are not traced; ValueError for one that is elsewhere, or nowhere."""
    if not any(x.is_deleted() for x in arrays.values()):
        devices = arrays["q"].devices()
        together = len(devices) == 1 and all(x.devices() == devices for x in arrays.values())
        if together and (found := cast(Any, lib).named(*devices)):
            return found
    place = interop.view(lib, "q", arrays["q"]).device
    for name, x in arrays.items():
        name = rules.argument_name(name)
        where = interop.view(lib, name, x).device
        if where != place:
            raise ValueError(f"{name} is on {where} but q is on {place}; all arrays must be on one device")
    return place


def _traced(arrays: Arrays) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays.values())
