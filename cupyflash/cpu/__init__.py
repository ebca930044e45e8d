"""Attention and its gradients on NumPy arrays: the same tiled algorithms as the GPU kernels, with BLAS for the
products."""

from .backward import backward
from .backward_jvp import backward_jvp
from .forward import forward
from .jvp import jvp

__all__ = ["backward", "backward_jvp", "forward", "jvp"]
