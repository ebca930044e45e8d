"""The tuning table, as data: problem class to tile, warps, stages. docs/kernels.md has the figures behind the rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from .. import tuned
from ..problem import AttentionProblem
from .device import Arch


@dataclass(frozen=True)
class Sm80:
    """Tiles of the sm80 kernels. Each field up to min_blocks is a constant of the kernel.

    Forward: a thread block owns `rows` queries and visits `keys` keys at a time. Backward: it owns `keys` keys and
    visits `rows` queries at a time. `column_warps` warps share 16-row fragments, each with its part of the columns.
    """

    dim: int  # head dimensions as the kernel pads them
    dim_v: int
    rows: int
    keys: int
    warps: int
    column_warps: int
    stages: int  # tiles in flight: 2, or 1 where another thread block hides the wait
    min_blocks: int  # thread blocks on a multiprocessor: bounds the registers
    shared_memory: int
    spills: int = 0  # bytes per thread, see SM80_SPILLS

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        names = ("dim", "dim_v", "rows", "keys", "warps", "column_warps", "stages", "min_blocks")
        return tuple((name.upper(), getattr(self, name)) for name in names)


ANY = 1 << 30
PAD = 8  # elements between the rows of a shared tile, see kernels_cu/tile/shared.cuh

# (largest head dimension, rows, keys, warps, column warps, stages, blocks); the first row that the dimension and the
# GPU's shared memory admit is taken.
SM80_FORWARD = (
    (64, 128, 128, 4, 1, 2, 2),
    (128, 128, 64, 4, 1, 2, 2),
    (128, 128, 32, 4, 1, 2, 2),
    (256, 64, 64, 4, 2, 1, 2),
    (256, 64, 32, 4, 1, 1, 2),
)

# (largest head dimension, longest sequence of queries, rows, keys, warps, column warps, stages, blocks)
SM80_BACKWARD = (
    (64, 2048, 64, 64, 4, 1, 2, 3),
    (64, ANY, 128, 128, 8, 2, 2, 1),
    (64, ANY, 64, 128, 8, 2, 1, 1),
    (128, ANY, 64, 128, 8, 2, 2, 1),
    (128, ANY, 64, 64, 8, 4, 1, 1),
    (192, ANY, 64, 64, 8, 2, 2, 1),
    (256, ANY, 64, 64, 8, 4, 2, 1),
    (256, ANY, 32, 64, 8, 2, 1, 1),
    (256, ANY, 32, 32, 4, 2, 1, 1),
)


# What ptxas may spill, in bytes per thread. Registers are full by choice: a tile a step smaller was slower everywhere.
# Unmasked kernels spill a few addresses, read once per tile; the most is spilled where key_mask's bytes are loaded ahead
# in the branch for tiles that test elements.
SM80_SPILLS = {False: 432, True: 80}


def sm80_forward(problem: AttentionProblem, arch: Arch) -> Sm80:
    for largest, rows, keys, warps, columns, stages, blocks in _tried(SM80_FORWARD, "sm80", False, problem, arch):
        dim, dim_v = _pad(problem.dim, 16), _pad(problem.dim_v, 16 * columns)
        elements = rows * (max(dim, dim_v) + PAD) + stages * keys * (dim + dim_v + 2 * PAD)
        size = 2 * elements + (2 * rows * (keys + PAD) + 8 * rows if columns > 1 else 0)  # P and row values exchanged
        if max(dim, dim_v) <= largest and size <= arch.shared_memory:
            return Sm80(dim, dim_v, rows, keys, warps, columns, stages, blocks, size, SM80_SPILLS[False])
    raise ValueError(f"no sm80 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


def sm80_backward(problem: AttentionProblem, arch: Arch) -> Sm80:
    table = _tried(SM80_BACKWARD, "sm80", True, problem, arch)
    for largest, longest, rows, keys, warps, columns, stages, blocks in table:
        dim, dim_v = _pad(problem.dim, 16 * columns), _pad(problem.dim_v, 16 * columns)
        elements = (keys + stages * rows) * (dim + dim_v + 2 * PAD) + (2 if columns > 1 else 1) * keys * (rows + PAD)
        size = 2 * elements + stages * 2 * 4 * rows + 16  # lse and delta of the queries, the ticket
        if max(dim, dim_v) <= largest and problem.seq_q <= longest and size <= arch.shared_memory:
            return Sm80(dim, dim_v, rows, keys, warps, columns, stages, blocks, size, SM80_SPILLS[True])
    raise ValueError(f"no sm80 backward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


@dataclass(frozen=True)
class Sm90:
    """Tiles of the sm90 forward. Each field up to pack is a constant of the kernel.

    A thread block has one warpgroup that loads and `groups` that own 64 rows each, together `span` queries of each of
    `pack` heads; it visits `keys` keys at a time.
    """

    dim: int  # head dimensions as the kernel pads them
    dim_v: int
    groups: int
    keys: int
    stages: int  # K and V tiles in flight
    q_stages: int  # Q tiles in flight: 2 where there is room, so that the next tile's comes early
    o_staged: bool  # the output has shared memory to leave through
    pack: int  # query heads with the same K and V that share a tile, where there are few queries
    dynamic: bool  # thread blocks ask for their next tile, where tiles differ in length
    shared_memory: int
    spills: int

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def span(self) -> int:
        return self.rows // self.pack

    def tiles(self, problem: AttentionProblem) -> int:
        packs = problem.heads_k * -(-problem.group // self.pack)
        return problem.batch * packs * -(-problem.seq_q // self.span)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        names = ("dim", "dim_v", "groups", "keys", "stages", "q_stages", "o_staged", "pack")
        return tuple((name.upper(), getattr(self, name)) for name in names)


SM90_DIMS = (64, 96, 128, 192, 256)  # head dimensions are padded to one of these; the copy engine fills in zeros
SM90_BARRIERS = 256  # bytes for barriers, more than any ring takes

# (largest head dimension, causal or window, groups, keys, stages, spills); None: either
SM90_FORWARD = (
    (64, None, 3, 128, 3, 160),  # with windows; else 16, once per tile
    (128, None, 2, 128, 2, 0),
    (192, None, 2, 128, 2, 0),
    (192, None, 2, 96, 2, 0),
    (256, True, 2, 64, 2, 0),
    (256, None, 2, 80, 2, 0),
)

# Where heads share K and V and queries are few, a tile takes all queries of as many heads as it holds. Not of every
# number: each is a kernel to compile. The rows are tried first there: three warpgroups would spill, and under a window
# with key_mask two do, once per tile.
SM90_FEW = 64
SM90_PACKS = (64, 16, 8, 4, 2)
SM90_PACKED = (
    (64, None, 2, 128, 4, 0),
    (128, None, 2, 128, 2, 96),
)


def sm90_forward(problem: AttentionProblem, arch: Arch) -> Sm90:
    dim, dim_v = (next(d for d in SM90_DIMS if n <= d) for n in (problem.dim, problem.dim_v))
    banded = problem.left is not None or problem.right is not None
    # With few heads too, thread blocks would stand idle, and each is as long at a tile.
    packed = problem.group > 1 and problem.seq_q <= SM90_FEW and 2 * problem.batch * problem.heads_q > arch.sms
    table = (*SM90_PACKED, *SM90_FORWARD) if packed else SM90_FORWARD
    for largest, band, groups, keys, stages, spills in _tried(table, "sm90", False, problem, arch):
        if max(dim, dim_v) > largest or band not in (None, banded):
            continue
        blocks, blocks_v = _pad(dim, 64), _pad(dim_v, 64)  # columns in shared memory
        rows = 64 * groups
        rings = 2 * stages * keys * (blocks + blocks_v) + SM90_BARRIERS + 1024  # tiles start at multiples of 1024
        pack = next(n for n in SM90_PACKS if rows // n >= problem.seq_q) if packed else 1
        for q_stages, o_staged in ((2, pack == 1), (2, False), (1, False)):
            size = rings + 2 * rows * (q_stages * blocks + o_staged * blocks_v)
            if size <= arch.shared_memory:
                alike = problem.seq_q <= rows or not (banded or problem.seq_q % rows)
                t = Sm90(dim, dim_v, groups, keys, stages, q_stages, o_staged, pack, not alike, size, spills)
                return t if t.tiles(problem) > arch.sms else replace(t, dynamic=False)
    raise ValueError(f"no sm90 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


@dataclass(frozen=True)
class Sm90Backward:
    """Tiles of the sm90 backward. Each field up to finish_stages is a constant of the kernel.

    A thread block has one warpgroup that moves data and `groups` that compute; it owns `keys` keys and visits `rows`
    queries at a time. The `cluster` blocks of a cluster visit the same queries, and add to dQ once for all their keys.
    """

    dim: int  # head dimensions as the kernel pads them
    dim_v: int
    rows: int
    keys: int
    groups: int
    cluster: int
    stages: int  # Q tiles in flight
    do_stages: int  # dO tiles in flight
    finishers: int  # warps of the moving warpgroup that turn float32 sums of dQ to rows
    finish_fragments: int  # of 512 bytes, that one turns at a time
    finish_stages: int  # and how many times as many are in flight
    shared_memory: int
    spills: int

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def span(self) -> int:
        return self.cluster * self.keys

    @property
    def out_rows(self) -> int:
        """Keys of dK and dV that leave at once: a warpgroup's own, or all where it has some of their columns."""
        return self.keys if _wide(self.keys, self.groups) else 64

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        names = ("dim", "dim_v", "rows", "keys", "groups", "cluster", "stages", "do_stages", "finishers",
                 "finish_fragments", "finish_stages")
        return tuple((name.upper(), getattr(self, name)) for name in names)


