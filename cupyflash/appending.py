"""Appending to caches in place: new rows of k and v behind those that are there, and attention to all of them.

It is put together from a launch that writes (gpu/append.py), elsewhere from array operations, and `attention`; nothing
waits for the device.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any, NamedTuple

from . import caches, dispatch, interop
from .api import attention
from .call import Arrays, Call
from .given import asked_for, present, trace_score, with_check
from .interop.protocol import Library
from .lengths import check_integers
from .namespaces import namespace
from .other_names import renaming, unexpected
from .passes import FORWARD
from .problem import ARRAYS, DESCALES, FLOATS, OFFSETS, OPTIONS, View, check_flag, check_layout, complete, to_bshd
from .rotary import check_tables, rotate, tables
from .rules import argument_name, seed_of, state
from .signature import sharing

Array = Any
Views = dict[str, View]
_INTEGERS = ("seqlens_k", "cu_seqlens_q", "page_table", "slots")
_KEPT: dict[str, Any] = {}
_ROWS = ("k_new", "v_new", "k_cache", "v_cache")
_NOT_HERE = ("cu_seqlens_k", "at", "out_dtype", "out_scale", *DESCALES)
_OPTIONS = [row.name for row in OPTIONS if row.name not in _NOT_HERE]
_ARRAYS = [row.name for row in ARRAYS if row.name not in _NOT_HERE]


@renaming(k="k_cache", v="v_cache")
@sharing(attention, without=_NOT_HERE)
def attention_append(
    q: Array | None,
    k_new: Array,
    v_new: Array,
    k_cache: Array,
    v_cache: Array,
    seqlens_k: Array | None = None,
    *,
    cu_seqlens_q: Array | None = None,
    page_table: Array | None = None,
    slots: Array | None = None,
    rotary: tuple[Array, Array] | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    check: bool = False,
    **options: Any,
) -> Any:
    """Write new rows of k and v behind those that caches have, in place, and attend with q to all that is there then.

    Parameters
    ----------
    q : (N, L, Hq, D), or (T, Hq, D) with cu_seqlens_q
        The queries that belong to the new rows. None: write alone.
    k_new, v_new : (N, L, Hk, D) and (N, L, Hk, Dv), or (T, Hk, D) and (T, Hk, Dv)
        New rows, as many of each sequence as it has queries. They are not written to.
    k_cache, v_cache : (N, S, Hk, D) and (N, S, Hk, Dv); with page_table (pages, page, Hk, D) and (pages, page, Hk, Dv)
        Of any strides. They are written to, but in JAX, where arrays are immutable; give them to `jax.jit` as donated.
    seqlens_k : (N,) int32 or int64
        Rows that each sequence has before the call: the first new row becomes row seqlens_k[n], counted from 0.
    cu_seqlens_q : (N + 1,) int32 or int64, optional
        q, k_new and v_new are packed: sequence n has their rows from cu_seqlens_q[n] up to cu_seqlens_q[n + 1].
    page_table : (N, P) int32 or int64, optional
        As of `attention`; with the pages that new rows come to, which no other sequence of the call may write to.
    slots : (N, L) or (T,) int32 or int64, optional
        In the place of seqlens_k and page_table: the row of each new one, counted through all entries of a cache, or
        all pages of a pool; -1 for none. q must be None then, and rotary too: positions are not known.
    rotary : (cos, sin), optional
        Rows of k_new and q are turned by the angles of their positions in the sequence (Su et al. 2021): (positions,
        half), in float32 or the caches' dtype, for the first 2 half columns, an even number up to D.
    rotary_interleaved : bool
        Pairs of columns are (2 i, 2 i + 1), in the place of (i, i + half).
    check : bool
        As of `attention`: look at what lengths, pages and slots on a device hold, before anything is written.
    return_lse, causal, window, ... : as of `attention`

    Returns
    -------
    out : shaped like q, with Dv columns
    lse : only with return_lse=True
    k_cache, v_cache : in JAX alone
        As one result where it is one, else as a tuple; None where there is none.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be: nothing has been written then. What lengths on a device
        hold is not known without `check`: rows that have no place in the cache are dropped there, and not attended.
    """
    arrays: Arrays = {"q": q, "k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache}
    arrays |= {"seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q, "page_table": page_table, "slots": slots}
    if rotary is not None:
        arrays |= tables(rotary)
    given = options | {"rotary_interleaved": rotary_interleaved, "return_lse": return_lse, "check": check}
    return _appended(arrays, given) if "torch" not in sys.modules else _not_compiled()(arrays, given)


def _not_compiled() -> Any:
    """For who may stand in the middle of what torch.compile reads: writes in place are none of its operators."""
    if "torch" not in _KEPT:
        _KEPT["torch"] = sys.modules["torch"].compiler.disable(_appended)
    return _KEPT["torch"]


def _appended(arrays: Arrays, options: dict[str, Any]) -> Any:
    """As `attention_append`, of its arrays and everything else by name."""
    key = _class(arrays, options)
    known = None if key is None else _alike.get(key)
    if known is not None and (done := known.run(arrays)) is not None:
        return _one_or_all(done)
    interleaved, return_lse = (check_flag(name, options.pop(name)) for name in ("rotary_interleaved", "return_lse"))
    check = options.pop("check")
    for name in options:
        if name not in (*_OPTIONS, *_ARRAYS, "score_arrays", "family", "out"):
            raise unexpected("attention_append", name, inspect.signature(attention_append).parameters)
    layout = check_layout(options.get("layout", "bshd"))
    q, arrays = arrays["q"], present(_ROWS, arrays)
    _check_together(arrays, [*options, *["return_lse"] * return_lse])
    lib, arrays = _of_one_library(arrays)
    views = {name: interop.view(lib, name, x) for name, x in arrays.items()}
    _check_rows(views, layout)
    if "slots" in arrays:
        found = _in_slots(lib, arrays, views, layout, asked_for(check), key)
    else:
        call = _call(lib, arrays, options, return_lse, check)
        found = _behind(lib, arrays, views, call, interleaved, q is not None, key)
    if q is not None and arrays["q"] is not q:  # of a library that has no adapter
        like = interop.like(q)
        found = tuple(None if x is None else like(x) for x in found)
    return _one_or_all(found)


def _one_or_all(found: tuple[Array, ...]) -> Any:
    return found[0] if len(found) == 1 else found or None


class _Alike(NamedTuple):
    """Calls that run as one before them has: a launch that writes and, where something is attended to, a call but for
    its arrays. `turns`: whether that is q turned."""

    writes: Any
    call: Call | None
    turns: bool

    def run(self, arrays: Arrays) -> tuple[Array, ...] | None:
        """None where this is for others to do."""
        done = self.writes.run(arrays)
        if done is None or self.call is None:
            return done and ()
        totals, turned = done
        of = {"q": turned if self.turns else arrays["q"], "k": arrays["k_cache"], "v": arrays["v_cache"]}
        of |= {name: arrays[name] for name in ("cu_seqlens_q", "page_table") if arrays[name] is not None}
        return _attended(self.call.but(arrays=of | {"seqlens_k": totals}))


_alike: dict[Any, _Alike] = {}
_MOST = 1024
_PLAIN = frozenset((bool, int, float, str, type(None), tuple))


def _class(arrays: Arrays, options: dict[str, Any]) -> Any:
    """What is the same of calls that run alike; None where there is something that each call must look at."""
    cls, given = type(arrays["k_cache"]), {name: x for name, x in arrays.items() if x is not None}
    lib: Any = interop.known(cls)
    if (
        lib is None
        or "seed" in options
        or options["check"] is not False
        or any(type(x) is not cls for x in given.values())
    ):
        return None
    kinds = (*map(type, options.values()),)
    if not _PLAIN.issuperset(kinds) or _kernel(lib, given) is None or asked_for(False):
        return None
    bits = [0, 0]
    try:
        for name, x in given.items():
            bits[name.startswith("rotary")] |= 0 if name in _INTEGERS else lib.pointer(x)
        key = cls, *options.items(), *kinds, *given, *map(lib.signature, given.values()), bits[0] & 15, bits[1] & 15
        hash(key)
    except (RuntimeError, TypeError):  # of a sparse tensor; of a list in a tuple
        return None
    return key


def _keep(key: Any, alike: _Alike) -> None:
    if key is not None:
        if len(_alike) >= _MOST:
            _alike.clear()
        _alike[key] = alike


def _attended(call: Call) -> tuple[Array, ...]:
    out, lse = (call.lib.recorder(call) or dispatch.run)(call)
    return (out, lse) if call.return_lse else (out,)


def _in_slots(lib: Library, arrays: Arrays, views: Views, layout: str, check: bool, key: Any) -> tuple[Array, ...]:
    xp, (entries, rows, _, _) = namespace(lib.kind), to_bshd(views["k_cache"].shape, layout)
    held = _on_host(lib, arrays, views, ("slots",), check)
    if held is not None:
        caches.check_slots(held["slots"], entries * rows)
    if (kernel := _kernel(lib, arrays)) is not None:
        place = kernel.Place.in_slots(views["slots"].shape, (entries, rows))
        prepared = kernel.prepare(lib, arrays, place, layout, False)
        if prepared is not None and prepared.run(arrays) is not None:
            _keep(key, _Alike(prepared, None, False))
            return ()
    with _device_of(lib, arrays["k_cache"]):
        places = caches.at_slots(xp, arrays["slots"], entries, rows)
        return _written(lib, xp, arrays, places, layout)


def _behind(
    lib: Library, arrays: Arrays, views: Views, call: Call, interleaved: bool, attends: bool, key: Any
) -> tuple[Array, ...]:
    xp, layout = namespace(lib.kind), call.options["layout"]
    adopted, targets = interop.adopt(lib, call.arrays, call.targets)
    seen = {name: interop.view(lib, argument_name(name), x) for name, x in adopted.items()}
    problem, _ = state(seen, {name: lib.view(x) for name, x in targets.items()}, call.options, FORWARD)
    k_new = views["k_new"].shape
    rows = to_bshd(k_new, layout)[1]
    lengths = [name for name in ("seqlens_k", "cu_seqlens_q", "page_table") if name in arrays]
    held = _on_host(lib, arrays, views, lengths, call.check)
    if held is not None:
        turned = views["rotary[0]"].shape[0] if "rotary[0]" in views else None
        caches.check_behind(problem, held, rows, turned)
    turns = attends and "rotary[0]" in arrays
    q, arrays = adopted["q"], {name: x for name, x in arrays.items() if name != "q"}
    changed: tuple[Array, ...] = ()
    done = None
    if (kernel := _kernel(lib, arrays)) is not None:
        place = kernel.Place.behind(problem, rows, to_bshd(views["k_cache"].shape, layout)[:2])
        of_kernel = arrays | ({"q": q} if turns else {})
        prepared = kernel.prepare(lib, of_kernel, place, layout, interleaved)
        done = prepared and prepared.run(of_kernel)
        if done is not None:
            _keep(key, _Alike(prepared, call.but(arrays={}) if attends else None, turns))
    if done is not None:
        totals, q = done[0], done[1] if turns else q
    else:
        with _device_of(lib, arrays["k_cache"]):
            found = caches.behind(xp, problem, rows, {name: arrays[name] for name in lengths})
            totals = found.totals
            if "rotary[0]" in arrays:
                by = arrays["rotary[0]"], arrays["rotary[1]"], found.positions, interleaved
                arrays["k_new"] = _rows_first(rotate(xp, _rows_first(arrays["k_new"], layout), *by), layout)
                q = _rows_first(rotate(xp, _rows_first(q, layout), *by), layout) if turns else q
            changed = _written(lib, xp, arrays, found.places, layout)
    if not attends:
        return changed
    k, v = changed or (arrays["k_cache"], arrays["v_cache"])
    call = call.but(arrays=adopted | {"q": q, "k": k, "v": v, "seqlens_k": totals}, targets=targets)
    return (*_attended(call), *changed)


def _kernel(lib: Any, arrays: Arrays) -> Any:
    """The module that launches, where arrays lie on a GPU and nobody follows them."""
    if lib.kind == "cupy" or (
        lib.kind == "torch" and arrays["k_cache"].is_cuda and not lib.recorded([*arrays.values()])
    ):
        from .gpu import append

        return append
    return None


def _written(lib: Library, xp: Any, arrays: Arrays, places: caches.Places, layout: str) -> tuple[Array, ...]:
    """Nothing, or the caches where those that are given cannot be written to."""
    found = []
    for name in "kv":
        cache, new = (_rows_first(arrays[f"{name}_{x}"], layout) for x in ("cache", "new"))
        found.append(_rows_first(caches.write(xp, cache, places, new), layout))
    return tuple(found) if lib.kind == "jax" else ()


def _rows_first(x: Array, layout: str) -> Array:
    """A view in which rows stand before heads, of one in this layout; and back again."""
    return x if layout == "bshd" else x.swapaxes(-2, -3)


# ---- what is asked --------------------------------------------------------------------------------------------------


def _call(lib: Library, arrays: Arrays, options: dict[str, Any], return_lse: bool, check: bool) -> Call:
    """The attention that is asked for, of lengths as they are before the call; of new rows alone where there is no
    q."""
    seed, number = seed_of(options.get("seed"), options.get("dropout", 0.0))
    named = {name: options.get(name) for name in _ARRAYS} | {"seed": seed}
    named |= {name: arrays.get(name) for name in ("seqlens_k", "cu_seqlens_q", "page_table")}
    q = arrays.get("q", arrays["k_new"])
    of_call = present("qkv", {"q": q, "k": arrays["k_cache"], "v": arrays["v_cache"]} | named)
    values = complete({name: x for name, x in options.items() if name in _OPTIONS})
    if values["score"] is not None or options.get("score_arrays") is not None:
        trace_score(lib, of_call, values, options.get("score_arrays"))
    targets = {} if options.get("out") is None else {"out": options["out"]}
    call = Call(lib, FORWARD, of_call, values, targets, number, options.get("family"), return_lse)
    return with_check(call, check)


def _of_one_library(arrays: Arrays) -> tuple[Library, Arrays]:
    first = "q" if "q" in arrays else "k_cache"
    lib = interop.library(first, arrays[first])
    for name, x in arrays.items():
        kind = interop.library(name, x).kind
        if kind != lib.kind and not (lib.kind == "jax" and kind == "numpy" and name in _INTEGERS):
            raise TypeError(
                f"{name} is a {kind} array but {first} is a {lib.kind} array; all arrays must come from one library"
            )
    found = interop.adopted(lib, {"q": arrays[first], **arrays})
    found = {name: found[name] for name in arrays}
    if lib.kind == "torch" and sys.modules["torch"].is_grad_enabled():
        for name, x in found.items():
            if x.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and attention_append, which writes to caches, has no gradient; call it "
                    "under torch.no_grad(), or pass its detach()"
                )
    if lib.kind != "jax":
        for name in ("k_cache", "v_cache"):
            lib.check_target(name, found[name])
    return lib, found


def _check_together(arrays: Arrays, options: list[str]) -> None:
    if "slots" in arrays:
        for name in (*("q", "seqlens_k", "cu_seqlens_q", "page_table", "rotary[0]"), *options):
            if name in arrays or (name in options and name != "layout"):
                raise ValueError(
                    f"{name.partition('[')[0]} is given with slots, which are for writing alone, to rows that they "
                    "name; it must be None there"
                )
        return
    if "seqlens_k" not in arrays:
        raise ValueError(
            "seqlens_k is None; it must be the rows that each sequence has filled, (sequences,), or slots must be given"
        )
    for name in options:
        if "q" not in arrays and name != "layout":
            raise ValueError(f"{name} is given, but q is None, so that nothing is attended; leave it out")


def _check_rows(views: Views, layout: str) -> None:
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
    if cache.dtype not in FLOATS:
        raise TypeError(f"k_cache has dtype {cache.dtype}; it must be one of {', '.join(FLOATS)}")
    for name in _INTEGERS:
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
        if views[name].dtype != cache.dtype:
            raise TypeError(f"{name} has dtype {views[name].dtype}; it must be that of k_cache, {cache.dtype}")
    if "rotary[0]" in views:
        check_tables(views["rotary[0]"], views["rotary[1]"], dim, cache.dtype)
    first = views.get("q", cache)
    for name, view in views.items():
        if view.device != first.device and view.device and first.device:  # traced JAX arrays have none yet
            where = "q" if "q" in views else "k_cache"
            raise ValueError(f"{name} is on {view.device} but {where} is on {first.device}; all must be on one device")


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


def _on_host(lib: Library, arrays: Arrays, views: Views, names: Any, check: bool) -> dict[str, Any] | None:
    """Arrays of integers as NumPy's, of int64: those on a CPU always, those on a device where a check is asked for."""
    device = views["k_cache"].device
    if any(not views[name].device for name in names) or not device or (device != "cpu" and not check):
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


attention_append._torchdynamo_disable = True  # type: ignore[attr-defined]  # writes in place are for its own operators
