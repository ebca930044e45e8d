"""Which array module the commands and examples compute with: CuPy where a GPU can be used, NumPy elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np


def array_module(device: str | None = None) -> Any:
    """The module for a device: "gpu" is CuPy, "cpu" is NumPy, None is CuPy where a GPU can be used and NumPy elsewhere.

    ValueError for another name; for "gpu", ImportError or RuntimeError that say what is missing.
    """
    if device not in (None, "cpu", "gpu"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'gpu'")
    if device == "cpu":
        return np
    from .gpu.device import current, import_cupy

    try:
        cupy = import_cupy()
        current(0)
    except (ImportError, RuntimeError):
        if device == "gpu":
            raise
        return np
    return cupy


def on_host(x: Any) -> np.ndarray:
    """A NumPy or CuPy array as a NumPy array."""
    return x if isinstance(x, np.ndarray) else x.get()
