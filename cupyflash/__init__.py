"""Exact attention, forward and backward, for any array library, on CPU and GPU."""

from typing import TYPE_CHECKING

from .api import attention, attention_backward, block_mask, merge
from .derivatives import attention_backward_jvp, attention_jvp
from .later import later

__version__ = "0.1.0"
__all__ = [
    "BlockMask", "Pages", "__version__", "attention", "attention_append", "attention_backward",
    "attention_backward_jvp", "attention_jvp", "attention_vjp", "attention_weights", "block_mask",
    "explain", "merge", "tune",
]  # fmt: skip

if TYPE_CHECKING:
    from . import compat as compat
    from . import float8 as float8
    from . import integrations as integrations
    from . import jax as jax
    from . import masks as masks
    from . import parallel as parallel
    from . import torch as torch
    from .appending import attention_append
    from .blockmask.blocks import BlockMask
    from .paging import Pages
    from .tools.autotune import tune
    from .tools.explanation import explain
    from .vjp import attention_vjp
    from .weights import attention_weights
else:
    # What needs an array library, and tools.
    __getattr__, __dir__ = later(
        __name__, "compat", "float8", "integrations", "jax", "masks", "parallel", "torch",
        BlockMask=".blockmask.blocks", Pages=".paging", attention_append=".appending",
        attention_vjp=".vjp", attention_weights=".weights", explain=".tools.explanation",
        tune=".tools.autotune",
    )  # fmt: skip
