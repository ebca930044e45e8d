"""Latent attention: V is the first columns of K, and no array of its own.

A call has q and k then. Where it runs, k stands for v too, of which the views and NumPy take the first columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .counts import check_latent
from .passes import FORWARD, Pass
from .problem import EIGHT, View
from .scalars import told


def operands(latent: Any, v: Any) -> str:
    """The arrays that a call must have. ValueError where v is given, too."""
    if latent is None:
        return "qkv"
    if v is not None:
        n = told(latent)
        raise ValueError(f"v is given, and latent is {n}; it must be None there: V is the first columns of k")
    return "qk"


def with_view(views: dict[str, View], options: Mapping[str, Any]) -> dict[str, View]:
    """The views of a call, that of v among them. ValueError, TypeError where k has no such columns."""
    n, k = check_latent(options.get("latent")), views["k"]
    if n is None:
        return views
    if k.dtype in EIGHT:
        raise TypeError(f"k has dtype {k.dtype}, and latent is {told(n)}; it must be of 16 bits or more there")
    if k.shape and n > k.shape[-1]:
        raise ValueError(f"latent is {told(n)}; it must be at most the columns of k, {k.shape[-1]}, shape {k.shape}")
    return views | {"v": k._replace(shape=(*k.shape[:-1], n)) if k.shape else k}


def refuse(latent: int | None, of: Pass) -> None:
    """TypeError for a derivative."""
    if latent is not None and of is not FORWARD:
        raise TypeError(f"latent is {told(latent)}, of which there is a forward alone; attention_{of} takes q, k and v")
