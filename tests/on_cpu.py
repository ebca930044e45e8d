"""One attention problem on kernels that run without a GPU (cuda_on_cpu.py), judged against the reference."""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from criterion import assert_as_good
from cuda_on_cpu import Launch, as_cpp, compile_all, launch
from reference import Standard, references, state
from semantics import Inputs, dead_rows, draw_blocks, draw_inputs, spoil

from cupyflash import cached
from cupyflash.gpu import grouping, portions
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import Box, KernelPlan
from cupyflash.gpu.params import KEYS, Packer, round_keys, score_shape
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.gpu.source import generate
from cupyflash.gpu.strides import params_strides
from cupyflash.passes import BACKWARD, BY_ROWS, FORWARD, Pass
from cupyflash.problem import ARRAYS, ITEMSIZE, AttentionProblem, View


def check(
    family: str,
    arch: Arch,
    rng: np.random.Generator,
    dtype: str,
    shapes: dict[str, Any],
    options: dict[str, Any],
    unit: float = 1.0,
    change: Callable[[Inputs], Inputs] = lambda inputs: inputs,
    own_times: float = 1,
    backward: bool = True,
) -> None:
    """Forward and, unless told otherwise, backward, in both orders (cuda_on_cpu.h); every result must be as good as the
    reference.

    To the bit the same in both, too, but for dq and what a score function reads where that is not asked for. `shapes`
    are those of `draw_inputs`, `options` those of a problem; "rows_aligned": whether rows of results start at multiples
    of 16 bytes; "apart": how many numbers of others are between two of them, True for 16 bytes; "tiles": those of the
    forward and of the backward, in place of what the plan would choose; "blocks": what `draw_blocks` takes. `change`
    makes others of the inputs that are drawn; `own_times` multiplies the errors of own precision, where few numbers
    decide.
    """
    options = {"rows_aligned": True, "apart": True, "tiles": (None, None), "deterministic": False} | options
    blocks, apart = options.pop("blocks", None), options.pop("apart")
    rows_aligned, tiles, deterministic = options.pop("rows_aligned"), options.pop("tiles"), options["deterministic"]
    q, k, v, dout, key_mask, dlse, others = change(draw_inputs(rng, dtype, **shapes))
    if key_mask is not None:
        key_mask[0] = False  # queries that see no key
        key_mask[1:, : key_mask.shape[1] // 3] = False  # and under a causal mask some of the others
    judged, seen = others, None
    if blocks:
        drawn = draw_blocks(rng, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), *blocks)
        options["block_mask"], judged, seen = drawn.mask(), drawn.with_mask(others), drawn.seen
    problem = state(q, k, v, key_mask, **options, **others)
    exact, own = references(problem, q, k, v, key_mask, dout, dlse, **judged)
    if own_times != 1:
        fields = (e if o is None else e + own_times * (o - e) for e, o in zip(exact, own))
        own = Standard(*fields)
    seed = None
    if "seed" in others and others["seed"].ndim == 0:  # a number
        seed = int(others.pop("seed")) % 2**64
        problem = replace(problem, given=tuple(x for x in problem.given if x.name != "seed"))

    passes = (FORWARD, BACKWARD) if backward else (FORWARD,)
    plans = [with_tile(problem, arch, of, family, tile) for of, tile in zip(passes, tiles)]
    lengths = {row.name: row.lengths(others[row.name].shape) for row in ARRAYS if row.gradient and row.name in others}
    of_score = {
        x.key: others[x.key].shape for x in (problem.score.arrays if problem.score else ()) if x.kind == "float"
    }
    asked = [names for names in (lengths, of_score) if names and backward]
    plans += [plan(problem, arch, BACKWARD, family, lengths=names).after(plans[1]) for names in asked]
    # What is dead may hold anything.
    blind, unseen = dead_rows(problem, key_mask, seen, {(use.queries, use.keys) for x in plans for use in x.lists})
    q, k, v, dout = (spoil(rng, x, dead) for x, dead in zip((q, k, v, dout), (blind, unseen, unseen, blind)))
    if dlse is not None:
        dlse = np.where(np.isneginf(exact.lse), np.nan, dlse).astype(dlse.dtype)
    aligned = plans[0].alignment == 16  # else any rows will do
    libraries = compile_all(*[as_cpp(generate(x), [y.name for y in x.launches]) for x in plans])
    listed = [
        {use.name: Guarded(x.shape, x.dtype, x) for use in kernels.lists for x in [options["block_mask"].list_for(use)]}
        for kernels in plans
    ]
    # The second time, the workspace is as the first has left it.
    spaces = [{x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes} for kernels in plans]
    for kernels, own_spaces in zip(plans[2:], spaces[2:]):  # what it finds there, the backward has left
        own_spaces |= {name: spaces[1][name] for name in kernels.found if name in spaces[1]}
    before: dict[str, bytes] = {}
    for last_first in (False, True):
        given = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, "key_mask": key_mask, **others}
        inputs = {name: Guarded(x.shape, x.dtype, x, aligned) for name, x in given.items() if x is not None}
        shapes_out = {name: getattr(exact, name).shape for name in ("out", "dq", "dk", "dv")}
        results = {
            name: Guarded(shape, q.dtype, None, aligned and rows_aligned, apart) for name, shape in shapes_out.items()
        }
        results["lse"] = Guarded(exact.lse.shape, problem.lse_dtype)
        run(libraries[0], plans[0], problem, results | inputs | spaces[0] | listed[0], last_first, arch.sms, seed)
        if not backward:
            for name in ("out", "lse"):
                assert_as_good(results[name].array, getattr(exact, name), getattr(own, name), name, unit)
            continue
        for name in ("out", "lse"):  # of the backward they are inputs
            inputs[name] = Guarded(results[name].array.shape, results[name].array.dtype, results[name].array, aligned)
        run(libraries[1], plans[1], problem, results | inputs | spaces[1] | listed[1], last_first, arch.sms, seed)
        for name in exact._fields:
            assert_as_good(results[name].array, getattr(exact, name), getattr(own, name), name, unit)
        of_arrays = {f"d{name}": Guarded(others[name].shape, others[name].dtype) for name in lengths | of_score}
        for n, names in enumerate(asked, 2):
            results_of = {f"d{name}": of_arrays[f"d{name}"] for name in names}
            run(
                libraries[n], plans[n], problem, results_of | inputs | spaces[n] | listed[n], last_first, arch.sms, seed
            )
        for name, x in of_arrays.items():
            assert_as_good(x.array, getattr(exact, name), getattr(own, name), name, max(unit, exact.unit(name)))
        for name, x in (results | spaces[1] | of_arrays).items():
            in_turn = name not in ("dq", "dq_sum") and not name.startswith("dscore_arrays")
            if name != "counters" and (deterministic or in_turn):
                bits = x.array.tobytes()
                assert before.setdefault(name, bits) == bits, f"{name} depends on the order"


