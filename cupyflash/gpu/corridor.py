"""Walks the corridor: views, problem, plan, source, cubin, launch. The only place that knows the order.

What a call's data does not change is prepared once and kept under a key of raw attributes, so that the next call
with the same shapes costs a look-up, the outputs' allocation and the launch.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

from .. import problem as rules
from .. import tuned
from ..call import Arrays, Call
from ..interop.protocol import GpuAdapter
from ..overlap import check_targets
from ..passes import FORWARD, PER_QUERY
from ..problem import ARRAYS, ITEMSIZE, Gradients, View, contiguous
from . import device, launch
from .kernel_plan import KernelPlan
from .params import KEYS, round_keys, score_shape
from .plan import plan
from .programs import functions
from .strides import padded, params_strides, to_copy

_prepared: dict[Any, Prepared] = {}
_MAX_PREPARED = 4096
_OPTIONAL = {row.name: row for row in ARRAYS}


class Ran(NamedTuple):
    """What a run gave: results, lse where it was asked for, and the workspace, which a run after it may find things in."""

    results: list[Any]
    lse: Any
    workspace: Any


class Prepared:
    """One class of calls (same shapes, strides, dtypes, options), planned, compiled and loaded.

    `misaligned`: arrays that start at no 16-byte boundary. `chosen` is taken instead of planning. `wrt`: the gradients of
    these arrays in the place of those of q, k and v. `after`: what runs on the same arrays before; what it leaves in its
    workspace is used.
    """

    def __init__(
        self,
        call: Call,
        misaligned: tuple[str, ...],
        ordinal: int,
        chosen: KernelPlan | None = None,
        wrt: tuple[str, ...] = (),
        after: Prepared | None = None,
    ) -> None:
        lib = call.lib
        arrays, targets, options, of = call.arrays, call.targets, call.options, call.of
        self.wrt = wrt
        views = {name: lib.view(x) for name, x in arrays.items()}
        into = {name: lib.view(x) for name, x in targets.items()}
        self.problem, self.shapes = problem, shapes = rules.state(views, into, options, of)
        self._rows = (
            rules.lse_shape(len(views["q"].shape), problem),
            problem.lse_dtype,
            ordinal,
        )  # as `empty` takes it
        self.plan: KernelPlan
        self.device, rank, layout = ordinal, len(views["q"].shape), options["layout"]
        # Where nothing can reach the results they are zeros, and no kernel is needed.
        self.empty = problem.empty or (of is not FORWARD and problem.dim_v == 0 and "dlse" not in views)
        dtypes = dict.fromkeys(shapes, problem.result_dtype)
        if wrt:
            self.shapes = shapes = {f"d{name}": views[name].shape for name in wrt}
            dtypes = {f"d{name}": views[name].dtype for name in wrt}
            rows = 0 not in (problem.batch, problem.heads_q, problem.seq_q)
            through_lse = "dlse" in views and (problem.seq_k or "sinks" in wrt)  # lse without keys is the sink
            self.empty = not (rows and (problem.seq_k and problem.dim_v or through_lse))
        self._results = [(shape, dtypes[name], ordinal) for name, shape in shapes.items()]
        self._apart: set[tuple[int, ...]] = set()  # addresses at which targets were seen to overlap nothing
        self.first: Prepared | None = None  # in whose workspace something is found
        if self.empty:
            return

        if chosen is None:
            arch = device.current(ordinal)
            lengths = rules.lengths_of(wrt, views)
            chosen = plan(problem, arch, of, call.family, tuned.tiles(problem, arch, of), lengths)
            if after is not None and not after.empty:
                chosen = chosen.after(after.plan)
                self.first = after if chosen.found else None
        self.plan = chosen
        strides: dict[str, tuple[int, ...]] = {}
        self.copies: list[tuple[str, View, View]] = []  # inputs to copy first: what they are, and what the copy is
        for name, view in views.items():
            copy = to_copy(name, view, problem, rank, chosen, name in misaligned)
            if copy is not None:
                view = padded(copy.source, copy.alignment)
                self.copies.append((name, copy.source, view))
            if name in _OPTIONAL:
                strides[name] = _OPTIONAL[name].strides(view, problem, rank)
            elif problem.reads(name):
                strides[name] = score_shape(view)
            elif name not in PER_QUERY:
                strides[name] = params_strides(view, layout)
        self.through: list[str] = []  # outputs given in a form no kernel writes: computed aside, copied over
        for name, shape in shapes.items():
            view = views["q"]._replace(shape=shape, strides=contiguous(shape))
            if wrt:
                if not problem.reads(name[1:]):
                    strides[name] = _OPTIONAL[name[1:]].strides(view, problem, rank)
                continue
            if name in into:
                if shape[-1] > 1 and into[name].strides[-1] != 1:
                    self.through.append(name)
                else:
                    view = into[name]
            strides[name] = params_strides(view, layout)
        self.launcher = launch.Launcher(chosen, functions(chosen, ordinal), problem, strides, ordinal)
        slots = self.launcher.slots
        # Of a call's addresses, and a 0 behind them, which stands in each slot.
        found = {name: n for n, name in enumerate((*arrays, *shapes, *(["lse"] if of is FORWARD else [])))}
        self._in_slots = itemgetter(*[found.get(name, -1) for name in slots])

    @property
    def scratch(self) -> int:
        """Bytes that a run without targets takes from `lib.empty` beside its results, each piece rounded up to 256."""
        if self.empty:
            return 0
        copies = [copy.strides[0] * copy.shape[0] * ITEMSIZE[source.dtype] for _, source, copy in self.copies]
        return sum(-(-size // 256) * 256 for size in (*copies, self.launcher.workspace))

    def run(self, call: Call, addresses: list[int] | None = None, workspace: Any = None) -> Ran:
        """Launch. `addresses` of the call's arrays, where they are known already; `workspace`: that of the run before, where
        this one finds something in it (`first`)."""
        lib = call.lib
        arrays, targets = call.arrays, call.targets
        ordinal, pointer, empty = self.device, lib.pointer, lib.empty
        stream = lib.stream(ordinal)
        if addresses is None:
            addresses = addresses_of(lib, arrays)
        if not targets:
            results = [empty(*what) for what in self._results]
        else:
            given = zip(self.shapes, self._results)
            results = [targets[name] if name in targets else empty(*what) for name, what in given]
            self._check(lib, arrays, targets, (*addresses, *addresses_of(lib, dict(zip(self.shapes, results)))))
        rows = empty(*self._rows) if call.return_lse else None
        if self.empty:
            for x in results:
                launch.fill(lib, x, 0.0, ordinal, stream)
            if rows is not None:
                launch.fill(lib, rows, float("-inf"), ordinal, stream)
                if "sinks" in arrays:
                    sinks = arrays["sinks"]
                    launch.spread(lib, rows, pointer(sinks), lib.view(sinks), ordinal, stream)
            return Ran(results, rows, None)

        written = results
        if self.through:
            and_made = zip(self.shapes, self._results, results)
            written = [empty(*what) if name in self.through else x for name, what, x in and_made]
        launcher = self.launcher
        slots = launcher.slots
        of_rows = () if rows is None else (pointer(rows),)
        pointers = [*self._in_slots((*addresses, *map(pointer, written), *of_rows, 0))]
        if call.seed is not None and KEYS[0] in slots:
            pointers[slots[KEYS[0]] :] = round_keys(call.seed)
        block_mask = call.options["block_mask"]
        if block_mask is not None:
            for use in self.plan.lists:
                pointers[slots[use.name]] = block_mask.list_for(use).data.ptr
        keep = []
        for name, view, copy in self.copies:
            slot = slots[name]
            held = launch.copy_of(lib, pointers[slot], view, copy, ordinal, stream)
            pointers[slot] = pointer(held)
            keep.append(held)
        own = empty((launcher.workspace // 4,), "float32", ordinal) if launcher.workspace else None
        if self.first is not None and workspace is not None:
            launcher.find(pointers, self.first.launcher, pointer(workspace))
        launcher(pointers, stream, 0 if own is None else pointer(own))
        if self.through:
            for x, result in zip(written, results):
                if x is not result:
                    launch.copy_into(lib, result, x, ordinal, stream)
        return Ran(results, rows, own)

    def _check(self, lib: GpuAdapter, arrays: Arrays, targets: Arrays, at: tuple[int, ...]) -> None:
        """That the targets given overlap nothing: once for each set of addresses, as only these differ between calls."""
        if at not in self._apart:
            views = {name: lib.view(x) for name, x in arrays.items()}
            check_targets({name: lib.view(x) for name, x in targets.items()}, views)
            if len(self._apart) >= _MAX_PREPARED:
                self._apart.clear()
            self._apart.add(at)


def run(call: Call) -> Any:
    """out and (where asked for) lse of a forward; the `Gradients` of a backward."""
    lib = call.lib
    ordinal, addresses = lib.device(call.arrays["q"]), addresses_of(lib, call.arrays)
    if call.of is FORWARD:
        (out,), lse, _ = prepare(call, addresses, ordinal).run(call, addresses)
        return out, lse
    first, *others = prepare_all(call, addresses, ordinal)
    results, _, workspace = first.run(call, addresses)
    if not finds(others):
        workspace = None  # its memory is free for the others
    of_arrays: dict[str, Any] = {}
    if others:
        call = call.but(targets={})
    for prepared in others:
        of_arrays |= zip(prepared.wrt, prepared.run(call, addresses, workspace).results)
    dq, dk, dv = results
    return Gradients(dq, dk, dv, of_arrays)


def addresses_of(lib: GpuAdapter, arrays: Arrays) -> list[int]:
    """Where each array begins. TypeError for one that is nowhere though it has elements: a fake one, beside a q that is none."""
    addresses = [*map(lib.pointer, arrays.values())]
    if 0 in addresses:
        for x, at in zip(arrays.values(), addresses):
            if not at and 0 not in lib.view(x).shape:
                raise TypeError(f"a {type(x).__name__} has no memory")
    return addresses


def prepare_all(call: Call, addresses: list[int], ordinal: int) -> list[Prepared]:
    """What a call runs, one after the other: gradients of arrays come after those of q, k and v."""
    first = prepare(call, addresses, ordinal)
    if not call.wrt:
        return [first]
    without = call.but(targets={})
    return [first, *[prepare(without, addresses, ordinal, names, first) for names in rules.apart(call.wrt)]]


def finds(passes: list[Prepared]) -> bool:
    """Whether any finds something in the workspace of the first, which is to be kept then until all have run."""
    return any(x.first for x in passes)


def prepare(
    call: Call, addresses: list[int], ordinal: int, wrt: tuple[str, ...] = (), after: Prepared | None = None
) -> Prepared:
    """What a call runs, where its arrays lie at `addresses` (and `after` has run on them): kept, or planned and compiled."""
    lib = call.lib
    arrays, targets = call.arrays, call.targets
    bits = 0
    for at in addresses:
        bits |= at
    misaligned = tuple([name for name, at in zip(arrays, addresses) if at & 15]) if bits & 15 else ()
    stated = options = rules.lasting(call.options)
    if options["block_mask"] is not None:  # its pattern changes nothing but what is pointed to
        stated = options | {"block_mask": rules.mask_kind(options["block_mask"])}
    key: tuple[Any, ...] | None = (
        lib.kind, call.of, wrt, after, call.family, misaligned, *stated.values(), *arrays, *map(lib.signature, arrays.values()),
        *targets, *map(lib.signature, targets.values()),
    )  # fmt: skip
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be a key: a window given as a list, or nonsense, which the rules name
        key = None
        prepared = None
    if prepared is None:
        prepared = Prepared(
            call if options is call.options else call.but(options=options), misaligned, ordinal, None, wrt, after
        )
        if key is not None:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def forget() -> None:
    """Plan every class of calls anew, because another tile was stored for one of them."""
    _prepared.clear()
