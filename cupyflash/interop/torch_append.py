"""The operator torch.ops.cupyflash.append: new rows of k and v written to caches, which PyTorch knows to be changed."""

from __future__ import annotations

from typing import Any

import torch

from .. import cached, interop, writing
from ..call import Arrays
from ..lengths import asked_for
from ..passes import FORWARD
from ..problem import complete
from ..rules import state
from .torch_schema import refuse_script, view

_NAMES = (
    "q", "k_new", "v_new", "k_cache", "v_cache", "seqlens_k", "cu_seqlens_q", "page_table", "slots", "rotary[0]",
    "rotary[1]",
)  # fmt: skip
_SCHEMA = (
    "append(Tensor? q, Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? seqlens_k, "
    "Tensor? cu_seqlens_q, Tensor? page_table, Tensor? slots, Tensor? cos, Tensor? sin, str layout, bool interleaved, "
    "bool check, Tensor? k_descale=None, Tensor? v_descale=None, Tensor(c!)? k_row_scales=None, "
    "Tensor(d!)? v_row_scales=None, float k_number=1., float v_number=1.) -> (Tensor, Tensor)"
)


def append(arrays: Arrays, layout: str, interleaved: bool, check: bool, numbers: dict[str, float]) -> tuple[Any, Any]:
    """Lengths behind the call, and q turned; without elements where there are none. `numbers`: scales of caches of 8
    bits that are no arrays."""
    refuse_script()
    given = [arrays.get(name) for name in _NAMES]
    scales = [arrays.get(name) for name in cached.SCALES]
    of_rows = [x if cached.of_rows(x, arrays["k_cache"]) else None for x in scales]
    others = [None if rows is not None else x for x, rows in zip(scales, of_rows)]
    factors = [numbers.get(name, 1.0) for name in cached.SCALES]
    totals, q = torch.ops.cupyflash.append.default(*given, layout, interleaved, check, *others, *of_rows, *factors)
    return totals, q


def _arrays(args: tuple[Any, ...]) -> tuple[Arrays, dict[str, float], tuple[Any, ...]]:
    """Arrays by name, numbers of scales, and layout, interleaved and check. (What is at its default may be missing.)"""
    arrays, rest = args[: len(_NAMES)], args[len(_NAMES) :]
    options, scales = rest[:3], (*rest[3:], *(None, None, None, None, 1.0, 1.0)[len(rest) - 3 :])
    named = zip((*_NAMES, *cached.SCALES, *cached.SCALES), (*arrays, *scales[:4]))
    given = {name: x for name, x in named if x is not None}
    return given, {name: x for name, x in zip(cached.SCALES, scales[4:]) if name not in given}, options


def _run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arrays, numbers, (layout, interleaved, check) = _arrays(args)
    lib = interop.library("k_cache", arrays["k_cache"])
    views = {name: interop.view(lib, name, x) for name, x in arrays.items()}
    writing.check_rows(views, layout)
    writing.check_apart(views)
    none = arrays["k_new"].new_empty
    if "slots" in arrays:
        writing.in_slots(lib, arrays, views, layout, asked_for(check), numbers)
        return none(0), none(0)
    turns = "q" in arrays and "rotary[0]" in arrays
    of = {"q": views.get("q", views["k_new"]), "k": views["k_cache"], "v": views["v_cache"]}
    of |= {name: views[name] for name in ("seqlens_k", "cu_seqlens_q", "page_table") if name in views}
    problem, _ = state(of, {}, complete({"layout": layout}), FORWARD)  # (scales change no place)
    given = {name: x for name, x in arrays.items() if turns or name != "q"}
    done = writing.behind(lib, given, views, problem, layout, interleaved, asked_for(check), numbers)
    totals = done.totals
    assert totals is not None
    q = none(0) if done.q is None else done.q.contiguous()
    return totals.clone() if totals is arrays["seqlens_k"] else totals, q


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arrays, _, (layout, *_) = _arrays(args)
    if all(type(n) is int for x in arrays.values() for n in x.shape):  # else it is said when they are numbers
        writing.check_rows({name: view(x) for name, x in arrays.items()}, layout)
    none = arrays["k_new"].new_empty
    turned = arrays["q"].new_empty(arrays["q"].shape) if "q" in arrays and "rotary[0]" in arrays else none(0)
    return arrays["seqlens_k"].new_empty(arrays["seqlens_k"].shape) if "seqlens_k" in arrays else none(0), turned


def _define() -> torch.library.Library:
    lib = torch.library.Library("cupyflash", "FRAGMENT")
    lib.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        lib.impl("append", _run, key)
    torch.library.register_fake("cupyflash::append", _fake, lib=lib)
    return lib


_library = _define()  # gone with it
