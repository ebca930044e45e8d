"""Whether results would be written over each other, over themselves or over an input. Looks at addresses, not
at data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import numpy as np

from .problem import ITEMSIZE, View
from .rules import argument_name, target_name

Pairs = tuple[tuple[str, str], ...]
_EFFORT = 10_000  # steps of NumPy's search; what it cannot decide in so many is let through


def check_targets(targets: dict[str, View], inputs: dict[str, View]) -> None:
    """`check_apart` of the targets of a pass, by the names that callers give them."""
    written = {target_name(name): view for name, view in targets.items()}
    check_apart(written, {argument_name(name): view for name, view in inputs.items()})


def check_apart(written: dict[str, View], read: dict[str, View], moved: Pairs = ()) -> None:
    """ValueError, naming the argument, where an element of what is written has the address of another's or of what is
    read. `moved`: what may be written over what, by names, since that is read whole before."""
    for name, view in written.items():
        if overlaps_itself(view):
            raise ValueError(
                f"{name} has shape {view.shape} and strides {view.strides}: elements share memory; it must be an array "
                "of which each element has its own"
            )
    there = [[(name, x) for name, x in of.items() if 0 not in x.shape] for of in (read, written)]
    names, views = zip(*there[0], *there[1]) if any(there) else ((), ())
    numbers = ((n, m) for n in range(len(there[0]), len(names)) for m in range(n))
    pairs = (pair for pair in numbers if (names[pair[0]], names[pair[1]]) not in moved)
    if found := sharing(pairs, [*map(extent, views)], views.__getitem__):
        name, other = (names[n] for n in found)
        raise ValueError(f"{name} shares memory with {other}; it must have memory of its own")


def overlap(x: View, y: View) -> bool:
    """Whether some element of x lies where one of y does."""
    if 0 in x.shape or 0 in y.shape:
        return False
    return sharing([(0, 1)], [extent(x), extent(y)], (x, y).__getitem__) is not None


def sharing(
    pairs: Iterable[tuple[int, int]], extents: Sequence[tuple[int, int]], view: Callable[[int], View]
) -> tuple[int, int] | None:
    """The first of these pairs of arrays, by number, of which some element of one lies where one of the other does.
    No array is empty; `extents` are reckoned before, since an array is in many pairs, and `view` is asked for few."""
    for x, y in pairs:
        (x_first, x_end), (y_first, y_end) = extents[x], extents[y]
        if x_first < y_end and y_first < x_end and _share(_array(view(x)), _array(view(y))):
            return x, y
    return None


def overlaps_itself(x: View) -> bool:
    """Whether two elements of x lie in one place."""
    if 0 in x.shape:
        return False
    span = 0  # of the axes with smaller strides
    for stride, length in sorted((abs(s), n) for s, n in zip(x.strides, x.shape) if n > 1):
        if stride <= span:
            break
        span += stride * (length - 1)
    else:
        return False
    # Not laid out axis over axis. Two elements that differ first along an axis: one may be taken to stand at its start.
    array = _array(x)
    for length in x.shape:
        if length > 1 and _share(array[1:], array[:1]):
            return True
        array = array[0, ...]  # never an element: that would be read
    return False


def extent(x: View) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    size = ITEMSIZE[x.dtype]
    reach = [stride * (length - 1) * size for stride, length in zip(x.strides, x.shape)]
    return x.ptr + sum(r for r in reach if r < 0), x.ptr + sum(r for r in reach if r > 0) + size


def _array(x: View) -> np.ndarray:
    """An array at x's address, which nobody may read: it can be on a GPU."""
    size = ITEMSIZE[x.dtype]
    described = {
        "shape": x.shape, "strides": tuple(s * size for s in x.strides), "typestr": f"|V{size}", "data": (x.ptr, True),
        "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _share(x: np.ndarray, y: np.ndarray) -> bool:
    try:
        return np.shares_memory(x, y, max_work=_EFFORT)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
