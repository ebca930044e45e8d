"""What the plans of the Hopper kernels say alike, and lay out alike in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...passes import Pass
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ..device import Arch
from ..kernel_plan import PAIRWISE, Box, ceil, pad

DIMS = (32, 64, 96, 128, 192, 256)  # head dimensions are padded to one of these; TMA fills in zeros
WIDEST = (576, 512)  # columns of Q and K, and of V, of the forward of 16 bits; elsewhere as many as the last of these
PART = DIMS[-1]  # columns that a thread block has, at most: of V, and in the backward of all
WIDEST_OF_CLUSTER = (2 * PART, 2 * PART)  # of two thread blocks, forward and backward
SPLIT_FROM = 321  # columns: of fewer, a third or more of what its blocks compute would be padding
FEW = 64  # queries, or keys: fewer than most tiles have
PAIR_STAGES = (2, 1)  # tiles of mask and bias in flight: the first that there is room for
ORDERED_WORDS = 8  # of a line of a list of tiles (kernels_cu/sm90/tile_order.cuh)
BARRIERS = 256  # bytes for barriers, more than any ring takes


def common(problem: AttentionProblem, arch: Arch, of: Pass) -> dict[str, Any]:
    """What all plans of this family say alike."""
    return {
        "family": "sm90",
        "arch": arch.name,
        "dtype": problem.dtype,
        "of": of,
        "source": f"sm90/{of}.cu",
        "alignment": 16,
        "given": problem.given,
    }


def check_tiles(name: str, problem: AttentionProblem, tiles: int) -> None:
    """ValueError where all heads of q, or of k, have more tiles than the kernels have numbers for."""
    if tiles >= 2**30:
        heads = problem.heads_q if name == "q" else problem.heads_k
        raise ValueError(f"{name} has batch {problem.batch} and {heads} heads: {tiles} tiles; less than 2**30 fit")


def padded(problem: AttentionProblem) -> tuple[int, int]:
    """The head dimensions that kernels are compiled for: 32 where both are, of 16-bit numbers; that of V of one of its
    parts."""
    least = DIMS[0] if max(problem.dim, problem.dim_v) <= DIMS[0] and problem.dtype != FLOAT8 else 64
    columns = ceil(problem.dim_v, value_parts(problem))
    dim, dim_v = (next((d for d in DIMS if max(n, least) <= d), pad(n, 64)) for n in (problem.dim, columns))
    return dim, dim_v


def columns_of_v(problem: AttentionProblem) -> int:
    """Of O, that a thread block of the forward computes: V has more in shared memory, which are padding."""
    _, dim_v = padded(problem)
    return dim_v if problem.dtype == FLOAT8 or not 64 < problem.dim_v <= dim_v else pad(problem.dim_v, 16)


def value_parts(problem: AttentionProblem) -> int:
    """In how many parts the columns of V, and so of O, are shared out over thread blocks."""
    return max(1, ceil(problem.dim_v, PART))


def dots(problem: AttentionProblem) -> tuple[tuple[str, int], ...]:
    """Columns that a product's sum runs along, of Q and K and of dO and V, as constants: less padding, in steps of 32
    bytes."""
    step = 32 // ITEMSIZE[problem.dtype]
    return ("DOT", pad(problem.dim, step)), ("DOT_V", pad(problem.dim_v, step))


def pair_stages(problem: AttentionProblem) -> tuple[int, ...]:
    """How many tiles of mask and bias may be in flight, what is best first."""
    return PAIR_STAGES if paired(problem) else (1,)


def paired(problem: AttentionProblem) -> list[str]:
    """The arrays over pairs that are given."""
    return [name for name in PAIRWISE if problem.has(name)]


@dataclass(frozen=True)
class PairTiles:
    """Tiles of the arrays over pairs, mask and bias, in shared memory, `stages` in flight."""

    problem: AttentionProblem
    stages: int = 1

    def _given(self) -> list[tuple[str, int, bool]]:
        """Name, bytes of an element, and whether queries differ."""
        found = [x for x in self.problem.given if x.name in PAIRWISE]
        return [(x.name, ITEMSIZE[x.dtype], "query" in x.axes or "line" in x.axes) for x in found]

    def memory(self, rows: int, keys: int) -> int:
        """Bytes of all: blocks of 128 bytes a row."""
        tiles = [ceil(keys * size, 128) * (128 * rows if by_query else 1024) for _, size, by_query in self._given()]
        return self.stages * sum(tiles)

    def boxes(self, rows: int) -> tuple[Box, ...]:
        return tuple(Box(name, rows if by_query else 1) for name, _, by_query in self._given())

    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        by_query = {name: differ for name, _, differ in self._given()}
        flags = ((f"{name.upper()}_BY_QUERY", by_query.get(name, False)) for name in PAIRWISE)
        return ("PAIR_STAGES", self.stages), *flags


def unplaced(problem: AttentionProblem) -> str | None:
    """What kernels object to that leave rows which are dead by position to tensor maps."""
    banded = problem.left is not None or problem.right is not None
    return "takes no `at` in memory with causal or window" if problem.has("at") and banded else None
