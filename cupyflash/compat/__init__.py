"""Functions of other packages, with their names, signatures and semantics, on the kernels of this one.

`install("flash_attn")` lets other people's `import flash_attn` find them.
"""

from typing import TYPE_CHECKING

from ..later import later
from .stand_in import Installed, install

__all__ = ["Installed", "install"]

if TYPE_CHECKING:
    from . import bert_padding as bert_padding
    from . import flash_attn as flash_attn
    from . import flash_attn_interface as flash_attn_interface
    from . import flash_mla as flash_mla
    from . import xformers as xformers
else:
    __getattr__, __dir__ = later(
        __name__, "bert_padding", "flash_attn", "flash_attn_interface", "flash_mla", "xformers"
    )
