"""What a plan is: the kernels that answer a problem, as plain data. The families make it, the rest of the corridor
reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from ..blockmask.tile_lists import ListUse
from ..passes import Pass
from ..problem import ARRAYS, AXES, ITEMSIZE, OPTIONS, AttentionProblem, Given
from ..score import Score
from .device import Arch

PAIRWISE = tuple(rule.name for rule in ARRAYS if rule.axes == AXES)  # arrays over pairs of a query and a key
RESERVED = 1024  # bytes of a multiprocessor's shared memory that each thread block takes for itself
LITTLE = 64 << 20  # bytes of workspace that nobody misses
MOVING = ("q", "k", "v", "dout", *(rule.name for rule in ARRAYS if rule.gradient))  # what may have tangents


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan, in order."""

    name: str
    grid: int
    threads: int
    shared_memory: int = 0
    fills: tuple[str, ...] = ()  # workspaces, where it does nothing else: not needed where these are filled already
    waits: bool = False  # for the kernel before: it may start while that one runs
    once: bool = False  # for all heads, where the others run in portions of these


@dataclass(frozen=True)
class Workspace:
    """Memory that a plan needs beyond inputs and outputs. `name` is a field of Params.

    Those of two plans of one problem that are equal hold the same once they are filled.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tile: int = 0  # rows of the tiles that its numbers are laid out or computed by, if any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Box(NamedTuple):
    """What the copy engine moves at once of an array: `rows` rows of `heads` heads (and 64 columns). `windows`: of a
    packed array, whose map has every so many rows that follow each other as an entry."""

    array: str
    rows: int
    heads: int = 1
    windows: bool = False

    @property
    def pairwise(self) -> bool:
        """Whether its columns are keys: of an array over pairs."""
        return self.array in PAIRWISE


@dataclass(frozen=True)
class KernelPlan:
    family: str
    arch: str
    dtype: str
    of: Pass
    source: str  # file under kernels_cu/
    constants: tuple[tuple[str, int | bool | float], ...]
    launches: tuple[Launch, ...]
    alignment: int  # bytes that the inputs' pointers and rows must be multiples of
    workspace: tuple[Workspace, ...] = ()
    spills: int = 0  # bytes of registers per thread that the tile's row lets ptxas spill
    maps: tuple[Box, ...] = ()  # how the copy engine moves arrays, in the order in which the kernels take their maps
    scalars: tuple[tuple[str, int], ...] = ()  # fields of Params that this plan alone has, with their values
    given: tuple[Given, ...] = ()  # optional arrays of the problem
    tangents: tuple[Given, ...] = ()  # of the problem, by what they are tangents of
    score: Score | None = None  # the user's own
    lists: tuple[ListUse, ...] = ()  # of a block mask, what the kernels walk by
    wrt: tuple[str, ...] = ()  # optional arrays: gradients, or their tangents, are of these and not of q, k and v
    passed_over: tuple[str, ...] = ()  # why faster families were not taken
    out_dtype: str | None = None  # of what the kernels write; None: dtype
    dq_dtype: str | None = None  # of dq; None: as the others
    cache_dtype: str | None = None  # of k and v, where that is another than dtype
    grouped: bool = False  # whether it is of the problem's `grouped`
    portions: tuple[
        int, ...
    ] = ()  # heads of K and V in each (portions.py), where launches and the like are of the first
    found: tuple[str, ...] = ()  # the part of the workspace that is taken as the plan that runs before has left it

    def after(self, first: KernelPlan) -> KernelPlan:
        """This plan where `first`, of the same problem, has run on the same arrays: what that has filled is not
        again."""
        if first.portions:  # of the last one alone something is left
            return self
        here = set(self.workspace) & set(first.workspace)
        names = {space.name for space in here}
        done = [launch for launch in self.launches if launch.fills and names.issuperset(launch.fills)]
        filled = {name for launch in done for name in launch.fills}
        left = tuple(launch for launch in self.launches if launch not in done)
        return replace(self, launches=left, found=tuple(x.name for x in self.workspace if x.name in filled))


Tile = TypeVar("Tile")


@dataclass(frozen=True)
class Tiles(Generic[Tile]):
    """The tiles of a family for one pass. A tile is a dataclass: the fields named in `tried`, then what limits
    its use."""

    table: tuple[Tile, ...]  # in order of preference
    tried: Mapping[str, tuple[int, ...]]  # what `tune` combines
    possible: Callable[[Tile, AttentionProblem], bool]  # whether that can be; shared memory is the plan's

    def tile(self, values: Sequence[int]) -> Tile:
        """A tile without limits, from its fields in the order of `tried`."""
        return type(self.table[0])(**dict(zip(self.tried, values)))

    def known(self, values: Sequence[int]) -> bool:
        """Whether that is a tile that `tune` can have found: one of the table, or a combination of what is tried."""
        tried = len(values) == len(self.tried) and all(n in allowed for n, allowed in zip(values, self.tried.values()))
        return tried or tuple(values) in self.listed()

    def listed(self) -> list[tuple[int, ...]]:
        """The tiles of the table, without their limits."""
        return [tuple(getattr(row, name) for name in self.tried) for row in self.table]

    def rows(self, tuned: Sequence[int] | None, first: tuple[Tile, ...] = ()) -> tuple[Tile, ...]:
        """What is tried in turn: the tile that was timed, where one was, then `first`, then the table."""
        return (*([self.tile(tuned)] if tuned else ()), *first, *self.table)


def features(problem: AttentionProblem) -> tuple[tuple[str, int | bool], ...]:
    """What is asked of the mask and the score, as constants: what is not asked compiles to nothing."""
    return (
        ("LEFT", problem.left is not None),
        ("RIGHT", problem.right is not None),
        *((rule.name.upper(), problem.has(rule.name)) for rule in ARRAYS if not rule.ragged),
        *((rule.name.upper(), getattr(problem, rule.name) != rule.default) for rule in OPTIONS if rule.adds),
        *(
            (f"{x}_BLOCKS", "key_block" in of.axes if (of := problem.array(f"{x.lower()}_descale")) else False)
            for x in "KV"
        ),
        ("EIGHT", problem.cache_dtype is not None),
        ("PACKED_Q", problem.rows_q is not None),
        ("PACKED_K", problem.rows_k is not None),
        ("LENGTHS", problem.has("seqlens_k")),
        ("PAGED", problem.page is not None),
        ("TOP_LEFT", problem.ragged and problem.causal == "top_left"),  # else lengths say where the diagonal is
        *((f"{name.upper()}_LINES", by_line(problem, name)) for name in PAIRWISE),
        ("BATCH_INVARIANT", problem.batch_invariant),
        ("BLOCK_MASK", problem.block_mask is not None),
        ("SOFTCAP", problem.softcap is not None),
        ("SCORE", problem.score is not None),
        ("ADDED", len(added(problem))),  # attention/terms.cuh has a term for each
        ("DROPOUT", problem.dropout > 0),
        ("PLACED", placed(problem)),
        ("ADDS", problem.add),
        ("NEGATIVE_SCALE", problem.scale < 0),
        # Whether ALiBi's distances are all of keys behind the query.
        ("ALIBI_BEHIND", problem.has("alibi_slopes") and None not in (problem.causal, problem.right)),
        *((f"T{name.upper()}", problem.moves(name)) for name in MOVING),
        ("TSCORE", problem.moves(*(x.key for x in problem.score.arrays)) if problem.score else False),
        ("ADDED_MOVES", sum(problem.moves(name) for name in added(problem))),  # whose terms have tangents
    )


def placed(problem: AttentionProblem) -> bool:
    """Whether kernels ask where a part stands in its whole: of a mask the diagonal says it."""
    part = problem.at is not None or problem.has("at")
    return part and (problem.score is not None or problem.dropout > 0)


def by_line(problem: AttentionProblem, name: str) -> bool:
    """Whether an array over pairs has a line for each packed query."""
    return (given := problem.array(name)) is not None and "line" in given.axes


def added(problem: AttentionProblem) -> list[str]:
    """What is added to the product of Q and K."""
    arrays = [rule.name for rule in ARRAYS if rule.adds and problem.has(rule.name)]
    return arrays + [rule.name for rule in OPTIONS if rule.adds and getattr(problem, rule.name) != rule.default]


def scored(problem: AttentionProblem) -> bool:
    """Whether scores are more than the scaled product of Q and K."""
    return problem.softcap is not None or problem.score is not None or bool(added(problem))


def lists(problem: AttentionProblem, *uses: ListUse) -> tuple[ListUse, ...]:
    """What a plan asks of a block mask, where there is one: of what is longer than a sequence may be, the part that
    sequences have."""
    seq = (problem.seq_q, problem.seq_k) if problem.ragged else None
    return tuple(use._replace(seq=seq) for use in uses) if problem.block_mask is not None else ()


def both_ways(problem: AttentionProblem, rows: int, keys: int, bits: str) -> tuple[ListUse, ...]:
    """What a backward asks of a block mask whose blocks own tiles of keys: also which of them add to dQ of a tile of
    queries."""
    return lists(problem, ListUse("query_lists", rows, keys, bits), ListUse("key_lists", rows, keys, None))


def query_tiles(problem: AttentionProblem, size: int) -> int:
    """How many numbers tiles of so many queries have, over all heads: of packed sequences, whatever their lengths
    (kernels_cu/attention/tiles.cuh)."""
    return problem.heads_q * _of_heads(problem, problem.rows_q, problem.seq_q, size)


def key_tiles(problem: AttentionProblem, size: int) -> int:
    """The same of keys, and heads of these."""
    return problem.heads_k * _of_heads(problem, problem.rows_k, problem.cache or problem.seq_k, size)


def _of_heads(problem: AttentionProblem, packed: int | None, rows: int, size: int) -> int:
    return problem.batch * ceil(rows, size) if packed is None else places(problem, packed, size)


def places(problem: AttentionProblem, rows: int, size: int) -> int:
    """For tiles of packed sequences, of a head: room for each one's, and for what is left behind the last."""
    return rows // size + problem.batch + 1


