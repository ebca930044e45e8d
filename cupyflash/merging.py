"""Combine attention over disjoint sets of keys: written once, for the array library that the parts come from."""

from __future__ import annotations

import functools
from typing import Any
from typing import cast as cast_to

import numpy as np

from . import interop
from .interop.protocol import Library
from .layouts import error_of_fit, other_layout
from .namespaces import cast, namespace, over_out
from .overlap import overlap, overlaps_itself
from .problem import FLOATS, check_layout

Array = Any
_prepared: dict[Any, Any] = {}
_MOST = 1024


def merge(outs: Any, lses: Any, *, layout: str = "bshd", out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """out = Σ outᵢ · exp(lseᵢ - lse) and lse = log Σ exp(lseᵢ); see `cupyflash.merge`."""
    given, into = outs, out
    key = _class(outs, lses, layout, into)
    if key is not None and key in _prepared:
        lib, prepared = _prepared[key]
        found = prepared.run(lib, outs, lses, into or ())
        for x in into or ():
            lib.written(x)
        return found
    lib, outs, lses = _checked(outs, lses, layout)
    targets = [] if into is None else _targets(lib, into, outs, lses)
    if _by_kernel(lib, [*outs, *targets[:1]], [*lses, *targets[1:]]):
        from .gpu.merge import Prepared

        prepared = Prepared(lib, outs, lses, targets, layout)
        if key is not None:
            if len(_prepared) >= _MOST:
                _prepared.clear()
            _prepared[key] = lib, prepared
        found = prepared.run(lib, outs, lses, targets)
    else:
        found = (_merged_quietly if lib.kind == "numpy" else _merged)(namespace(lib.kind), outs, lses, layout)
        for x, y in zip(targets, found):
            x[...] = y
    if into is not None:
        for x in targets:
            cast_to(Any, lib).written(x)
        return into[0], into[1]
    if outs[0] is not given[0]:  # of a library that has no adapter
        like = interop.like(given[0])
        return like(found[0]), like(found[1])
    return found


def _class(outs: Any, lses: Any, layout: Any, into: Any) -> Any:
    """What is the same of calls that kernels run alike; None where none do."""
    if type(outs) not in (list, tuple) or type(lses) not in (list, tuple) or not outs or len(outs) != len(lses):
        return None
    if not isinstance(layout, str) or not (into is None or (type(into) in (list, tuple) and len(into) == 2)):
        return None
    arrays, cls = [*outs, *lses, *(into or ())], type(outs[0])
    lib: Any = interop.known(cls)
    if lib is None or lib.kind not in ("cupy", "torch") or any(type(x) is not cls for x in arrays):
        return None
    if lib.kind == "torch" and (lib.recorded(arrays) or not all(x.is_cuda for x in arrays)):
        return None
    try:
        addresses, bits = [*map(lib.pointer, arrays)], 0
    except RuntimeError:  # of a sparse tensor
        return None
    for at in addresses:
        bits |= at
    # Whether arrays to write share memory with others is a matter of addresses.
    return cls, layout, len(outs), bits & 31, *map(lib.signature, arrays), *(addresses if into else ())


def _by_kernel(lib: Any, outs: list[Array], lses: list[Array]) -> bool:
    """Whether they lie on a GPU, and nobody follows what becomes of them: else the library's own functions serve."""
    if lib.kind == "cupy" or (lib.kind == "torch" and outs[0].is_cuda and not lib.recorded([*outs, *lses])):
        from .gpu.merge import takes

        return takes([lib.view(x) for x in outs])
    return False


def _targets(lib: Any, into: Any, outs: list[Array], lses: list[Array]) -> list[Array]:
    """The arrays to write, which may be those of a part."""
    if not isinstance(into, (list, tuple)) or len(into) != 2:
        raise TypeError(f"out is a {type(into).__name__}; it must be None or two arrays to write to, (out, lse)")
    if lib.kind == "jax":
        raise TypeError("out is given, but arrays of JAX cannot be written; it must be None")
    targets: list[Array] = []
    for name, x, parts in (("out[0]", into[0], outs), ("out[1]", into[1], lses)):
        if interop.library(name, x) is not lib:
            raise TypeError(f"{name} is a {type(x).__name__}; it must be of the library of outs[0], {lib.kind}")
        x = interop.adopted(lib, {name: x})[name]
        lib.check_target(name, x)
        view, like = interop.view(lib, name, x), lib.view(parts[0])
        if (view.shape, view.dtype, view.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"{name} has shape {view.shape}, dtype {view.dtype}, on {view.device}; they must be those of the parts,"
                f" {like.shape}, {like.dtype}, on {like.device}"
            )
        if overlaps_itself(view):
            raise ValueError(f"{name} has elements that share memory; each must have its own")
        for part in (*outs, *lses, *targets):
            other = lib.view(part)
            if overlap(view, other) and view != other:
                raise ValueError(f"{name} shares some memory with a part; it must be one of the parts, or have its own")
        targets.append(x)
    return targets


def _merged_quietly(*given: Any) -> tuple[Array, Array]:
    """Of NumPy, which would warn: an lse of +inf gives NaN, as IEEE says."""
    with np.errstate(all="ignore"):
        return _merged(*given)


def _merged(xp: Any, outs: list[Array], lses: list[Array], layout: str) -> tuple[Array, Array]:
    top = functools.reduce(xp.maximum, lses)
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)  # a row that no part saw must not compute inf - inf
    weights = [xp.exp(lse - top) for lse in lses]
    total = _sum(weights)
    unseen = total == 0
    total = xp.where(unseen, xp.ones_like(total), total)
    lse = xp.where(unseen, xp.full_like(total, -xp.inf), top + xp.log(total))
    parts = [cast(out, total.dtype) * over_out(weight / total, layout) for out, weight in zip(outs, weights)]
    return cast(_sum(parts), outs[0].dtype), lse


