"""Attention on arrays of any library that live on a CPU: views, rules, layout, NumPy, results. As gpu/corridor.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import rules
from ..call import Call
from ..gradients import Gradients
from ..interop.protocol import CpuAdapter
from ..overlap import check_targets
from ..passes import BACKWARD, BY_ROWS, FORWARD, JVP, PER_QUERY
from ..problem import DESCALES, FLOAT8, AttentionProblem, MaskKind, View, mask_kind
from ..score import Score
from . import float8, ragged
from .backward import backward as _backward
from .backward_jvp import backward_jvp as _backward_jvp
from .forward import forward as _forward
from .jvp import jvp as _jvp


class Stated(NamedTuple):
    """A class of calls as the rules have it. `shapes`: of its results, by name."""

    problem: AttentionProblem
    shapes: dict[str, tuple[int, ...]]


_stated: dict[Any, Stated] = {}
_MAX_STATED = 4096
# Options of other types are no keys: what they hold may change, or the rules have yet to refuse it.
_PLAIN = frozenset((bool, int, float, str, tuple, type(None), Score, MaskKind))
_WHOLE = frozenset((int, type(None)))  # in a tuple


def run(call: Call) -> Any:
    """out and (where asked for) lse of a forward; tout and tlse of a jvp; `Gradients`."""
    lib = call.lib
    problem, given, shapes = _checked(call)
    if call.of.of_gradients:
        compute = _backward if call.of is BACKWARD else _backward_jvp
        if problem.ragged:
            grads = ragged.run(compute, call.of, problem, given, call.wrt)
        else:
            grads = compute(problem, wrt=call.wrt, **given)
        dq, dk, dv = (_returned(call, name, x, shapes) for name, x in zip(call.of.results, grads))
        return Gradients(dq, dk, dv, {name: lib.from_numpy(grads.of_arrays[name]) for name in call.wrt})
    forward = float8.forward if problem.dtype == FLOAT8 else float8.cached if problem.cache_dtype else _forward
    of_rows = forward if call.of is FORWARD else _jvp
    out, lse = ragged.run(of_rows, call.of, problem, given) if problem.ragged else of_rows(problem, **given)
    (name,) = call.of.results
    asked = call.return_lse or call.of is JVP
    rows = lib.from_numpy(lse.reshape(rules.lse_shape(len(shapes[name]), problem))) if asked else None
    return _returned(call, name, out, shapes), rows


def _checked(call: Call) -> tuple[AttentionProblem, dict[str, Any], dict[str, tuple[int, ...]]]:
    """The problem, its arrays as (B, S, H, D), lse as (B, H, S), and the shapes of the results."""
    lib, options = call.lib, call.options
    problem, shapes = _state(call)
    layout, block_mask = options["layout"], options["block_mask"]
    given: dict[str, Any] = {} if call.seed is None else {"seed": np.array(call.seed, np.uint64)}
    if block_mask is not None:
        given["block_mask"] = block_mask
    for name, x in call.arrays.items():
        x = lib.to_numpy(x)
        if name in BY_ROWS:
            given[name] = _four(x, layout)
        elif name in PER_QUERY:
            packed = problem.rows_q is not None
            given[name] = x[None] if packed else x.reshape(problem.batch, problem.heads_q, problem.seq_q)
        elif problem.cache_dtype and name in DESCALES:  # as rows of one number
            cache = call.arrays["k"].shape[:-1]
            rows = x if x.shape == tuple(cache) else np.broadcast_to(_of_heads(x, len(cache), layout), tuple(cache))
            given[name] = _four(rows[..., None], layout)
        else:
            given[name] = x
    if problem.latent is not None:
        given["v"] = given["k"][..., : problem.latent]
    return problem, given, shapes


def _state(call: Call) -> Stated:
    """What the rules say of a call; of one like those before, what they said then."""
    key = _key(call)
    found = None if key is None else _stated.get(key)
    if found is not None:
        return found
    lib = call.lib
    views = {name: lib.view(x) for name, x in call.arrays.items()}
    into = {name: lib.view(x) for name, x in call.targets.items()}
    problem, shapes = rules.state(views, into, call.options, call.of)
    if into:
        check_targets(
            {name: _in_memory(lib, call.targets[name], x) for name, x in into.items()},
            {name: _in_memory(lib, call.arrays[name], x) for name, x in views.items()},
        )
    if call.add and problem.dtype in ("float16", "bfloat16"):  # rounded once, with what is there
        problem = replace(problem, out_dtype="float32")
    found = Stated(problem, shapes)
    if key is not None:
        if len(_stated) >= _MAX_STATED:
            _stated.clear()
        _stated[key] = found
    return found


def _key(call: Call) -> tuple[Any, ...] | None:
    """Calls of one key are one to the rules. None: of a call that they are to look at whatever came before."""
    if call.targets:  # where these lie is asked of each
        return None
    options, arrays = call.options, call.arrays
    if options["block_mask"] is not None:
        options = options | {"block_mask": mask_kind(options["block_mask"])}
    kinds = (*map(type, options.values()),)  # True and 1 are equal, but not the same option
    if not _PLAIN.issuperset(kinds):
        return None
    if tuple in kinds and any(not _WHOLE.issuperset(map(type, x)) for x in options.values() if type(x) is tuple):
        return None
    return (
        call.of, *options, *options.values(), *kinds, *arrays, *map(call.lib.signature, arrays.values()),
    )  # fmt: skip


def _in_memory(lib: CpuAdapter, x: Any, view: View) -> View:
    """The view of x; byte by byte where strides are no whole elements, as those of a field of records may be."""
    memory = lib.to_numpy(x)
    if not any(stride % memory.itemsize for stride in memory.strides):
        return view
    return view._replace(shape=(*view.shape, memory.itemsize), strides=(*memory.strides, 1), dtype="bool")


def _four(x: np.ndarray, layout: str) -> np.ndarray:
    """An array in the caller's rank and layout as a (B, S, H, D) view."""
    if x.ndim == 2:
        return x[None, :, None, :]
    if x.ndim == 3:
        x = x[None]
    return x if layout == "bshd" else x.transpose(0, 2, 1, 3)


def _of_heads(x: np.ndarray, axes: int, layout: str) -> np.ndarray:
    """A number for each head, to be broadcast to a cache of so many axes but its columns."""
    return x[:, None] if layout == "bhsd" and axes > 1 and x.ndim else x


def _returned(call: Call, name: str, x: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> Any:
    """A (B, S, H, D) result in the rank and layout of the caller, in his array where he gave one."""
    lib = call.lib
    layout, target = call.options["layout"], call.targets.get(name)
    if len(shapes[name]) == 2:
        x = x[0, :, 0]
    else:
        x = x if layout == "bshd" else x.transpose(0, 2, 1, 3)
        x = x[0] if len(shapes[name]) == 3 else x
    if target is None:
        return lib.from_numpy(np.ascontiguousarray(x))  # as on a GPU
    memory = lib.to_numpy(target)
    with np.errstate(all="ignore"):
        memory[...] = memory.astype(x.dtype) + x if call.add else x
    return target
