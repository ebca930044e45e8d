"""Which keys a query sees, as flash-attn says it, and its flags."""

from __future__ import annotations

import operator
from typing import Any


def window_of(window: tuple[int, int]) -> tuple[int | None, int | None]:
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window!r}; it must be two integers, -1 where a side is unbounded") from None
    return None if left < 0 else left, None if right < 0 else right


def check_flags(**flags: Any) -> None:
    for name, x in flags.items():
        if isinstance(x, str):  # causal's "top_left" means nothing there, and "no" would be yes
            raise TypeError(f"{name} is {x!r}; it must be True or False")
