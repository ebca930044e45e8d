"""Which arrays the kernels read where they are, and what a copy of the others looks like. Pure; tested without
a GPU."""

from __future__ import annotations

from typing import NamedTuple

from ..passes import PER_QUERY
from ..problem import ARRAYS, ITEMSIZE, AttentionProblem, View, contiguous, to_bshd
from .kernel_plan import KernelPlan
from .tensormap import WINDOW

_OPTIONAL = {row.name: row for row in ARRAYS}
# Bytes: strides that TMA takes are less, those of rows of a map of windows too (gpu/tensormap.py, the fifth axis).
FAR, WINDOW_FAR = 2**40, 2**64 // WINDOW


class Copy(NamedTuple):
    """A copy that is made of an input: what of it, at multiples of how many bytes rows begin then, and why."""

    source: View
    alignment: int
    why: str


def params_strides(view: View, layout: str) -> tuple[int, int, int]:
    """Element strides of (batch, row, head), as Params wants them; 0 for axes the array does not have."""
    b, s, h, _ = to_bshd(view.strides, layout, fill=0)
    return b, s, h


def to_copy(
    name: str, view: View, problem: AttentionProblem, rank: int, plan: KernelPlan, misaligned: bool
) -> Copy | None:
    """The copy that kernels want of an input, if they cannot read it where it is. `misaligned`: where it begins, to 16
    bytes."""
    of = name.removeprefix("t")  # tangents are read as what they are tangents of
    far = WINDOW_FAR if any(box.windows and box.array == name for box in plan.maps) else FAR
    if name in PER_QUERY:
        return None if view.strides == contiguous(view.shape) else Copy(view, 1, "it is not contiguous")
    if problem.reads(of):
        return None
    rule, alignment = _OPTIONAL.get(of), plan.alignment
    if rule is not None:
        full = rule.to_copy(view, problem, rank)
        if full is not None:
            return Copy(full, 1, f"its last dimension has stride {full.strides[-1]}, not 1")
        if not any(box.array == name for box in plan.maps):
            return None
        view = view._replace(shape=tuple(n if stride else 1 for n, stride in zip(view.shape, view.strides)))
    why = needs_copy(view, alignment, far if plan.maps else None, padded=rule is None)
    if why is None and alignment == 16 and misaligned:
        why = "it does not start at a 16-byte boundary"
    return None if why is None else Copy(view, alignment, why)


def needs_copy(view: View, alignment: int, far: int | None = None, padded: bool = True) -> str | None:
    """Why kernels that need `alignment` cannot read this array where it is, or None. The pointer is not looked at.

    `far`: they read it by TMA, whose strides are positive and less than so many bytes. `padded`: they read whole
    multiples of `alignment`.
    """
    if 0 in view.shape:
        return None
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        return f"its last dimension has stride {view.strides[-1]}, not 1"
    size = ITEMSIZE[view.dtype]
    if padded and view.shape[-1] * size % alignment:
        return f"its rows of {view.shape[-1]} elements are no multiple of {alignment} bytes"
    for extent, stride in zip(view.shape[:-1], view.strides[:-1]):
        if extent > 1 and stride * size % alignment:
            return f"its rows are not {alignment}-byte aligned (a stride of {stride} elements)"
        if far and extent > 1 and not 0 < stride * size < far:
            return f"TMA of Hopper takes strides of 1 to 2**{far.bit_length() - 1} bytes, not {stride * size}"
    return None


def padded(view: View, alignment: int) -> View:
    """The view of a copy whose rows start at multiples of `alignment` bytes, zeros between them."""
    unit = max(1, alignment // ITEMSIZE[view.dtype])
    return view._replace(strides=contiguous((*view.shape[:-1], -(-view.shape[-1] // unit) * unit)))
