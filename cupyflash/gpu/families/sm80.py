"""sm80: mma.sync tensor cores, on Ampere and every GPU after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...passes import BACKWARD, FORWARD, Pass
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ...tile_lists import ListUse
from ..array_gradient import Lengths, work
from ..device import Arch
from ..kernel_plan import KernelPlan, Launch, Tiles, Workspace, ceil, features, lists, pad, scored
from ..score_gradient import score_work
from . import shares, simt

# Compute capabilities whose tensor cores multiply doubles at full rate. Elsewhere `simt` is as fast.
FAST_DOUBLES = (8.0, 9.0, 10.0)


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    if problem.dtype == FLOAT8:
        return f"takes no {problem.dtype}"
    if arch.cc < 80:
        return f"needs compute capability 8.0, this GPU has {arch.cc / 10}"
    if problem.dtype == "float64" and arch.cc / 10 not in FAST_DOUBLES:
        return f"takes float64 where double precision is fast {FAST_DOUBLES}, not on compute capability {arch.cc / 10}"
    if max(problem.dim, problem.dim_v) > 256:
        return f"takes head dimensions up to 256, not {problem.dim} and {problem.dim_v}"
    if _fitting(problem, arch, of, None) is None:
        return f"has no {problem.dtype} {of} for head dimensions {problem.dim} and {problem.dim_v} in {arch.shared_memory} bytes"
    return None


ANY = 1 << 30


@dataclass(frozen=True)
class Tile:
    """Forward: a thread block owns `rows` queries and visits `keys` keys at a time. Backward: it owns `keys` keys and
    visits `rows` queries at a time. `column_warps` warps share 16-row fragments, each with its part of the columns.
    """

    rows: int
    keys: int
    warps: int
    column_warps: int
    stages: int  # tiles in flight: 2, or 1 where another thread block hides the wait
    min_blocks: int  # thread blocks on a multiprocessor: bounds the registers
    dim: int = 256  # for head dimensions up to this
    seq_q: int = ANY  # and this many queries
    size: int | None = None  # and elements of so many bytes; None: any
    spills: int = 0  # bytes per thread that ptxas may spill beside SPILLS

    def dims(self, problem: AttentionProblem, of: Pass) -> tuple[int, int]:
        """Head dimensions as the kernel pads them."""
        step = 16 * self.column_warps
        return pad(problem.dim, step if of is BACKWARD else 16), pad(problem.dim_v, step)


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
    Tile(64, 64, 4, 2, 1, 2),
    Tile(64, 32, 4, 1, 1, 2),
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
    Tile(64, 64, 8, 4, 2, 1),
    Tile(32, 64, 8, 2, 1, 1),
    Tile(32, 32, 4, 2, 1, 1),
)
# What ptxas may spill, in bytes per thread, by pass and whether scores are more than a product. Registers are full by choice:
# a tile a step smaller was slower everywhere. A few addresses are spilled, read once per tile; with a bias, elements of it,
# which ptxas loads ahead.
LISTED_SPILLS = 112  # more, with a block mask: its addresses
SPILLS = {(FORWARD, False): 144, (FORWARD, True): 1072, (BACKWARD, False): 80, (BACKWARD, True): 480}


def _spills(t: Tile, problem: AttentionProblem, of: Pass) -> int:
    return t.spills + SPILLS[of, scored(problem)] + LISTED_SPILLS * (problem.block_mask is not None)


def _registers(t: Tile, problem: AttentionProblem) -> int:
    """How many numbers of the sums of its part of a tile a thread has room for."""
    return (min(255, 65536 // (32 * t.warps * t.min_blocks)) - 40) * 4 // ITEMSIZE[problem.lse_dtype]


def _of_size(t: Tile, problem: AttentionProblem, rows: int) -> bool:
    """Fewer rows than these, and fewer than 32 keys, are for doubles."""
    return ITEMSIZE[problem.dtype] == 8 or (t.rows >= rows and t.keys >= 32)


def _forward_possible(t: Tile, problem: AttentionProblem) -> bool:
    """Do the warps share the tile out evenly, and have its sums room in the registers?"""
    even = t.rows % (16 * t.warps // t.column_warps) == 0 and t.keys % (16 * t.column_warps) == 0
    sums = pad(problem.dim_v, 16) + parts_of(problem.dtype) * t.keys
    fits = t.rows * sums // (32 * t.warps) <= _registers(t, problem)
    return even and fits and _of_size(t, problem, 64)


def _backward_possible(t: Tile, problem: AttentionProblem) -> bool:
    d, dv = pad(problem.dim, 16), pad(problem.dim_v, 16)
    down = max(1, t.rows // 32)  # warps along dQ's rows
    query_warps = min(t.rows // 16, t.column_warps) if ITEMSIZE[problem.dtype] == 8 else t.column_warps
    even = t.keys % (16 * t.warps // t.column_warps) == 0 and t.rows % (16 * query_warps) == 0
    sums = d + dv + (1 + parts_of(problem.dtype)) * t.rows
    fits = t.keys * sums // (32 * t.warps) <= _registers(t, problem)
    return even and t.warps % down == 0 and fits and _of_size(t, problem, 32)


TILES = {
    FORWARD: Tiles(FORWARD_TILES, {
        "rows": (32, 64, 128), "keys": (16, 32, 48, 64, 96, 128), "warps": (4, 8), "column_warps": (1, 2), "stages": (1, 2),
        "min_blocks": (1, 2, 3),
    }, _forward_possible),
    BACKWARD: Tiles(BACKWARD_TILES, {
        "rows": (16, 32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "column_warps": (1, 2, 4), "stages": (1, 2),
        "min_blocks": (1, 2, 3),
    }, _backward_possible),
}  # fmt: skip


# FLOP/s of a multiprocessor, by bytes of a number: between an RTX 4090's and an H200's.
RATES = {2: 2e12, 4: 7e11, 8: 3e11}
CROWDING = 0.9  # two blocks of a multiprocessor take 1.7 to 1.9 times as long as one

PAD = 8  # elements between the rows of a shared tile, see kernels_cu/tile/shared.cuh; none in one of doubles


def shared_memory(t: Tile, dim: int, dim_v: int, of: Pass, dtype: str) -> int:
    """Bytes that the kernel of a tile lays out."""
    parts = parts_of(dtype)
    size, pad, of_sums = (8, 0, 8) if dtype == "float64" else (2, PAD, 4)
    pair = parts * (dim + dim_v) + 2 * pad  # a row of Q and dO, or of K and V
    if of is FORWARD:
        widest = parts * dim if parts > 1 else max(dim, dim_v)  # float32 does not leave through shared memory
        elements = t.rows * (widest + pad) + t.stages * t.keys * pair
        exchanged = size * t.rows * (parts * t.keys + pad) + 2 * of_sums * t.rows  # P and row values
        return size * elements + (exchanged if t.column_warps > 1 else 0)
    elements = (t.keys + t.stages * t.rows) * pair
    elements += (2 if t.column_warps > 1 else 1) * t.keys * (parts * t.rows + pad)
    maxima = 4 * t.warps if parts > 1 else 0
    return size * elements + t.stages * 2 * of_sums * t.rows + 16 + maxima  # lse and delta of the queries, the ticket


def _fitting(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> Tile | None:
    """The first tile that the problem and the GPU's shared memory admit; of a size, for as many blocks as it is made for."""
    for t in TILES[of].rows(tile):
        dim, dim_v = t.dims(problem, of)
        size = shared_memory(t, dim, dim_v, of, problem.dtype)
        if (
            t.size in (None, ITEMSIZE[problem.dtype]) and max(dim, dim_v) <= t.dim and problem.seq_q <= t.seq_q
            and size <= arch.shared_memory and (t.size is None or t.min_blocks * (size + 1024) <= arch.shared_memory + 1024)
        ):  # fmt: skip
            return t
    return None


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    parts = parts_of(problem.dtype)
    t = _fitting(problem, arch, of, tile)
    if t is None:
        raise ValueError(f"no sm80 {of} tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    dim, dim_v = t.dims(problem, of)
    size = shared_memory(t, dim, dim_v, of, problem.dtype)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), *((name.upper(), getattr(t, name)) for name in TILES[of].tried),
        ("SHARED_MEMORY", size), *features(problem),
        # Whether there are dead rows before the live ones, by position.
        *((f"DEAD_{name}", rows.start > 0) for name, rows in zip(("QUERIES", "KEYS"), problem.live)),
    )  # fmt: skip
    pairs, tiles_q = problem.batch * problem.heads_q, ceil(problem.seq_q, t.rows)
    common = _common(problem, arch, of)
    split, halves = _split(problem, t, dim, dim_v, of) if parts > 1 else ((), ())
    if of is FORWARD:
        flops = 2 * t.rows * t.keys * (problem.dim + problem.dim_v)
        visit = shares.Visit(flops / RATES[ITEMSIZE[problem.dtype]], crowding=CROWDING)
        tiles = shares.Tiles(pairs * tiles_q, t.rows, t.keys, t.min_blocks, visit)
        share = shares.shares(problem, tiles, arch.sms).number
        launch = Launch("attention_forward", pairs * tiles_q * share, 32 * t.warps, size)
        launches = (*split, launch, *shares.combine(problem, share))
        return KernelPlan(
            **common,
            source="sm80/forward.cu",
            constants=(*constants, ("SHARES", share > 1)),
            launches=launches,
            workspace=(*halves, *shares.left(problem, share, dim_v)),
            spills=_spills(t, problem, of),
            scalars=(("shares", share),),
            lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        )
    blocks = problem.batch * problem.heads_k * ceil(problem.seq_k, t.keys)
    launches = (
        *split,
        Launch("attention_backward_prepare", pairs * tiles_q, 128),
        Launch("attention_backward", blocks, 32 * t.warps, size),
        Launch("attention_backward_finish", pairs * tiles_q, 128),
    )
    workspace = (
        Workspace("delta", problem.lse_dtype, (pairs, tiles_q, 2, t.rows), t.rows),  # and lse
        Workspace("dq_sum", problem.lse_dtype, (pairs, tiles_q, t.rows * dim)),
        Workspace("counters", "uint32", (pairs * tiles_q + 1 if problem.deterministic else 0,)),
        *halves,
    )
    constants += (("DETERMINISTIC", problem.deterministic), ("VECTOR_RED", arch.cc >= 90))
    return KernelPlan(
        **common,
        source="sm80/backward.cu",
        constants=constants,
        launches=launches,
        workspace=workspace,
        spills=_spills(t, problem, of),
        lists=both_ways(problem, t.rows, t.keys, "keys"),
    )


