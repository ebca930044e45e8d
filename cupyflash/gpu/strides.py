"""Which arrays the kernels read where they are, and what a copy of the others looks like. Pure; tested without a GPU."""

from __future__ import annotations

from ..problem import ITEMSIZE, View, contiguous, to_bshd


def params_strides(view: View, layout: str) -> tuple[int, int, int]:
    """Element strides of (batch, row, head), as Params wants them; 0 for axes the array does not have."""
    b, s, h, _ = to_bshd(view.strides, layout, fill=0)
    return b, s, h


def needs_copy(view: View, alignment: int, maps: bool = False) -> str | None:
    """Why kernels that need `alignment` cannot read this array where it is, or None. The pointer is not looked at.

    `maps`: they read it by the copy engine (TMA), whose strides are positive and less than 2**40 bytes.
    """
    if 0 in view.shape:
        return None
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        return f"its last dimension has stride {view.strides[-1]}, not 1"
    size = ITEMSIZE[view.dtype]
    if view.shape[-1] * size % alignment:
        return f"its rows of {view.shape[-1]} elements are no multiple of {alignment} bytes"
    for extent, stride in zip(view.shape[:-1], view.strides[:-1]):
        if extent > 1 and stride * size % alignment:
            return f"its rows are not {alignment}-byte aligned (a stride of {stride} elements)"
        if maps and extent > 1 and not 0 < stride * size < 2**40:
            return f"the copy engine takes strides of 1 to 2**40 bytes, not {stride * size}"
    return None


def padded(view: View, alignment: int) -> View:
    """The view of a copy whose rows start at multiples of `alignment` bytes, zeros between them."""
    unit = max(1, alignment // ITEMSIZE[view.dtype])
    return view._replace(strides=contiguous((*view.shape[:-1], -(-view.shape[-1] // unit) * unit)))
