"""These kernels under the names by which other packages choose an attention."""

from typing import TYPE_CHECKING

from ..later import later

if TYPE_CHECKING:
    from . import diffusers as diffusers
    from . import flax as flax
    from . import transformers as transformers
else:
    __getattr__, __dir__ = later(__name__, "diffusers", "flax", "transformers")
