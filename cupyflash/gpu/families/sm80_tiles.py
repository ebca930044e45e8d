"""The tiles of sm80: tables, what `tune` may try, the shared memory that each asks for, and what it may spill."""

from __future__ import annotations

from dataclasses import dataclass

from ...passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from ...problem import ITEMSIZE, AttentionProblem
from ..kernel_plan import Tiles, pad, scored

ANY = 1 << 30
WIDEST = 576  # head dimensions of 16 bits, forward and backward; of all else 256


@dataclass(frozen=True)
class Tile:
    """Forward: a thread block owns `rows` queries and visits `keys` keys at a time. Backward: it owns `keys` keys and
    visits `rows` queries at a time. `column_warps` warps share 16-row fragments, each with its part of the columns, and
    of the other side 16 rows or more, if there are so many: else they compute the same scores.
    """

    rows: int
    keys: int
    warps: int
    column_warps: int
    stages: int  # tiles in flight: 2, or 1 where another thread block hides the wait
    min_blocks: int  # thread blocks on a multiprocessor: bounds the registers
    dim: int = WIDEST  # for head dimensions up to this
    seq_q: int = ANY  # and this many queries
    size: int | None = None  # and elements of so many bytes; None: any
    spills: int = 0  # bytes per thread that ptxas may spill beside SPILLS

    def dims(self, problem: AttentionProblem, of: Pass) -> tuple[int, int]:
        """Head dimensions as the kernel pads them."""
        step = 16 * self.column_warps
        return pad(problem.dim, step if of.of_gradients else 16), pad(problem.dim_v, step)


def parts_of(dtype: str) -> int:
    """How many float16 a number is for the tensor cores (kernels_cu/tile/halves.cuh)."""
    return 2 if dtype == "float32" else 1


