"""What an adapter has: the functions that the rest of the package asks about the arrays of one library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..call import Call
from ..problem import View

if TYPE_CHECKING:  # NumPy takes longer to import than all of this package
    import numpy as np

# Runs a call that somebody follows (autograd, a compiler, a transform) as `dispatch.run` does.
Recorder = Callable[[Call], Any]


class Library(Protocol):
    """One array library: a plain module of functions."""

    @property
    def kind(self) -> str: ...  # "numpy", "cupy", "torch", "jax" or "DTensor"

    def objection(self, cls: type) -> str | None:
        """Why instances of this class of the library are no arrays for us; None where they are."""

    def view(self, x: Any) -> View:
        """TypeError or ValueError, without the argument's name in front, where x cannot be read as it is."""

    def recorder(self, call: Call) -> Recorder | None:
        """What runs this call where somebody follows it; None where it may simply run."""

    def check_target(self, name: str, x: Any) -> None:
        """TypeError or ValueError where x, given as `name`, is not to be written to."""

    def wrap(self, name: str, x: Any) -> Any:
        """An array of another DLPack or CUDA array interface producer as one of this library, sharing memory."""


class Adapter(Protocol):
    """What the backends ask; a library's module is one, too, but for JAX (see `jax_ops`)."""

    @property
    def kind(self) -> str: ...

    def on_gpu(self, x: Any) -> bool:
        """Whether x lives on a CUDA device."""

    def view(self, x: Any) -> View: ...

    def signature(self, x: Any) -> tuple[Any, ...]:
        """Hashable; arrays of one device with equal signatures have views equal in all but the pointer."""

    def written(self, x: Any) -> None:
        """Tell the library that the caller's array x has been written to."""


class CpuAdapter(Adapter, Protocol):
    """Arrays on the CPU. Memory is shared; bfloat16 is that of ml_dtypes."""

    def to_numpy(self, x: Any) -> np.ndarray:
        """ValueError for what is on no CPU, as PyTorch's meta tensors; TypeError for what has no memory."""

    def from_numpy(self, a: np.ndarray) -> Any: ...


class GpuAdapter(Adapter, Protocol):
    """Arrays on a GPU. This is the hot path: each well under a microsecond."""

    def pointer(self, x: Any) -> int:
        """Address of the first element."""

    def device(self, x: Any) -> int:
        """CUDA ordinal."""

    def stream(self, device: int) -> int:
        """Raw handle of the library's current stream on that device."""

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """Uninitialised, from the library's own allocator."""
