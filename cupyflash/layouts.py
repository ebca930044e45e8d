"""Where the heads stand, and what is told where they seem to stand elsewhere: most wrong calls are wrong in this."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from .problem import LAYOUTS, AttentionProblem, View


def of_layout(error: ValueError, layout: Any, q: View, retry: Callable[[str], Any]) -> ValueError:
    """The error; where shapes are right in the other layout, by which `retry` checks them, its message says so."""
    if type(error) is ValueError and isinstance(layout, str) and layout in LAYOUTS:
        with contextlib.suppress(TypeError, ValueError):
            retry(other_layout(layout))
            return ValueError(error_of_fit(str(error), other_layout(layout), len(q.shape)))
    return error


def error_of_fit(message: str, layout: str, rank: int) -> str:
    """A message of shapes that fit another layout. (Functions that have no such argument say it, too.)"""
    return f'{message}; the shapes fit as {_axes(layout, rank)}, layout="{layout}"'


def _axes(layout: str, rank: int) -> str:
    axes = ("batch", *(("sequence", "heads") if layout == "bshd" else ("heads", "sequence")), "dim")
    return f"({', '.join(axes[4 - rank :])})"


def doubt(problem: AttentionProblem, q: View, layout: str) -> None:
    """Warn of heads that nobody has: they are rows, in the place where heads stand.

    No error: each such problem could be meant, and of fewer heads nobody knows.
    """
    n, rank = problem.heads_k, len(q.shape)
    if any(type(x) is not int for x in (*q.shape, n, problem.seq_k)):  # symbols: they stay open
        return
    if n == problem.heads_q and (
        (rank == 4 and n > max(128, problem.seq_k)) or (rank == 3 and n > 32 and problem.dim > 256)
    ):
        warnings.warn(
            f"q of shape {q.shape} is read as {_axes(layout, rank)}: {n} heads of dimension {problem.dim}, with "
            f'{problem.seq_q} queries each; if these are rows, give layout="{other_layout(layout)}"',
            stacklevel=2,
        )


def other_layout(layout: str) -> str:
    return LAYOUTS[1 - LAYOUTS.index(layout)]
