"""sm80: mma.sync tensor cores, on Ampere and every GPU after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...blockmask.tile_lists import ListUse
from ...passes import BACKWARD, FORWARD, JVP, Pass
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ..array_gradient import Lengths, work
from ..device import Arch
from ..kernel_plan import (
    KernelPlan,
    Launch,
    Workspace,
    both_ways,
    features,
    key_numbers,
    key_tiles,
    lists,
    pad,
    query_numbers,
    query_tiles,
    room,
)
from ..measured import number
from ..score_gradient import score_work
from . import shares, sm80_tiles
from .likely import as_dense
from .sm80_tiles import ANY, PAD, WIDEST, Tile, parts_of, shared_memory, spills

TILES = sm80_tiles.TILES
# Compute capabilities whose tensor cores multiply doubles at full rate. Elsewhere `simt` is as fast.
FAST_DOUBLES = (8.0, 9.0, 10.0)


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    if problem.page is not None and of is not FORWARD:
        return f"takes no page_table in a {of}"
    if problem.dtype == FLOAT8:
        return f"takes no {problem.dtype}"
    if problem.cache_dtype is not None and of is not FORWARD:
        return f"takes no k and v of {problem.cache_dtype} beside q of {problem.dtype} in a {of}"
    if problem.batch_invariant and parts_of(problem.dtype) > 1:  # the rows of a tile are split in one unit
        return f"takes no batch_invariant=True with {problem.dtype}"
    if arch.cc < 80:
        return f"needs compute capability 8.0, this GPU has {arch.cc / 10}"
    if problem.dtype == "float64" and arch.cc / 10 not in FAST_DOUBLES:
        return f"takes float64 where double precision is fast {FAST_DOUBLES}, not on compute capability {arch.cc / 10}"
    widest = WIDEST if ITEMSIZE[problem.dtype] == 2 and not of.moved else 256
    if max(problem.dim, problem.dim_v) > widest:
        dims = f"{problem.dim} and {problem.dim_v}"
        return f"takes head dimensions up to {widest} in a {of} of {problem.dtype}, not {dims}"
    if _fitting(problem, arch, of, None) is None:
        dims = f"{problem.dim} and {problem.dim_v}"
        return f"has no {problem.dtype} {of} for head dimensions {dims} in {arch.shared_memory} bytes"
    return None


# FLOP/s of a multiprocessor, by bytes of a number.
RATES = {2: number("sm80.rate_2"), 4: number("sm80.rate_4"), 8: number("sm80.rate_8")}
CROWDING = number("sm80.crowding")
BYTES = number("sm80.bytes")
ALONE = 2.0  # so many times what its bytes take a block needs that has a multiprocessor to itself: reckoned


def _fitting(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> Tile | None:
    """The first tile that the problem and the GPU's shared memory admit; of a size, for as many blocks as it is made
    for."""
    seq_q = ANY if problem.batch_invariant else problem.seq_q
    for t in sm80_tiles.EIGHT_TILES if problem.cache_dtype else TILES[of].rows(tile):
        size = shared_memory(t, problem, of)
        if (
            t.size in (None, ITEMSIZE[problem.dtype]) and max(t.dims(problem, of)) <= t.dim and seq_q <= t.seq_q
            and size <= room(arch, 1 if t.size is None else t.min_blocks)
        ):  # fmt: skip
            return t
    return None


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    parts = parts_of(problem.dtype)
    t = _fitting(problem, arch, of, tile)
    if t is None:
        raise ValueError(f"no sm80 {of} tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    dim, dim_v = t.dims(problem, of)
    size = shared_memory(t, problem, of)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("DIM", dim), ("DIM_V", dim_v), *((name.upper(), getattr(t, name)) for name in TILES[of].tried),
        ("SHARED_MEMORY", size), *features(problem),
        # Whether there are dead rows before the live ones, by position.
        *((f"DEAD_{name}", dead) for name, dead in zip(("QUERIES", "KEYS"), _dead(problem))),
    )  # fmt: skip
    tiles_q = query_tiles(problem, t.rows)
    common = _common(problem, arch, of) | {"out_dtype": problem.out_dtype, "dq_dtype": problem.dq_dtype}
    split, halves = _split(problem, t, dim, dim_v, of) if parts > 1 else ((), ())
    if of is JVP:
        return KernelPlan(
            **common,
            source="sm80/jvp.cu",
            constants=constants,
            launches=(*split, Launch("attention_jvp", tiles_q, 32 * t.warps, size)),
            workspace=halves,
            spills=spills(t, problem, of),
            lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        )
    if of is FORWARD:
        flops = 2 * t.rows * t.keys * (problem.dim + problem.dim_v)
        visit = shares.Visit(flops / RATES[ITEMSIZE[problem.dtype]], crowding=CROWDING)
        if problem.cache_dtype:  # few rows wait for the bytes of their keys
            arrive = t.keys * (problem.dim + problem.dim_v) / BYTES
            visit = visit._replace(seconds=max(visit.seconds, arrive), least=ALONE * arrive)
        tiles = shares.Tiles(tiles_q, t.rows, t.keys, t.min_blocks, visit)
        share_tiles, share = 0, 1 if problem.batch_invariant else shares.shares(problem, tiles, arch.sms).number
        packed = problem.rows_q is not None or problem.rows_k is not None
        if not (problem.batch_invariant or packed) and problem.seq_q <= t.rows:
            share_tiles, share = shares.by_length(problem, as_dense(problem), t.keys, share)
        waits = arch.cc >= 90
        launch = Launch("attention_forward", tiles_q * share, 32 * t.warps, size, waits=waits)
        combined = shares.combined(problem, share, dim_v, arch.sms)
        return KernelPlan(
            **common,
            source="sm80/forward.cu",
            constants=(*constants, ("SHARES", share > 1), ("SHARE_TILES", share_tiles)),
            launches=(*split, launch, *shares.combine(combined, share, arch, waits)),
            workspace=(*halves, *shares.left(problem, share, dim_v)),
            spills=spills(t, problem, of),
            scalars=(("shares", share), ("combine_lanes", combined.lanes)),
            lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        )
    launches = (
        *split,
        Launch(f"attention_{of}_prepare", tiles_q, 128),
        Launch(f"attention_{of}", key_tiles(problem, t.keys), 32 * t.warps, size),
        Launch(f"attention_{of}_finish", tiles_q, 128),
    )
    in_turn = problem.deterministic or problem.batch_invariant  # whether tiles of keys add to dQ in a fixed order
    numbers = 4 if of.moved else 2  # of each query: lse and delta, and what these change by
    workspace = (
        Workspace("delta", problem.lse_dtype, (*_tiles_of_heads(problem, t.rows), numbers, t.rows), t.rows),
        Workspace("dq_sum", problem.lse_dtype, (*_tiles_of_heads(problem, t.rows), t.rows * dim)),
        Workspace("counters", "uint32", (tiles_q + 1 if in_turn else 0,)),
        *halves,
    )
    constants += (("DETERMINISTIC", in_turn), ("VECTOR_RED", arch.cc >= 90))
    return KernelPlan(
        **common,
        source=f"sm80/{of}.cu",
        constants=constants,
        launches=tuple(x for x in launches if x.grid),
        workspace=workspace,
        spills=spills(t, problem, of),
        lists=both_ways(problem, t.rows, t.keys, "keys"),
    )


def _dead(problem: AttentionProblem) -> tuple[bool, bool]:
    """Whether queries, and keys, may be dead that come before the live ones."""
    if problem.shifts:
        return problem.right is not None, problem.left is not None
    queries, keys = problem.live
    return queries.start > 0, keys.start > 0


def _tiles_of_heads(problem: AttentionProblem, rows: int) -> tuple[int, int]:
    """Heads whose tiles of queries are numbered, and how many of these each has."""
    heads, _ = query_numbers(problem)
    return heads, query_tiles(problem, rows) // max(1, heads)


def _common(problem: AttentionProblem, arch: Arch, of: Pass) -> dict[str, Any]:
    """What all plans of this family say alike. (Float32 is split before: then rows need not be aligned.)"""
    return {
        "family": "sm80",
        "arch": arch.name,
        "dtype": problem.dtype,
        "cache_dtype": problem.cache_dtype,
        "of": of,
        "alignment": 16 if parts_of(problem.dtype) == 1 else ITEMSIZE[problem.dtype],
        "given": problem.given,
        "tangents": problem.tangents,
    }


def _split(
    problem: AttentionProblem, t: Tile | GradientTile, dim: int, dim_v: int, of: Pass
) -> tuple[tuple[Launch, ...], tuple[Workspace, ...]]:
    """What puts the parts of float32 numbers into memory, and that memory (kernels_cu/attention/operands.cuh)."""
    of_queries = (query_tiles(problem, t.rows), math.prod(query_numbers(problem)), t.rows)
    of_keys = (key_tiles(problem, t.keys), math.prod(key_numbers(problem)), t.keys)
    arrays = [("q", *of_queries, dim), ("k", *of_keys, dim), ("v", *of_keys, dim_v)]
    arrays += [("dout", *of_queries, dim_v)] if of.of_gradients else []
    tiles, spaces = 0, []
    for name, of_array, rows, size, width in (*arrays, *((f"t{x[0]}", *x[1:]) for x in arrays if problem.moves(x[0]))):
        tiles += of_array
        spaces.append(Workspace(f"{name}_halves", "float16", (rows, 2 * width), size))
        spaces.append(Workspace(f"{name}_units", "float32", (of_array,), size))
    return (Launch("attention_split", tiles, 256, fills=tuple(x.name for x in spaces)),), tuple(spaces)


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
        """Bytes that the kernel lays out: the pieces, whose place the sums take in the end, and a bias of so many
        bytes."""
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


def gradients(problem: AttentionProblem, arch: Arch, lengths: Lengths) -> KernelPlan | None:
    if problem.dtype == "float64" or problem.tangents:
        return None
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
        pad(n, 16) if parts > 1 else next(x for x in (64, 128, 256, WIDEST) if n <= x)
        for n in (problem.dim, problem.dim_v)
    )
    if t.shares and main is not None:
        dim, dim_v = main.dims(problem, BACKWARD)
    of_arrays = work(problem, lengths, t.rows, t.keys, threads, size, arch.sms)
    of_arrays += score_work(problem, lengths, t.rows, t.keys, threads, size, arch.sms)
    constants: tuple[tuple[str, int | bool], ...] = (
        ("ROWS", t.rows), ("KEYS", t.keys), ("ROW_WARPS", t.row_warps), ("COLUMN_WARPS", t.column_warps),
        ("DEPTH", depth), ("STAGES", t.stages), ("DIM", dim), ("DIM_V", dim_v), ("SHARED_MEMORY", size),
        *of_arrays.constants, *features(problem),
    )  # fmt: skip
    split, halves = _split(problem, t, dim, dim_v, BACKWARD) if parts > 1 else ((), ())
    prepare = Launch("attention_backward_prepare", query_tiles(problem, t.rows), 128, fills=("delta",))
    return KernelPlan(
        **_common(problem, arch, BACKWARD),
        source="sm80/array_gradient.cu",
        constants=constants,
        launches=(*split, prepare, *of_arrays.launches),
        workspace=(
            Workspace("delta", "float32", (*_tiles_of_heads(problem, t.rows), 2, t.rows), t.rows),
            *of_arrays.workspace,
            *halves,
        ),
        spills=GRADIENT_SPILLS,
        scalars=of_arrays.scalars,
        lists=lists(problem, ListUse("key_lists", t.rows, t.keys, "queries")),
        wrt=tuple(lengths),
    )
