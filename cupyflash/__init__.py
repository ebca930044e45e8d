"""Exact attention, forward and backward, for any array library, on CPU and GPU."""

from typing import TYPE_CHECKING, Any

from .api import attention, attention_backward, block_mask, merge
from .derivatives import attention_backward_jvp, attention_jvp

__version__ = "0.1.0"
__all__ = [
    "BlockMask", "__version__", "attention", "attention_backward", "attention_backward_jvp", "attention_jvp",
    "block_mask",
    "explain", "merge", "tune",
]  # fmt: skip

if TYPE_CHECKING:
    from . import masks as masks
    from .blockmask.blocks import BlockMask
    from .tools.autotune import tune
    from .tools.explanation import explain
else:
    # What needs NumPy, and tools, are imported when they are asked for.
    _LATER = {"BlockMask": ".blockmask.blocks", "explain": ".tools.explanation", "tune": ".tools.autotune"}

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name == "masks":
            return import_module(".masks", __name__)
        if name in _LATER:
            return getattr(import_module(_LATER[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "masks"})
