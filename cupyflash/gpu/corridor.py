"""Walks the corridor: views, problem, plan, source, cubin, launch. The only place that knows the order.

What a call's data does not change is prepared once and kept under a key of raw attributes, so that the next call
with the same shapes costs a look-up, the outputs' allocation and the launch.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from .. import problem as rules
from .. import tuned
from ..interop.protocol import Arrays, GpuAdapter
from ..overlap import check_targets
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
_ROWS = ("lse", "dlse")  # (B, H, S): read as one block


class Prepared:
    """One class of calls (same shapes, strides, dtypes, options), planned, compiled and loaded.

    `misaligned`: arrays that start at no 16-byte boundary. `chosen` is taken instead of planning. `after`: what
    runs on the same arrays before; what it leaves in its workspace is used.
    """

    def __init__(
        self,
        lib: GpuAdapter,
        arrays: Arrays,
        targets: Arrays,
        misaligned: tuple[str, ...],
        options: dict[str, Any],
        family: str | None,
        backward: bool,
        ordinal: int,
        chosen: KernelPlan | None = None,
        wrt: tuple[str, ...] = (),
        after: Prepared | None = None,
    ) -> None:
        views = {name: lib.view(x) for name, x in arrays.items()}
        into = {name: lib.view(x) for name, x in targets.items()}
        self.problem, self.shapes = problem, shapes = rules.state(views, into, options, backward)
        self._rows = (
            rules.lse_shape(len(views["q"].shape), problem),
            problem.lse_dtype,
            ordinal,
        )  # as `empty` takes it
        self.plan: KernelPlan
        self.device, rank, layout = ordinal, len(views["q"].shape), options["layout"]
        # Where nothing can reach the results they are zeros, and no kernel is needed.
        self.empty = problem.empty or (backward and problem.dim_v == 0 and "dlse" not in views)
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
            chosen = plan(problem, arch, backward, family, tuned.tiles(problem, arch, backward), lengths)
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
            elif name not in _ROWS:
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
        found = {name: n for n, name in enumerate((*arrays, *shapes, *([] if backward else ["lse"])))}
        self._in_slots = itemgetter(*[found.get(name, -1) for name in slots])

    @property
    def scratch(self) -> int:
        """Bytes that a run without targets takes from `lib.empty` beside its results, each piece rounded up to 256."""
        if self.empty:
            return 0
        copies = [copy.strides[0] * copy.shape[0] * ITEMSIZE[source.dtype] for _, source, copy in self.copies]
        return sum(-(-size // 256) * 256 for size in (*copies, self.launcher.workspace))

    def run(
        self,
        lib: GpuAdapter,
        arrays: Arrays,
        targets: Arrays,
        lse: bool,
        addresses: list[int] | None = None,
        seed: int | None = None,
        block_mask: Any = None,
        left: list[Any] | None = None,
    ) -> tuple[list[Any], Any]:
        """Launch. Returns the outputs, and in the forward the LSE where it is asked for.

        `addresses` of `arrays`, where they are known already; `seed` of dropout, where it is a number; `block_mask`, where
        there is one: of the prepared kind. `left`: the workspace of the run before, from which this one or a later one takes
        what it finds there; put there by the first."""
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
        rows = empty(*self._rows) if lse else None
        if self.empty:
            for x in results:
                launch.fill(lib, x, 0.0, ordinal, stream)
            if rows is not None:
                launch.fill(lib, rows, float("-inf"), ordinal, stream)
                if "sinks" in arrays:
                    sinks = arrays["sinks"]
                    launch.spread(lib, rows, pointer(sinks), lib.view(sinks), ordinal, stream)
            return results, rows

        written = results
        if self.through:
            and_made = zip(self.shapes, self._results, results)
            written = [empty(*what) if name in self.through else x for name, what, x in and_made]
        launcher = self.launcher
        slots = launcher.slots
        of_rows = () if rows is None else (pointer(rows),)
        pointers = [*self._in_slots((*addresses, *map(pointer, written), *of_rows, 0))]
        if seed is not None and KEYS[0] in slots:
            pointers[slots[KEYS[0]] :] = round_keys(seed)
        if block_mask is not None:
            for use in self.plan.lists:
                pointers[slots[use.name]] = block_mask.list_for(use).data.ptr
        keep = []
        for name, view, copy in self.copies:
            slot = slots[name]
            held = launch.copy_of(lib, pointers[slot], view, copy, ordinal, stream)
            pointers[slot] = pointer(held)
            keep.append(held)
        workspace = 0
        if launcher.workspace:
            space = empty((launcher.workspace // 4,), "float32", ordinal)
            workspace = pointer(space)
            keep.append(space)
            if left == []:
                left.append(space)
        if self.first is not None and left:
            launcher.find(pointers, self.first.launcher, pointer(left[0]))
        launcher(pointers, stream, workspace)
        if self.through:
            for x, result in zip(written, results):
                if x is not result:
                    launch.copy_into(lib, result, x, ordinal, stream)
        return results, rows

    def _check(self, lib: GpuAdapter, arrays: Arrays, targets: Arrays, at: tuple[int, ...]) -> None:
        """That the targets given overlap nothing: once for each set of addresses, as only these differ between calls."""
        if at not in self._apart:
            views = {name: lib.view(x) for name, x in arrays.items()}
            check_targets({name: lib.view(x) for name, x in targets.items()}, views)
            if len(self._apart) >= _MAX_PREPARED:
                self._apart.clear()
            self._apart.add(at)


def forward(
    lib: GpuAdapter,
    arrays: Arrays,
    targets: Arrays,
    return_lse: bool,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
) -> tuple[Any, Any]:
    """out and (where asked for) lse of one attention call."""
    ordinal = lib.device(arrays["q"])
    addresses = addresses_of(lib, arrays)
    prepared = prepare(lib, arrays, addresses, targets, options, family, False, ordinal)
    (out,), lse = prepared.run(lib, arrays, targets, return_lse, addresses, seed, options["block_mask"])
    return out, lse


def backward(
    lib: GpuAdapter,
    arrays: Arrays,
    targets: Arrays,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
    wrt: tuple[str, ...] = (),
) -> Gradients:
    """The gradients of one attention call."""
    ordinal = lib.device(arrays["q"])
    addresses = addresses_of(lib, arrays)
    passes = prepare_all(lib, arrays, addresses, targets, options, family, True, ordinal, wrt)
    left = to_leave(passes) if wrt else None
    grads, _ = passes[0].run(lib, arrays, targets, False, addresses, seed, options["block_mask"], left)
    of_arrays: dict[str, Any] = {}
    for prepared in passes[1:]:
        results, _ = prepared.run(lib, arrays, {}, False, addresses, seed, options["block_mask"], left)
        of_arrays |= zip(prepared.shapes, results)
    return Gradients(*grads, **of_arrays)


def addresses_of(lib: GpuAdapter, arrays: Arrays) -> list[int]:
    """Where each begins. TypeError for one that is nowhere though it has elements: a fake one, beside a q that is none."""
    addresses = [*map(lib.pointer, arrays.values())]
    if 0 in addresses:
        for x, at in zip(arrays.values(), addresses):
            if not at and 0 not in lib.view(x).shape:
                raise TypeError(f"a {type(x).__name__} has no memory")
    return addresses


def prepare_all(
    lib: GpuAdapter,
    arrays: Arrays,
    addresses: list[int],
    targets: Arrays,
    options: dict[str, Any],
    family: str | None,
    backward: bool,
    ordinal: int,
    wrt: tuple[str, ...] = (),
) -> list[Prepared]:
    """What a call runs, one after the other: gradients of arrays come after those of q, k and v."""
    first = prepare(lib, arrays, addresses, targets, options, family, backward, ordinal)
    rest = rules.apart(wrt) if wrt else []
    return [
        first,
        *[prepare(lib, arrays, addresses, {}, options, family, True, ordinal, names, first) for names in rest],
    ]


def to_leave(passes: list[Prepared]) -> list[Any] | None:
    """`left` of their runs: None where nothing is found in the first's workspace, whose memory is free then for the others."""
    return [] if any(x.first for x in passes) else None


