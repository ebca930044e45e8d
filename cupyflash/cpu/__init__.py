"""Attention and its gradients on NumPy arrays: the same tiled algorithms as the GPU kernels, with BLAS for the products."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
