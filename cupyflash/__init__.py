"""Exact attention, forward and backward, for any array library, on CPU and GPU."""

from typing import TYPE_CHECKING, Any

from .api import attention, attention_backward, block_mask, explain, merge, tune

__version__ = "0.1.0"
__all__ = ["BlockMask", "__version__", "attention", "attention_backward", "block_mask", "explain", "merge", "tune"]

if TYPE_CHECKING:
    from . import masks as masks
    from .blocks import BlockMask
else:

    def __getattr__(name: str) -> Any:
        """What needs NumPy is imported when it is asked for."""
        from importlib import import_module

        if name == "masks":
            return import_module(".masks", __name__)
        if name == "BlockMask":
            return import_module(".blocks", __name__).BlockMask
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
