"""Attention for PyTorch: differentiable by autograd, on CPU and CUDA tensors.

`cupyflash.attention` does the same when a tensor requires grad; this entry takes tensors only.
"""

from .autograd import attention

__all__ = ["attention"]
