"""Exact attention, forward and backward, for any array library, on CPU and GPU."""

from . import masks as masks
from .api import attention, attention_backward, explain, merge, tune
from .blocks import BlockMask, block_mask

__version__ = "0.1.0"
__all__ = ["__version__", "BlockMask", "attention", "attention_backward", "block_mask", "explain", "merge", "tune"]