def with_tile(problem: AttentionProblem, arch: Arch, of: Pass, family: str, tile: Sequence[int] | None) -> KernelPlan:
    """The plan with this tile, if one is named: `plan` leaves out what cannot be, and others would be tested."""
    made = plan(problem, arch, of, family, tile and {family: tile})
    if tile:
        has = dict(made.constants)
        asked = {name.upper(): n for name, n in zip(FAMILIES[family].TILES[of].tried, tile) if name.upper() in has}
        assert asked == {name: has[name] for name in asked}, f"{family} has no {of.name} with {asked} for {problem}"
    return made


class Guarded:
    """An array amid memory that nobody may write; what lies further than 16 bytes behind it nobody may even read.

    An input has `values`, which nobody may write either. With `rows_aligned` its rows start at multiples of 16 bytes,
    and what follows the values of one up to the next such multiple is zeros, as the corridor pads it. With that, or
    `apart` (so many numbers, or True: 16 bytes), rows have something of another between them. (An array that has no
    rows, of fewer axes, is one block; `packed`: its last axis is a row, all the same.)
    """

    AROUND = 1 << 20  # bytes that are out of bounds, on both sides

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        values: np.ndarray | None = None,
        rows_aligned: bool = False,
        apart: bool | int = False,
        packed: bool = False,
    ) -> None:
        self._dtype, self._shape = np.dtype(dtype), shape
        size, whole = self._dtype.itemsize, shape[-1]
        unit = max(1, 16 // size)
        if (len(shape) == 4 or packed) and rows_aligned:
            whole = -(-whole // unit) * unit
        between = unit if rows_aligned or apart is True else int(apart)
        row = whole + (between if len(shape) == 4 else 0)
        self._strides = (*[size * row * math.prod(shape[n + 1 : -1]) for n in range(len(shape) - 1)], size)
        used = size * max(0, math.prod(shape[:-1]) * row - (row - whole))
        used = -(-used // 16) * 16
        room = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        self._start = room - used  # it ends where the page does
        pages = np.frombuffer(mmap.mmap(-1, room + 2 * self.AROUND), np.uint8)
        for forbidden in (0, self.AROUND + room):
            at = ctypes.c_void_p(pages.ctypes.data + forbidden)
            assert ctypes.CDLL(None).mprotect(at, ctypes.c_size_t(self.AROUND), 0) == 0
        self._memory = pages[self.AROUND : self.AROUND + room]
        self._memory[:] = 0xFF  # NaN, in every format
        self.array = self._in(self._memory, shape)
        self._is_input = values is not None
        if values is not None:
            self._in(self._memory, (*shape[:-1], whole))[...] = 0
            self.array[...] = values
        self._before = self._memory.copy()

    def _in(self, memory: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, self._dtype, memory, self._start, self._strides)

    @property
    def pointer(self) -> int:
        return self._memory.ctypes.data + self._start

    @property
    def strides(self) -> tuple[int, ...]:
        """Of an array with rows, in elements, as `Packer` takes them: (batch, row, head)."""
        return tuple(s // self._dtype.itemsize for s in self.array.strides)[:3]

    @property
    def view(self) -> View:
        own = tuple(s // self._dtype.itemsize for s in self.array.strides)
        return View(self._shape, own, self._dtype.name, "cpu", "numpy", self.pointer)

    def check(self, name: str) -> None:
        memory = self._memory.copy()
        if not self._is_input:
            self._in(memory, self._shape)[...] = self._in(self._before, self._shape)
        what = f"{name}, an input," if self._is_input else f"memory around {name}"
        assert np.array_equal(memory, self._before), f"{what} was written"


def run(
    library: ctypes.CDLL,
    kernels: KernelPlan,
    problem: AttentionProblem,
    given: dict[str, Guarded],
    last_first: bool,
    in_flight: int,
    seed: int | None = None,
) -> None:
    """Launch a plan's kernels on these arrays and workspaces."""
    slots = Packer(kernels, problem, {}).slots
    strides = {name: x.strides for name, x in given.items()}
    for name in {*BY_ROWS} & given.keys():
        strides[name] = params_strides(given[name].view, "bshd")
    for row in ARRAYS:
        for name in {f"{of}{row.name}" for of in ("", "d", "t", "td")} & given.keys():
            x = given[name].array
            own = tuple(s // x.itemsize for s in x.strides)
            view = View(x.shape, own, x.dtype.name, "cpu", "numpy")
            scales = problem.cache_dtype and name in cached.SCALES
            strides[name] = cached.strides(problem, name, view, "bshd") if scales else row.strides(view, problem)
    keys = [x.key for x in (problem.score.arrays if problem.score else ())]
    for name in (name for key in keys for name in (key, f"t{key}") if name in given):
        x = given[name].array
        strides[name] = score_shape(
            View(x.shape, tuple(s // x.itemsize for s in x.strides), x.dtype.name, "cpu", "numpy")
        )
    if kernels.grouped:
        strides |= {name: grouping.strides(problem.group, strides[name]) for name in ("q", "out")}
        problem = grouping.grouped(problem) or problem
    addresses = {name: x.pointer for name, x in given.items()} | dict(zip(KEYS, round_keys(seed or 0)))
    maps = tensor_maps(kernels, problem, given, strides) if kernels.maps else None
    # What a kernel declares to be aligned to 1024 bytes begins so; nothing else does.
    start = 1024 if "extern __shared__ __align__(1024)" in generate(kernels) else 1024 + 16
    for made in portions.one_by_one(kernels):
        packer = Packer(made, problem, strides)
        memory = packer.memory()
        packer.fill(memory, [addresses.get(name, 0) for name in slots])
        for x in made.launches:
            cluster = dict(kernels.constants).get("CLUSTER", 1) if x.shared_memory else 1
            how = Launch(x.grid, x.threads, cluster, in_flight, start, x.shared_memory, last_first)
            wrong = launch(library, x.name, how, bytes(memory), maps)
            assert wrong is None, f"{x.name}: {wrong}"
    for name, array in given.items():
        array.check(name)


def map_text(pointer: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: Box) -> bytes:
    """A map as ptx_on_cpu/tma.h reads it, in the place of `tensormap.encode`."""
    size = ITEMSIZE[dtype]
    more = 5 - len(shape)
    text = struct.pack(
        "QQ5q4q5i", 0x70614D20726F736E, pointer, *shape, *[1] * more, *strides, *[16] * more, 128 // size, box.rows,
        box.heads, len(shape), size,
    )  # fmt: skip
    return text.ljust(128, b"\0")


def tensor_maps(
    kernels: KernelPlan, problem: AttentionProblem, arrays: dict[str, Guarded], strides: dict[str, tuple[int, ...]]
) -> bytes:
    """What gpu/tensormap.py makes for a launch, but for the driver's part."""
    tensormap = pytest.importorskip("cupyflash.gpu.tensormap", reason="needs CuPy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensormap, "encode", map_text)
        used = {box.array: arrays[box.array] for box in kernels.maps}
        maps = tensormap.PlacedMaps(tensormap.Maps(kernels, problem, {name: strides[name] for name in used}))
        maps.point([x.pointer for x in used.values()])
        return bytes(maps.memory)
