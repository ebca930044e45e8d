"""Tangents of the arrays of a call: what they are called, there and by a user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from .call import Arrays, Call
from .passes import JVP, Pass
from .problem import ARRAYS
from .score import Score


def of_call(tangents: Any, arrays: Arrays, score: Score | None, of: Pass) -> Arrays:
    """As arrays of the call, by "t" and the name of what each is the tangent of. TypeError or ValueError, naming it,
    for what none is."""
    reads = {x.name: x.key for x in score.arrays if x.kind == "float"} if score else {}
    rows = [row.name[1:] for row in of.rows if row.optional and row.name.startswith("t")]
    optional = [row.name for row in ARRAYS if row.gradient]
    can = {name: name for name in (*rows, *[name for name in optional if name in arrays])}
    can |= {name: key for name, key in reads.items() if name not in can}
    must = f"have at least one of {', '.join(can)}"
    if not isinstance(tangents, Mapping):
        raise TypeError(f"tangents is a {type(tangents).__name__}; it must be a dict of arrays by name, and {must}")
    if not tangents:
        raise ValueError(f"tangents is empty; it must {must}")
    found = {}
    for name, x in tangents.items():
        if name not in can:
            why = f"but {name} is not given" if name in optional else "which has none"
            text = f"tangents has {name!r}, {why}; it may have {', '.join(can)}"
            meant = "" if name in optional else _meant(name, (*rows, *optional, *reads), of)
            raise TypeError(f"{text}; {meant}" if meant else text)
        if name in reads and can[name] != reads[name]:
            raise ValueError(
                f"tangents has {name!r}, which is {name} and an array of score_arrays; give that another name"
            )
        found[f"t{can[name]}"] = x
    return found


def _meant(name: Any, known: Iterable[str], of: Pass) -> str:
    """What may have been meant by a name that no tangent has; "" where nobody knows."""
    if name in ("dout", "dlse") and not of.of_gradients:
        return f"{name} belongs to attention_backward_jvp"
    if name in ("out", "lse"):
        return f"{name} follows from the others: leave it out"
    text, known = str(name).lower(), list(known)
    near = [x for x in (text, text[1:]) if x in known] or difflib.get_close_matches(text, known, 1)
    return f"did you mean {near[0]!r}?" if near else ""


def jvp_of(call: Call) -> Call:
    """Of a BACKWARD_JVP: the jvp whose results it takes as "tout" and "tlse"."""
    without = ("dout", "dlse", "tdout", "tdlse", "tout", "tlse")
    return call.but(
        of=JVP, arrays={name: x for name, x in call.arrays.items() if name not in without}, targets={}, wrt=()
    )
