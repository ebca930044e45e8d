"""flash1: FlashAttention (2022) as published, to be compared with."""

from __future__ import annotations

from collections.abc import Sequence

from ...lengths import untaken
from ...passes import BACKWARD, Pass
from ...problem import FLOAT8, ITEMSIZE, AttentionProblem
from ..array_gradient import Lengths
from ..device import Arch
from ..kernel_plan import KernelPlan, Launch, Tiles, Workspace, features

TILES: dict[Pass, Tiles[int]] = {}  # the tile follows from the chip: nothing to choose
COLUMNS = (32, 64, 128)  # head dimensions are padded to one of these
SQUARES = (64, 32, 16)  # queries, and as many keys
THREADS = 256


def objection(problem: AttentionProblem, arch: Arch, of: Pass) -> str | None:
    if why := untaken(problem):
        return why
    if problem.at is not None or problem.has("at"):
        return "takes no `at`"
    if problem.widened:
        return f"has no results of float32 beside inputs of {problem.dtype}"
    if problem.add:
        return "does not add to gradients"
    if of.moved:
        return f"has no {of}"
    if problem.dtype == FLOAT8:
        return f"takes no {problem.dtype}"
    if problem.cache_dtype is not None:
        return f"takes no k and v of {problem.cache_dtype} beside q of {problem.dtype}"
    if problem.dtype == "float64":
        return "takes float16, bfloat16 and float32, not float64"
    largest = COLUMNS[-1]  # all columns of a tile are on the chip at once
    if max(problem.dim, problem.dim_v) > largest:
        return f"takes head dimensions up to {largest}, not {problem.dim} and {problem.dim_v}"
    others = [x.name for x in problem.given if x.name != "key_mask"] + ["softcap"] * (problem.softcap is not None)
    others += ["dropout"] * (problem.dropout > 0)
    others += ["block_mask"] * (problem.block_mask is not None)
    others += ["score function"] * (problem.score is not None)
    if others:
        return f"takes no {' and no '.join(others)}"
    return None


def gradients(problem: AttentionProblem, arch: Arch, lengths: Lengths) -> None:
    return None  # it takes no array that has one


def shared_memory(tile: int, columns: int, of: Pass) -> int:
    """Bytes of a tile's Q, K, V and O (or their gradients) and its scores, rows padded by 16 bytes."""
    backward = of is BACKWARD
    return 4 * tile * ((3 + backward) * (columns + 4) + tile + 4 + backward)


def plan(problem: AttentionProblem, arch: Arch, of: Pass, tile: Sequence[int] | None) -> KernelPlan:
    """With the largest square tile that fits: the paper's Bc = M / 4d and Br = min(Bc, d), in powers of two."""
    columns = next(n for n in COLUMNS if max(problem.dim, problem.dim_v) <= n)
    for t in SQUARES:
        size = shared_memory(t, columns, of)
        if size <= arch.shared_memory:
            break
    else:
        raise ValueError(f"no flash1 tile of head dimension {problem.dim} fits {arch.shared_memory} bytes")
    constants = (
        ("OWNED", t), ("VISITED", t), ("COLUMNS", columns),
        ("DEPTH", t),  # nothing comes in pieces
        ("THREADS", THREADS), ("ON_CHIP", size), *features(problem),
    )  # fmt: skip
    rows = (problem.batch * problem.heads_q, problem.seq_q)
    # O and dQ are read and written at every step; where they have 16 bits, in float32 aside.
    aside = problem.dtype != "float32"
    if of is BACKWARD:
        launch = Launch("attention_backward", problem.batch * problem.heads_k, THREADS, size)
        workspace: tuple[Workspace, ...] = (Workspace("dq_sum", "float32", (*rows, problem.dim if aside else 0)),)
    else:
        launch = Launch("attention_forward", problem.batch * problem.heads_q, THREADS, size)
        sums = Workspace("o_sum", "float32", (*rows, problem.dim_v if aside else 0))
        workspace = (Workspace("m", "float32", rows), Workspace("l", "float32", rows), sums)
    return KernelPlan(
        family="flash1",
        arch=arch.name,
        dtype=problem.dtype,
        of=of,
        source=f"flash1/{of}.cu",
        constants=constants,
        launches=(launch,),
        alignment=ITEMSIZE[problem.dtype],
        workspace=workspace,
        given=problem.given,
    )
