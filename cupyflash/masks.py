"""Patterns for `block_mask`: functions of positions, to be combined by `&`, `|` and `~`.

    block_mask(masks.causal() & (masks.window(1024) | masks.prefix(4)), shape=(1, 1, 8192, 8192), like=q)

Positions are those of the call: query i, key j. `diagonal`: query i stands on key i + diagonal; seq_k - seq_q where the
last query stands on the last key, as `causal=True` of `attention` has it.
"""

from .blockmask.patterns import Pattern, bigbird, causal, dilated, documents, prefix, strided, window

__all__ = ["Pattern", "bigbird", "causal", "dilated", "documents", "prefix", "strided", "window"]
