"""What is written once for all array libraries: the module of functions to write it with, and what differs."""

from __future__ import annotations

import importlib
from typing import Any

_NAMESPACES = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jax": "jax.numpy"}


def namespace(kind: str) -> Any:
    """The functions of a library, by the name of its adapter."""
    return importlib.import_module(_NAMESPACES[kind])


def cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)  # PyTorch's name for it


def float8_of(xp: Any) -> Any:
    """The dtype of e4m3 numbers. (CuPy has none.)"""
    return importlib.import_module("ml_dtypes" if xp.__name__ == "numpy" else xp.__name__).float8_e4m3fn


def arange(xp: Any, n: int, like: Any) -> Any:
    """0 to n - 1, in the dtype of `like` and on its device."""
    return cast(xp.arange(n, **({"device": like.device} if xp.__name__ == "torch" else {})), like.dtype)
