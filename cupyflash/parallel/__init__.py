"""One sequence over several devices: who holds which rows, what each computes with whose keys, and the transfers.

rows = parallel.Rows.zigzag(length, group.size)
out = parallel.attention(q, k, v, group, rows=rows, causal=True)     # q, k, v, out: this rank's rows
"""

from .entries import attention, attention_backward, merge
from .explain import Machine, explain
from .masks import block_mask
from .rows import Rows
from .simulated import Simulated as simulated

__all__ = ["Machine", "Rows", "attention", "attention_backward", "block_mask", "explain", "merge", "simulated"]
