"""The tuning table, as data: problem class to tile, warps, stages. docs/kernels.md has the figures behind the rows."""

from __future__ import annotations

from dataclasses import dataclass

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
SM80_SPILLS = {False: 416, True: 80}


def sm80_forward(problem: AttentionProblem, arch: Arch) -> Sm80:
    for largest, rows, keys, warps, columns, stages, blocks in SM80_FORWARD:
        dim, dim_v = _pad(problem.dim, 16), _pad(problem.dim_v, 16 * columns)
        elements = rows * (max(dim, dim_v) + PAD) + stages * keys * (dim + dim_v + 2 * PAD)
        size = 2 * elements + (2 * rows * (keys + PAD) + 8 * rows if columns > 1 else 0)  # P and row values exchanged
        if max(dim, dim_v) <= largest and size <= arch.shared_memory:
            return Sm80(dim, dim_v, rows, keys, warps, columns, stages, blocks, size, SM80_SPILLS[False])
    raise ValueError(f"no sm80 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


def sm80_backward(problem: AttentionProblem, arch: Arch) -> Sm80:
    for largest, longest, rows, keys, warps, columns, stages, blocks in SM80_BACKWARD:
        dim, dim_v = _pad(problem.dim, 16 * columns), _pad(problem.dim_v, 16 * columns)
        elements = (keys + stages * rows) * (dim + dim_v + 2 * PAD) + (2 if columns > 1 else 1) * keys * (rows + PAD)
        size = 2 * elements + stages * 2 * 4 * rows + 16  # lse and delta of the queries, the ticket
        if max(dim, dim_v) <= largest and problem.seq_q <= longest and size <= arch.shared_memory:
            return Sm80(dim, dim_v, rows, keys, warps, columns, stages, blocks, size, SM80_SPILLS[True])
    raise ValueError(f"no sm80 backward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


@dataclass(frozen=True)
class Sm90:
    """Tiles of the sm90 forward. Each field up to dynamic is a constant of the kernel.

    A thread block has one warpgroup that loads and `groups` that own 64 queries each; it visits `keys` keys at a time.
    """

    dim: int  # head dimensions as the kernel pads them
    dim_v: int
    groups: int
    keys: int
    stages: int  # K and V tiles in flight
    o_apart: bool  # the output has shared memory of its own, so that the next Q can come before the output has left
    dynamic: bool  # thread blocks ask for their next tile, where tiles differ in length
    shared_memory: int
    spills: int

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        names = ("dim", "dim_v", "groups", "keys", "stages", "o_apart", "dynamic")
        return tuple((name.upper(), getattr(self, name)) for name in names)


SM90_DIMS = (64, 96, 128, 192, 256)  # head dimensions are padded to one of these; the copy engine fills in zeros
SM90_BARRIERS = 256  # bytes for barriers, more than any ring takes
SM90_STATIC = 1024  # longest sequence of keys for which asking for tiles does not pay

# (largest head dimension, causal or window, longest sequence of keys, groups, keys, stages, spills); None: either,
# any. What may be spilled are addresses, read once per tile: the wide accumulators need most of the registers.
SM90_FORWARD = (
    (64, True, 1024, 2, 128, 2, 0),
    (64, None, None, 3, 128, 2, 0),
    (128, None, None, 2, 128, 2, 0),
    (192, None, None, 2, 128, 2, 0),
    (192, None, None, 2, 96, 2, 16),
    (256, None, None, 2, 80, 2, 16),
)


def sm90_forward(problem: AttentionProblem, arch: Arch) -> Sm90:
    dim, dim_v = (next(d for d in SM90_DIMS if n <= d) for n in (problem.dim, problem.dim_v))
    banded = problem.left is not None or problem.right is not None
    for largest, band, longest, groups, keys, stages, spills in SM90_FORWARD:
        if max(dim, dim_v) > largest or band not in (None, banded) or (longest or problem.seq_k) < problem.seq_k:
            continue
        blocks, blocks_v = _pad(dim, 64), _pad(dim_v, 64)  # columns in shared memory
        rows = 64 * groups
        rings = 2 * stages * keys * (blocks + blocks_v) + SM90_BARRIERS + 1024  # tiles start at multiples of 1024
        for apart in (True, False):
            size = rings + 2 * rows * (blocks + blocks_v if apart else max(blocks, blocks_v))
            if size <= arch.shared_memory:
                dynamic = problem.right is not None and problem.seq_k > SM90_STATIC
                return Sm90(dim, dim_v, groups, keys, stages, apart, dynamic, size, spills)
    raise ValueError(f"no sm90 forward tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")


def _pad(n: int, step: int) -> int:
    return max(1, -(-n // step)) * step


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


def simt(problem: AttentionProblem, backward: bool) -> Simt:
    size = 8 if problem.dtype == "float64" else 4
    widest = max(problem.dim, problem.dim_v)
    for row_size, row_backward, largest, tile in SIMT:
        if (row_size, row_backward) == (size, backward) and widest <= largest:
            return tile
    raise ValueError(f"no simt tile of head dimension {widest}")
