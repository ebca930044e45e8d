"""How many keys each row of a `BlockMask` sees: what `Rows.balanced` deals out by."""

from __future__ import annotations

import numpy as np

from ..blockmask.blocks import BlockMask
from ..blockmask.tile_lists import FULL, WORD

AT_ONCE = 1 << 20  # words of bits that are counted at once


def keys_of_rows(mask: BlockMask) -> np.ndarray:
    """Of each row, in all heads and batch entries together, float64. On the host, as plans are."""
    (rows, columns), (_, _, seq_q, seq_k) = mask.block, mask.shape
    slots, bits = (x if isinstance(x, np.ndarray) else x.get() for x in (mask._slots, mask._bits))
    (_, _, blocks_q, blocks_k), words = slots.shape, columns // WORD
    # What a block has behind the last key does not count: neither of full blocks, nor of bits.
    there = np.minimum(columns, seq_k - columns * np.arange(blocks_k))
    found = np.zeros((blocks_q, rows), np.int64)
    found += ((slots == FULL).sum(axis=(0, 1)) @ there)[:, None]
    left = np.clip(there[:, None] - WORD * np.arange(words), 0, WORD)
    inside = ((1 << left) - 1).astype(np.uint16)
    _, _, r, c = np.nonzero(slots >= 0)
    numbers = slots[slots >= 0]
    step = max(1, AT_ONCE // (rows * words))
    for first in range(0, len(r), step):
        some = slice(first, first + step)
        seen = bits[numbers[some]] & inside[c[some], None]
        np.add.at(found, r[some], np.unpackbits(seen.view(np.uint8), axis=-1).sum(axis=-1, dtype=np.int64))
    return found.reshape(-1)[:seq_q].astype(float)
