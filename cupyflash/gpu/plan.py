"""From a problem to the kernels that answer it: family, tiles, stages, grid, workspace. Pure; tested without a GPU.

A family is a row in `FAMILIES`: why it does not take a problem, and how it plans one it takes. The order is the
preference; the first family with nothing to object is chosen, and the objections of the others are kept for `explain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..problem import ITEMSIZE, AttentionProblem
from . import tuning
from .device import Arch


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan, in order."""

    name: str
    grid: int
    threads: int
    shared_memory: int = 0


@dataclass(frozen=True)
class Workspace:
    """Memory that a plan needs beyond inputs and outputs. `name` is a field of Params."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "uint32" else ITEMSIZE[self.dtype])


class Box(NamedTuple):
    """What the copy engine moves at once of an array: `rows` rows of `heads` heads (and 64 columns)."""

    array: str
    rows: int
    heads: int = 1


@dataclass(frozen=True)
class KernelPlan:
    family: str
    arch: str
    dtype: str
    source: str  # file under kernels_cu/
    constants: tuple[tuple[str, int | bool | float], ...]
    launches: tuple[Launch, ...]
    alignment: int  # bytes that the inputs' pointers and rows must be multiples of
    workspace: tuple[Workspace, ...] = ()
    passed_over: tuple[str, ...] = ()  # why faster families were not taken
    spills: int = 0  # bytes of registers per thread that the tuning row lets ptxas spill
    maps: tuple[Box, ...] = ()  # how the copy engine moves arrays, in the order in which the kernels take their maps
    together: int = 1  # sm90 backward: heads of K and V whose tiles are dealt out as one
    kept: int = 0  # and for whose float32 dQ there is room at a time


def plan(problem: AttentionProblem, arch: Arch, backward: bool = False, family: str | None = None) -> KernelPlan:
    """Choose the family (or take the one named) and plan the problem on `arch`.

    Raises ValueError where the family named, or every family, objects to the problem.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(map(repr, FAMILIES))}, or None")
    objections: list[str] = []
    for name, (objection, build) in FAMILIES.items():
        if family == name or (family is None and name not in ON_REQUEST):
            why = objection(problem, arch, backward)
            if why is None:
                return _checked(build(problem, arch, backward, tuple(objections)), problem)
            objections.append(f"{name} {why}")
    raise ValueError(f"no kernel family takes this problem: {'; '.join(objections)}")


def _checked(plan: KernelPlan, problem: AttentionProblem) -> KernelPlan:
    """Positions and thread blocks are 32-bit integers in the kernels; elements and bytes are 64-bit."""
    for name, length in (("q", problem.seq_q), ("k", problem.seq_k)):
        if length >= 2**30:
            raise ValueError(f"{name} has a sequence of {length}; the kernels take less than 2**30")
    blocks = max(x.grid for x in plan.launches)
    if blocks >= 2**31:
        raise ValueError(f"q has batch {problem.batch} and {problem.heads_q} heads: {blocks} tiles; less than 2**31 fit")
    return plan


def _features(problem: AttentionProblem) -> tuple[tuple[str, int | bool], ...]:
    """What is asked of the mask and the score, as constants: what is not asked compiles to nothing."""
    return (
        ("LEFT", problem.left is not None),
        ("RIGHT", problem.right is not None),
        ("KEY_MASK", problem.key_mask),
        ("NEGATIVE_SCALE", problem.scale < 0),
    )


