"""Rows of packed sequences that are used, where others behind them are not."""

from __future__ import annotations

import torch

from ..interop.torch_ import WITHOUT_MEMORY, wrapped


def readable(x: torch.Tensor) -> bool:
    """Whether what x holds may be looked at by who waits for no device."""
    held = x.device.type == "cpu" and not torch.compiler.is_compiling() and not wrapped(x)
    return held and not isinstance(x, WITHOUT_MEMORY)


def check_used(name: str, used: torch.Tensor, of: str, ends: torch.Tensor, rows: int, array: str) -> None:
    """ValueError where `used`, the rows of each sequence that there are, are no first rows of sequences that `ends`,
    the argument `of`, says begin among the rows of an array."""
    lengths = ends.diff()
    if int(ends[0]) != 0:
        raise ValueError(f"{of}[0] is {int(ends[0])}; it must be 0")
    for wrong, text in (
        (lengths < 0, lambda n: f"{of}[{n + 1}] is {int(ends[n + 1])}; it must be {of}[{n}], {int(ends[n])}, or more"),
        (
            ends[1:] > rows,
            lambda n: f"{of}[{n + 1}] is {int(ends[n + 1])}; it must be at most {rows}, the rows of {array}",
        ),
        (used < 0, lambda n: f"{name}[{n}] is {int(used[n])}; it must be 0 or more"),
        (used > lengths, lambda n: f"{name}[{n}] is {int(used[n])}; it must be at most {int(lengths[n])}, as {of} say"),
    ):
        if wrong.any():
            raise ValueError(text(int(wrong.int().argmax())))
