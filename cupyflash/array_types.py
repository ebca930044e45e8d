"""What the public signatures say of arrays."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class DLPackArray(Protocol):
    """NumPy, CuPy, PyTorch, JAX, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class CudaArray(Protocol):
    """Numba, Warp, ..."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


Array = DLPackArray | CudaArray
A = TypeVar("A", bound=Array)  # results are of the type of q
L = TypeVar("L", bound=Array)  # lse has a dtype and a shape of its own
