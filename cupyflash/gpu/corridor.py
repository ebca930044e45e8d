"""Walks the corridor: views, problem, plan, source, cubin, launch. The only place that knows the order.

What a call's data does not change is prepared once and kept under a key of raw attributes, so that the next call
with the same shapes costs a look-up, the outputs' allocation and the launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from .. import cached, latent, rules
from ..call import Arrays, Call
from ..gradients import Gradients, apart
from ..interop.protocol import GpuAdapter
from ..overlap import check_targets
from ..passes import BACKWARD, FORWARD, PER_QUERY
from ..problem import ARRAYS, ITEMSIZE, AttentionProblem, View, contiguous, mask_kind
from . import device, early, grouping, launch, tuned
from .ahead import compile_ahead
from .kernel_plan import KernelPlan
from .params import KEYS, round_keys, score_shape
from .plans import plans
from .programs import functions, ready
from .strides import padded, params_strides, to_copy

_prepared: dict[Any, Prepared] = {}
_MAX_PREPARED = 4096
_OPTIONAL = {row.name: row for row in ARRAYS}


class Stated(NamedTuple):
    """A class of calls as the rules have it. `shapes`: of its results, by name."""

    problem: AttentionProblem
    shapes: dict[str, tuple[int, ...]]
    views: dict[str, View]
    into: dict[str, View]  # of targets

    @classmethod
    def of(cls, call: Call) -> Stated:
        view = call.lib.view
        views = {name: view(x) for name, x in call.arrays.items()}
        into = {name: view(x) for name, x in call.targets.items()}
        problem, shapes = rules.state(views, into, call.options, call.of)
        return cls(replace(problem, add=call.add), shapes, latent.with_view(views, call.options), into)


class Ran(NamedTuple):
    """What a step gave: results, the one for each query where it was asked for, and the workspace, which a step after
    it may find things in. `pointers`: what its kernels were launched with."""

    results: list[Any]
    rows: Any
    workspace: Any
    pointers: Sequence[int] = ()


class Step:
    """A part of what a call runs, with results of its own. This one needs no kernel: nothing reaches its results.

    `wrt`: it gives the gradients of these arrays, in the place of the results of the pass.
    """

    scratch = (
        0  # bytes that a run without targets takes from `lib.empty` beside its results, each piece rounded up to 256
    )
    plan: KernelPlan | None = None
    copies: Sequence[tuple[str, View, View]] = ()

    def __init__(self, call: Call, stated: Stated, ordinal: int, wrt: tuple[str, ...] = ()) -> None:
        problem, self.shapes, views, _ = stated
        self.device, self.wrt = ordinal, wrt
        self._forward, self._ragged = call.of is FORWARD, problem.ragged
        dtypes = {name: problem.dtype_of(name) for name in self.shapes}
        if wrt:
            gradient = "td" if call.of.moved else "d"
            self.shapes = {gradient + name: views[name].shape for name in wrt}
            dtypes = {gradient + name: views[name].dtype for name in wrt}
        self._results = [(shape, dtypes[name], ordinal) for name, shape in self.shapes.items()]  # as `empty` takes them
        self.row = next((x.name for x in call.of.rows if x.result and x.per_query), None)
        self._rows = rules.lse_shape(len(views["q"].shape), problem), problem.lse_dtype, ordinal
        self.always_rows = self.row is not None and not self._forward
        self._apart: set[tuple[int, ...]] = set()  # addresses at which targets were seen to overlap nothing

    def run(self, call: Call, addresses: list[int] | None = None, workspace: Any = None) -> Ran:
        """Results, filled in. `addresses` of the call's arrays, where they are known already."""
        lib = call.lib
        results = self._targets(call, addresses or addresses_of(lib, call.arrays))
        rows = lib.empty(*self._rows) if call.return_lse or self.always_rows else None
        stream = lib.stream(self.device)
        for x in () if call.add else results:  # nothing is added to what is there
            launch.fill(lib, x, 0.0, self.device, stream)
        if rows is not None:
            launch.fill(lib, rows, float("-inf") if self._forward else 0.0, self.device, stream)
            sinks = call.arrays.get("sinks" if self._forward else "tsinks")
            if sinks is not None and not self._ragged:  # else no row belongs to a sequence
                launch.spread(lib, rows, lib.pointer(sinks), lib.view(sinks), self.device, stream)
        return Ran(results, rows, None)

    def _targets(self, call: Call, addresses: list[int]) -> list[Any]:
        """Memory for the results, the caller's where he gave some."""
        lib, targets = call.lib, call.targets
        given = zip(self.shapes, self._results)
        results = [targets[name] if name in targets else lib.empty(*what) for name, what in given]
        if targets:
            self._check(lib, call.arrays, targets, (*addresses, *addresses_of(lib, dict(zip(self.shapes, results)))))
        return results

    def _check(self, lib: GpuAdapter, arrays: Arrays, targets: Arrays, at: tuple[int, ...]) -> None:
        """That the targets given overlap nothing: once for each set of addresses, as only these differ between
        calls."""
        if at not in self._apart:
            views = {name: lib.view(x) for name, x in arrays.items()}
            check_targets({name: lib.view(x) for name, x in targets.items()}, views)
            if len(self._apart) >= _MAX_PREPARED:
                self._apart.clear()
            self._apart.add(at)


