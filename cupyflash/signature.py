"""Functions that take what another one takes, and show it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

P = ParamSpec("P")


def like(shown: Callable[P, Any], without: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[P, Any]]:
    """Give a function that hands its keyword arguments on the signature of the one that takes them (but for some)."""
    signature = inspect.signature(shown)
    kept = [x for x in signature.parameters.values() if x.name not in without]

    def decorate(function: Callable[..., Any]) -> Callable[P, Any]:
        function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return function

    return decorate
