"""The few things that are done to arrays of any library here: room for them, views, copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from .rows import Span

SIXTEEN = ("float16", "bfloat16")


def empty(shape: tuple[int, ...], like: Any, dtype: Any = None) -> Any:
    """Room of the library, the device and (unless another is named) the dtype of `like`."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype if dtype is None else dtype)
    import torch

    return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)


def zeros(shape: tuple[int, ...], like: Any, dtype: Any = None) -> Any:
    found = empty(shape, like, dtype)
    found[...] = 0
    return found


def wide(x: Any) -> str | None:
    """What sums of such numbers are kept in; None: in their own dtype."""
    return "float32" if str(x.dtype).removeprefix("torch.") in SIXTEEN else None


def packed(x: Any) -> Any:
    """x, or a copy, with its elements side by side."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def put(target: Any, x: Any) -> None:
    """Write, rounded to the target's dtype."""
    with np.errstate(over="ignore"):
        target[...] = x


def four(x: Any, layout: str) -> Any:
    """An array in the caller's rank and layout as a (B, S, H, D) view."""
    if len(x.shape) == 2:
        return x[None, :, None]
    x = x[None] if len(x.shape) == 3 else x
    return x if layout == "bshd" else x.swapaxes(1, 2)


def three(lse: Any) -> Any:
    """A number for each row, (B, H, S), of what the caller has."""
    return lse[(None,) * (3 - len(lse.shape))]


def rows_of(x: Any, spans: tuple[Span, ...], heads: slice) -> Any:
    """Some rows and heads of (B, S, H, D), side by side."""
    count = sum(b - a for a, b in spans)
    if len(spans) == 1:
        return packed(x[:, slice(*spans[0]), heads])
    found, at = empty((x.shape[0], count, len(range(x.shape[2])[heads]), x.shape[3]), x), 0
    for a, b in spans:
        found[:, at : at + b - a] = x[:, a:b, heads]
        at += b - a
    return found


def spread(target: Any, spans: tuple[Span, ...], x: Any, add: bool = False) -> None:
    """Such rows to where they belong: written there, or added."""
    at = 0
    for a, b in spans:
        part = x[:, at : at + b - a]
        if add:
            target[:, a:b] += part
        else:
            put(target[:, a:b], part)
        at += b - a