class Kernels(Step):
    """A step with a plan, compiled and loaded for arrays that lie as those of the call.

    `misaligned`: arrays that start at no 16-byte boundary. `first`: the step before, in whose workspace it finds
    something.
    """

    def __init__(
        self,
        call: Call,
        stated: Stated,
        ordinal: int,
        plan: KernelPlan,
        misaligned: tuple[str, ...] = (),
        wrt: tuple[str, ...] = (),
        first: Kernels | None = None,
    ) -> None:
        super().__init__(call, stated, ordinal, wrt)
        self.plan, self.first, self._lists = plan, first, plan.lists
        problem, _, views, into = stated
        # (Where lengths are data optional arrays have all axes.)
        rank, layout = 4 if problem.ragged else len(views["q"].shape), call.options["layout"]
        strides: dict[str, tuple[int, ...]] = {}
        self.copies: list[tuple[str, View, View]] = []  # inputs to copy first: what they are, and what the copy is
        for name, view in views.items():
            copy = to_copy(name, view, problem, rank, plan, name in misaligned)
            if copy is not None:
                view = padded(copy.source, copy.alignment)
                self.copies.append((name, copy.source, view))
            of = name.removeprefix("t")  # a tangent lies as what it is the tangent of may lie
            if problem.cache_dtype and of in cached.SCALES:
                strides[name] = cached.strides(problem, of, view, layout)
            elif of in _OPTIONAL:
                strides[name] = _OPTIONAL[of].strides(view, problem, rank)
            elif problem.reads(of):
                strides[name] = score_shape(view)
            elif name not in PER_QUERY:
                strides[name] = params_strides(view, layout)
        self._through: list[str] = []  # outputs given in a form no kernel writes: computed aside, copied over
        for n, (name, shape) in enumerate(self.shapes.items()):
            view = views["q"]._replace(shape=shape, strides=contiguous(shape))
            if wrt:
                if not problem.reads(wrt[n]):
                    strides[name] = _OPTIONAL[wrt[n]].strides(view, problem, rank)
                continue
            if name in into:
                if shape[-1] > 1 and into[name].strides[-1] != 1:
                    self._through.append(name)
                else:
                    view = into[name]
            strides[name] = params_strides(view, layout)
        if plan.grouped:
            for name in ("q", "out"):
                strides[name] = grouping.strides(problem.group, strides[name])
            problem = grouping.grouped(problem) or problem
        overlaps = call.lib.kind != "jax" and early.possible()  # XLA puts what it captures into graphs of its own
        self._launcher = launch.Launcher(plan, functions(plan, ordinal), problem, strides, ordinal, overlaps)
        copied = [copy.strides[0] * copy.shape[0] * ITEMSIZE[source.dtype] for _, source, copy in self.copies]
        self.scratch = sum(-(-size // 256) * 256 for size in (*copied, self._launcher.workspace))
        # Of a call's addresses, and a 0 behind them, which stands in each slot.
        found = {name: n for n, name in enumerate((*views, *self.shapes, *([self.row] if self.row else [])))}
        self._in_slots = itemgetter(*[found.get(name, -1) for name in self._launcher.slots])

    def run(self, call: Call, addresses: list[int] | None = None, workspace: Any = None) -> Ran:
        """Launch. `workspace`: that of the step before, where this one finds something in it."""
        lib, ordinal, launcher = call.lib, self.device, self._launcher
        pointer, empty, slots = lib.pointer, lib.empty, launcher.slots
        stream = lib.stream(ordinal)
        if addresses is None:
            addresses = addresses_of(lib, call.arrays)
        results = self._targets(call, addresses) if call.targets else [empty(*what) for what in self._results]
        rows = empty(*self._rows) if call.return_lse or self.always_rows else None
        written = results
        if self._through:
            and_made = zip(self.shapes, self._results, results)
            written = [empty(*what) if name in self._through else x for name, what, x in and_made]
            for x, result in zip(written, results):
                if call.add and x is not result:
                    launch.copy_into(lib, x, result, ordinal, stream)
        of_rows = () if rows is None else (pointer(rows),)
        pointers = [*self._in_slots((*addresses, *map(pointer, written), *of_rows, 0))]
        if call.seed is not None and KEYS[0] in slots:
            pointers[slots[KEYS[0]] :] = round_keys(call.seed)
        block_mask = call.options["block_mask"]
        if block_mask is not None:
            for use in self._lists:
                pointers[slots[use.name]] = block_mask.list_for(use).data.ptr
        keep = []
        for name, view, copy in self.copies:
            slot = slots[name]
            held = launch.copy_of(lib, pointers[slot], view, copy, ordinal, stream)
            pointers[slot] = pointer(held)
            keep.append(held)
        own = empty((launcher.workspace // 4,), "float32", ordinal) if launcher.workspace else None
        if self.first is not None and workspace is not None:
            launcher.find(pointers, self.first._launcher, pointer(workspace))
        launcher(pointers, stream, 0 if own is None else pointer(own), call.follows)
        if self._through:
            for x, result in zip(written, results):
                if x is not result:
                    launch.copy_into(lib, result, x, ordinal, stream)
        return Ran(results, rows, own, pointers)

    def again(self, pointers: Sequence[int], stream: int) -> None:
        """Launch what has been launched with these pointers, where all lies as it did."""
        self._launcher.again(pointers, stream)


class Prepared:
    """One class of calls (same shapes, strides, dtypes, options): the steps that they run, one after the other.

    Gradients of arrays come after those of q, k and v. `keeps`: whether any finds something in the workspace of the
    first, which is to be kept then until all have run; else its memory is free for the others.
    """

    def __init__(self, call: Call, misaligned: tuple[str, ...], ordinal: int) -> None:
        stated, of, wrt = Stated.of(call), call.of, call.wrt
        problem, arch = stated.problem, device.current(ordinal)
        through_lse = "dlse" in stated.views or "tdlse" in stated.views
        found = plans(problem, arch, of, call.family, tuned.tiles(problem, arch, of), wrt, stated.views, through_lse)

        if found[0] is not None and (call.followed or len(found) > 1) and not ready(found[0], ordinal):
            options, family, followed = call.options, call.family, call.followed  # not the arrays
            compile_ahead(lambda: (*found[1:], *(_gradients(options, family, stated, ordinal) if followed else ())))
        self.first: Step
        self.others: list[Step] = []
        for names, plan in zip(((), *apart(wrt)), found):
            if plan is None:
                step = Step(call, stated, ordinal, names)
            else:
                first = self.first if plan.found else None
                assert first is None or isinstance(first, Kernels)
                step = Kernels(call, stated, ordinal, plan, misaligned, names, first)
            if names:
                self.others.append(step)
            else:
                self.first = step
        self.keeps = any(step.plan is not None and step.plan.found for step in self.others)

    def run(self, call: Call, addresses: list[int]) -> Any:
        """(out, lse), where lse is None unless it is asked for; of gradients, `Gradients`; of a jvp, (tout, tlse)."""
        results, rows, workspace, _ = self.first.run(call, addresses)
        if not call.of.of_gradients:
            return results[0], rows
        of_arrays: dict[str, Any] = {}
        if self.others:
            if not self.keeps:
                workspace = None
            call = call.but(targets={}, add=False)
            for step in self.others:
                of_arrays |= zip(step.wrt, step.run(call, addresses, workspace).results)
        dq, dk, dv = results
        return Gradients(dq, dk, dv, of_arrays)

    @property
    def steps(self) -> list[Step]:
        return [self.first, *self.others]

    @property
    def scratch(self) -> int:
        """Bytes that the steps take beside their results, one after the other."""
        return (sum if self.keeps else max)(step.scratch for step in self.steps)


def _gradients(
    options: dict[str, Any], family: str | None, stated: Stated, ordinal: int
) -> tuple[KernelPlan | None, ...]:
    """The plans of a forward's backward, where the gradient of out will lie as out does."""
    problem, arch = stated.problem, device.current(ordinal)
    shape, rows = stated.shapes["out"], rules.lse_shape(len(stated.views["q"].shape), problem)
    out = stated.views["q"]._replace(shape=shape, strides=contiguous(shape))
    lse = out._replace(shape=rows, strides=contiguous(rows), dtype=problem.lse_dtype)
    problem, _ = rules.state(stated.views | {"dout": out, "out": out, "lse": lse}, {}, options, BACKWARD)
    return plans(problem, arch, BACKWARD, family, tuned.tiles(problem, arch, BACKWARD))


def run(call: Call) -> Any:
    """As `Prepared.run`."""
    addresses = addresses_of(call.lib, call.arrays)
    return prepare(call, addresses, call.lib.device(call.arrays["q"])).run(call, addresses)


def kept(call: Call) -> Callable[[], Prepared | None]:
    """What such a call runs, as long as `forget` or others do not take its place: a tile may be stored for it."""
    return weakref.ref(prepare(call, addresses_of(call.lib, call.arrays), call.lib.device(call.arrays["q"])))


def addresses_of(lib: GpuAdapter, arrays: Arrays) -> list[int]:
    """Where each array begins. TypeError for one that is nowhere though it has elements: a fake one, beside a q that is
    none."""
    addresses = [*map(lib.pointer, arrays.values())]
    if 0 in addresses:
        for x, at in zip(arrays.values(), addresses):
            if not at and 0 not in lib.view(x).shape:
                raise TypeError(f"a {type(x).__name__} has no memory")
    return addresses


def prepare(call: Call, addresses: list[int], ordinal: int) -> Prepared:
    """What a call runs, where its arrays lie at `addresses`: kept, or planned and compiled."""
    lib = call.lib
    arrays, targets = call.arrays, call.targets
    bits = 0
    for at in addresses:
        bits |= at
    misaligned = tuple([name for name, at in zip(arrays, addresses) if at & 15]) if bits & 15 else ()
    stated = options = rules.lasting(call.options)
    if options["block_mask"] is not None:  # its pattern changes nothing but what is pointed to
        stated = options | {"block_mask": mask_kind(options["block_mask"])}
    key: tuple[Any, ...] | None = (
        lib.kind, call.of, call.wrt, call.family, call.add, misaligned, *stated.values(), *arrays,
        *map(lib.signature, arrays.values()),
        *targets, *map(lib.signature, targets.values()),
    )  # fmt: skip
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be a key: a window given as a list, or nonsense, which the rules name
        key = None
        prepared = None
    if prepared is None:
        lasting = call if options is call.options else call.but(options=options)
        prepared = Prepared(lasting, misaligned, ordinal)
        if key is not None:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def check_family(call: Call, problem: AttentionProblem, ordinal: int) -> None:
    """ValueError where the family that is named does not take the call."""
    plans(problem, device.current(ordinal), call.of, call.family)


def forget() -> None:
    """Plan every class of calls anew, because another tile was stored for one of them."""
    _prepared.clear()