def prepare(
    lib: GpuAdapter,
    arrays: Arrays,
    addresses: list[int],
    targets: Arrays,
    options: dict[str, Any],
    family: str | None,
    backward: bool,
    ordinal: int,
    wrt: tuple[str, ...] = (),
    after: Prepared | None = None,
) -> Prepared:
    """What a call runs, where its arrays lie at `addresses` (and `after` has run on them): kept, or planned and compiled."""
    bits = 0
    for at in addresses:
        bits |= at
    misaligned = tuple([name for name, at in zip(arrays, addresses) if at & 15]) if bits & 15 else ()
    stated = options = rules.lasting(options)
    if options["block_mask"] is not None:  # its pattern changes nothing but what is pointed to
        stated = options | {"block_mask": rules.mask_kind(options["block_mask"])}
    key: tuple[Any, ...] | None = (
        lib.kind, backward, wrt, after, family, misaligned, *stated.values(), *arrays, *map(lib.signature, arrays.values()),
        *targets, *map(lib.signature, targets.values()),
    )  # fmt: skip
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be a key: a window given as a list, or nonsense, which the rules name
        key = None
        prepared = None
    if prepared is None:
        prepared = Prepared(lib, arrays, targets, misaligned, options, family, backward, ordinal, None, wrt, after)
        if key is not None:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def forget() -> None:
    """Plan every class of calls anew, because another tile was stored for one of them."""
    _prepared.clear()
