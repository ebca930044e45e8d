"""Options that are whole numbers: the bounds of a window, places, columns, longest lengths, multiprocessors."""

from __future__ import annotations

import operator
from typing import Any

from .scalars import told, whole_number


def check_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"window is {told(window)!r}; it must be None or a pair (left, right) of key counts, None = unbounded"
        )
    bounds: list[int | None] = []
    for side, n in zip(("left", "right"), window):
        if n is not None:
            number = whole_number(n)
            if number is None:
                raise TypeError(f"window's {side} bound is {n!r}; it must be an integer or None")
            if number < 0:
                n = told(number)
                raise ValueError(f"window's {side} bound is {n}; it must be 0 or more keys, or None for unbounded")
            n = number
        bounds.append(n)
    return bounds[0], bounds[1]


def check_at(at: Any) -> tuple[int, int, int, int] | None:
    if at is None:
        return None
    try:
        # (torch.compile takes an int for a symbol as long as nothing asks which one it is.)
        if isinstance(at, (set, frozenset, dict)):  # in no order of places
            raise TypeError
        places = tuple([x if type(x) is int else operator.index(x) for x in at if not isinstance(x, bool)])
    except TypeError:
        places = ()
    if len(places) != 4 or min(places) < 0 or max(places) >= 2**31:
        raise ValueError(
            f"at is {told(at)!r}; it must be None or four integers, where the first batch entry, head, query and key "
            "stand, each 0 or more and less than 2**31"
        )
    return places


def check_latent(latent: Any) -> int | None:
    if latent is None:
        return None
    n = whole_number(latent)
    if n is None:
        raise TypeError(f"latent is {latent!r}; it must be None or how many columns of k are V, an integer")
    if n < 1:
        raise ValueError(f"latent is {told(n)}; it must be 1 or more, the first columns of k that are V")
    return n


def check_sms(n: Any) -> int | None:
    if n is None:
        return None
    count = whole_number(n)
    if count is None or not 1 <= count < 2**31:
        raise ValueError(f"sms is {n!r}; it must be None or how many multiprocessors a call takes at most, 1 or more")
    return count


def check_hint(name: str, x: Any) -> int | None:
    """The next power of two: a plan for each longest length would be too many. None for what may be on a device or
    traced: nobody waits for a hint."""
    if x is None:
        return None
    if hasattr(x, "dtype") and not hasattr(x, "__array_interface__"):
        if "int" not in str(x.dtype) or tuple(x.shape):
            raise TypeError(f"{name} is an array of {x.dtype} of shape {tuple(x.shape)}; it must be one integer")
        return None
    n = whole_number(x)
    if n is None or not 0 <= n < 2**31:
        raise ValueError(f"{name} is {x!r}; it must be None or how many rows a sequence has at most, 0 to 2**31 - 1")
    return 1 << max(0, n - 1).bit_length()
