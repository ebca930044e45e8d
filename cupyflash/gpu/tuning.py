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
    blocks: int  # thread blocks that should fit on a multiprocessor: bounds the registers
    shared_memory: int

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        return (
            ("ROWS", self.rows),
            ("KEYS", self.keys),
            ("WARPS", self.warps),
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

# (largest head dimension, rows, keys, warps, blocks); the first row that the dimension and the GPU's shared
# memory admit is taken.
SM80_FORWARD = (
    (64, 128, 64, 4, 2),
    (96, 128, 64, 4, 2),
    (128, 128, 64, 4, 2),
    (128, 128, 32, 4, 2),
    (192, 128, 64, 8, 1),
    (256, 128, 64, 8, 1),
    (256, 64, 32, 4, 1),
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
    for largest, rows, keys, warps, blocks in SM80_FORWARD:
        if max(dim, dim_v) <= largest:
            elements = rows * (max(dim, dim_v) + PAD) + 2 * keys * (dim + dim_v + 2 * PAD)
            if 2 * elements <= arch.shared_memory:
                return Sm80Forward(rows, keys, warps, blocks, 2 * elements)
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
    """A thread block of 16 x 16 threads owns a tile of rows x keys scores and `columns` columns of the result."""

    rows: int
    keys: int
    columns: int
    threads: int = 256

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        return (("ROWS", self.rows), ("KEYS", self.keys), ("COLUMNS", self.columns))


def simt(problem: AttentionProblem, backward: bool) -> Simt:
    widest = max(problem.dim, problem.dim_v)
    columns = next((c for c in (32, 64, 128) if widest <= c), 128)
    if problem.dtype == "float64" or (backward and columns == 128):
        return Simt(32, 32, columns)
    return Simt(64, 64, columns)
