"""Appending to caches in place: new rows of k and v behind those that are there, and attention to all of them.

It is put together from what writes (writing.py) and `attention`; nothing waits for the device.
"""

from __future__ import annotations

import inspect
import numbers as numbers_module
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import cached, dispatch, interop, writing
from .api import attention
from .call import Arrays, Call
from .counts import check_latent
from .given import present, trace_score, with_check
from .interop.protocol import Library
from .lengths import asked_for
from .other_names import renaming, unexpected
from .passes import FORWARD
from .problem import ARRAYS, DESCALES, EIGHT, OPTIONS, check_layout, complete
from .reals import positive
from .rotary import tables
from .rules import argument_name, fold_descales, seed_of, state
from .scalars import check_flag, told
from .signature import sharing
from .writing import INTEGERS

Array = Any
_ROWS = ("k_new", "v_new", "k_cache", "v_cache")
_NOT_HERE = ("cu_seqlens_k", "at", "out_dtype", "out_scale", *DESCALES)
_OF_CACHES = ("layout", "latent")  # options that are about writing too
_OPTIONS = [row.name for row in OPTIONS if row.name not in _NOT_HERE]
_ARRAYS = [row.name for row in ARRAYS if row.name not in _NOT_HERE]


def _compiled() -> bool:
    """Whether a compiler of PyTorch's reads this."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)  # None, too, while another thread imports it
    return compiler is not None and compiler.is_compiling()


@renaming(_compiled, k="k_cache", v="v_cache")
@sharing(attention, without=_NOT_HERE)
def attention_append(
    q: Array | None,
    k_new: Array,
    v_new: Array | None = None,
    k_cache: Array = None,
    v_cache: Array | None = None,
    seqlens_k: Array | None = None,
    *,
    cu_seqlens_q: Array | None = None,
    page_table: Array | None = None,
    slots: Array | None = None,
    rotary: tuple[Array, Array] | None = None,
    rotary_interleaved: bool = False,
    k_descale: float | Array | None = None,
    v_descale: float | Array | None = None,
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
        Of any strides; of 8 bits, float8_e4m3fn or int8, beside new rows of 16. They are written to, and share
        memory with no other argument, but new rows may lie in their own cache. In JAX, where arrays are immutable,
        give them to `jax.jit` as donated.
    seqlens_k : (N,) int32 or int64
        Rows that each sequence has before the call: the first new row becomes row seqlens_k[n], counted from 0.
    cu_seqlens_q : (N + 1,) int32 or int64, optional
        q, k_new and v_new are packed: sequence n has their rows from cu_seqlens_q[n] up to cu_seqlens_q[n + 1].
    page_table : (N, P) int32 or int64, optional
        As of `attention`; with the pages that new rows come to, which no other sequence of the call may write to. A
        page that a sequence has twice must not give two new rows one place.
    slots : (N, L) or (T,) int32 or int64, optional
        In the place of seqlens_k and page_table: the row of each new one, counted through all entries of a cache, or
        all pages of a pool; -1 for none. q must be None then, and rotary too: positions are not known.
    rotary : (cos, sin), optional
        Rows of k_new and q are turned by the angles of their positions in the sequence (Su et al. 2021): (positions,
        half), in float32 or the caches' dtype, for the first 2 half columns, an even number up to D.
    rotary_interleaved : bool
        Pairs of columns are (2 i, 2 i + 1), in the place of (i, i + half).
    latent : int, optional
        V is the first so many columns of K, as of `attention`: a row is written once, v_new and v_cache are left out,
        and k_new comes turned (rotary must be None).
    k_descale, v_descale : float, (Hk,) or the cache's shape without its last axis, in float32, optional
        What numbers of caches of 8 bits are multiplied by: a number, 1 if left out, or an array with one or one for
        each head, by which new rows are divided; or an array with one for each row of a head, which is written too,
        with what makes the row's largest number the largest of 8 bits. What is too large becomes the largest; NaN in
        int8 becomes 0, beside a scale of NaN if the row has its own.
    check : bool
        As of `attention`: look at what lengths, pages and slots on a device hold, before anything is written.
    return_lse, causal, window, ... : as of `attention`

    Returns
    -------
    out : shaped like q, with Dv columns
    lse : only with return_lse=True
    k_cache, v_cache, and arrays of scales of rows : in JAX alone
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
    if "numbers" in options:
        raise unexpected("attention_append", "numbers", inspect.signature(attention_append).parameters)
    numbers = {}
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None and isinstance(x, numbers_module.Real):
            numbers[name] = positive(name, x)
        else:
            arrays[name] = x
    if numbers:
        options["numbers"] = tuple(numbers.items())
    given = options | {"rotary_interleaved": rotary_interleaved, "return_lse": return_lse, "check": check}
    lib: Any = interop.library("k_cache", k_cache)
    traced = lib.kind == "torch" and lib.traced(k_cache)
    return _traced(arrays, given) if traced else _appended(arrays, given)


class _Asked(NamedTuple):
    """What is asked, as far as it is checked before arrays are looked at."""

    arrays: Arrays  # those that are given
    options: dict[str, Any]  # of the attention
    layout: str
    interleaved: bool
    return_lse: bool
    check: Any
    numbers: dict[str, float]  # of scales that are no arrays

    @classmethod
    def of(cls, arrays: Arrays, given: dict[str, Any]) -> _Asked:
        own = ("rotary_interleaved", "return_lse", "check", "numbers")
        options = {name: x for name, x in given.items() if name not in own}
        interleaved, return_lse = (check_flag(name, given[name]) for name in own[:2])
        numbers = dict(given.get("numbers", ()))
        for name in options:
            if name not in (*_OPTIONS, *_ARRAYS, "score_arrays", "family", "out"):
                raise unexpected("attention_append", name, inspect.signature(attention_append).parameters)
        layout = check_layout(options.get("layout", "bshd"))
        arrays = present(_ROWS if options.get("latent") is None else ("k_new", "k_cache"), arrays)
        if interleaved and "rotary[0]" not in arrays:
            raise TypeError(
                "rotary_interleaved is True, but rotary is None; it says which columns rotary turns: give that, or "
                "leave it out"
            )
        _check_together(arrays, [*options, *["return_lse"] * return_lse])
        _check_latent(options.get("latent"), arrays)
        if numbers and not cached.of_eight(arrays["k_cache"]):
            raise TypeError(
                f"{next(iter(numbers))} is given with k_cache of {arrays['k_cache'].dtype}; it is for caches of "
                f"{' or '.join(EIGHT)}"
            )
        return cls(arrays, options, layout, interleaved, return_lse, given["check"], numbers)


def _traced(arrays: Arrays, given: dict[str, Any]) -> Any:
    """Where PyTorch follows the call: by an operator that writes, and that of attention."""
    asked = _Asked.of(arrays, given)
    lib, arrays = _of_one_library(asked.arrays)
    arrays = _with_v(arrays)
    check = check_flag("check", asked.check)
    of_torch: Any = lib
    if "q" in arrays:
        call = _call(lib, arrays, asked)
        of_torch.check(call)
        dispatch.check_family(call, None)
    totals, turned = of_torch.append(arrays, asked.layout, asked.interleaved, check, asked.numbers)
    if "q" not in arrays:
        return None
    q = turned if "rotary[0]" in arrays else arrays["q"]
    of: dict[str, Any] = {name: arrays[name] for name in ("cu_seqlens_q", "page_table") if name in arrays}
    of |= {"seqlens_k": totals, "return_lse": asked.return_lse, **asked.numbers}
    of |= {name: arrays[name] for name in cached.SCALES if name in arrays}
    v = arrays["v_cache"] if asked.options.get("latent") is None else None
    return attention(q, arrays["k_cache"], v, **of, **asked.options)


def _appended(arrays: Arrays, options: dict[str, Any]) -> Any:
    """As `attention_append`, of its arrays and everything else by name."""
    key, addresses = _class(arrays, options)
    try:
        known = None if key is None else _alike.get(key)
    except TypeError:  # of a list in a tuple
        key = known = None
    if known is not None and (done := known.run(arrays, addresses)) is not None:
        return _one_or_all(done)
    asked = _Asked.of(arrays, options)
    q = arrays["q"]
    lib, arrays = _of_one_library(asked.arrays)
    arrays = _with_v(arrays)
    views = {name: interop.view(lib, name, x) for name, x in arrays.items()}
    writing.check_rows(views, asked.layout)
    if interop.followed(lib, arrays["k_cache"]):
        writing.check_mapped(lib, arrays)
    if lib.kind == "jax" and cached.of_eight(arrays["k_cache"]):
        of_jax: Any = lib
        arrays |= {name: of_jax.forward_alone(name, arrays[name]) for name in ("k_new", "v_new")}
    if "slots" in arrays:
        if lib.kind != "jax":  # whose arrays are not written to
            writing.check_apart(views, memory=interop.memory(lib, arrays))
        done = writing.in_slots(lib, arrays, views, asked.layout, asked_for(asked.check), asked.numbers)
        _keep(key, done, None, False)
        found = _changed(done, asked)
    else:
        found = _behind(lib, arrays, views, asked, key)
    if q is not None and arrays["q"] is not q:  # of a library that has no adapter
        like = interop.like(q)
        found = tuple(None if x is None else like(x) for x in found)
    return _one_or_all(found)


def _behind(lib: Library, arrays: Arrays, views: writing.Views, asked: _Asked, key: Any) -> tuple[Array, ...]:
    attends, layout = "q" in arrays, asked.layout
    turns = attends and "rotary[0]" in arrays
    call = _call(lib, arrays, asked)
    adopted, targets = interop.adopt(lib, call.arrays, call.targets)
    seen = {name: interop.view(lib, argument_name(name), x) for name, x in adopted.items()}
    into = {name: lib.view(x) for name, x in targets.items()}
    problem, _ = state(seen, into, call.options, FORWARD)
    if lib.kind != "jax":  # before anything is written, what the attention would say after
        writing.check_apart(views, into, interop.memory(lib, arrays))
        interop.check_followed(call)
        dispatch.check_family(call.but(arrays=adopted), problem)
    given = {name: x for name, x in arrays.items() if turns or name != "q"}
    done = writing.behind(lib, given, views, problem, layout, asked.interleaved, call.check, asked.numbers)
    _keep(key, done, call.but(arrays={}) if attends else None, turns)
    if not attends:
        return _changed(done, asked)
    k, v, *scales = done.changed or (arrays["k_cache"], arrays["v_cache"])
    of = adopted | {"q": done.q if turns else adopted["q"], "k": k, "v": v, "seqlens_k": done.totals}
    of |= zip([name for name in cached.SCALES if cached.of_rows(arrays.get(name), k)], scales)
    follows = done.prepared is not None
    return (*_attended(call.but(arrays=of, targets=targets, follows=follows)), *_changed(done, asked))


def _one_or_all(found: tuple[Array, ...]) -> Any:
    return found[0] if len(found) == 1 else found or None


class _Alike:
    """Calls that run as one before them has: a launch that writes and, where something is attended to, a call but for
    its arrays. `turns`: whether that is q turned."""

    def __init__(self, writes: Any, call: Call | None, turns: bool) -> None:
        self._writes, self._call, self._turns = writes, call, turns
        self._prepared: Callable[[], Any] = lambda: None  # what a GPU attends by, as long as the corridor keeps it

    def run(self, arrays: Arrays, at: dict[str, int]) -> tuple[Array, ...] | None:
        """None where this is for others to do. `at`: addresses of the arrays."""
        call = self._call
        if arrays["v_cache"] is None:  # of latent attention, which has k in its place
            arrays = arrays | {"v_new": arrays["k_new"], "v_cache": arrays["k_cache"]}
            at = at | {"v_new": at["k_new"], "v_cache": at["k_cache"]}
        done = self._writes.run(arrays, at)
        if done is None or call is None:
            return done and ()
        totals, turned = done
        of = {"q": turned if self._turns else arrays["q"], "k": arrays["k_cache"], "v": arrays["v_cache"]}
        of |= {name: arrays[name] for name in _ALSO if arrays.get(name) is not None}
        call = call.but(arrays=of | {"seqlens_k": totals}, follows=True)
        lib, prepared = call.lib, self._prepared()
        if (recorder := lib.recorder(call)) is not None:
            return _results(call, recorder(call))
        if prepared is not None:
            return _results(call, prepared.run(call, [*map(lib.pointer, call.arrays.values())]))
        found = dispatch.run(call)
        self._prepared = dispatch.kept(call)
        return _results(call, found)


_alike: dict[Any, _Alike] = {}
_MOST = 1024
_ALSO = ("cu_seqlens_q", "page_table", *cached.SCALES)
_OF_ANY_PLACE = frozenset((*INTEGERS, *cached.SCALES))
_PLAIN = frozenset((bool, int, float, str, type(None), tuple))


def _class(arrays: Arrays, options: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """What is the same of calls that run alike, None where there is something that each call must look at; and where
    arrays lie."""
    cls, given = type(arrays["k_cache"]), {name: x for name, x in arrays.items() if x is not None}
    lib: Any = interop.known(cls)
    if lib is None or "seed" in options or options["check"] is not False or {*map(type, given.values())} != {cls}:
        return None, {}
    kinds = (*map(type, options.values()),)
    if not _PLAIN.issuperset(kinds) or writing.on_kernel(lib, given) is None or asked_for(False):
        return None, {}
    try:
        at = dict(zip(given, map(lib.pointer, given.values())))
        signatures = [*map(lib.signature, given.values())]
    except (RuntimeError, TypeError):  # of a sparse tensor
        return None, {}
    # Of integers and scales, which no kernel reads in vectors, it does not matter where they begin.
    odd = tuple([(name, x & 15) for name, x in at.items() if x & 15 and name not in _OF_ANY_PLACE])
    return (cls, *options.items(), *kinds, *given, *signatures, *odd), at


def _keep(key: Any, done: writing.Written, call: Call | None, turns: bool) -> None:
    if key is not None and done.prepared is not None:
        if len(_alike) >= _MOST:
            _alike.clear()
        _alike[key] = _Alike(done.prepared, call, turns)


def _attended(call: Call) -> tuple[Array, ...]:
    return _results(call, (call.lib.recorder(call) or dispatch.run)(call))


def _results(call: Call, found: tuple[Array, Array | None]) -> tuple[Array, ...]:
    return found if call.return_lse else found[:1]


# ---- what is asked --------------------------------------------------------------------------------------------------


def _call(lib: Library, arrays: Arrays, asked: _Asked) -> Call:
    """The attention that is asked for, of lengths as they are before the call; of new rows alone where there is no
    q."""
    options = asked.options
    seed, number = seed_of(options.get("seed"), options.get("dropout", 0.0))
    named = {name: options.get(name) for name in _ARRAYS} | {"seed": seed}
    named |= {name: arrays.get(name) for name in ("seqlens_k", "cu_seqlens_q", "page_table")}
    q = arrays.get("q", arrays["k_new"])
    of_call = present("qkv", {"q": q, "k": arrays["k_cache"], "v": arrays["v_cache"]} | named)
    values = complete({name: x for name, x in options.items() if name in _OPTIONS})
    if values["score"] is not None or options.get("score_arrays") is not None:
        trace_score(lib, of_call, values, options.get("score_arrays"))
    numbers = asked.numbers if "q" in arrays else {}  # where nothing is attended they scale nothing
    scales = {name: numbers.get(name, arrays.get(name)) for name in cached.SCALES}
    of_call |= fold_descales(values, q, arrays["k_cache"], scales)
    targets = {} if options.get("out") is None else {"out": options["out"]}
    call = Call(lib, FORWARD, of_call, values, targets, number, options.get("family"), asked.return_lse)
    return with_check(call, asked.check)


def _check_latent(latent: Any, arrays: Arrays) -> None:
    """TypeError or ValueError where arrays are given that go with no `latent`, or with another."""
    if (n := check_latent(latent)) is None:
        return
    for name in ("v_new", "v_cache", "rotary[0]"):
        if name in arrays:
            why = "k_new comes turned, where V is not" if name == "rotary[0]" else "V is the first columns of K"
            name = name.partition("[")[0]
            raise ValueError(f"{name} is given, and latent is {told(n)}; it must be None there: {why}")
    if cached.of_eight(arrays["k_cache"]):
        raise TypeError(
            f"k_cache has dtype {cached.name_of(arrays['k_cache'])}, and latent is {told(n)}; it must be of "
            "16 bits or more there"
        )
    if (shape := tuple(getattr(arrays["k_cache"], "shape", ()))) and n > shape[-1]:
        shape = told(shape)
        raise ValueError(f"latent is {told(n)}; it must be at most the columns of k_cache, {shape[-1]}, shape {shape}")


def _with_v(arrays: Arrays) -> Arrays:
    """With V of no columns, where it is in K: so a row is written once."""
    if "v_cache" in arrays:
        return arrays
    return arrays | {f"v_{x}": arrays[f"k_{x}"][..., :0] for x in ("new", "cache")}


def _changed(done: writing.Written, asked: _Asked) -> tuple[Array, ...]:
    return done.changed if asked.options.get("latent") is None else done.changed[:1]


def _of_one_library(arrays: Arrays) -> tuple[Library, Arrays]:
    first = "q" if "q" in arrays else "k_cache"
    lib = interop.library(first, arrays[first])
    for name, x in arrays.items():
        kind = interop.library(name, x).kind
        if kind != lib.kind and not (lib.kind == "jax" and kind == "numpy" and name in INTEGERS):
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
        rows = (x for x in cached.SCALES if cached.of_rows(found.get(x), found["k_cache"]))
        for name in ("k_cache", *(["v_cache"] if "v_cache" in found else []), *rows):
            lib.check_target(name, found[name])
    return lib, found


def _check_together(arrays: Arrays, options: list[str]) -> None:
    if "slots" in arrays:
        for name in (*("q", "seqlens_k", "cu_seqlens_q", "page_table", "rotary[0]"), *options):
            if name in arrays or (name in options and name not in _OF_CACHES):
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
        if "q" not in arrays and name not in _OF_CACHES:
            raise ValueError(f"{name} is given, but q is None, so that nothing is attended; leave it out")
