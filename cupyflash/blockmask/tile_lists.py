"""Lists by which kernels walk over the tiles of a block mask, by array operations alone, on NumPy or CuPy (`xp`).

A mask is `slots`, int32 (B, H, blocks of queries, blocks of keys): EMPTY, FULL, or which of `bits` a block has; and
`bits`, uint16 (blocks, queries of a block, keys of a block / 16), the lowest bit first. What a block has behind the
ends does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

EMPTY, FULL = -2, -1  # in slots
WORD = 16  # pairs, side by side, of a word of bits
ALL = 0xFFFF
AT_ONCE = 1 << 22  # words that are worked on at once


class ListUse(NamedTuple):
    """What a kernel asks of a mask: for each tile of one side the tiles of the other side that it visits."""

    name: str  # a field of Params: "key_lists", for each tile of queries, or "query_lists", for each tile of keys
    queries: int  # of a tile
    keys: int
    bits: (
        str | None
    )  # of partial tiles: "queries" by "keys" (rows are queries), or the other way round; None: not asked
    seq: tuple[int, int] | None = None  # of how many of the mask's queries and keys, the first ones; None: of all


def make(xp: ModuleType, slots: Any, bits: Any, block: tuple[int, int], seq: tuple[int, ...], use: ListUse) -> Any:
    """One array of int32, as kernels_cu/attention/block_list.cuh reads it: where the visits of each tile begin, tiles
    in order of the number of their visits (of each head, most first), visits as (tile, where its bits are or -1), and
    the bits."""
    slots, bits = _in_tiles(xp, slots, bits, block, seq, use)
    if use.name == "query_lists":
        slots = slots.swapaxes(2, 3)
    there = slots > EMPTY
    counts = there.sum(axis=3, dtype=np.int32)
    order = xp.argsort(-counts.astype(np.int64) * counts.shape[2] + xp.arange(counts.shape[2]), axis=2)
    begins = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(counts.ravel(), dtype=np.int64)])
    tiles, chosen = xp.nonzero(there)[3], slots[there]
    head = 2 * counts.size + 1
    words_at, size = head + 2 * len(tiles), bits[:1].nbytes // 4
    if words_at + bits.nbytes // 4 >= 2**31:
        raise ValueError(
            "block_mask has more tiles than 32 bits can number; it must be shared by more heads, or sparser"
        )
    where = xp.where(chosen == FULL, -1, words_at + chosen.astype(np.int64) * size)
    visits = xp.stack([tiles, where], axis=1)
    parts = [x.astype(np.int32).ravel() for x in (begins, order, visits)]
    if use.bits is not None:
        parts.append(bits.ravel().view(np.int32))
    return xp.concatenate(parts)


def _in_tiles(
    xp: ModuleType, slots: Any, bits: Any, block: tuple[int, int], seq: tuple[int, ...], use: ListUse
) -> tuple[Any, Any]:
    """The same mask in tiles; rows of its bits are what `use.bits` says."""
    count = [-(-n // size) for n, size in zip(seq, (use.queries, use.keys))]
    ranges = [
        _covered(xp, n, size, length, of) for n, size, length, of in zip(count, (use.queries, use.keys), seq, block)
    ]
    within = (ranges[0][1] - ranges[0][0])[:, None] * (ranges[1][1] - ranges[1][0])
    tiles = xp.full((*slots.shape[:2], *count), EMPTY, np.int32)
    tiles[_sums(xp, slots > EMPTY, ranges) > 0] = 0
    mixed = (tiles == 0) & (_sums(xp, slots == FULL, ranges) < within)
    tiles[(tiles == 0) & ~mixed] = FULL
    at = xp.nonzero(mixed)
    found = []
    kept, number = 0, len(at[0])
    step = max(1, AT_ONCE // (use.queries * use.keys // WORD))
    for first in range(0, number, step):
        b, h, r, c = (x[first : first + step] for x in at)
        i = (r[:, None] * use.queries + xp.arange(use.queries))[:, :, None]
        j16 = (c[:, None] * (use.keys // WORD) + xp.arange(use.keys // WORD))[:, None, :]
        some = words(xp, slots, bits, block, i, j16, (b[:, None, None], h[:, None, None]), seq)
        inside = _inside(xp, i, j16, seq)
        none, whole = ((x == y).all(axis=(1, 2)) for x, y in ((some & inside, 0), (some | ~inside, ALL)))
        partial = ~(none | whole)
        numbers = kept + xp.cumsum(partial) - 1
        tiles[b, h, r, c] = xp.where(none, EMPTY, xp.where(whole, FULL, numbers)).astype(np.int32)
        found.append(_transposed(xp, some[partial]) if use.bits == "keys" else some[partial])
        kept += len(found[-1])
    shape = (use.keys, use.queries // WORD) if use.bits == "keys" else (use.queries, use.keys // WORD)
    return tiles, xp.concatenate([xp.zeros((0, *shape), np.uint16), *found])


def words(
    xp: ModuleType,
    slots: Any,
    bits: Any,
    block: tuple[int, int],
    i: Any,
    j16: Any,
    head: tuple[Any, ...] = (),
    seq: tuple[int, ...] | None = None,
) -> Any:
    """The bits of query i and keys from 16 * j16 on, of arrays that broadcast; `head`: the indices in front of
    these."""
    if seq is not None:  # what a tile has behind the ends is read from the last block
        i, j16 = xp.minimum(i, seq[0] - 1), xp.minimum(j16, (seq[1] - 1) // WORD)
    wide = block[1] // WORD
    slot = slots[(*head, i // block[0], j16 // wide)]
    simple = xp.where(slot == FULL, ALL, 0).astype(np.uint16)
    if not len(bits):
        return simple
    return xp.where(slot < 0, simple, bits[xp.maximum(slot, 0), i % block[0], j16 % wide])


def from_pairs(
    xp: ModuleType,
    rows: Iterable[tuple[slice, slice, slice, Any]],
    shape: tuple[int, ...],
    block: tuple[int, int],
    present: Any = None,
    whole: Any = None,
) -> tuple[Any, Any]:
    """slots and bits of booleans, which come in rows of blocks: (batch entries, heads, queries, what they see).
    `present` and `whole`: booleans of blocks that are there, and that are full anyway."""
    (block_q, block_k), (seq_q, seq_k) = block, shape[2:]
    blocks_k, wide = -(-seq_k // block_k), block_k // WORD
    slots = xp.full((*shape[:2], -(-seq_q // block_q), blocks_k), EMPTY, np.int32)
    found: list[Any] = []
    kept = 0
    for of_batch, of_heads, queries, seen in rows:
        n = -(-(queries.stop - queries.start) // block_q)
        padded = xp.zeros((*seen.shape[:2], n * block_q, blocks_k * block_k), bool)
        padded[:, :, : seen.shape[2], : seen.shape[3]] = seen
        packed = xp.packbits(padded.ravel(), bitorder="little").view(np.uint16)
        packed = packed.reshape(*seen.shape[:2], n, block_q, blocks_k, wide)
        i = queries.start + xp.arange(n * block_q)[:, None]
        inside = _inside(xp, i, xp.arange(blocks_k * wide)[None], (seq_q, seq_k)).reshape(n, block_q, blocks_k, wide)
        any_seen, all_seen = packed.any(axis=(3, 5)), (packed | ~inside == ALL).all(axis=(3, 5))
        first = queries.start // block_q
        where = of_batch, of_heads, slice(first, first + n)
        there = any_seen if present is None else any_seen & present[where]
        full = there & all_seen if whole is None else (there & all_seen) | whole[where]
        partial = there & ~full
        numbers = (kept + xp.cumsum(partial.ravel()) - 1).reshape(partial.shape)
        slots[where] = xp.where(full, FULL, xp.where(partial, numbers, EMPTY)).astype(np.int32)
        found.append(packed.transpose(0, 1, 2, 4, 3, 5)[partial])
        kept += len(found[-1])
    return slots, xp.concatenate([xp.zeros((0, block_q, wide), np.uint16), *found])


def _inside(xp: ModuleType, i: Any, j16: Any, seq: tuple[int, ...]) -> Any:
    """Words of which those bits are set that are before both ends."""
    bits = xp.clip(seq[1] - WORD * j16, 0, WORD)
    return xp.where(i < seq[0], (1 << bits) - 1, 0).astype(np.uint16)


def _covered(xp: ModuleType, count: int, size: int, length: int, block: int) -> tuple[Any, Any]:
    """For each of `count` tiles, the first block that it shares with, and the last but one."""
    begin = xp.arange(count) * size
    return begin // block, -(-xp.minimum(begin + size, length) // block)


def _sums(xp: ModuleType, x: Any, ranges: list[tuple[Any, Any]]) -> Any:
    """How many blocks of x are set in each tile."""
    total = xp.zeros((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1), np.int32)
    total[:, :, 1:, 1:] = x.cumsum(axis=2, dtype=np.int32).cumsum(axis=3, dtype=np.int32)
    (top, bottom), (left, right) = ranges
    down = total[:, :, bottom] - total[:, :, top]
    return down[..., right] - down[..., left]


def _transposed(xp: ModuleType, x: Any) -> Any:
    """Bits of tiles with rows and columns exchanged."""
    n, rows, wide = x.shape
    squares = x.reshape(n, rows // WORD, WORD, wide).transpose(0, 3, 1, 2)  # (n, wide, rows / 16, 16)
    for d, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        pairs = squares.reshape(*squares.shape[:3], WORD // (2 * d), 2, d)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        changed = ((low >> d) ^ high) & np.uint16(mask)  # quarters that change places
        squares = xp.stack([low ^ (changed << d), high ^ changed], axis=-2).reshape(squares.shape)
    return squares.transpose(0, 1, 3, 2).reshape(n, wide * WORD, rows // WORD)
