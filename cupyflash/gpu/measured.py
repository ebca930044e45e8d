"""What was measured of GPUs, and plans choose by. No result depends on it; on another GPU another choice may be faster.

Who measures anew changes rows here. What a choice must gain, or may take at most, is no measurement and stands where it
is made.
"""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    number: float
    unit: str
    gpu: str
    date: str
    what: str


# By the module of gpu/families that asks.
TABLE = {
    # A forward whose keys are dealt out in shares
    "shares.combine": Measured(2.5e-6, "s", "H200", "2026-11-23", "the kernel that combines shares"),
    "shares.share": Measured(6.5e-8, "s", "H200", "2026-11-23", "and each share there"),
    "shares.left": Measured(2.3e12, "B/s", "H200", "2026-11-23", "what shares leave in memory, to there or back"),
    "shares.ends": Measured(3e-6, "s", "H200", "2026-11-23", "begin and end of a tile, on mma.sync"),
    # Of a multiprocessor, on mma.sync
    "sm80.rate_2": Measured(2e12, "FLOP/s", "RTX 4090, H200", "2026-11-23", "numbers of 2 bytes; between the two"),
    "sm80.rate_4": Measured(7e11, "FLOP/s", "RTX 4090, H200", "2026-11-23", "of 4"),
    "sm80.rate_8": Measured(3e11, "FLOP/s", "H200", "2026-11-23", "of 8"),
    "sm80.crowding": Measured(0.9, "", "H200", "2026-11-24",
        "two blocks together take 1.7 to 1.9 times as long as one"),
    "sm80.bytes": Measured(2.34e10, "B/s", "H100", "2026-11-26", "of what reading large caches reaches"),
    # Of a multiprocessor in the Hopper forward: fitted to 100 calls of one round, within 10 % (docs/hopper-forward.md)
    "sm90_forward.rate": Measured(5.9e12, "FLOP/s", "H200", "2026-11-24", "products"),
    "sm90_forward.score": Measured(5.2e-11, "s", "H200", "2026-11-24", "a score at least: its exponential"),
    "sm90_forward.visit": Measured(6e-7, "s", "H200", "2026-11-24", "a visit of 64 keys at least"),
    "sm90_forward.ends": Measured(2e-6, "s", "H200", "2026-11-24", "begin and end of a tile"),
    "sm90_forward.warpgroup": Measured(1.4e-6, "s", "H200", "2026-11-24", "and more for each warpgroup"),
    # Of the same, where sequences are short: fitted to 662 tiles of 99 random calls, within 15 %; what is chosen takes
    # 1.7 % longer than the best in the mean (docs/notes/short-sequences.md)
    "sm90_forward.products": Measured(7.7e12, "FLOP/s", "H100", "2026-11-26", "products"),
    "sm90_forward.wait": Measured(7.2e-8, "s", "H100", "2026-11-26", "a visit of keys at least"),
    "sm90_forward.wait_key": Measured(4.8e-9, "s", "H100", "2026-11-26", "and more for each key"),
    "sm90_forward.alone": Measured(4.9e-6, "s", "H100", "2026-11-26", "begin and end of the first tile"),
    "sm90_forward.pack": Measured(0.26, "", "H100", "2026-11-26", "and of that more, where heads share a tile"),
    "sm90_forward.copies": Measured(1e11, "B/s", "H100", "2026-11-26", "lines of memory, by TMA"),
    "sm90_forward.bytes": Measured(4.4e12, "B/s", "H100", "2026-11-26", "of all: Q, K, V and O once"),
    "sm90_forward.small": Measured(1.15, "rows", "H200", "2026-11-23", "of one warpgroup, 64 keys, three blocks; to 64 "
                                                                       "columns"),
    "sm90_forward.middle": Measured(1.12, "rows", "H200", "2026-11-23", "of four warpgroups, 64 keys; to 64 columns"),
    "sm90_forward.wider": Measured(0.92, "rows", "H200", "2026-11-23", "of three warpgroups, 96 keys; to 96 columns"),
    "sm90_forward.few_keys": Measured(1.3, "rows", "H200", "2026-11-23",
        "of two warpgroups where one tile has all keys"),
    "sm90_latent.visit": Measured(2.4e-6, "s", "H100", "2026-11-26", "a visit of 64 keys, K from memory: reckoned"),
    # The Hopper jvp
    "sm90_jvp.narrow": Measured(0.93, "rows", "H100", "2026-11-25", "of three warpgroups, 64 keys; to 64 columns"),
    "sm90_jvp.middle": Measured(0.9, "rows", "H100", "2026-11-25", "of three warpgroups, 48 keys; to 96 columns"),
    # The Hopper backward, in visits of a query tile
    "sm90_backward.tile": Measured(3.5, "visits", "H200", "2026-11-30", "of 64 queries: begin and end of a key tile"),
    "sm90_backward.ends": Measured(0.75, "visits", "H100", "2026-11-26",
        "the same, where tiles are weighed by visits: fitted to 112 tiles of 57 random calls, whose choice takes 1.0 % "
        "(up to 64 columns) and 1.9 % longer than the best"),
    "sm90_backward.wave": Measured(0.7, "", "H100", "2026-11-26", "of a wave that is not full, how much is in vain"),
    "sm90_backward.few_rows": Measured(1.17, "", "H100", "2026-11-26", "of a pair, 64 by 128 beside 128 by 128"),
    "sm90_backward.rest": Measured(0.8, "", "H200", "2026-11-29", "of a pair, 48 by 128 beside 64 by 96"),
    "sm90_backward.rest_192": Measured(0.93, "", "H200", "2026-11-29", "the same, of 192 columns of K and 128 of V"),
    "sm90_backward.few_keys": Measured(1.2, "", "H200", "2026-11-29", "of a pair, 64 by 64 beside 64 by 96"),
    "sm90_backward.sums": Measured(1.1, "visits", "H200", "2026-11-30", "its sums to memory or back"),
    "sm90_backward.sums_traffic": Measured(
        0.05 / 2**20, "visits/B", "H200", "2026-11-30", "of all sums, written and read, what memory takes",
    ),
    "sm90_backward.spilled": Measured(
        0.18, "", "H200", "2026-11-30",
        "so much longer is a visit of 128 keys for each doubling of what Q, dO and dQ of the shares under work take "
        "beyond `held`, under a causal mask, where heads that share keys are half a sequence's key tiles or more: with "
        "`sums` fitted to 646 ways to deal out 218 calls, of which the best by it take 0.4 % longer than the best",
    ),
    "sm90_backward.held": Measured(6 << 23, "B", "H200", "2026-11-30", "of these that the L2 cache holds"),
}  # fmt: skip


def number(name: str) -> float:
    return TABLE[name].number
