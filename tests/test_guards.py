"""Nobody writes beside the results of a call, or reads beside its arrays: all of them, and the workspace, lie in one
piece of memory with red zones between them, and results between other columns."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from backends import CPU, Backend
from reference import DTYPES
from semantics import Inputs, Judge, as_arguments, draw_inputs

from cupyflash import attention, attention_backward
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import AttentionProblem

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
BYTE = 0xFF  # of what lies around: NaN, in every format


class Arena:
    """Memory in which arrays lie apart. `own` are those that a call may write: all the rest stays as it was."""

    SIZE, APART = 64 << 20, 1024  # bytes in all; between two arrays, at least

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.memory = backend.xp.full(self.SIZE, BYTE, np.uint8)
        self.used, self.own = self.APART, []

    def array(self, shape: tuple[int, ...], size: int) -> Any:
        """One of numbers of so many bytes, at a multiple of 512; the red zone begins with the next byte."""
        begin, end = self.used, self.used + math.prod(shape) * size
        self.used = -(-end // 512) * 512 + self.APART
        assert self.used <= self.SIZE, f"{self.SIZE} bytes are too few"
        return self.memory[begin:end].view(UNSIGNED[size]).reshape(shape)

    def put(self, x: np.ndarray) -> Any:
        made = self.array(x.shape, x.itemsize)
        made[...] = self.backend.put(x.view(UNSIGNED[x.itemsize]))
        self.own.append(made)  # it may hold anything when the rest is looked at
        return made.view(x.dtype)

    def columns(self, shape: tuple[int, ...], dtype: Any, first: int, row: int) -> Any:
        """A result as columns, from `first` on, of an array whose rows have `row`."""
        made = self.array((*shape[:-1], row), np.dtype(dtype).itemsize)[..., first : first + shape[-1]]
        self.own.append(made)
        return made.view(dtype)

    def allocate(self, size: int) -> Any:
        """As CuPy asks for memory."""
        made = self.array((size,), 1)
        self.own.append(made)
        return made.data

    def serves(self) -> Any:
        """While everything that a call allocates lies here."""
        if self.backend.family is None:
            return contextlib.nullcontext()
        return self.backend.xp.cuda.using_allocator(self.allocate)

    def check(self) -> None:
        """That nothing beside the arrays was written; then they are forgotten."""
        for x in self.own:
            x[...] = 256**x.itemsize - 1
        wrong = self.memory[: self.used] != BYTE
        if bool(wrong.any()):
            at = np.flatnonzero(self.backend.get(wrong))
            raise AssertionError(f"{len(at)} bytes beside arrays were written, from {at[0]} to {at[-1]} of {self.used}")
        self.used, self.own = self.APART, []


# (batch, (Sq, Sk), (Hq, Hk)), each with another in which some arrays have a single row.
SHAPES = (
    ((2, (70, 130), (2, 2)), (1, (1, 130), (1, 1))),
    ((24, (3, 70), (4, 1)), (1, (1, 1), (1, 1))),
    ((1, (33, 1100), (2, 1)), (1, (1, 1100), (1, 1))),
)
PIECES = [(n, min(n + 15, 257)) for n in range(1, 258, 16)]  # head dimensions that kernels pad to the same


def cases() -> list[Any]:
    """16-bit formats and shapes take the head dimensions in turn: each set of features is a kernel to compile."""
    found = []
    for n, piece in enumerate(PIECES):
        for dtype in (("float16", "bfloat16")[n % 2], "float32"):
            for backend in (*(Backend(name, name) for name in FAMILIES), *([CPU] if n in (0, 16) else [])):
                if backend.takes(dtype, piece[0], piece[0]):
                    marks = [pytest.mark.gpu] if backend.family else []
                    name = f"{backend.name}-{dtype}-{piece[0]}-to-{piece[1]}"
                    found.append(pytest.param(backend, dtype, piece, SHAPES[n % 3], id=name, marks=marks))
    return found


def run(arena: Arena, inputs: Inputs, judge: Judge, layout: str, wrt: tuple[str, ...] = (), **options: Any) -> None:
    """Both passes in the arena. `layout`: results of the call's own; columns whose rows start at 16 bytes, where
    TMA stores; or columns that begin anywhere."""
    q, k, v, dout = (arena.put(x) for x in inputs[:4])
    named = dict(inputs.given) if inputs.key_mask is None else {"key_mask": inputs.key_mask, **inputs.given}
    options |= as_arguments({name: int(x) if name == "seed" else arena.put(x) for name, x in named.items()})
    options["family"] = arena.backend.family_for(judge.problem)

    def target(like: tuple[int, ...], columns: int) -> Any:
        if layout == "own":
            return None
        unit = 16 // q.itemsize
        first, row = (0, -(-columns // unit) * unit + unit) if layout == "at-16" else (1, columns + 3)
        return arena.columns((*like[:-1], columns), q.dtype, first, row)

    of = {"out": (q, v), "dq": (q, q), "dk": (k, k), "dv": (v, v)}
    into = {name: target(rows.shape, columns.shape[-1]) for name, (rows, columns) in of.items()}
    out, *grads = into.values()
    with arena.serves():
        out, lse = attention(q, k, v, out=out, return_lse=True, **options)
        results = attention_backward(
            dout, q, k, v, out, lse, grads=None if grads[0] is None else tuple(grads), wrt=wrt, **options
        )
    found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), results))}
    found |= {f"d{name}": getattr(results, f"d{name}") for name in wrt}
    for name, x in zip(found, arena.backend.get_all(list(found.values()))):
        judge(name, x)
    arena.check()


@pytest.mark.parametrize(("backend", "dtype", "piece", "shapes"), cases())
def test_every_head_dimension(
    backend: Backend, dtype: str, piece: tuple[int, int], shapes: tuple[Any, ...], rng: np.random.Generator
) -> None:
    arena = Arena(backend)
    for dim in range(piece[0], piece[1] + 1):
        dims = (dim, sum(piece) - dim)
        if not backend.takes(dtype, *dims):
            continue
        for batch, seq, heads in shapes:
            inputs = draw_inputs(rng, dtype, batch=batch, seq=seq, heads=heads, dims=dims)
            judge = Judge(inputs, {}, backward=True, large_scores=min(dims) < 8)
            for layout in ("own", "at-16", "anywhere"):
                run(arena, inputs, judge, layout)


@pytest.mark.parametrize("dim", [24, 59, 128, 250])
def test_shapes_take_every_way_out(dim: int) -> None:
    """On Hopper: O by TMA, from heads that share a tile, from shares of the keys; dQ from sums or whole."""
    taken = []
    for (batch, (sq, sk), (hq, hk)), _ in SHAPES:
        problem = AttentionProblem("float16", batch, sq, sk, hq, hk, dim, dim, 0.1)
        forward, backward = (dict(plan(problem, Arch.of("sm_90a"), x, "sm90").constants) for x in (FORWARD, BACKWARD))
        taken.append((forward["PACK"] > 1, forward["SHARES"], backward["WHOLE_DQ"]))
    packed, shared, whole_dq = zip(*taken)
    assert packed[:2] == (False, True) and shared == (False, False, True) and whole_dq == (False, True, False)


SCORES = ("bias", "mask", "alibi_slopes", "sinks")


@pytest.mark.parametrize(
    "backend",
    [pytest.param(x, id=x.name, marks=[pytest.mark.gpu] if x.family else []) for x in (CPU,
        *(Backend(name, name) for name in FAMILIES))
     if x.takes("bfloat16", 64, 64, softcap=1.0)],
)  # fmt: skip
def test_arrays_beside_q_k_and_v(backend: Backend, rng: np.random.Generator) -> None:
    """A mask, a bias and what else a score reads, whose rows end anywhere, and their gradients."""
    arena, options = Arena(backend), {"softcap": 2.0, "causal": True}
    for batch, seq in ((2, (37, 77)), (24, (1, 131))):  # where a handful of rows decides, luck does
        heads, dims = (4, 2), (59, 51)
        inputs = draw_inputs(rng, "bfloat16", batch=batch, seq=seq, heads=heads, dims=dims, key_mask=True, given=SCORES)
        judge = Judge(inputs, options, backward=True, large_scores=False)
        for layout in ("own", "at-16"):
            run(arena, inputs, judge, layout, ("bias", "alibi_slopes", "sinks"), **options)


@pytest.mark.parametrize("at", ["behind", "before", "between"])
def test_the_arena_finds_what_is_written(at: str) -> None:
    arena = Arena(CPU)
    arena.check()
    x = arena.columns((2, 3, 1, 5), DTYPES["float16"], 0, 16)
    x[...] = 0
    if at == "behind":
        arena.memory[arena.APART + 2 * 3 * 16 * 2] = 0
    elif at == "before":
        arena.memory[arena.APART - 1] = 0
    else:
        arena.memory[arena.APART + 2 * 5] = 0
    with pytest.raises(AssertionError, match="^1 bytes beside arrays were written"):
        arena.check()