def _ceil(n: int, step: int) -> int:
    return -(-n // step)


# ---- sm90: wgmma tensor cores and the copy engine of Hopper -----------------------------------------------------------


def _sm90_objection(problem: AttentionProblem, arch: Arch, backward: bool) -> str | None:
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if arch.cc != 90:
        return f"is for compute capability 9.0, this GPU has {arch.cc / 10}"
    if not 0 < min(problem.dim, problem.dim_v) or max(problem.dim, problem.dim_v) > 256:
        return f"takes head dimensions from 1 to 256, not {problem.dim} and {problem.dim_v}"
    return None


def _sm90(problem: AttentionProblem, arch: Arch, backward: bool, passed_over: tuple[str, ...]) -> KernelPlan:
    if backward:
        return _sm90_backward(problem, arch, passed_over)
    t = tuning.sm90_forward(problem, arch)
    tiles = t.tiles(problem)
    if tiles >= 2**30:
        raise ValueError(f"q has batch {problem.batch} and {problem.heads_q} heads: {tiles} tiles; less than 2**30 fit")
    return KernelPlan(
        "sm90", arch.name, problem.dtype, "sm90/forward.cu", (*t.constants, *_features(problem)),
        (Launch("attention_forward", min(tiles, arch.sms), t.threads, t.shared_memory),), 16,
        (Workspace("counters", "uint32", (3,)),) if t.dynamic else (), passed_over, t.spills,
        (Box("q", t.span, t.pack), Box("k", t.keys), Box("v", t.keys), Box("out", 64)),
    )  # fmt: skip


def _sm90_backward(problem: AttentionProblem, arch: Arch, passed_over: tuple[str, ...]) -> KernelPlan:
    t = tuning.sm90_backward(problem, arch)
    pairs, key_tiles = problem.batch * problem.heads_k, _ceil(problem.seq_k, t.span)
    clusters = arch.sms // t.cluster
    tiles = problem.group * _ceil(problem.seq_q, t.rows)  # of queries, for one pair
    for name, heads, n in (("k", problem.heads_k, key_tiles), ("q", problem.heads_q, tiles)):
        if pairs * n >= 2**30:
            raise ValueError(f"{name} has batch {problem.batch} and {heads} heads: {pairs * n} tiles; less than 2**30 fit")
    # A causal mask makes key tiles of different length: those of some heads are dealt out together, long ones first. Of one
    # long head the first tile takes as long as all others do on all multiprocessors: at the end they would stand idle.
    traffic = problem.group * problem.seq_q * (6 * problem.dim + 2 * problem.dim_v)
    together, spare, cache = 1, _ceil(tuning.SM90_WAVES * clusters, key_tiles), tuning.SM90_CACHE
    if problem.right is not None:
        long = problem.seq_q > tuning.SM90_LONG
        together = min(pairs, max(2, _ceil(2 * cache, traffic)) if long else max(1, cache // traffic))
    # The key tiles of a head add to dQ in order. Taken at once, each would wait for the one before: all but one stand idle
    # for some steps. So they are taken some steps apart, and in between those of other heads.
    elif problem.deterministic:
        groups = _ceil(pairs, _ceil(tuning.SM90_APART * clusters, tiles))
        together = _ceil(pairs, groups)
        spare = max(0, spare - together)  # a head is under work for as long as all of them
    kept = min(pairs, 2 * together + spare)
    launches = (
        Launch("attention_backward_prepare", pairs * tiles, 128),
        Launch("attention_backward", t.cluster * min(pairs * key_tiles, clusters), t.threads, t.shared_memory),
    )
    workspace = (
        Workspace("delta", "float32", (pairs * tiles, 2, t.rows)),  # and lse
        Workspace("dq_sum", "float32", (kept * tiles, t.rows * t.dim)),
        Workspace("counters", "uint32", (2 + pairs + pairs * tiles,)),
    )
    constants = (*t.constants, *_features(problem), ("DETERMINISTIC", problem.deterministic), ("VECTOR_RED", True))
    return KernelPlan(
        "sm90", arch.name, problem.dtype, "sm90/backward.cu", constants, launches, 16, workspace, passed_over, t.spills,
        (
            Box("q", t.rows), Box("k", t.keys), Box("v", t.keys), Box("dout", t.rows), Box("dk", t.out_rows),
            Box("dv", t.out_rows),
        ), together, kept,
    )  # fmt: skip


# ---- sm80: mma.sync tensor cores ------------------------------------------------------------------------------------


def _sm80_objection(problem: AttentionProblem, arch: Arch, backward: bool) -> str | None:
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if arch.cc < 80:
        return f"needs compute capability 8.0, this GPU has {arch.cc / 10}"
    if max(problem.dim, problem.dim_v) > 256:
        return f"takes head dimensions up to 256, not {problem.dim} and {problem.dim_v}"
    return None


def _sm80(problem: AttentionProblem, arch: Arch, backward: bool, passed_over: tuple[str, ...]) -> KernelPlan:
    pairs = problem.batch * problem.heads_q
    if not backward:
        t = tuning.sm80_forward(problem, arch)
        launches: tuple[Launch, ...] = (
            Launch("attention_forward", pairs * _ceil(problem.seq_q, t.rows), 32 * t.warps, t.shared_memory),
        )
        return KernelPlan(
            "sm80", arch.name, problem.dtype, "sm80/forward.cu", (*t.constants, *_features(problem)), launches, 16,
            passed_over=passed_over, spills=t.spills,
        )  # fmt: skip
    b = tuning.sm80_backward(problem, arch)
    tiles_q, tiles_k = _ceil(problem.seq_q, b.rows), _ceil(problem.seq_k, b.keys)
    launches = (
        Launch("attention_backward_prepare", pairs * tiles_q, 128),
        Launch("attention_backward", problem.batch * problem.heads_k * tiles_k, 32 * b.warps, b.shared_memory),
        Launch("attention_backward_finish", pairs * tiles_q, 128),
    )
    workspace = [
        Workspace("delta", "float32", (pairs, problem.seq_q)),
        Workspace("dq_sum", "float32", (pairs, tiles_q, b.rows * b.dim)),
    ]
    if problem.deterministic:
        workspace.append(Workspace("counters", "uint32", (pairs * tiles_q + 1,)))
    constants = (
        *b.constants, *_features(problem), ("DETERMINISTIC", problem.deterministic), ("VECTOR_RED", arch.cc >= 90),
    )  # fmt: skip
    return KernelPlan(
        "sm80", arch.name, problem.dtype, "sm80/backward.cu", constants, launches, 16, tuple(workspace), passed_over,
        b.spills,
    )  # fmt: skip


# ---- simt: plain CUDA -----------------------------------------------------------------------------------------------

SIMT_MAX_DIM = 4096


def _simt_objection(problem: AttentionProblem, arch: Arch, backward: bool) -> str | None:
    if max(problem.dim, problem.dim_v) > SIMT_MAX_DIM:
        return f"takes head dimensions up to {SIMT_MAX_DIM}, not {problem.dim} and {problem.dim_v}"
    return None


def _simt(problem: AttentionProblem, arch: Arch, backward: bool, passed_over: tuple[str, ...]) -> KernelPlan:
    t = tuning.simt(problem, arch, backward)
    pairs = problem.batch * problem.heads_q
    tiles_q, tiles_k = _ceil(problem.seq_q, t.owned), _ceil(problem.seq_k, t.owned)
    # A block owns t.columns columns of the result: a wider one takes several blocks, which share their rows.
    parts, parts_v = _ceil(problem.dim, t.columns), max(1, _ceil(problem.dim_v, t.columns))
    constants = (*t.constants, *_features(problem))
    if not backward:
        launches: tuple[Launch, ...] = (Launch("attention_forward", pairs * tiles_q * parts_v, t.threads),)
        return KernelPlan(
            "simt", arch.name, problem.dtype, "simt/forward.cu", constants, launches, ITEMSIZE[problem.dtype],
            passed_over=passed_over, spills=t.spills,
        )  # fmt: skip
    pairs_k = problem.batch * problem.heads_k
    launches = (
        Launch("attention_backward_delta", _ceil(pairs * problem.seq_q, t.threads), t.threads),
        Launch("attention_backward_dk_dv", pairs_k * tiles_k * max(parts, parts_v), t.threads),
    )
    if problem.dim:  # else dQ has no elements, and no block
        launches += (Launch("attention_backward_dq", pairs * tiles_q * parts, t.threads),)
    workspace = (Workspace("delta", problem.lse_dtype, (pairs, problem.seq_q)),)
    return KernelPlan(
        "simt", arch.name, problem.dtype, "simt/backward.cu", constants, launches, ITEMSIZE[problem.dtype], workspace,
        passed_over, t.spills,
    )  # fmt: skip


# ---- flash1: FlashAttention (2022) as published, to be compared with ------------------------------------------------


def _flash1_objection(problem: AttentionProblem, arch: Arch, backward: bool) -> str | None:
    if problem.dtype == "float64":
        return "takes float16, bfloat16 and float32, not float64"
    largest = tuning.FLASH1_COLUMNS[-1]  # all columns of a tile are on the chip at once
    if max(problem.dim, problem.dim_v) > largest:
        return f"takes head dimensions up to {largest}, not {problem.dim} and {problem.dim_v}"
    return None


def _flash1(problem: AttentionProblem, arch: Arch, backward: bool, passed_over: tuple[str, ...]) -> KernelPlan:
    t = tuning.flash1(problem, arch, backward)
    rows = (problem.batch * problem.heads_q, problem.seq_q)
    # O and dQ are read and written at every step; where they have 16 bits, in float32 aside.
    aside = problem.dtype != "float32"
    if backward:
        launch = Launch("attention_backward", problem.batch * problem.heads_k, t.threads, t.shared_memory)
        workspace = [Workspace("dq_sum", "float32", (*rows, problem.dim))] if aside else []
    else:
        launch = Launch("attention_forward", problem.batch * problem.heads_q, t.threads, t.shared_memory)
        workspace = [Workspace("m", "float32", rows), Workspace("l", "float32", rows)]
        workspace += [Workspace("o_sum", "float32", (*rows, problem.dim_v))] if aside else []
    return KernelPlan(
        "flash1", arch.name, problem.dtype, f"flash1/{'backward' if backward else 'forward'}.cu",
        (*t.constants, *_features(problem)), (launch,), ITEMSIZE[problem.dtype], tuple(workspace), passed_over,
    )  # fmt: skip


Objection = Callable[[AttentionProblem, Arch, bool], "str | None"]
Build = Callable[[AttentionProblem, Arch, bool, "tuple[str, ...]"], KernelPlan]
FAMILIES: dict[str, tuple[Objection, Build]] = {
    "sm90": (_sm90_objection, _sm90),
    "sm80": (_sm80_objection, _sm80),
    "simt": (_simt_objection, _simt),
    "flash1": (_flash1_objection, _flash1),
}
ON_REQUEST = ("flash1",)  # families that are taken only where they are named