def _common(problem: AttentionProblem, arch: Arch, of: Pass) -> dict[str, Any]:
    """What all plans of this family say alike. (Float32 is split before: then rows need not be aligned.)"""
    return {
        "family": "sm80",
        "arch": arch.name,
        "dtype": problem.dtype,
        "of": of,
        "alignment": 16 if parts_of(problem.dtype) == 1 else ITEMSIZE[problem.dtype],
        "given": problem.given,
    }


def _split(
    problem: AttentionProblem, t: Tile | GradientTile, dim: int, dim_v: int, of: Pass
) -> tuple[tuple[Launch, ...], tuple[Workspace, ...]]:
    """What puts the parts of float32 numbers into memory, and that memory (kernels_cu/attention/operands.cuh)."""
    of_queries = (problem.heads_q, problem.seq_q, t.rows)
    of_keys = (problem.heads_k, problem.seq_k, t.keys)
    arrays = [("q", *of_queries, dim), ("k", *of_keys, dim), ("v", *of_keys, dim_v)]
    arrays += [("dout", *of_queries, dim_v)] if of is BACKWARD else []
    tiles, spaces = 0, []
    for name, heads, seq, size, width in arrays:
        of_array = problem.batch * heads * ceil(seq, size)
        tiles += of_array
        spaces.append(Workspace(f"{name}_halves", "float16", (problem.batch * heads * seq, 2 * width), size))
        spaces.append(Workspace(f"{name}_units", "float32", (of_array,), size))
    return (Launch("attention_split", tiles, 256, fills=tuple(x.name for x in spaces)),), tuple(spaces)


