"""Walks the corridor: views, problem, plan, source, cubin, launch. The only place that knows the order.

What a call's data does not change is prepared once and kept under a key of raw attributes, so that the next call
with the same shapes costs a look-up, the outputs' allocation and the launch.
"""

from __future__ import annotations

from typing import Any

from .. import problem as rules
from ..problem import View
from . import compiler, device, launch
from .device import Arch
from .plan import KernelPlan, plan
from .source import generate
from .strides import contiguous, needs_copy, padded, params_strides

_prepared: dict[Any, Any] = {}
_MAX_PREPARED = 4096

# Where each argument's pointer stands in Params.
_SLOT = {name: i for i, name in enumerate(launch.POINTERS)}
_SLOT["key_mask"] = _SLOT.pop("mask")


class Prepared:
    """One class of calls (same shapes, strides, dtypes, options), planned, compiled and loaded."""

    def __init__(
        self,
        lib: Any,
        arrays: dict[str, Any],
        targets: dict[str, Any],
        misaligned: tuple[str, ...],
        options: dict[str, Any],
        family: str | None,
        backward: bool,
        ordinal: int,
        arch: Arch | None = None,
    ) -> None:
        views: dict[str, View] = {name: lib.view(x) for name, x in arrays.items() if x is not None}
        q, k, v = (views[name] for name in "qkv")
        self.problem = problem = rules.describe(q, k, v, key_mask=views.get("key_mask"), **options)
        self.device, self.layout = ordinal, options["layout"]
        rank = len(q.shape)
        lse_shape, out_shape = rules.lse_shape(rank, problem), rules.out_shape(q.shape, problem)
        if backward:
            for name in ("dout", "out"):
                rules.check_like(name, views[name], out_shape, problem.dtype, q)
            rules.check_like("lse", views["lse"], lse_shape, problem.lse_dtype, q)
            self.outputs = {"dq": q, "dk": k, "dv": v}
        else:
            self.outputs = {"out": q._replace(shape=out_shape)}
        for name, like in self.outputs.items():
            if targets.get(name) is not None:
                where = f"grads: {name}" if backward else name
                rules.check_like(where, lib.view(targets[name]), like.shape, problem.dtype, q)
        self.lse_shape = lse_shape
        self._results = [(name, like.shape, _SLOT[name]) for name, like in self.outputs.items()]
        self.empty = problem.empty or (backward and problem.dim_v == 0)  # results are zeros, no kernel is needed
        if self.empty:
            return

        self.plan = plan(problem, arch or device.current(ordinal), backward, family)
        strides: dict[str, tuple[int, int, int]] = {}
        mask_batch = 0
        self.copies: list[tuple[str, int]] = []  # inputs to copy first, with the alignment they need
        for name, view in views.items():
            alignment = 1
            if name in launch.STRIDED:
                alignment = self.plan.alignment
                odd = name in misaligned and alignment == 16
                copy = odd or needs_copy(view, alignment, bool(self.plan.maps)) is not None
            else:  # lse is read as one block, key_mask as contiguous rows
                copy = view.strides != contiguous(view.shape) if name == "lse" else view.strides[-1] != 1
            if copy:
                self.copies.append((name, alignment))
                view = padded(view, alignment)
            if name in launch.STRIDED:
                strides[name] = params_strides(view, self.layout)
            elif name == "key_mask" and len(view.shape) == 2:
                mask_batch = view.strides[0]
        self.through: list[str] = []  # outputs given in a form no kernel writes: computed aside, copied over
        for name, like in self.outputs.items():
            view = like._replace(strides=contiguous(like.shape))
            if targets.get(name) is not None:
                target = lib.view(targets[name])
                if target.shape[-1] > 1 and target.strides[-1] != 1:
                    self.through.append(name)
                else:
                    view = target
            strides[name] = params_strides(view, self.layout)
        functions = load(self.plan, ordinal)
        self.launcher = launch.Launcher(self.plan, functions, problem, strides, mask_batch, ordinal)

    def run(
        self,
        lib: Any,
        arrays: dict[str, Any],
        targets: dict[str, Any],
        lse: bool,
        addresses: dict[str, int] | None = None,
    ) -> tuple[list[Any], Any]:
        """Launch. Returns the outputs, and in the forward the LSE where it is asked for.

        `addresses` of `arrays`, where they are known already."""
        dtype, ordinal, pointer = self.problem.dtype, self.device, lib.pointer
        stream = lib.stream(ordinal)
        results = []
        for name, shape, _ in self._results:
            target = targets.get(name)
            results.append(lib.empty(shape, dtype, ordinal) if target is None else target)
        rows = lib.empty(self.lse_shape, self.problem.lse_dtype, ordinal) if lse else None
        if self.empty:
            for x in results:
                launch.fill(lib, x, 0.0, ordinal, stream)
            if rows is not None:
                launch.fill(lib, rows, float("-inf"), ordinal, stream)
            return results, rows

        pointers = [0] * len(launch.POINTERS)
        for name, at in (_addresses(lib, arrays) if addresses is None else addresses).items():
            pointers[_SLOT[name]] = at
        keep = []
        for name, alignment in self.copies:
            copy = launch.padded_copy(lib, arrays[name], alignment, ordinal, stream)
            pointers[_SLOT[name]] = pointer(copy)
            keep.append(copy)
        written = results
        if self.through:
            written = [
                lib.empty(like.shape, dtype, ordinal) if name in self.through else x
                for (name, like), x in zip(self.outputs.items(), results)
            ]
        for (_, _, slot), x in zip(self._results, written):
            pointers[slot] = pointer(x)
        if rows is not None:
            pointers[_SLOT["lse"]] = pointer(rows)
        workspace = 0
        if self.launcher.workspace:
            space = lib.empty((self.launcher.workspace // 4,), "float32", ordinal)
            workspace = pointer(space)
            keep.append(space)
        self.launcher(pointers, stream, workspace)
        if self.through:
            for x, result in zip(written, results):
                if x is not result:
                    launch.copy_into(lib, result, x, ordinal, stream)
        return results, rows


def forward(
    lib: Any,
    q: Any,
    k: Any,
    v: Any,
    key_mask: Any,
    out: Any,
    return_lse: bool,
    options: dict[str, Any],
    family: str | None,
) -> tuple[Any, Any]:
    """out and (where asked for) lse of one attention call on GPU arrays."""
    ordinal = lib.device(q)
    arrays, targets = {"q": q, "k": k, "v": v, "key_mask": key_mask}, {"out": out}
    addresses = _addresses(lib, arrays)
    prepared = _find(lib, arrays, addresses, targets, options, family, False, ordinal)
    (o,), lse = prepared.run(lib, arrays, targets, return_lse, addresses)
    return lib.finish(o, ordinal) if out is None else out, lib.finish(lse, ordinal) if return_lse else None


def backward(
    lib: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    key_mask: Any,
    into: tuple[Any, Any, Any] | None,
    options: dict[str, Any],
    family: str | None,
) -> tuple[Any, Any, Any]:
    """dq, dk, dv of one attention call on GPU arrays."""
    ordinal = lib.device(q)
    arrays = {"q": q, "k": k, "v": v, "key_mask": key_mask, "dout": dout, "out": out, "lse": lse}
    targets = dict(zip(("dq", "dk", "dv"), into or (None, None, None)))
    addresses = _addresses(lib, arrays)
    prepared = _find(lib, arrays, addresses, targets, options, family, True, ordinal)
    grads, _ = prepared.run(lib, arrays, targets, False, addresses)
    return tuple(lib.finish(g, ordinal) for g in grads) if into is None else into  # type: ignore[return-value]


def _addresses(lib: Any, arrays: dict[str, Any]) -> dict[str, int]:
    pointer = lib.pointer
    return {name: pointer(x) for name, x in arrays.items() if x is not None}


def _find(
    lib: Any,
    arrays: dict[str, Any],
    addresses: dict[str, int],
    targets: dict[str, Any],
    options: dict[str, Any],
    family: str | None,
    backward: bool,
    ordinal: int,
) -> Prepared:
    signature = lib.signature
    misaligned = tuple([name for name, at in addresses.items() if at & 15])
    key: tuple[Any, ...] | None = (
        lib.kind, backward, family, misaligned, *options.values(),
        *[None if x is None else signature(x) for x in arrays.values()],
        *[None if x is None else signature(x) for x in targets.values()],
    )  # fmt: skip
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be a key: a window given as a list, or nonsense, which the rules name
        key = None
        prepared = None
    if prepared is None:
        prepared = Prepared(lib, arrays, targets, misaligned, options, family, backward, ordinal)
        if key is not None:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def forget() -> None:
    """Plan every class of calls anew, because another tile was stored for one of them."""
    device.current.cache_clear()
    _prepared.clear()


_loaded: dict[tuple[Any, ...], list[Any]] = {}


def load(kernel_plan: KernelPlan, ordinal: int) -> list[Any]:
    """The plan's kernels as functions on a device, compiled (or found in the cache) and loaded once."""
    key = (kernel_plan.source, kernel_plan.arch, kernel_plan.dtype, kernel_plan.constants, ordinal)
    if key not in _loaded:
        compiled = compiler.compile_source(generate(kernel_plan), kernel_plan.arch)
        _loaded[key] = compiler.load(compiled, [(x.name, x.shared_memory) for x in kernel_plan.launches], ordinal)
    return _loaded[key]
