"""What a dropout probability of another function becomes here."""

from __future__ import annotations

from typing import Any


def dropout_options(name: str, p: float) -> dict[str, Any]:
    """Options of `attention` for the probability p, given as `name`."""
    if p:
        raise NotImplementedError(f"{name} is {p}; there is no dropout yet, so it must be 0")
    return {}