# (largest head dimension, rows, keys, groups, Q stages, dO stages, spills). What may be spilled are addresses: the moving
# warps', and a worker's, once per tile or where it adds to dQ in turn.
SM90_BACKWARD = (
    (64, 128, 128, 2, 2, 2, 152),
    (128, 64, 128, 2, 2, 2, 0),
    (192, 64, 96, 3, 2, 1, 32),
    (256, 64, 64, 2, 2, 1, 32),
)
# Warps that turn sums of dQ to rows, fragments at a time, stages: the first that there is room for.
SM90_FINISH = ((2, 8, 4), (2, 8, 2), (2, 8, 1), (1, 2, 1))
# The order of the key tiles, and room for sums of dQ.
SM90_CACHE = 16 << 20  # bytes of the L2 cache that Q, dO and dQ of heads dealt out together take; twice where tiles are
SM90_LONG = 1024  # longer than this, in queries
SM90_APART = 2  # deterministic, no causal mask: steps between two key tiles of a head
SM90_WAVES = 3  # key tiles of every thread block for whose heads there is room: under work, loaded, being finished


def sm90_backward(problem: AttentionProblem, arch: Arch) -> Sm90Backward:
    dim, dim_v = (next(d for d in SM90_DIMS if n <= d) for n in (problem.dim, problem.dim_v))
    table = _tried(SM90_BACKWARD, "sm90", True, problem, arch)
    for (largest, rows, keys, groups, stages, do_stages, spills), finish in itertools.product(table, SM90_FINISH):
        wide = _wide(keys, groups)
        # Where two warpgroups share out the columns, what they add to dQ is what binds: half of it with twice the keys.
        paired = wide and groups == 2
        if max(dim, dim_v) > largest:
            continue
        if wide and (rows != 64 or stages != 2 or dim > 64 * groups * (1 + paired) or (paired and keys % 32)):
            continue
        share_rows = not wide and dim == 64
        if share_rows and rows % (16 * groups):
            continue
        part_rows = rows // groups if share_rows else rows  # of dQ, a warpgroup's
        blocks, blocks_v = _pad(dim, 64), _pad(dim_v, 64)  # columns in shared memory
        s_tile = 2 * (keys * _pad(rows, 64) if wide else rows * _pad(keys, 64))  # of P or dS
        parts = 256 * groups * part_rows
        if not wide and groups * 2 * 64 * (blocks + blocks_v) > 2 * s_tile + parts:  # dK and dV leave there
            continue
        size = 2 * (keys * (blocks + blocks_v) + rows * (stages * blocks + do_stages * blocks_v))
        size += stages * 8 * rows + SM90_BARRIERS  # lse and delta
        # P, dS of two steps, also the other block's, and some columns of its K; else dS of two steps, or P and dS.
        size += 5 * s_tile + 2 * keys * 64 * groups if paired else 2 * s_tile + parts
        finishers, fragments, finish_stages = finish
        size += finishers * finish_stages * (512 * fragments + 16)
        if size <= arch.shared_memory and part_rows // 8 % (fragments // 2) == 0:
            cluster = 2 if paired else 1
            return Sm90Backward(dim, dim_v, rows, keys, groups, cluster, stages, do_stages, *finish, size, spills)
    raise ValueError(f"no sm90 backward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


def _wide(keys: int, groups: int) -> bool:
    """Whether warpgroups share out the columns of dK and dV (and P goes through shared memory too), not the keys."""
    return keys < 64 * groups


def _pad(n: int, step: int) -> int:
    return max(1, -(-n // step)) * step


# What a row of a table has in front of its tile where the tile is for one class of problems alone: no limits.
UNLIMITED: dict[tuple[str, bool], tuple[int | None, ...]] = {
    ("sm80", False): (256,),
    ("sm80", True): (256, ANY),
    ("sm90", False): (256, None),
    ("sm90", True): (256,),
}


def _tried(table: Any, family: str, backward: bool, problem: AttentionProblem, arch: Arch) -> Any:
    """A table's rows in the order in which they are tried: what was tuned for this class of problems comes first."""
    tile = tuned_tile(family, backward, problem, arch)
    return table if tile is None else ((*UNLIMITED[family, backward], *tile), *table)


def tuned_tile(family: str, backward: bool, problem: AttentionProblem, arch: Arch) -> tuple[int, ...] | None:
    """The tile that was timed on this GPU and stored for problems like this one."""
    if not arch.tuned:
        return None
    key = tuned.entry(problem, arch.name, arch.sms, family, backward).key
    return next((x.tile for x in arch.tuned if x.key == key), None)


@dataclass(frozen=True)
class Simt:
    """A block owns `owned` rows and `columns` columns of the result, and visits the other side `visited` rows at a time.

    Operands come to shared memory in pieces of `depth` columns (of Q, K) or rows (of V).
    """

    owned: int
    visited: int
    columns: int
    depth: int
    blocks: int  # thread blocks that should fit on a multiprocessor: bounds the registers
    spills: int = 0  # bytes per thread: addresses that do not change in the loop, written once and read once per tile
    threads: int = 128

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        return (
            ("OWNED", self.owned),
            ("VISITED", self.visited),
            ("COLUMNS", self.columns),
            ("DEPTH", self.depth),
            ("THREADS", self.threads),
            ("BLOCKS", self.blocks),
        )


# (bytes of a number that sums are kept in, backward, largest head dimension, tile)
SIMT = (
    (4, False, 32, Simt(64, 64, 32, 32, 3)),
    (4, False, 64, Simt(64, 64, 64, 32, 3)),
    (4, False, 128, Simt(64, 64, 128, 16, 2)),
    (4, False, 4096, Simt(64, 32, 256, 16, 2)),
    (4, True, 32, Simt(64, 32, 32, 32, 2)),
    (4, True, 64, Simt(64, 32, 64, 32, 3, spills=32)),
    (4, True, 4096, Simt(64, 32, 128, 32, 2)),
    (8, False, 32, Simt(64, 32, 32, 16, 2)),
    (8, False, 64, Simt(32, 32, 64, 16, 3)),
    (8, False, 4096, Simt(32, 32, 128, 16, 3, spills=64)),
    (8, True, 32, Simt(32, 32, 32, 16, 3)),
    (8, True, 64, Simt(32, 32, 64, 16, 2)),
    (8, True, 4096, Simt(32, 32, 128, 16, 2, spills=64)),
)


def simt(problem: AttentionProblem, arch: Arch, backward: bool) -> Simt:
    tile = tuned_tile("simt", backward, problem, arch)
    if tile is not None:
        return Simt(*tile)
    size = 8 if problem.dtype == "float64" else 4
    widest = max(problem.dim, problem.dim_v)
    for row_size, row_backward, largest, row in SIMT:
        if (row_size, row_backward) == (size, backward) and widest <= largest:
            return row
    raise ValueError(f"no simt tile of head dimension {widest}")


@dataclass(frozen=True)
class Flash1:
    """Tiles of FlashAttention-1: `tile` queries by `tile` keys, with all columns of a head on the chip."""

    tile: int
    columns: int  # head dimensions as the kernel pads them
    shared_memory: int
    threads: int = 256

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        return (
            ("OWNED", self.tile),
            ("VISITED", self.tile),
            ("COLUMNS", self.columns),
            ("DEPTH", self.tile),  # nothing comes in pieces
            ("THREADS", self.threads),
            ("ON_CHIP", self.shared_memory),
        )


FLASH1_COLUMNS = (32, 64, 128)
FLASH1_TILES = (64, 32, 16)


def flash1(problem: AttentionProblem, arch: Arch, backward: bool) -> Flash1:
    """The largest square tile that fits: the paper's Bc = M / 4d and Br = min(Bc, d), in powers of two."""
    columns = next(n for n in FLASH1_COLUMNS if max(problem.dim, problem.dim_v) <= n)
    for tile in FLASH1_TILES:
        size = 4 * tile * ((4 if backward else 3) * (columns + 4) + tile + 4 + backward)  # rows padded by 16 bytes
        if size <= arch.shared_memory:
            return Flash1(tile, columns, size)
    raise ValueError(f"no flash1 tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
