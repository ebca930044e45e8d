"""Which probabilities dropout keeps: the same as attention/dropout.cuh of the kernels, for a tile at a time."""

from __future__ import annotations

import numpy as np

ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[np.ndarray | int, ...], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[np.ndarray, ...]:
    """Philox4x32 (Salmon et al. 2011): four random words of 32 bits, as uint64, for each counter of four and a key of
    two.

    Words of the counter broadcast against each other; while some depend on one axis alone, so do the products.
    """
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.asarray(x, np.uint64) for x in counter)
    for n in range(rounds):
        k0, k1 = (np.uint64((k + n * w) & 0xFFFFFFFF) for k, w in zip(key, _WEYL))
        first, second = a * np.uint64(_MULTIPLIERS[0]), c * np.uint64(_MULTIPLIERS[1])
        a, b = (second >> np.uint64(32)) ^ b ^ k0, second & low
        c, d = (first >> np.uint64(32)) ^ d ^ k1, first & low
    return a, b, c, d


def kept(
    seed: int, batch: int, head: int, queries: tuple[int, int], keys: tuple[int, int], dropped_below: int
) -> np.ndarray:
    """Booleans, (queries, keys), for queries and keys [begin, end).

    One counter stands for eight pairs: queries that differ in bit 3, keys that differ in bits 3 and 0. Its words are
    (key, batch entry, query, head) without these bits; its result is 16 bits for each pair.
    """
    (i, i_end), (j, j_end) = queries, keys
    rows = np.arange(i // 16, -(-i_end // 16))[:, None] * 8 + np.arange(8)  # (blocks of 16, 8)
    columns = np.arange(j // 16, -(-j_end // 16))[:, None] * 4 + np.arange(4)
    counter = columns[None, None], batch, rows[:, :, None, None], head
    words = np.stack([np.asarray(x, np.uint32) for x in philox(counter, (seed & 0xFFFFFFFF, seed >> 32))])
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], -1)
    numbers = halves.reshape(2, 2, len(rows), 8, len(columns), 4, 2)  # by bit 3 of the key and of the query, ..., bit 0
    numbers = numbers.transpose(2, 1, 3, 4, 0, 5, 6).reshape(16 * len(rows), 16 * len(columns))
    first_i, first_j = i // 16 * 16, j // 16 * 16
    return numbers[i - first_i : i_end - first_i, j - first_j : j_end - first_j] >= dropped_below