def query_numbers(problem: AttentionProblem) -> tuple[int, int]:
    """Shape of an array that holds a number for each query of each head."""
    packed = problem.rows_q
    return (problem.batch * problem.heads_q, problem.seq_q) if packed is None else (problem.heads_q, packed)


def key_numbers(problem: AttentionProblem) -> tuple[int, int]:
    """The same for each key of each of its heads."""
    packed = problem.rows_k
    return (problem.batch * problem.heads_k, problem.seq_k) if packed is None else (problem.heads_k, packed)


def largest(problem: AttentionProblem) -> int:
    """Bytes of the largest of q, k, v and out, or more."""
    rows = max(math.prod(query_numbers(problem)), math.prod(key_numbers(problem)))
    return ITEMSIZE[problem.dtype] * rows * max(problem.dim, problem.dim_v)


def allowed(problem: AttentionProblem, times: float) -> int:
    """Bytes that workspace may take: so many times those of the largest, or LITTLE."""
    return max(LITTLE, int(times * largest(problem)))


def room(arch: Arch, blocks: int) -> int:
    """Bytes of shared memory that each of so many thread blocks of a multiprocessor can have."""
    return (arch.shared_memory + RESERVED) // blocks - RESERVED


def ceil(n: int, step: int) -> int:
    """How many steps cover n."""
    return -(-n // step)


def pad(n: int, step: int) -> int:
    """n as a multiple of step, and not 0."""
    return max(1, ceil(n, step)) * step