# In order of preference.
FORWARD_TILES = (
    Tile(128, 64, 4, 1, 1, 2, dim=64, size=4),
    Tile(64, 48, 4, 1, 1, 2, dim=128, size=4),
    Tile(64, 32, 4, 1, 1, 2, dim=128, size=4),
    Tile(64, 32, 4, 2, 1, 1, dim=128, size=4),
    Tile(64, 32, 8, 2, 1, 1, size=4),
    Tile(32, 16, 2, 1, 1, 1, size=4),
    Tile(64, 32, 4, 1, 2, 2, dim=64, size=8),
    Tile(128, 32, 8, 1, 2, 1, dim=64, size=8),
    Tile(128, 32, 8, 1, 1, 1, dim=128, size=8, spills=32),
    Tile(64, 32, 8, 2, 1, 1, dim=192, size=8),
    Tile(32, 32, 4, 2, 1, 1, size=8, spills=72),
    Tile(128, 128, 4, 1, 2, 2, dim=64),
    Tile(128, 64, 4, 1, 2, 2, dim=128),
    Tile(128, 32, 4, 1, 2, 2, dim=128),
    Tile(64, 64, 4, 2, 1, 2, dim=256),
    Tile(64, 32, 4, 1, 1, 2, dim=256),
    Tile(128, 64, 8, 2, 1, 1, dim=320, size=2),
    Tile(64, 64, 8, 4, 1, 1, size=2, spills=64),  # with a window and a key mask; else none
    Tile(64, 32, 8, 2, 1, 1, size=2, spills=32),
    Tile(64, 16, 8, 2, 1, 1, size=2),
    Tile(32, 16, 4, 2, 1, 1, size=2),
)
# Of k and v of 8 bits, `stages` tiles of which are in flight as bytes, and one has become 16 bits. A few rows are those
# of the heads that share a head of k.
EIGHT_TILES = (
    Tile(16, 64, 4, 4, 2, 3, dim=128, seq_q=16, size=2),
    Tile(16, 64, 4, 4, 2, 2, dim=128, seq_q=16, size=2),
    Tile(16, 64, 4, 4, 2, 1, dim=256, seq_q=16, size=2),
    Tile(64, 64, 4, 1, 1, 2, dim=128, size=2),
    Tile(64, 64, 4, 2, 1, 1, dim=256, size=2),
    Tile(64, 32, 4, 2, 1, 1, dim=256, size=2),
    Tile(64, 32, 8, 2, 1, 1, size=2),
    Tile(64, 16, 8, 2, 1, 1, size=2),
    Tile(32, 16, 4, 2, 1, 1, size=2),
)
BACKWARD_TILES = (
    Tile(64, 64, 4, 1, 1, 3, dim=32, size=4),
    Tile(64, 128, 8, 2, 1, 1, dim=64, size=4),
    Tile(32, 64, 8, 2, 1, 1, dim=64, size=4),
    Tile(64, 64, 8, 4, 1, 1, dim=128, size=4),
    Tile(64, 32, 8, 4, 1, 1, size=4, spills=144),
    Tile(32, 32, 4, 2, 1, 1, dim=128, size=4),
    Tile(32, 32, 4, 2, 1, 1, size=4, spills=352),
    Tile(16, 32, 2, 1, 1, 1, dim=192, size=4, spills=736),
    Tile(32, 64, 4, 1, 1, 2, dim=64, size=8, spills=136),
    Tile(32, 64, 8, 2, 1, 1, dim=128, size=8),
    Tile(32, 32, 4, 2, 1, 1, dim=128, size=8),
    Tile(32, 32, 8, 4, 1, 1, dim=192, size=8, spills=32),
    Tile(32, 16, 4, 4, 1, 1, size=8, spills=560),  # a warp has 64 columns of dQ beside those of dK and dV
    Tile(64, 64, 4, 1, 2, 3, dim=64, seq_q=2048),
    Tile(128, 128, 8, 2, 2, 1, dim=64),
    Tile(64, 128, 8, 2, 1, 1, dim=64),
    Tile(64, 128, 8, 2, 2, 1, dim=128),
    Tile(64, 64, 8, 4, 1, 1, dim=128),
    Tile(64, 64, 8, 2, 2, 1, dim=192),
    Tile(64, 64, 8, 4, 2, 1, dim=256),
    Tile(32, 64, 8, 2, 1, 1, dim=256),
    Tile(32, 32, 4, 2, 1, 1, dim=256),
    Tile(64, 64, 8, 4, 1, 1, dim=320, size=2),
    Tile(64, 32, 8, 4, 1, 1, size=2),
    Tile(32, 32, 8, 4, 1, 1, size=2),
    Tile(32, 16, 4, 4, 1, 1, size=2),
    Tile(16, 16, 4, 4, 1, 1, size=2),
)
JVP_TILES = (
    Tile(64, 48, 4, 1, 1, 2, dim=64, size=4),
    Tile(128, 32, 8, 1, 1, 1, dim=128, size=4, spills=96),
    Tile(64, 32, 4, 1, 1, 1, dim=128, size=4),
    Tile(64, 16, 4, 1, 1, 1, dim=128, size=4),
    Tile(32, 32, 4, 2, 1, 1, size=4),
    Tile(32, 16, 2, 1, 1, 1, size=4),
    Tile(64, 32, 4, 1, 1, 2, dim=32, size=8),
    Tile(64, 16, 4, 1, 1, 2, dim=64, size=8),
    Tile(64, 16, 4, 1, 1, 1, dim=128, size=8),
    Tile(32, 16, 2, 1, 1, 1, dim=128, size=8),
    Tile(128, 32, 4, 1, 1, 2, dim=128, size=2),
    Tile(64, 32, 4, 1, 1, 2, dim=192, size=2),
    Tile(128, 32, 8, 1, 1, 1, size=2),
    Tile(64, 32, 4, 1, 1, 1, size=2),
    Tile(32, 32, 2, 1, 1, 1, size=2),
)
BACKWARD_JVP_TILES = (
    Tile(64, 64, 4, 1, 1, 2, dim=32, size=4, spills=224),
    Tile(32, 128, 8, 2, 1, 1, dim=64, size=4),
    Tile(32, 32, 4, 2, 1, 2, dim=64, size=4),
    Tile(32, 32, 4, 2, 1, 1, dim=64, size=4),
    Tile(32, 64, 8, 2, 1, 1, dim=128, size=4),
    Tile(32, 32, 4, 2, 1, 1, dim=128, size=4, spills=336),
    Tile(16, 32, 4, 2, 1, 1, dim=128, size=4),
    Tile(16, 32, 8, 4, 1, 1, size=4),
    Tile(16, 64, 4, 1, 1, 2, dim=32, size=8),
    Tile(32, 64, 8, 2, 1, 1, dim=64, size=8),
    Tile(32, 32, 4, 2, 1, 1, dim=64, size=8),
    Tile(16, 32, 8, 4, 1, 1, dim=128, size=8),
    Tile(16, 16, 4, 4, 1, 1, dim=192, size=8),
    Tile(64, 64, 4, 2, 1, 2, dim=64, size=2),
    Tile(64, 128, 8, 2, 1, 1, dim=64, size=2),
    Tile(32, 64, 4, 2, 1, 2, dim=128, size=2),
    Tile(64, 64, 8, 4, 1, 1, dim=128, size=2),
    Tile(64, 64, 8, 4, 1, 1, dim=192, size=2),
    Tile(32, 64, 8, 2, 1, 1, size=2),
    Tile(32, 32, 4, 2, 1, 1, size=2),
    Tile(16, 32, 4, 2, 1, 1, size=2),
)
# What ptxas may spill, in bytes per thread, by pass and whether scores are more than a product. Registers are full by
# choice: a tile a step smaller was slower everywhere. A few addresses are spilled, read once per tile; with a bias,
# elements of it, which ptxas loads ahead.
LISTED_SPILLS = 140  # more, with a block mask: its addresses
SPILLS = {
    (FORWARD, False): 144, (FORWARD, True): 1072,
    (BACKWARD, False): 80, (BACKWARD, True): 480,
    (JVP, False): 104, (JVP, True): 256,
    (BACKWARD_JVP, False): 80, (BACKWARD_JVP, True): 272,
}  # fmt: skip