def _sum(parts: list[Array]) -> Array:
    """By pairs: many of one sign, added one by one, would drift."""
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], start=parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]


def _checked(outs: Any, lses: Any, layout: str) -> tuple[Library, list[Array], list[Array]]:
    check_layout(layout)
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"{name} is a {type(parts).__name__}; it must be a list or tuple of arrays, one for each part"
            )
    if not outs:
        raise ValueError("outs is empty; it must hold at least one part")
    if len(lses) != len(outs):
        raise ValueError(f"lses has {len(lses)} arrays; it must have as many as outs, {len(outs)}")
    named = {f"{name}[{i}]": x for name, parts in (("outs", outs), ("lses", lses)) for i, x in enumerate(parts)}
    lib = interop.library("outs[0]", outs[0])
    for name, x in named.items():
        kind = interop.library(name, x).kind
        if kind != lib.kind:
            raise TypeError(
                f"{name} is a {kind} array but outs[0] is a {lib.kind} array; all must come from one library"
            )
    arrays = interop.adopted(lib, named)
    views = {name: interop.view(lib, name, x) for name, x in arrays.items()}
    first = views["outs[0]"]
    if first.dtype not in FLOATS:
        raise TypeError(f"outs[0] has dtype {first.dtype}; it must be one of {', '.join(FLOATS)}")
    if len(first.shape) not in (2, 3, 4):
        raise ValueError(
            f"outs[0] has {len(first.shape)} dimensions, shape {first.shape}; it must have 4, 3 (without batch) or 2 "
            "(sequence, dim)"
        )
    for name, view in views.items():
        is_out = name.startswith("outs")
        shape = first.shape if is_out else _rows(first.shape, layout)
        dtype = first.dtype if is_out else "float64" if first.dtype == "float64" else "float32"
        if view.dtype != dtype:
            raise TypeError(f"{name} has dtype {view.dtype}; it must be {dtype}, since outs[0] is {first.dtype}")
        if view.shape != shape:
            other = other_layout(layout)
            fits = not is_out and view.shape == _rows(first.shape, other)
            said = f"{name} has shape {view.shape}; it must be {shape}, since outs[0] has shape {first.shape}"
            raise ValueError(error_of_fit(said, other, len(first.shape)) if fits else said)
        if view.device != first.device and view.device and first.device:  # traced JAX arrays have none yet
            raise ValueError(f"{name} is on {view.device} but outs[0] is on {first.device}; all must be on one device")
    parts = list(arrays.values())
    return lib, parts[: len(outs)], parts[len(outs) :]


def _rows(out_shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of the lse that belongs to an out of this shape."""
    rows = out_shape[:-1]
    return (*rows[:-2], rows[-1], rows[-2]) if layout == "bshd" and len(rows) > 1 else rows
