"""Writing new rows of k and v to caches in place: what is checked before, and by whom they are written."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import cached, caches, interop, overlap
from .call import Arrays
from .interop.protocol import Library
from .lengths import check_integers
from .namespaces import namespace
from .problem import EIGHT, FLOATS, HALVES, OFFSETS, AttentionProblem, View, to_bshd
from .rotary import check_tables, rotate

Array = Any
Views = dict[str, View]
INTEGERS = ("seqlens_k", "cu_seqlens_q", "page_table", "slots")


class Written(NamedTuple):
    totals: Array | None  # lengths behind the call, where there are lengths
    q: Array | None  # turned, where it was given
    changed: tuple[Array, ...]  # the caches, and scales of rows, where those that are given cannot be written to
    prepared: Any  # what runs the next call like it (gpu.append.Prepared), if something does


def in_slots(
    lib: Library, arrays: Arrays, views: Views, layout: str, check: bool, numbers: dict[str, float] | None = None
) -> Written:
    """At rows that slots name. `arrays`: new rows, caches and slots, scales of caches of 8 bits among them; `numbers`:
    those of such scales that are no arrays."""
    xp, (entries, rows, _, _) = namespace(lib.kind), to_bshd(views["k_cache"].shape, layout)
    arrays = _looked_at(lib, arrays, views, ("slots",), check, caches.check_slots, most=entries * rows)
    if (kernel := on_kernel(lib, arrays)) is not None:
        place = kernel.Place.in_slots(views["slots"].shape, (entries, rows))
        prepared = kernel.prepare(lib, arrays, place, layout, False, numbers)
        if prepared is not None and prepared.run(arrays) is not None:
            return Written(None, None, (), prepared)
    with _device_of(lib, arrays["k_cache"]):
        places = caches.at_slots(xp, arrays["slots"], entries, rows)
        return Written(None, None, _write(lib, xp, arrays, places, layout, numbers or {}), None)


def behind(
    lib: Library,
    arrays: Arrays,
    views: Views,
    problem: AttentionProblem,
    layout: str,
    interleaved: bool,
    check: bool,
    numbers: dict[str, float] | None = None,
) -> Written:
    """Behind the rows that sequences have. `arrays`: new rows, caches, lengths, tables of angles, and q where it is to
    be turned by them. `problem`: of the attention that follows; `numbers` as of `in_slots`."""
    xp, rows = namespace(lib.kind), to_bshd(views["k_new"].shape, layout)[1]
    lengths = [name for name in ("seqlens_k", "cu_seqlens_q", "page_table") if name in arrays]
    turned = views["rotary[0]"].shape[0] if "rotary[0]" in views else None
    how = {"problem": problem, "rows": rows, "turned": turned}
    arrays = _looked_at(lib, arrays, views, lengths, check, caches.check_behind, **how)
    if (kernel := on_kernel(lib, arrays)) is not None:
        place = kernel.Place.behind(problem, rows, to_bshd(views["k_cache"].shape, layout)[:2])
        prepared = kernel.prepare(lib, arrays, place, layout, interleaved, numbers)
        done = prepared and prepared.run(arrays)
        if done is not None:
            return Written(done[0], done[1], (), prepared)
    with _device_of(lib, arrays["k_cache"]):
        found = caches.behind(xp, problem, rows, {name: arrays[name] for name in lengths})
        arrays = dict(arrays)
        if "rotary[0]" in arrays:
            by = arrays["rotary[0]"], arrays["rotary[1]"], found.positions, interleaved
            for name in ("k_new", "q"):
                if name in arrays:
                    arrays[name] = _rows_first(rotate(xp, _rows_first(arrays[name], layout), *by), layout)
        return Written(
            found.totals, arrays.get("q"), _write(lib, xp, arrays, found.places, layout, numbers or {}), None
        )


def on_kernel(lib: Any, arrays: Arrays) -> Any:
    """The module that launches, where arrays lie on a GPU and nobody follows them."""
    if lib.kind == "cupy" or (lib.kind == "torch" and arrays["k_cache"].is_cuda and not lib.recorded(arrays.values())):
        return _append()
    return None


@functools.cache  # an import statement costs 1 us in every call
def _append() -> Any:
    from .gpu import append

    return append


def _write(
    lib: Library, xp: Any, arrays: Arrays, places: caches.Places, layout: str, numbers: dict[str, float]
) -> tuple[Array, ...]:
    """Nothing, or the caches, and their scales of rows, where those that are given cannot be written to."""
    if lib.kind == "torch":
        _check_inference(arrays)
    found, of_rows = [], []
    for name in "kv":
        whole = arrays[f"{name}_cache"]
        cache, new = _rows_first(whole, layout), _rows_first(arrays[f"{name}_new"], layout)
        if cached.of_eight(whole):
            given: Any = numbers.get(f"{name}_descale", arrays.get(f"{name}_descale", 1.0))
            rows = cached.of_rows(given, whole)
            new, scale = cached.quantised(xp, new, cached.name_of(whole), None if rows else given)
            if rows:
                scales = _rows_first(given[..., None], layout)
                of_rows.append(_rows_first(caches.write(xp, scales, places, scale[..., None]), layout)[..., 0])
        found.append(_rows_first(caches.write(xp, cache, places, new), layout))
    return (*found, *of_rows) if lib.kind == "jax" else ()


def _rows_first(x: Array, layout: str) -> Array:
    """A view in which rows stand before heads, of one in this layout; and back again."""
    return x if layout == "bshd" else x.swapaxes(-2, -3)


# ---- what is checked -------------------------------------------------------------------------------------------------


def check_rows(views: Views, layout: str) -> None:
    """TypeError or ValueError where caches and new rows do not belong together."""
    cache = views["k_cache"]
    what = "pages, rows" if "page_table" in views else "entries, rows" if "slots" in views else "sequences, rows"
    for name in ("k_cache", "v_cache"):
        if len(views[name].shape) != 4:
            raise ValueError(
                f"{name} has {len(views[name].shape)} dimensions, shape {views[name].shape}; it must have 4, "
                f"({_in_layout((*what.split(', '), 'heads', 'dim'), layout)})"
            )
    entries, rows, heads, dim = to_bshd(cache.shape, layout)
    dim_v = views["v_cache"].shape[-1]
    if cache.dtype not in (*FLOATS, *EIGHT):
        raise TypeError(f"k_cache has dtype {cache.dtype}; it must be one of {', '.join((*FLOATS, *EIGHT))}")
    dtype = _dtype_of_new(views)
    for name in INTEGERS:
        if name in views and name != "slots":
            check_integers(name, views[name])
    front = _front(views, layout)
    want = {
        "v_cache": (entries, rows, heads, dim_v), "k_new": (*front, heads, dim), "v_new": (*front, heads, dim_v)
    }  # fmt: skip
    for name, shape in want.items():
        if views[name].shape != (shape := tuple(_placed(shape, layout))):
            of = "k_cache" if name == "v_cache" else f"{_leader(views)} and {name[0]}_cache"
            raise ValueError(
                f"{name} has shape {views[name].shape}; it must be {shape}, as {of} say" + "s" * (of == "k_cache")
            )
        if views[name].dtype != (must := cache.dtype if name == "v_cache" else dtype):
            of = "k_cache" if must == cache.dtype else "k_new"
            raise TypeError(f"{name} has dtype {views[name].dtype}; it must be that of {of}, {must}")
    if "rotary[0]" in views:
        check_tables(views["rotary[0]"], views["rotary[1]"], dim, dtype)
    for name in cached.SCALES:
        if name in views:
            cached.check(name, views[name], cache.shape, layout)
    first = views.get("q", cache)
    for name, view in views.items():
        if view.device != first.device and view.device and first.device:  # traced JAX arrays have none yet
            where = "q" if "q" in views else "k_cache"
            raise ValueError(f"{name} is on {view.device} but {where} is on {first.device}; all must be on one device")


def check_apart(views: Views, targets: Views | None = None, memory: Views | None = None) -> None:
    """ValueError where what is written, caches, scales of rows and `targets` of the attention, shares memory with
    anything else; but new rows may lie in their cache. `memory`: of those whose addresses are hidden, which are 0 in
    `views`; what has none has no memory."""
    of_rows = [name for name in cached.SCALES if name in views and cached.of_rows(views[name], views["k_cache"])]
    named = {name: x for name, x in (views | (targets or {}) | (memory or {})).items() if x.ptr}
    written = {name: named.pop(name) for name in ("k_cache", "v_cache", *of_rows, *(targets or ())) if name in named}
    overlap.check_apart(written, named, (("k_cache", "k_new"), ("v_cache", "v_new")))


def _check_inference(arrays: Arrays) -> None:
    """ValueError where PyTorch would refuse a write, once it has written."""
    inference_mode: Any = sys.modules["torch"].is_inference_mode_enabled
    for name in ("k_cache", "v_cache", *(x for x in cached.SCALES if cached.of_rows(arrays.get(x), arrays["k_cache"]))):
        if arrays[name].is_inference() and not inference_mode():
            raise ValueError(
                f"{name} was made under torch.inference_mode, and PyTorch lets nobody write to it outside; call "
                "attention_append under torch.inference_mode, too, or make it under torch.no_grad"
            )


def check_mapped(lib: Library, arrays: Arrays) -> None:
    """ValueError where vmap maps what is written, or where, and not what it is written to."""
    for of in "kv":
        for name in (f"{of}_new", f"{of}_descale", *INTEGERS, "rotary[0]", "rotary[1]"):
            if name in arrays and interop.mapped(lib, arrays[name]) and not interop.mapped(lib, arrays[f"{of}_cache"]):
                raise ValueError(
                    f"{name} is mapped by vmap and {of}_cache is not, so that all entries would write to one cache; "
                    f"{of}_cache must be mapped, too"
                )


def _dtype_of_new(views: Views) -> str:
    """That of new rows: the caches', but beside these of 8 bits one of 16."""
    dtype, new = views["k_cache"].dtype, views["k_new"].dtype
    if dtype not in EIGHT:
        for name in cached.SCALES:
            if name in views:
                raise TypeError(f"{name} is given with k_cache of {dtype}; it is for caches of {' or '.join(EIGHT)}")
        return dtype
    if new not in HALVES:
        raise TypeError(f"k_new has dtype {new}; beside k_cache of {dtype} it must be {' or '.join(HALVES)}")
    return new


