"""Attention on arrays of any library that live on a CPU: views, rules, layout, NumPy, results. As gpu/corridor.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import problem as rules
from ..interop.protocol import Arrays, CpuAdapter
from ..overlap import check_targets
from ..problem import ARRAYS, FLOAT8, AttentionProblem, Gradients, View
from . import float8
from .backward import backward as _backward
from .forward import forward as _forward


def forward(
    lib: CpuAdapter,
    arrays: Arrays,
    targets: Arrays,
    return_lse: bool,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
) -> tuple[Any, Any]:
    """out and (where asked for) lse of one attention call."""
    problem, given, shapes = _checked(lib, arrays, targets, options, seed, family, False)
    if problem.dtype == FLOAT8:
        out, lse = float8.forward(problem, **given)
    else:
        out, lse = _forward(problem, **given)
    rows = lib.from_numpy(lse.reshape(rules.lse_shape(len(shapes["out"]), problem))) if return_lse else None
    return _returned(lib, "out", out, shapes, targets, options["layout"]), rows


def backward(
    lib: CpuAdapter,
    arrays: Arrays,
    targets: Arrays,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
    wrt: tuple[str, ...] = (),
) -> Gradients:
    """The gradients of one attention call; also of the optional arrays that `wrt` names."""
    problem, given, shapes = _checked(lib, arrays, targets, options, seed, family, True)
    grads = _backward(problem, wrt=wrt, **given)
    of_qkv = (_returned(lib, name, x, shapes, targets, options["layout"]) for name, x in grads._asdict().items())
    return Gradients(*of_qkv, **{f"d{name}": lib.from_numpy(getattr(grads, f"d{name}")) for name in wrt})


def _checked(
    lib: CpuAdapter,
    arrays: Arrays,
    targets: Arrays,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
    backward: bool,
) -> tuple[AttentionProblem, dict[str, Any], dict[str, tuple[int, ...]]]:
    """The problem, its arrays as (B, S, H, D), lse as (B, H, S), and the shapes of the results."""
    if family is not None:
        refuse_family(family, lib.kind)
    views = {name: lib.view(x) for name, x in arrays.items()}
    into = {name: lib.view(x) for name, x in targets.items()}
    problem, shapes = rules.state(views, into, options, backward)
    if into:
        check_targets(
            {name: _in_memory(lib, targets[name], x) for name, x in into.items()},
            {name: _in_memory(lib, arrays[name], x) for name, x in views.items()},
        )
    layout = options["layout"]
    given: dict[str, Any] = {} if seed is None else {"seed": np.array(seed, np.uint64)}
    if options["block_mask"] is not None:
        given["block_mask"] = options["block_mask"]
    for name in views:
        x = lib.to_numpy(arrays[name])
        if name in ("lse", "dlse"):
            given[name] = x.reshape(problem.batch, problem.heads_q, problem.seq_q)
        else:
            given[name] = x if name in _OPTIONAL or problem.reads(name) else _four(x, layout)
    return problem, given, shapes


_OPTIONAL = [row.name for row in ARRAYS]


def _in_memory(lib: CpuAdapter, x: Any, view: View) -> View:
    """The view of x; byte by byte where strides are no whole elements, as those of a field of records may be."""
    memory = lib.to_numpy(x)
    if not any(stride % memory.itemsize for stride in memory.strides):
        return view
    return view._replace(shape=(*view.shape, memory.itemsize), strides=(*memory.strides, 1), dtype="bool")


def refuse_family(family: str, kind: str) -> None:
    from ..gpu.plan import check_family

    check_family(family)
    raise ValueError(f"family is {family!r}, a family of GPU kernels, but q is a {kind} array on the CPU")


def _four(x: np.ndarray, layout: str) -> np.ndarray:
    """An array in the caller's rank and layout as a (B, S, H, D) view."""
    if x.ndim == 2:
        return x[None, :, None, :]
    if x.ndim == 3:
        x = x[None]
    return x if layout == "bshd" else x.transpose(0, 2, 1, 3)


def _returned(
    lib: CpuAdapter, name: str, x: np.ndarray, shapes: dict[str, tuple[int, ...]], targets: Arrays, layout: str
) -> Any:
    """A (B, S, H, D) result in the rank and layout of the caller, in his array where he gave one."""
    if len(shapes[name]) == 2:
        x = x[0, :, 0]
    else:
        x = x if layout == "bshd" else x.transpose(0, 2, 1, 3)
        x = x[0] if len(shapes[name]) == 3 else x
    target = targets.get(name)
    if target is None:
        return lib.from_numpy(np.ascontiguousarray(x))  # as on a GPU
    lib.to_numpy(target)[...] = x
    return target
