"""Results for arrays of libraries that have no adapter: of their kind, sharing memory with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def like(q: Any) -> Callable[[Any], Any]:
    """What makes an array of ours (NumPy's or CuPy's) one of q's library; it stays ours where that library is
    unknown."""
    package = type(q).__module__.partition(".")[0]
    if hasattr(q, "__array_namespace__"):
        xp, device = q.__array_namespace__(), q.device
        return lambda x: xp.from_dlpack(x, device=device)
    if package == "warp":
        import warp

        return warp.from_dlpack
    if package in ("numba", "numba_cuda"):
        from numba import cuda

        return cuda.as_cuda_array
    if package == "tensorflow":
        from tensorflow.experimental import dlpack

        return lambda x: dlpack.from_dlpack(x.__dlpack__())
    return lambda x: x
