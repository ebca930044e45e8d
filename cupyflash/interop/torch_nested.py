"""Jagged nested tensors (torch.nested, layout=torch.jagged) as packed sequences: their values, and where each begins.

q, k and v are (N, sequence, heads, dim), or with layout="bhsd" (N, heads, sequence, dim); results are nested as what
they belong to. lse stays packed, (Hq, T).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from ..call import Arrays, Call
from ..gradients import Gradients
from ..other_names import renaming
from ..passes import BY_ROWS
from ..rules import argument_name

# Errors name what is wrong of offsets by where these come from.
_named = renaming(torch.compiler.is_compiling, cu_seqlens_q="q.offsets()", cu_seqlens_k="k.offsets()")

OF_KEYS = frozenset(x for x in BY_ROWS if x.endswith(("k", "v")))  # k, v and their tangents
REFUSED = "a nested tensor; it must be a dense one, or q, k and v all of layout torch.jagged"


def run(call: Call, packed: Callable[[Call], Any]) -> Any:
    """The results of a call whose q is nested, by `packed`, which runs one of packed sequences."""
    for name in call.targets:
        given = "grads" if call.of.of_gradients else name
        raise ValueError(f"{given} is given, but q is a nested tensor, whose results are new ones; it must be None")
    if call.options["at"] is not None or "at" in call.arrays:
        raise ValueError(f"at is {call.options['at']}, and q is a nested tensor; it must be None there")
    axis = 1 if call.options["layout"] == "bshd" else 2
    arrays = _packed(call.arrays, axis, call.options["layout"])
    results = _named(packed)(call.but(arrays=arrays))
    q, k = (call.arrays[name] for name in "qk")
    if not call.of.of_gradients:
        return _like(q, results[0], axis), results[1]
    dq, dk, dv = results
    v = call.arrays["v"]
    return Gradients(_like(q, dq, axis), _like(k, dk, axis), _like(v, dv, axis), results.of_arrays)


def _packed(arrays: Arrays, axis: int, layout: str) -> Arrays:
    """The same arrays, packed, with offsets."""
    found, of = dict(arrays), {"q": arrays["q"], "k": arrays["k"]}
    for side in "qk":
        if f"cu_seqlens_{side}" in arrays or (side == "k" and "seqlens_k" in arrays):
            given = f"cu_seqlens_{side}" if f"cu_seqlens_{side}" in arrays else "seqlens_k"
            raise ValueError(f"{given} is given, but {side} is a nested tensor, with its own; it must be None there")
    for name, x in arrays.items():
        rows, nested = name in BY_ROWS, isinstance(x, torch.Tensor) and x.is_nested
        if nested and not rows:
            raise TypeError(f"{argument_name(name)} is a nested tensor; it must be a dense one")
        if rows and not nested:
            raise TypeError(
                f"{argument_name(name)} is a {type(x).__name__}, but q is a nested tensor; both must be, or none"
            )
        if nested:
            found[name] = _values(name, x, axis, layout)
            side = "k" if name in OF_KEYS else "q"
            if x.shape[axis] != of[side].shape[axis]:
                raise ValueError(
                    f"{argument_name(name)} is a nested tensor of other lengths than {side}; it must be made with the "
                    f"offsets of {side}, as by torch.nested.nested_tensor_from_jagged(values, {side}.offsets())"
                )
    return found | {f"cu_seqlens_{side}": x.offsets() for side, x in of.items()}


def _values(name: str, x: Any, axis: int, layout: str) -> torch.Tensor:
    if not isinstance(x, NestedTensor):
        raise TypeError(f"{argument_name(name)} is {REFUSED}")
    if x.dim() != 4 or x._ragged_idx != axis:
        form = "(N, sequence, heads, dim)" if axis == 1 else "(N, heads, sequence, dim)"
        raise ValueError(
            f"{argument_name(name)} is a nested tensor of {x.dim()} dimensions whose axis {x._ragged_idx} has the "
            f"lengths; with layout={layout!r} it must be {form}"
        )
    if x.lengths() is not None:
        raise ValueError(f"{argument_name(name)} is a nested tensor with holes; pass its contiguous()")
    values: torch.Tensor = x.values()
    return values


def _like(x: Any, values: torch.Tensor, axis: int) -> Any:
    """Values nested as x is."""
    return torch.nested.nested_tensor_from_jagged(values, x.offsets(), jagged_dim=axis)
