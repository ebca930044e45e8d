"""Lengths that are data: sequences whose rows lie where arrays of integers say.

`cu_seqlens_q` and `cu_seqlens_k` pack sequences one behind the other, `seqlens_k` says how much of a cache is filled,
`page_table` which pages of a pool a cache is made of. Here is what shapes alone must be (`extents`, `check_array`): of
values nothing is known then, so that one plan serves them all. `check_values` is about these, where they can be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .passes import Pass
from .problem import (
    ARRAY_RULES,
    ARRAYS,
    BLOCK,
    PLACES,
    ArrayRule,
    AttentionProblem,
    MaskKind,
    View,
    to_bshd,
)
from .scalars import check_flag

if TYPE_CHECKING:  # NumPy takes longer to import than all of this package
    import numpy as np

LENGTHS = tuple(row.name for row in ARRAYS if row.ragged)
PLACED = {"packed": "rows, heads, dim", "filled": "sequences, rows, heads, dim", "paged": "pages, rows, heads, dim"}
Extents = tuple[int, int, int]  # the most rows of a sequence, heads, columns


def stated(given: Mapping[str, Any]) -> list[str]:
    """Those of these arrays that are given."""
    return [name for name in LENGTHS if given.get(name) is not None]


# ---- shapes ---------------------------------------------------------------------------------------------------------


def extents(
    named: Mapping[str, View], given: Mapping[str, Any], layout: str
) -> tuple[dict[str, Any], tuple[Extents, Extents, Extents]]:
    """Of a call with lengths: fields of its problem, and for each of q, k and v the most rows that a sequence may have,
    heads and columns."""
    lengths = {name: given[name] for name in stated(given)}
    _check_together(lengths)
    for name, x in lengths.items():
        check_integers(name, x)
    forms = {"q": "packed" if "cu_seqlens_q" in lengths else "filled", "k": "filled"}
    forms["k"] = "packed" if "cu_seqlens_k" in lengths else "paged" if "page_table" in lengths else "filled"
    forms["v"] = forms["k"]
    quads = {}
    for name, x in named.items():
        form = PLACED[forms[name]]
        if len(x.shape) != form.count(",") + 1:
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, shape {x.shape}; with {_why(name, lengths)} it must have "
                f"{form.count(',') + 1}, ({_in_layout(form, layout)})"
            )
        quads[name] = to_bshd(x.shape, layout)
    batch = _sequences(lengths, {name: quads[name][0] for name, form in forms.items() if form == "filled"}, named)
    for axis, (a, b) in enumerate(zip(quads["k"][:2], quads["v"][:2])):
        if a != b:
            what = "pages" if axis == 0 else "rows of a page" if forms["k"] == "paged" else "keys"
            raise ValueError(f"v has {b} {what}, shape {named['v'].shape}; it must have as many as k, {a}")
    rows_q, rows_k = (quads[name][1] if forms[name] == "packed" else None for name in "qk")
    seq_q, seq_k, page, pages = quads["q"][1], quads["k"][1], None, 0
    if forms["k"] == "paged":
        pages, page = quads["k"][:2]
        seq_k = lengths["page_table"].shape[1] * page
        if page == 0:
            raise ValueError(f"k has pages of 0 rows, shape {named['k'].shape}; they must have 1 or more")
    sides = {"query": rows_q is not None, "key": rows_k is not None or "seqlens_k" in lengths}
    seq_q, seq_k = _held(given, seq_q, seq_k, sides)
    cache = quads["k"][1] if forms["k"] == "filled" and "seqlens_k" in lengths else None
    fields = {"batch": batch, "rows_q": rows_q, "rows_k": rows_k, "cache": cache, "page": page, "pages": pages}
    most = {"q": seq_q, "k": seq_k, "v": seq_k}
    return fields, tuple((most[name], *quads[name][2:]) for name in "qkv")  # type: ignore[return-value]


def _check_together(lengths: Mapping[str, View]) -> None:
    for name in ("seqlens_k", "page_table"):
        if name in lengths and "cu_seqlens_k" in lengths:
            raise ValueError(
                f"{name} is given with cu_seqlens_k, which says that k and v are packed; it must be None there: it is "
                "for caches"
            )
    if "page_table" in lengths and "seqlens_k" not in lengths:
        raise ValueError(
            "page_table is given without seqlens_k; give the rows that each sequence has filled, (sequences,)"
        )


def check_integers(name: str, x: View) -> None:
    row = ARRAY_RULES[name]
    if x.dtype not in row.dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {' or '.join(row.dtypes)} ({row.entry})")
    if len(x.shape) != len(row.axes) or (row.axes == ("offset",) and not x.shape[0]):
        want = {"offset": "sequences + 1,", "sequence": "sequences,"}.get(row.axes[0], "")
        want = want if len(row.axes) == 1 else "sequences, pages of one"
        raise ValueError(f"{name} has shape {x.shape}; it must be ({want}) ({row.entry})")


def _sequences(lengths: Mapping[str, View], filled: dict[str, int], named: Mapping[str, View]) -> int:
    """Their number, in which all agree."""
    found = {name: x.shape[0] - (ARRAY_RULES[name].axes == ("offset",)) for name, x in lengths.items()} | filled
    (first, n), *others = found.items()
    for name, m in others:
        if m != n:
            shape = (named.get(name) or lengths[name]).shape
            raise ValueError(f"{name} has {m} sequences, shape {shape}; it must have as many as {first}, {n}")
    return n


def _why(name: str, lengths: Mapping[str, View]) -> str:
    """What asks for the form of q, k or v."""
    own = [x for x in lengths if x.endswith("_q") == (name == "q")]
    return own[-1] if own else f"{next(iter(lengths))} and no cu_seqlens_{'q' if name == 'q' else 'k'}"


def _in_layout(form: str, layout: str) -> str:
    if layout == "bshd":
        return form
    *first, rows, heads, dim = form.split(", ")
    return ", ".join((*first, heads, rows, dim))


def _held(given: Mapping[str, Any], seq_q: int, seq_k: int, is_data: Mapping[str, bool]) -> tuple[int, int]:
    """The most queries and keys of a sequence, where these are data: no more than arrays over pairs have."""
    most = {"query": seq_q, "key": seq_k}
    for row in ARRAYS:
        x = given.get(row.name)
        if x is None or row.ragged:
            continue
        line = is_data["query"] and _over_pairs(row) and len(x.shape) == 3
        for axis, n in zip(reversed(row.axes), reversed(x.shape)):
            place = PLACES.get(axis, axis)
            if n != 1 and is_data.get(place) and not (line and place == "query"):
                most[place] = min(most[place], n if place == axis else n * BLOCK)
    kind = getattr(given.get("block_mask"), "kind", given.get("block_mask"))
    if isinstance(kind, MaskKind):
        for place, n in zip(("query", "key"), kind.shape[2:]):
            most[place] = min(most[place], n) if is_data[place] else most[place]
    return most["query"], most["key"]


def _over_pairs(row: ArrayRule) -> bool:
    return row.axes[-2:] == ("query", "key")


def is_data(axis: str, problem: AttentionProblem) -> bool:
    """Whether lengths along this axis, of AXES or in the place of one, are those of each sequence."""
    place = PLACES.get(axis, axis)
    if place == "query":
        return problem.rows_q is not None
    return place == "key" and (problem.rows_k is not None or problem.has("seqlens_k"))


def by_line(row: ArrayRule, shape: tuple[int, ...], problem: AttentionProblem) -> bool:
    """Whether an array over pairs has a line for each packed query, (Hq or 1, T, keys or 1)."""
    return problem.rows_q is not None and _over_pairs(row) and len(shape) == 3


def spread(row: ArrayRule, x: View, packed: bool) -> tuple[str, ...]:
    """As `ArrayRule.spread`, where lengths are data; "line" is the axis of packed queries."""
    found = row.spread(x, 4)
    if not (packed and _over_pairs(row) and len(x.shape) == 3):
        return found
    return tuple("line" if axis == "query" else axis for axis in row.axes if axis in found or axis == "query")


def check_array(row: ArrayRule, x: View, problem: AttentionProblem) -> None:
    """ValueError where the shape of an optional array is not what it must be beside lengths."""
    if row.ragged or not row.axes:
        return
    line = by_line(row, x.shape, problem)
    pairs = _over_pairs(row)
    want = (problem.extent("head"), problem.rows_q, problem.extent("key")) if line else row.shape(problem)
    axes = row.axes[1:] if line else row.axes
    free = [is_data(axis, problem) and not (line and axis == "query") for axis in axes]
    fits = len(x.shape) <= len(want) and not (pairs and problem.rows_q is not None and len(x.shape) < 3)
    own = zip(reversed(x.shape), reversed(want), reversed(free), reversed(axes))
    if fits and all(n == whole or (n == 1 and not (line and axis == "query")) or any for n, whole, any, axis in own):
        return
    named = ("longest" if any else str(n) for n, any in zip(want, free))
    called = ["sequence" if axis == "batch" else "row of q" if line and axis == "query" else axis for axis in axes]
    also = ""
    if pairs and problem.rows_q is not None and not line:
        also = f", or ({problem.heads_q}, {problem.rows_q}, longest), (head, row of q, key)"
    longest = ", and longest is as many as a sequence has, or more" if True in free else ""
    raise ValueError(
        f"{row.name} has shape {x.shape}; it must be ({', '.join(named)}), ({', '.join(called)}){also}, where a length "
        f"of 1 stands for all{longest} ({row.entry})"
    )


def check_mask_kind(kind: MaskKind, problem: AttentionProblem) -> None:
    """ValueError where a block mask is for other sequences."""
    want = problem.batch, problem.heads_q, problem.seq_q, problem.seq_k
    exact = not is_data("query", problem), not is_data("key", problem)
    wrong = any(n not in (1, whole) for n, whole in zip(kind.shape[:2], want))
    if wrong or any(fixed and n != whole for fixed, n, whole in zip(exact, kind.shape[2:], want[2:])):
        longest = [str(n) if fixed else "longest" for fixed, n in zip(exact, want[2:])]
        raise ValueError(
            f"block_mask has shape {kind.shape}; it must be ({want[0]}, {want[1]}, {', '.join(longest)}), (sequence, "
            "head, query, key), where sequence and head may be 1"
        )


def check_options(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """ValueError where hints are given with nothing that they are about, or `at` with lengths."""
    for name, about in (("max_seqlen_q", ("cu_seqlens_q",)), ("max_seqlen_k", ("cu_seqlens_k", "seqlens_k"))):
        if options[name] is not None and not any(given.get(x) is not None for x in about):
            raise ValueError(f"{name} is {given[name]}, but {' or '.join(about)}, which it is about, is not given")
    lengths = stated(given)
    if lengths and (at := options.get("at") or given.get("at")) is not None:
        what = f"an array of {at.dtype}" if isinstance(at, View) else at
        raise ValueError(f"at is {what}, and {lengths[0]} is given; it must be None there")


def untaken(problem: AttentionProblem) -> str | None:
    """What kernels object to that know nothing of lengths."""
    names = [x.name for x in problem.given if ARRAY_RULES[x.name].ragged]
    names += ["batch_invariant=True"] * problem.batch_invariant
    return f"takes no {' and no '.join(names)}" if names else None


def refuse_pages(problem: AttentionProblem, of: Pass) -> None:
    """TypeError for a derivative where k and v are in pages."""
    if problem.page is not None:
        raise TypeError(
            f"page_table is given to attention_{of}; k and v in pages have a forward alone: give them packed "
            "(cu_seqlens_k) or as caches (seqlens_k)"
        )


# ---- values ---------------------------------------------------------------------------------------------------------


_CHECK = "CUPYFLASH_CHECK"
_environ: Any = os.environ
_below: Any = getattr(_environ, "_data", None) if hasattr(_environ, "encodekey") else None  # its dictionary
_key: Any = None if _below is None else _environ.encodekey(_CHECK)


def _is_set() -> bool:
    """Whether CUPYFLASH_CHECK is there. os.environ by itself takes 0.6 us to say no, what lies below it 0.04."""
    return _key in _below if _below is not None and os.environ is _environ else _CHECK in os.environ


def asked_for(check: Any) -> bool:
    """Whether values on a device shall be looked at: for a call alone, or for all of the process."""
    if check is False and not _is_set():  # each call with lengths comes here
        return False
    asked = os.environ.get(_CHECK, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"CUPYFLASH_CHECK is {asked!r}; it must be 1, 0 or empty")
    return check_flag("check", check) or asked == "1"


def check_values(problem: AttentionProblem, arrays: Mapping[str, np.ndarray]) -> None:
    """ValueError, naming the place, where offsets, lengths or pages (int64, on the host) are not what they must be."""
    for side in "qk":
        if (x := arrays.get(f"cu_seqlens_{side}")) is not None:
            _check_offsets(f"cu_seqlens_{side}", x, side, problem)
    if (x := arrays.get("seqlens_k")) is not None:
        what = "the rows of a cache"
        if problem.page is not None:
            pages = arrays["page_table"].shape[1]
            what = f"the reach of page_table, {pages} pages of {problem.page} rows"
        _check_range("seqlens_k", x, what, problem)
    if (table := arrays.get("page_table")) is not None:
        _check_pages(table, arrays["seqlens_k"], problem)


def _check_offsets(name: str, x: np.ndarray, side: str, problem: AttentionProblem) -> None:
    rows, most = (problem.rows_q, problem.seq_q) if side == "q" else (problem.rows_k, problem.seq_k)
    assert rows is not None
    if x[0] != 0:
        raise ValueError(f"{name}[0] is {x[0]}; it must be 0")
    if (n := _first(x[1:] < x[:-1])) is not None:
        raise ValueError(f"{name}[{n + 1}] is {x[n + 1]}; it must be {name}[{n}], {x[n]}, or more")
    if x[-1] > rows:
        where = _first(x > rows)
        raise ValueError(f"{name}[{where}] is {x[where]}; it must be at most {rows}, the rows of {side}")
    if (n := _first(x[1:] - x[:-1] > most)) is not None:
        raise ValueError(
            f"{name}[{n + 1}] is {x[n + 1]}, {x[n + 1] - x[n]} more than {name}[{n}]; it must be at most {most} more, "
            f"as long as {holders(problem, side)}"
        )


def _check_range(name: str, x: np.ndarray, what: str, problem: AttentionProblem) -> None:
    if (n := _first(x < 0)) is not None:
        raise ValueError(f"{name}[{n}] is {x[n]}; it must be 0 or more")
    if (n := _first(x > problem.seq_k)) is not None:
        also = holders(problem, "k")
        what += f", and as long as {also}" if also else ""
        raise ValueError(f"{name}[{n}] is {x[n]}; it must be at most {problem.seq_k}, {what}")


def _check_pages(table: np.ndarray, lengths: np.ndarray, problem: AttentionProblem) -> None:
    assert problem.page is not None
    reached = -(-lengths // problem.page)  # entries of the table that are read
    places = (table < 0) | (table >= problem.pages)
    places &= _range(table.shape[1]) < reached[:, None]
    if (flat := _first(places.ravel())) is not None:
        n, at = divmod(flat, table.shape[1])
        raise ValueError(
            f"page_table[{n}, {at}] is {table[n, at]}; it must be a page of k, 0 to {problem.pages - 1}: "
            f"seqlens_k[{n}], {lengths[n]}, reaches it"
        )


def _range(n: int) -> np.ndarray:
    import numpy as np

    return np.arange(n)


def _first(wrong: np.ndarray) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None


def holders(problem: AttentionProblem, side: str) -> str:
    """The arrays over pairs, which may be shorter than sequences could be."""
    axis = "query" if side == "q" else "key"
    rows = (ARRAY_RULES[x.name] for x in problem.given)
    names = [x.name for x in rows if any(PLACES.get(a, a) == axis and not x.ragged for a in x.axes)]
    return " or ".join([*names, *["block_mask"] * (problem.block_mask is not None)])
