"""From what a call is given to the problem that it states: every rule of shapes, dtypes and devices, and its message.

Nothing here touches an array: callers describe their arrays as `View`s, and get back an `AttentionProblem`, or a
`TypeError` / `ValueError` that names the argument, what it is and what it must be.
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import replace
from typing import Any

from . import cached, latent, lengths, places
from .layouts import doubt, of_layout
from .passes import BACKWARD, FORWARD, PER_QUERY, Pass
from .problem import (
    ARRAY_RULES,
    ARRAYS,
    AXES,
    DROPOUT_STEPS,
    FLOAT8,
    FLOATS,
    HALVES,
    INPUTS,
    LAYOUTS,
    OF_FLOAT8,
    OPTIONS,
    SCORE_ARRAYS,
    ArrayRule,
    AttentionProblem,
    Given,
    MaskKind,
    View,
    check_dropout,
    check_options,
    check_out_scale,
    check_scale,
    check_score,
    contiguous,
    float_name,
    mask_kind,
    to_bshd,
)
from .reals import positive
from .scalars import told
from .score import Score, trace
from .score.graph import name_of


def seed_of(seed: Any, dropout: Any) -> tuple[Any, int | None]:
    """A seed as the array that it is, or as a number of 64 bits; neither where there is none and dropout asks
    for none."""
    if seed is None:
        if not (type(dropout) is float and dropout == 0) and check_dropout(dropout):
            raise ValueError(
                f"dropout is {told(dropout)}, but seed is not given; it must be an integer, or an array that holds one"
            )
        return None, None
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        number = int(seed)
        if not -(2**64) <= number < 2**64:
            raise ValueError(f"seed is {number}; it must have 64 bits, from -2**64 to 2**64 - 1")
        return None, number % 2**64
    if isinstance(seed, (bool, numbers.Number)) or not _may_be_array(seed):
        raise TypeError(f"seed is {seed!r}; it must be an integer, or an array that holds one")
    return seed, None


def _may_be_array(x: Any) -> bool:
    """Or, of `explain`, its shape."""
    return not isinstance(x, (str, bytes, list, dict, set))


def fold_descales(options: dict[str, Any], q: Any, k: Any, descales: dict[str, Any]) -> dict[str, Any]:
    """The arrays of DESCALES, by name. A number becomes a part of the options `scale` or `out_scale`.

    q, k: arrays or `View`s, of which shape and dtype are asked.
    """
    arrays, folded = {}, {"scale": "", "out_scale": ""}
    for name, x in ((name, x) for name, x in descales.items() if x is not None):
        if not isinstance(x, numbers.Real):
            if not _may_be_array(x):
                raise TypeError(
                    f"{name} is {x!r}; it must be a number, or an array with one for each head, block or row of a head"
                )
            arrays[name] = x
            continue
        dtype = float_name(getattr(q, "dtype", None))
        if dtype in FLOATS and (name == "q_descale" or not cached.of_eight(k)):
            raise TypeError(_of_float8(name, dtype))
        if name == "v_descale":
            option, before = "out_scale", check_out_scale(options.get("out_scale"))
        else:
            dim = tuple(getattr(q, "shape", ()))[-1:] or (0,)
            usual = 1.0 / math.sqrt(dim[0]) if dim[0] else 1.0
            scale = check_scale(options.get("scale"))
            option, before = "scale", usual if scale is None else scale
        options[option] = before * positive(name, x)
        folded[option] += f" times {name}"
    if folded["scale"]:
        if cached.of_eight(q) and not {"q_descale", "k_descale"} & {*arrays} and abs(options["scale"]) < 1e-30:
            options["scale"] = 0.0  # scores of 8 bits are so small then that softmax does not tell them from 0
        _in_range(f"scale{folded['scale']}", cached.name_of(k) if cached.of_eight(k) else FLOAT8, options["scale"])
    if folded["out_scale"]:  # that of V where it is 0 is the least, and may not become less
        options["out_scale"] = positive(f"out_scale{folded['out_scale']}", max(options["out_scale"], 1e-30))
    return arrays


def _of_float8(name: str, dtype: str | None) -> str:
    also = "" if name == "q_descale" else ", and for k and v of 8 bits beside q of 16"
    return f"{name} is given with q of {dtype}; it is for inputs of {FLOAT8}{also}"


_NUMBERED = {row.name: row.check for row in OPTIONS if row.number}
_CHECK_WINDOW = next(row.check for row in OPTIONS if row.name == "window")
_NUMBERS = frozenset((float, int, type(None)))


def lasting(options: dict[str, Any]) -> dict[str, Any]:
    """With the numbers that arrays and lists among the values hold now: later they may hold others."""
    if not _NUMBERS.issuperset(map(type, map(options.get, _NUMBERED))):  # hardly ever: every call comes here
        for name, check in _NUMBERED.items():
            if type(options.get(name)) not in _NUMBERS:
                options = options | {name: check(options[name])}
    window = options.get("window")
    if window is not None and not (type(window) is tuple and all(type(x) in _NUMBERS for x in window)):
        options = options | {"window": _CHECK_WINDOW(window)}
    return options


def describe(q: View, k: View, v: View | None = None, **given: Any) -> AttentionProblem:
    """Check q, k, v (of `latent` none) and what else is given, and return the problem that they state.

    A reading of the shapes that is allowed and almost surely not meant is warned of.

    `given` holds options (OPTIONS) as they are and optional arrays (ARRAYS) as `View`s or None, by name; as
    "score_arrays" the arrays that a score function reads, by their names.
    """
    layout = given.get("layout", LAYOUTS[0])
    views = latent.with_view({name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}, given)
    try:
        problem = _described(**views, **given)
    except ValueError as error:
        raise of_layout(error, layout, q, lambda other: _described(**views, **given | {"layout": other})) from None
    places.check(problem)
    doubt(problem, q, layout)
    return problem


def _described(q: View, k: View, v: View, **given: Any) -> AttentionProblem:
    score_arrays = given.pop("score_arrays", None) or {}
    check_options("describe", given)
    asked, given = places.apart(given)
    options = {row.name: row.check(asked.get(row.name, row.default)) for row in OPTIONS}
    layout, (left, right) = options.pop("layout"), options.pop("window")
    named, ragged = {"q": q, "k": k, "v": v}, bool(lengths.stated(given))
    lengths.check_options(options, given)
    cache_dtype, scales = cached.taken(q, k, v, given)
    given = {name: x for name, x in given.items() if name not in scales}
    for name, x in named.items():
        if x.dtype not in INPUTS and not (cache_dtype and name != "q"):
            raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(cached.TAKEN[name])}")
        if not ragged and len(x.shape) not in (2, 3, 4):
            axes = "(batch, sequence, heads, dim)" if layout == "bshd" else "(batch, heads, sequence, dim)"
            folded = f"; fold axes before these into the batch: {name}.reshape(-1, *{name}.shape[-3:])"
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, shape {x.shape}; it must have 4 {axes}, "
                "3 (the same without batch) or 2 (sequence, dim)" + folded * (len(x.shape) > 4)
            )
    for name, x in (("k", k), ("v", v)):
        if not ragged and len(x.shape) != len(q.shape):
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, shape {x.shape}, but q has {len(q.shape)}, shape {q.shape}; "
                "they must have the same number"
            )
        _same(name, x, "q", q, dtype=not cache_dtype)
    fields: dict[str, Any] = {"cache_dtype": cache_dtype}
    if ragged:
        of_lengths, ((sq, hq, d), (sk, hk, dk), (sv, hv, dv)) = lengths.extents(named, given, layout)
        fields |= of_lengths
    else:
        (batch, sq, hq, d), (bk, sk, hk, dk), (bv, sv, hv, dv) = (to_bshd(x.shape, layout) for x in named.values())
        fields["batch"] = batch
        for name, b in (("k", bk), ("v", bv)):
            if b != batch:
                raise ValueError(f"{name} has batch {b}, shape {named[name].shape}; it must be that of q, {batch}")
    if dk != d:
        raise ValueError(f"k has head dimension {dk}, shape {k.shape}; it must be that of q, {d}")
    if sv != sk:
        raise ValueError(f"v has {sv} keys, shape {v.shape}; it must have as many as k, {sk}")
    if hv != hk:
        raise ValueError(f"v has {hv} heads, shape {v.shape}; it must have as many as k, {hk}")
    if (hk == 0) != (hq == 0) or (hk and hq % hk):
        raise ValueError(f"q has {hq} heads and k has {hk}; the heads of q must be a multiple of those of k")

    diagonal = 0 if ragged or options["causal"] == "top_left" else sk - sq
    if options["at"] is not None:
        diagonal = options["at"][2] - options["at"][3]  # query i of all stands on key i
    if options["causal"] is not None:
        right = 0 if right is None else min(right, 0)
    if not (ragged or options["batch_invariant"] or given["at"]):  # else it is data what a bound hides
        left, right = bounds(left, right, diagonal, sq, sk)
    options["scale"] = _in_range("scale", q.dtype, options["scale"], 1.0 / math.sqrt(d) if d else 1.0)
    options["softcap"] = _in_range("softcap", q.dtype, options["softcap"])
    options["score"] = score_of(options["score"], score_arrays, q)
    if options["score"] is not None and options["softcap"] is not None:
        raise ValueError(
            f"softcap is {options['softcap']}, and score is given too; with a score function it must be None: write "
            "the cap into that, as c * tanh(s / c)"
        )
    for name, given_, usual in (("out_dtype", options["out_dtype"], None), ("out_scale", options["out_scale"], 1.0)):
        wide = name == "out_dtype" and q.dtype in HALVES and given_ == "float32"  # of gradients: `_stated`
        if q.dtype != FLOAT8 and given_ != usual and not (cache_dtype and name == "out_scale") and not wide:
            also = ", or for gradients float32" if name == "out_dtype" and q.dtype in HALVES else ""
            raise ValueError(
                f"{name} is {given_}; with q of {q.dtype} it must be {usual}{also}: it is for inputs of {FLOAT8}"
            )
    if q.dtype == FLOAT8 and options["out_dtype"] not in OF_FLOAT8:
        if options["out_dtype"] is not None:
            raise ValueError(f"out_dtype is {options['out_dtype']!r}; it must be {', '.join(OF_FLOAT8)} or None")
        options["out_dtype"] = OF_FLOAT8[0]
    options["dropout"] *= round(options["dropout"] * DROPOUT_STEPS) > 0  # a share that never drops anything is none
    arrays = [(row, given[row.name]) for row in _arrays_in(given) if options["dropout"] or row.name != "seed"]
    packed = fields.get("rows_q") is not None if ragged else None
    spread = (Given(row.name, x.dtype, _spread(row, x, len(q.shape), packed)) for row, x in arrays)
    problem = AttentionProblem(
        dtype=q.dtype, seq_q=sq, seq_k=sk, heads_q=hq, heads_k=hk, dim=d, dim_v=dv, diagonal=diagonal, left=left,
        right=right, **fields, **options, given=(*spread, *cached.stated(scales, k, layout)),
    )  # fmt: skip
    for name, x in scales.items():
        _same(name, x, "q", q, dtype=False)
    for row in _arrays_in(given):
        _check_array(row, given[row.name], problem, q)
    if (kind := mask_kind(given.get("block_mask"))) is not None:
        _check_mask_kind(kind, problem, q)
    return problem


def bounds(left: int | None, right: int | None, diagonal: int, sq: int, sk: int) -> tuple[int | None, int | None]:
    """A window's, where lengths are known: a bound that hides nothing is no bound. So fewer kernels are to compile,
    with fewer instructions in them."""
    if left is not None and left >= max(0, sq - 1 + diagonal):
        left = None
    if right is not None and right >= max(0, sk - 1 - diagonal):
        right = None
    return left, right


def _spread(row: ArrayRule, x: View, rank: int, packed: bool | None) -> tuple[str, ...]:
    """The axes along which an array given for this row has more than one entry. `packed`: whether q is, where lengths
    are data."""
    return row.spread(x, rank) if packed is None else lengths.spread(row, x, packed)


def _check_mask_kind(kind: MaskKind, problem: AttentionProblem, q: View) -> None:
    want = tuple(problem.extent(axis) for axis in AXES)
    if problem.ragged:
        lengths.check_mask_kind(kind, problem)
    elif any(n not in (1, whole) for n, whole in zip(kind.shape[:2], want)) or kind.shape[2:] != want[2:]:
        raise ValueError(
            f"block_mask has shape {kind.shape}; it must be {want}, (batch, head, query, key), where batch and head "
            "may be 1"
        )
    if q.kind != "shape" and kind.device != q.device:
        raise ValueError(f"block_mask is on {kind.device} but q is on {q.device}; make it with like=q")


def score_of(score: Any, arrays: dict[str, View], q: View, inlined: bool = False) -> Score | None:
    """The score function that is asked for, traced, once the arrays that it reads are what they must be; `inlined` as
    for `trace`."""
    score = check_score(score)
    if score is None:
        if arrays:
            raise ValueError(
                f"score_arrays holds {', '.join(map(repr, arrays))}, but no score is given that reads them"
            )
        return None
    if len(arrays) > SCORE_ARRAYS:
        raise ValueError(f"score_arrays holds {len(arrays)} arrays; it must hold at most {SCORE_ARRAYS}: stack some")
    dtypes = list(dict.fromkeys([*([] if q.dtype == FLOAT8 else [q.dtype]), "float32", "int32", "int64", "bool"]))
    for name, x in arrays.items():
        what = f"score_arrays[{name!r}]"
        if x.dtype not in dtypes:
            raise TypeError(f"{what} has dtype {x.dtype}; it must be {', '.join(dtypes[:-1])} or {dtypes[-1]}")
        if not 1 <= len(x.shape) <= 4 or 0 in x.shape:
            raise ValueError(f"{what} has shape {x.shape}; it must have 1 to 4 dimensions, none of length 0")
        _same(what, x, "q", q, dtype=False)
    return trace(score, {name: (x.dtype, len(x.shape), not inlined and wide(x)) for name, x in arrays.items()}, inlined)


def wide(x: View) -> bool:
    """Whether offsets of its elements may have more than 32 bits. Of lengths that are symbols it is not known yet."""
    plain = all(type(n) is int for n in (*x.shape, *x.strides))
    return plain and sum((n - 1) * abs(stride) for n, stride in zip(x.shape, x.strides)) >= 2**31


def _arrays_in(given: dict[str, Any]) -> list[ArrayRule]:
    return [row for row in ARRAYS if given.get(row.name) is not None]


def _check_array(row: ArrayRule, x: View, problem: AttentionProblem, q: View) -> None:
    if row.of_float8 and q.dtype != FLOAT8:
        raise TypeError(_of_float8(row.name, q.dtype))
    dtypes = row.taken(q.dtype)
    if x.dtype not in dtypes:
        raise TypeError(f"{row.name} has dtype {x.dtype}; it must be {' or '.join(dtypes)} ({row.entry})")
    rank = len(q.shape)
    want = row.shape(problem, rank)
    if not row.axes and math.prod(x.shape) != 1:
        raise ValueError(f"{row.name} has shape {x.shape}; it must have one element ({row.entry})")
    if problem.ragged:
        lengths.check_array(row, x, problem)
    elif row.placed and x.shape != want:
        raise ValueError(f"{row.name} has shape {x.shape}; it must be {want} ({row.entry})")
    elif row.axes and (
        len(x.shape) > len(want) or any(n not in (1, whole) for n, whole in zip(reversed(x.shape), reversed(want)))
    ):
        raise ValueError(
            f"{row.name} has shape {x.shape}; it must be {want}, ({', '.join(row.has(rank))}), where a length of 1 "
            f"stands for all, and leading axes may be left out ({row.entry})"
        )
    _same(row.name, x, "q", q, dtype=False)


def _in_range(name: str, dtype: str, value: float | None, default: float | None = None) -> Any:
    if value is None:
        return default
    largest = 1e290 if dtype == "float64" else 1e30  # what scores are computed in takes it, and its inverse
    if value and not 1 / largest <= abs(value) <= largest:
        raise ValueError(
            f"{name} is {value}; for {dtype} inputs its size must be from {1 / largest:.0e} to {largest:.0e}, or 0"
        )
    return value


def state(
    views: dict[str, View], targets: dict[str, View], options: dict[str, Any], of: Pass
) -> tuple[AttentionProblem, dict[str, tuple[int, ...]]]:
    """Check a whole call: the problem, and the shapes of its results by name (out; dq, dk, dv; tout; tdq, tdk, tdv).

    `views` are q, k, v, the optional arrays that are given and the other inputs of the pass; `targets` what results are
    to be written to, where that is given.
    """
    layout = options.get("layout", LAYOUTS[0])
    try:
        stated = _stated(views, targets, options, of)
    except ValueError as error:
        q, again = views["q"], lambda other: _stated(views, targets, options | {"layout": other}, of)
        raise of_layout(error, layout, q, again) from None
    places.check(stated[0])
    doubt(stated[0], views["q"], layout)
    return stated


def _stated(
    views: dict[str, View], targets: dict[str, View], options: dict[str, Any], of: Pass
) -> tuple[AttentionProblem, dict[str, tuple[int, ...]]]:
    views = latent.with_view(views, options)
    q, k, v = (views[name] for name in "qkv")
    score = options.get("score")
    reads = {x.name: views[x.key] for x in score.arrays} if isinstance(score, Score) else {}
    arrays = {row.name: views[row.name] for row in ARRAYS if row.name in views}
    problem = _described(q, k, v, **options | arrays, score_arrays=reads)
    problem = for_pass(problem, of)
    if problem.widened and of is not BACKWARD:
        raise ValueError(
            f"out_dtype is float32; with q of {q.dtype} it must be None but for gradients: give an array of float32 to "
            "write to"
        )
    out, lse = out_shape(q.shape, problem), lse_shape(len(q.shape), problem)
    if of is not FORWARD:
        lengths.refuse_pages(problem, of)
        cached.refuse_float8(problem.dtype, of, problem.cache_dtype)
        latent.refuse(problem.latent, of)
        for name in of.inputs:  # dout, out, lse and dlse, and what a jvp gave
            if name in views and name not in "qkv" and name not in _TANGENTS:
                shape, dtype = (lse, problem.lse_dtype) if name in PER_QUERY else (out, problem.dtype)
                if name == "out" and dtype in HALVES and views[name].dtype == "float32":  # a forward may write it so
                    raise TypeError(f"out has dtype float32; it must be {dtype}, that of q: round it for a backward")
                check_like(argument_name(name), views[name], shape, dtype, q)
    if of.moved:
        problem = replace(problem, tangents=_check_tangents(views, problem, lse))
    t = "t" if of.moved else ""
    results = {f"{t}d{name}": views[name].shape for name in "qkv"} if of.of_gradients else {f"{t}out": out}
    problem = _into(targets, problem, of)
    for name, target in targets.items():
        check_like(target_name(name), target, results[name], problem.dtype_of(name), q)
    return problem, results


def _into(targets: dict[str, View], problem: AttentionProblem, of: Pass) -> AttentionProblem:
    """Results of 16-bit inputs are not rounded where they go to arrays of float32; dq may be, alone: a part of a whole
    has all of it more often than all of dk and dv."""
    dtypes = list(dict.fromkeys(x.dtype for x in targets.values()))
    if of.moved or problem.dtype not in HALVES or dtypes in ([], [problem.dtype]):
        return problem
    for name, x in targets.items():
        if x.dtype not in (problem.dtype, "float32"):
            raise TypeError(f"{target_name(name)} has dtype {x.dtype}; it must be {problem.dtype} or float32")
    dq_alone = dtypes == [problem.dtype, "float32"] and targets["dk"].dtype == targets["dv"].dtype
    if len(dtypes) > 1 and not dq_alone:
        raise TypeError(
            f"grads hold arrays of {' and '.join(dtypes)}; all must have one dtype, or dk and dv float32 and dq "
            f"{problem.dtype}"
        )
    return replace(problem, out_dtype="float32", dq_dtype=problem.dtype if dq_alone else None)


def for_pass(problem: AttentionProblem, of: Pass) -> AttentionProblem:
    """Without the options that a pass does not look at."""
    if of.of_gradients:
        return problem
    return replace(problem, **{row.name: row.default for row in OPTIONS if row.of_gradients})


def tangents_in(views: dict[str, Any]) -> list[str]:
    """The names of the arrays of a call whose tangents are among them."""
    return [name[1:] for name in views if name in _TANGENTS or name.startswith(f"t{_OF_SCORE}")]


def _check_tangents(views: dict[str, View], problem: AttentionProblem, lse: tuple[int, ...]) -> tuple[Given, ...]:
    """Each is shaped and typed like what it is the tangent of, and lies where it likes."""
    q, found = views["q"], []
    packed = problem.rows_q is not None if problem.ragged else None
    for name in tangents_in(views):
        tangent, what = views[f"t{name}"], argument_name(f"t{name}")
        of = "lse" if name == "dlse" else name
        x, of = views[of], name_of(of) or of
        if tangent.dtype != x.dtype:
            raise TypeError(f"{what} has dtype {tangent.dtype}; it must have that of {of}, {x.dtype}")
        if tangent.shape != x.shape:
            raise ValueError(f"{what} has shape {tangent.shape}; it must have that of {of}, {x.shape}")
        _same(what, tangent, "q", q, dtype=False)
        rule = ARRAY_RULES.get(name)
        found.append(Given(name, tangent.dtype, _spread(rule, tangent, len(q.shape), packed) if rule else ()))
    return tuple(found)


_TANGENTS = frozenset(
    f"t{name}" for name in ("q", "k", "v", "dout", "dlse", *(row.name for row in ARRAYS if row.gradient))
)
_OF_SCORE = "score_arrays["


@functools.cache
def target_name(name: str) -> str:
    """What a user gave to have the result `name` written to."""
    return name if name in ("out", "tout") else f"grads: {name.removeprefix('t')}"


@functools.cache
def argument_name(name: str) -> str:
    """What a user calls an array of a call."""
    if name in ("tout", "tlse"):
        return f"jvp: {name}"
    if name in _TANGENTS or name.startswith(f"t{_OF_SCORE}"):
        return f"tangents[{name_of(name[1:]) or name[1:]!r}]"
    return name


def whole(row: ArrayRule, problem: AttentionProblem, q: View) -> View:
    """An array given for a row of ARRAYS, in full and contiguous, where there are shapes and no arrays."""
    shape = row.shape(problem, 4 if problem.ragged else len(q.shape))
    return View(shape, contiguous(shape), row.taken(q.dtype)[0], q.device, q.kind)


def check_like(name: str, x: View, shape: tuple[int, ...], dtype: str, like: View) -> None:
    """Check an array that the problem already fixes: out, lse, dout, or one given as out=."""
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {dtype}")
    if x.shape != shape:
        turned = len(shape) == len(like.shape) > 2 and x.shape == (*shape[:-3], shape[-2], shape[-3], shape[-1])
        also = ", with the heads where q has them, as layout says" * turned
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}{also}")
    _same(name, x, "q", like, dtype=False)


def out_shape(q_shape: tuple[int, ...], problem: AttentionProblem) -> tuple[int, ...]:
    """Shape of out, in the rank and layout of q."""
    return (*q_shape[:-1], problem.dim_v)


def lse_shape(rank: int, problem: AttentionProblem) -> tuple[int, ...]:
    """Shape of lse: (B, Hq, Sq), without the axes that q does not have; (Hq, T) of packed queries."""
    if problem.rows_q is not None:
        return problem.heads_q, problem.rows_q
    return (problem.batch, problem.heads_q, problem.seq_q)[4 - rank :]


def _same(name: str, x: View, other: str, like: View, dtype: bool = True) -> None:
    if x.kind != like.kind:
        raise TypeError(
            f"{name} is a {x.kind} array but {other} is a {like.kind} array; all arrays must come from one library"
        )
    if dtype and x.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {x.dtype} but {other} has {like.dtype}; all arrays must have one dtype")
    if x.device != like.device and x.device and like.device:  # of what JAX traces it is not known
        raise ValueError(f"{name} is on {x.device} but {other} is on {like.device}; all arrays must be on one device")