def _leader(views: Views) -> str:
    """Which array says how many new rows there are."""
    return next(name for name in ("q", "slots", "k_new") if name in views)


def _front(views: Views, layout: str) -> tuple[int, ...]:
    """(sequences, rows) or (rows,) of what is new."""
    name = _leader(views)
    x = views[name].shape
    if name == "slots":
        if views[name].dtype not in OFFSETS:
            raise TypeError(f"slots has dtype {views[name].dtype}; it must be {' or '.join(OFFSETS)}")
        if len(x) not in (1, 2):
            raise ValueError(f"slots has shape {x}; it must be (rows,) or (sequences, rows), a row of k_cache for each")
        return x
    packed = "cu_seqlens_q" in views
    if len(x) != (3 if packed else 4):
        form = ("rows", "heads", "dim") if packed else ("sequences", "rows", "heads", "dim")
        why = "with" if packed else "without"
        raise ValueError(
            f"{name} has {len(x)} dimensions, shape {x}; {why} cu_seqlens_q it must have {len(form)}, "
            f"({_in_layout(form, layout)})"
        )
    sequences, rows, _, _ = to_bshd(x, layout)
    n = views["seqlens_k"].shape[0]
    if not packed and sequences != n:
        raise ValueError(f"{name} has {sequences} sequences, shape {x}; it must have as many as seqlens_k, {n}")
    return (rows,) if packed else (sequences, rows)


