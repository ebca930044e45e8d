"""Which keys a query sees, as flash-attn says it."""

from __future__ import annotations

import operator


def window_of(window: tuple[int, int]) -> tuple[int | None, int | None]:
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window!r}; it must be two integers, -1 where a side is unbounded") from None
    return None if left < 0 else left, None if right < 0 else right
