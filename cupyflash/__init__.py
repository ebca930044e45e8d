"""Exact attention, forward and backward, for any array library, on CPU and GPU."""

from .api import attention, attention_backward, explain, merge, tune

__version__ = "0.1.0"
__all__ = ["__version__", "attention", "attention_backward", "explain", "merge", "tune"]