def _placed(shape: tuple[Any, ...], layout: str) -> tuple[Any, ...]:
    return shape if layout == "bshd" else (*shape[:-3], shape[-2], shape[-3], shape[-1])


def _in_layout(axes: tuple[str, ...], layout: str) -> str:
    return ", ".join(_placed(axes, layout))


# ---- where it is ----------------------------------------------------------------------------------------------------


def _looked_at(
    lib: Library, arrays: Arrays, views: Views, names: Sequence[str], check: bool, look: Callable[..., None], **how: Any
) -> Arrays:
    """The arrays, of which `look` has seen the integers `names` where they can be read. Where JAX traces a call, they
    can when it runs on a CPU, and others come in their place."""
    held = _on_host(lib, arrays, views, names, check)
    if held is not None:
        look(arrays=held, **how)
    elif lib.kind == "jax" and any(not views[name].device for name in ("k_cache", *names)):
        of_jax: Any = lib
        return arrays | of_jax.looked_at({name: arrays[name] for name in names}, check, look, **how)
    return arrays


def _on_host(lib: Library, arrays: Arrays, views: Views, names: Sequence[str], check: bool) -> dict[str, Any] | None:
    """Arrays of integers as NumPy's, of int64: those on a CPU always, those on a device where a check is asked for."""
    device = views["k_cache"].device
    if any(not views[name].device for name in names) or not device or (device != "cpu" and not check):
        return None
    if not all(interop.held(lib, arrays[name]) for name in names):
        return None
    if lib.kind != "jax" and device != "cpu":
        from .gpu import values

        return values.read(lib, {name: arrays[name] for name in names}, arrays["k_cache"])
    import numpy as np

    read: Any = np.asarray if lib.kind == "jax" else lib.to_numpy  # type: ignore[attr-defined]
    return {name: read(arrays[name]).astype(np.int64) for name in names}


def _device_of(lib: Library, x: Array) -> Any:
    """The context in which CuPy computes where x is."""
    return x.device if lib.kind == "cupy" else contextlib.nullcontext()