def both_ways(problem: AttentionProblem, rows: int, keys: int, bits: str) -> tuple[ListUse, ...]:
    """What a backward asks of a block mask whose blocks own tiles of keys: also which of them add to dQ of a tile of queries."""
    return lists(problem, ListUse("query_lists", rows, keys, bits), ListUse("key_lists", rows, keys, None))


@dataclass(frozen=True)
class GradientTile:
    """Of arrays: a thread block sums dS of `rows` queries by `keys` keys, with so many warps down and across."""

    rows: int
    keys: int
    row_warps: int
    column_warps: int
    stages: int  # pieces of the operands in flight
    length: int = ANY  # where there are no more queries, or no more keys
    parts: int | None = None  # that a number is; None: any
    shares: bool = False  # only where the backward of q, k and v has such tiles: what that has split is not split again

    def shared_memory(self, depth: int, bias: int, parts: int) -> int:
        """Bytes that the kernel lays out: the pieces, whose place the sums take in the end, and a bias of so many bytes."""
        pieces = max(self.stages * 2 * (self.rows + self.keys) * (parts * depth + PAD), 4 * self.rows * (self.keys + 2))
        return pieces + bias * self.rows * (self.keys + PAD)


GRADIENT_SPILLS = 560  # of addresses, once per tile: 512 threads have 128 registers each
GRADIENT = (
    *(GradientTile(64, keys, 2, keys // 32, stages, 1024, 2, True) for keys, stages in ((64, 4), (128, 3), (128, 2))),
    GradientTile(64, 64, 2, 2, 4, length=64),
    GradientTile(128, 64, 4, 2, 3, parts=2),
    *(GradientTile(128, 128, 4, 4, stages) for stages in (4, 3, 2)),
    *(GradientTile(64, 64, 2, 2, stages) for stages in (4, 3, 2)),
)


def gradients(problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan:
    """The plan that gives the gradients of arrays, of these lengths along (batch, head, query, key)."""
    if problem.dtype == "float64":
        return simt.gradients(problem, arch, lengths)
    parts = parts_of(problem.dtype)
    depth = 32 if max(problem.dim, problem.dim_v) <= 32 else 64  # columns of a piece
    shortest = min(problem.seq_q, problem.seq_k)
    bias = ITEMSIZE[x.dtype] if "bias" in lengths and (x := problem.array("bias")) else 0
    main = _fitting(problem, arch, BACKWARD, None)
    t = next(
        t
        for t in GRADIENT
        if shortest <= t.length
        and (not t.shares or (main is not None and (t.rows, t.keys) == (main.rows, main.keys)))
        and t.parts in (None, parts)
        and t.shared_memory(depth, bias, parts) <= arch.shared_memory
    )
    size, threads = t.shared_memory(depth, bias, parts), 32 * t.row_warps * t.column_warps
    # Operands come in pieces, whatever the head dimension; those that are split have rows of their own.
    dim, dim_v = (
        pad(n, 16) if parts > 1 else next(x for x in (64, 128, 256) if n <= x) for n in (problem.dim, problem.dim_v)
    )
    if t.shares and main is not None:
        dim, dim_v = main.dims(problem, BACKWARD)
    of_arrays = work(problem, lengths, t.rows, t.keys, threads, size, arch.sms)
    of_arrays += score_work(problem, lengths, t.rows, t.keys, threads, size, arch.sms)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("ROWS", t.rows), ("KEYS", t.keys), ("ROW_WARPS", t.row_warps), ("COLUMN_WARPS", t.column_warps),
        ("DEPTH", depth), ("STAGES", t.stages), ("DIM", dim), ("DIM_V", dim_v), ("SHARED_MEMORY", size), *of_arrays.constants, *features(problem),
    )  # fmt: skip
    pairs, tiles_q = problem.batch * problem.heads_q, ceil(problem.seq_q, t.rows)
    split, halves = _split(problem, t, dim, dim_v, BACKWARD) if parts > 1 else ((), ())
    prepare = Launch("attention_backward_prepare", pairs * tiles_q, 128, fills=("delta",))
    return KernelPlan(
        **_common(problem, arch, BACKWARD),
        source="sm80/array_gradient.cu",
        constants=constants,
        launches=(*split, prepare, *of_arrays.launches),
        workspace=(Workspace("delta", "float32", (pairs, tiles_q, 2, t.rows), t.rows), *of_arrays.workspace, *halves),
        spills=GRADIENT_SPILLS,
        scalars=of_arrays.scalars,
        lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        wrt=tuple(lengths),
    )