def spills(t: Tile, problem: AttentionProblem, of: Pass) -> int:
    return t.spills + SPILLS[of, scored(problem)] + LISTED_SPILLS * (problem.block_mask is not None)


def _registers(t: Tile, problem: AttentionProblem) -> int:
    """How many numbers of the sums of its part of a tile a thread has room for."""
    return (min(255, 65536 // (32 * t.warps * t.min_blocks)) - 40) * 4 // ITEMSIZE[problem.lse_dtype]


def _of_size(t: Tile, problem: AttentionProblem, rows: int) -> bool:
    """Fewer rows than these, and fewer than 32 keys, are for doubles."""
    return ITEMSIZE[problem.dtype] == 8 or (t.rows >= rows and t.keys >= 32)


def _copied(t: Tile, problem: AttentionProblem) -> bool:
    """Do the threads copy a whole row at once, 16 bytes each (tile/shared.cuh)?"""
    size = 8 if problem.dtype == "float64" else 2 * parts_of(problem.dtype)
    return pad(max(problem.dim, problem.dim_v), 16) * size <= 16 * 32 * t.warps


def _forward_possible(t: Tile, problem: AttentionProblem) -> bool:
    """Do the warps share the tile out evenly, and have its sums room in the registers?"""
    even = t.rows % (16 * t.warps // t.column_warps) == 0 and t.keys % (16 * t.column_warps) == 0
    sums = pad(problem.dim_v, 16) + parts_of(problem.dtype) * t.keys
    fits = t.rows * sums // (32 * t.warps) <= _registers(t, problem)
    return even and fits and _copied(t, problem) and _of_size(t, problem, 64)


def _backward_possible(t: Tile, problem: AttentionProblem) -> bool:
    d, dv = pad(problem.dim, 16), pad(problem.dim_v, 16)
    down = max(1, t.rows // 32)  # warps along dQ's rows
    query_warps = min(t.rows // 16, t.column_warps) if ITEMSIZE[problem.dtype] == 8 else t.column_warps
    even = t.keys % (16 * t.warps // t.column_warps) == 0 and t.rows % (16 * query_warps) == 0
    sums = d + dv + (1 + parts_of(problem.dtype)) * t.rows
    fits = t.keys * sums // (32 * t.warps) <= _registers(t, problem)
    if max(d, dv) > 256:  # one order of products, see WIDE in the kernel
        even = even and t.stages == 1 and t.column_warps > 1
    return even and t.warps % down == 0 and fits and _copied(t, problem) and _of_size(t, problem, 32)


TILES = {
    FORWARD: Tiles(FORWARD_TILES, {
        "rows": (32, 64, 128), "keys": (16, 32, 48, 64, 96, 128), "warps": (4, 8), "column_warps": (1, 2, 4),
        "stages": (1, 2),
        "min_blocks": (1, 2, 3),
    }, _forward_possible),
    BACKWARD: Tiles(BACKWARD_TILES, {
        "rows": (16, 32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "column_warps": (1, 2, 4),
        "stages": (1, 2),
        "min_blocks": (1, 2, 3),
    }, _backward_possible),
    JVP: Tiles(JVP_TILES, {
        "rows": (32, 64, 128), "keys": (16, 32, 48, 64), "warps": (4, 8), "column_warps": (1, 2), "stages": (1, 2),
        "min_blocks": (1, 2, 3),
    }, _forward_possible),
    BACKWARD_JVP: Tiles(BACKWARD_JVP_TILES, {
        "rows": (16, 32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "column_warps": (1, 2, 4),
        "stages": (1, 2),
        "min_blocks": (1, 2),
    }, _backward_possible),
}  # fmt: skip


PAD = 8  # elements between the rows of a shared tile, see kernels_cu/tile/shared.cuh; none in one of doubles


def moving_scores(problem: AttentionProblem) -> bool:
    """Whether scores have a tangent."""
    return any(x.name not in ("v", "sinks", "dout", "dlse") for x in problem.tangents)


def shared_memory(t: Tile, problem: AttentionProblem, of: Pass) -> int:
    """Bytes that the kernel of a tile lays out."""
    parts, accum = parts_of(problem.dtype), ITEMSIZE[problem.lse_dtype]

    def row(width: int, parts: int = parts) -> int:
        return 8 * width if problem.dtype == "float64" else 2 * (parts * width + PAD)

    dim, dim_v = t.dims(problem, of)
    # How many arrays like Q, K, V and dO there are, with their tangents.
    q, k, v, dout = (1 + problem.moves(name) for name in ("q", "k", "v", "dout"))
    maxima = 4 * t.warps * (3 if of is BACKWARD_JVP else 1) if parts > 1 else 0
    if not of.of_gradients:
        weighed = moving_scores(problem)
        of_v, of_p = (v - 1 + weighed, v - 1 + weighed) if of.moved else (1, 1)
        queries = max(q * row(dim), 0 if parts > 1 else row(dim_v))  # float32 does not leave through shared memory
        stages = 1 if problem.cache_dtype else t.stages
        size = t.rows * queries + stages * t.keys * (k * row(dim) + of_v * row(dim_v))
        if problem.cache_dtype:  # as they arrive, with a scale for each row of both
            size += t.stages * t.keys * (dim + dim_v + 8)
        exchanged = t.rows * (of_p * row(t.keys) + t.column_warps * accum) + maxima * of.moved  # P and row values
        return size + (exchanged if t.column_warps > 1 and t.keys >= 16 * t.column_warps else 0)
    tiles = 2 if t.column_warps > 1 else 1  # of P and dS
    if of.moved:
        tiles = scores_in_memory(t, problem)
    size = t.keys * (k * row(dim) + v * row(dim_v) + tiles * row(t.rows))
    numbers = 4 if of.moved else 2  # lse and delta of the queries, and their tangents
    size += t.stages * t.rows * (q * row(dim) + dout * row(dim_v) + numbers * accum)
    return size + 16 + maxima  # the ticket


def scores_in_memory(t: Tile, problem: AttentionProblem) -> int:
    """Tiles like that of scores that a jvp of the backward keeps in shared memory: tdS; dS; tP; P."""
    q, k, dout = (problem.moves(name) for name in ("q", "k", "dout"))
    moves, shared = moving_scores(problem) or problem.moves("sinks"), t.column_warps > 1
    apart = problem.dtype == "float64" and t.rows // 16 < t.column_warps
    return 1 + (k or shared and q or apart) + shared * (moves + dout)
