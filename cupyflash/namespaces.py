"""What is written once for all array libraries: the module of functions to write it with, and what differs."""

from __future__ import annotations

import importlib
from typing import Any

_NAMESPACES = {"numpy": "numpy", "cupy": "cupy", "jax": "jax.numpy"}


def namespace(kind: str) -> Any:
    """The functions of a library, by the name of its adapter."""
    if kind == "torch":  # by a statement, which torch.compile reads
        import torch

        return torch
    return importlib.import_module(_NAMESPACES[kind])


def cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)  # PyTorch's name for it


def over_out(rows: Any, layout: str) -> Any:
    """A number for each row, shaped like lse (.., H, S), so that it broadcasts over out."""
    return by_heads(rows, layout)[..., None]


def by_heads(rows: Any, layout: str) -> Any:
    """Numbers of rows as lse has them, from (.., S, H) as out has these, or back."""
    return rows.swapaxes(-1, -2) if layout == "bshd" and rows.ndim > 1 else rows


def float8_of(xp: Any) -> Any:
    """The dtype of e4m3 numbers. (CuPy has none.)"""
    return (importlib.import_module("ml_dtypes") if xp.__name__ == "numpy" else xp).float8_e4m3fn


def arange(xp: Any, n: int, like: Any) -> Any:
    """0 to n - 1, in the dtype of `like` and on its device."""
    return cast(xp.arange(n, **({"device": like.device} if xp.__name__ == "torch" else {})), like.dtype)
