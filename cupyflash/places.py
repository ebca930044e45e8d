"""Where the arrays of a call on a part of a whole stand: `at`, as numbers, or as an array that kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .counts import check_at
from .problem import AXES, AttentionProblem, View

WINDOW = 1 << 29  # bounds of windows are less where places are data: sums of positions have 32 bits


def apart(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is given by name as options, and as arrays: `at` is either."""
    without = given | {"at": None}
    return (without, given) if isinstance(given.get("at"), View) else (given, without)


def check(problem: AttentionProblem) -> None:
    """ValueError where numbers are not what they must be. (Nothing of layout: another one does not make it right.)"""
    for axis, first in zip(AXES, problem.at or ()):
        n = problem.extent(axis)
        if first + n > 2**31:
            raise ValueError(
                f"at is {problem.at}: the last {axis} would stand at {first + n - 1}; it must be less than 2**31"
            )
        if problem.dropout and axis in ("query", "key") and first % 16:
            raise ValueError(f"at is {problem.at}; with dropout its {axis}, {first}, must be a multiple of 16")


def check_values(problem: AttentionProblem, arrays: Mapping[str, Any]) -> None:
    """The same of an array of them, on the host."""
    if "at" in arrays:
        check(replace(problem, at=check_at((*arrays["at"].tolist(),))))
