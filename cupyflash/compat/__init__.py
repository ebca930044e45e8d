"""Functions of other packages, with their names, signatures and semantics, on the kernels of this one.

`install("flash_attn")` lets other people's `import flash_attn` find them.
"""

from .stand_in import Installed, install

__all__ = ["Installed", "install"]
