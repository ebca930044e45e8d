"""What a public function was given, as the arrays and the options of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import interop
from .call import Arrays, Call
from .counts import check_at
from .interop.protocol import Library
from .lengths import asked_for, stated
from .problem import OFFSETS
from .rules import score_of


def trace_score(lib: Library, arrays: Arrays, options: dict[str, Any], score_arrays: Any) -> None:
    """The score function becomes a `Score`, and the arrays that it reads some of those of the call."""
    given = {} if score_arrays is None else score_arrays
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        what = f"has the names {list(given)}" if isinstance(given, Mapping) else f"is a {type(given).__name__}"
        raise TypeError(f"score_arrays {what}; it must be a dict of arrays by the names of score's parameters")
    named = {f"score_arrays[{name!r}]": x for name, x in given.items()}
    present(named, named)
    rows = arrays["q"]
    rows = rows.values() if getattr(rows, "is_nested", False) else rows  # PyTorch's
    adopted = interop.adopted(lib, {"q": rows, **named})
    q, *views = (interop.view(lib, name, x) for name, x in adopted.items())
    score = score_of(options["score"], dict(zip(given, views)), q, interop.inlined(lib))
    options["score"] = score
    if score is not None:
        arrays.update((key, given[x.name]) for key, x in zip(score.keys, score.arrays))


def placed(at: Any, arrays: Arrays) -> tuple[int, ...] | None:
    """`at` as the numbers that it holds now. None where it is on a device or traced: it is one of the arrays then."""
    if not hasattr(at, "shape"):
        return check_at(at)
    lib = interop.library("at", at)
    x = interop.view(lib, "at", at)
    if x.dtype not in OFFSETS or x.shape != (4,):
        dtypes = " or ".join(OFFSETS)
        raise TypeError(f"at is an array of {x.dtype} of shape {x.shape}; it must have four integers of {dtypes}")
    if x.device == "cpu" and not interop.followed(lib, at):
        return check_at((*at.tolist(),))
    arrays["at"] = at
    return None


def present(required: Iterable[str], arrays: Arrays) -> Arrays:
    """Those that are given."""
    for name in required:
        if arrays[name] is None:
            interop.library(name, None)  # raises: None is no array
    for x in arrays.values():
        if x is None:
            return {name: x for name, x in arrays.items() if x is not None}
    return arrays


def add_lengths(arrays: Arrays, of_q: Any, of_k: Any, filled: Any, pages: Any) -> None:
    """Those of the arrays that say where sequences lie that are given."""
    if of_q is not None:
        arrays["cu_seqlens_q"] = of_q
    if of_k is not None:
        arrays["cu_seqlens_k"] = of_k
    if filled is not None:
        arrays["seqlens_k"] = filled
    if pages is not None:
        arrays["page_table"] = pages


def with_check(call: Call, check: Any) -> Call:
    """A call that knows whether values on a device shall be looked at: for it alone, or for all of the process."""
    asked = asked_for(check)
    return call.but(check=True) if asked and (stated(call.arrays) or "at" in call.arrays) else call
