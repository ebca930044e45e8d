"""The tuning table, as data: problem class to tile, warps, stages. docs/kernels.md has the figures behind the rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import AttentionProblem
from .device import Arch


@dataclass(frozen=True)
class Sm80Forward:
    """A thread block owns `rows` queries; each warp owns rows / warps of them. K and V come in tiles of `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int
    blocks: int  # thread blocks that should fit on a multiprocessor: bounds the registers
    shared_memory: int

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        return (
            ("ROWS", self.rows),
            ("KEYS", self.keys),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("MIN_BLOCKS", self.blocks),
        )


@dataclass(frozen=True)
class Sm80Backward:
    """A thread block owns `keys` keys and loops over tiles of `rows` queries."""

    rows: int
    keys: int
    warps: int
    column_warps: int  # warps that share 16 keys, each with its part of the columns of dK and dV
    stages: int
    blocks: int
    shared_memory: int

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        return (
            ("ROWS", self.rows),
            ("KEYS", self.keys),
            ("WARPS", self.warps),
            ("COLUMN_WARPS", self.column_warps),
            ("STAGES", self.stages),
            ("MIN_BLOCKS", self.blocks),
        )


PAD = 8  # elements between the rows of a shared tile, see kernels_cu/tile/shared.cuh

# (largest head dimension, rows, keys, warps, stages, blocks); the first row that the dimension and the GPU's shared
# memory admit is taken.
SM80_FORWARD = (
    (64, 128, 64, 4, 2, 2),
    (96, 128, 64, 4, 2, 2),
    (128, 128, 64, 4, 2, 2),
    (128, 128, 32, 4, 2, 2),
    (192, 128, 64, 8, 2, 1),
    (256, 128, 64, 8, 2, 1),
    (256, 64, 32, 4, 2, 1),
)

# (largest head dimension, rows, keys, warps, column warps, stages, blocks)
SM80_BACKWARD = (
    (64, 64, 128, 8, 1, 2, 1),
    (128, 64, 128, 8, 1, 2, 1),
    (128, 64, 64, 8, 2, 1, 1),
    (256, 64, 64, 8, 2, 2, 1),
    (256, 32, 64, 8, 2, 1, 1),
    (256, 32, 32, 4, 2, 1, 1),
)


def sm80_forward(dim: int, dim_v: int, problem: AttentionProblem, arch: Arch) -> Sm80Forward:
    for largest, rows, keys, warps, stages, blocks in SM80_FORWARD:
        if max(dim, dim_v) <= largest:
            elements = rows * (max(dim, dim_v) + PAD) + stages * keys * (dim + dim_v + 2 * PAD)
            if 2 * elements <= arch.shared_memory:
                return Sm80Forward(rows, keys, warps, stages, blocks, 2 * elements)
    raise ValueError(f"no sm80 forward tile of head dimension {dim} fits {arch.shared_memory} bytes of shared memory")


def sm80_backward(dim: int, dim_v: int, problem: AttentionProblem, arch: Arch) -> Sm80Backward:
    for largest, rows, keys, warps, columns, stages, blocks in SM80_BACKWARD:
        if max(dim, dim_v) <= largest:
            elements = (keys + stages * rows) * (dim + dim_v + 2 * PAD) + (1 if columns == 1 else 2) * keys * (rows + PAD)
            size = 2 * elements + stages * 2 * 4 * rows  # lse and delta of the queries
            if size <= arch.shared_memory:
                return Sm80Backward(rows, keys, warps, columns, stages, blocks, size)
    raise ValueError(f"no sm80 backward tile of head dimension {dim} fits {arch.shared_memory} bytes of shared memory")


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


# (bytes of an element of a sum, backward, largest head dimension) to the tile; the last serves any larger dimension.
SIMT = (
    (4, False, 32, Simt(64, 64, 32, 32, 3)),
    (4, False, 64, Simt(64, 64, 64, 32, 3)),
    (4, False, 128, Simt(64, 32, 128, 32, 3)),
    (4, False, 4096, Simt(64, 32, 256, 16, 2)),
    (4, True, 32, Simt(64, 32, 32, 32, 3)),
    (4, True, 64, Simt(64, 32, 64, 32, 2)),
    (4, True, 4096, Simt(64, 32, 128, 32, 2)),
    (8, False, 32, Simt(64, 32, 32, 16, 2)),
    (8, False, 64, Simt(64, 32, 64, 16, 2)),
    (8, False, 4096, Simt(32, 32, 128, 16, 2)),
    (8, True, 32, Simt(32, 32, 32, 16, 3)),
    (8, True, 64, Simt(32, 32, 64, 16, 2)),
    (8, True, 4096, Simt(32, 32, 128, 16, 2)),
)


def simt(problem: AttentionProblem, backward: bool) -> Simt:
    size = 8 if problem.dtype == "float64" else 4
    widest = max(problem.dim, problem.dim_v)
    for row_size, row_backward, largest, tile in SIMT:
        if (row_size, row_backward) == (size, backward) and widest <= largest:
            return tile
    raise ValueError(f"no simt tile of head dimension {widest}")
