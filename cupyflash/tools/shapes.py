"""Shapes of a call's arrays, from those of q, k and v and the names of what else is given."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from ..cached import SCALES
from ..lengths import LENGTHS
from ..problem import ARRAY_RULES, ARRAYS, AttentionProblem, View, contiguous, to_bshd
from ..rules import describe, whole

Shape = tuple[int, ...]
PAGE = 16  # rows of one, where nobody says


def of_lengths(
    names: Collection[str], q: Shape, k: Shape, layout: str = "bshd", sequences: int | None = None
) -> dict[str, Shape]:
    """Of the arrays that say how long sequences are, and where. `sequences`: how many, where q and k are packed or in
    pages; else their first axes say it."""
    packed_k = "cu_seqlens_k" in names or "page_table" in names
    own = [q[0]] * ("cu_seqlens_q" not in names) + [k[0]] * (not packed_k)
    n = own[0] if own else sequences or 1
    if sequences not in (None, n):
        raise ValueError(f"there are {n} sequences by the shapes {q} and {k}, but --sequences is {sequences}")
    shapes = {"cu_seqlens_q": (n + 1,), "cu_seqlens_k": (n + 1,), "seqlens_k": (n,)}
    pages = {"page_table": (n, -(-to_bshd(k, layout)[0] // max(n, 1)))} if "page_table" in names else {}
    return {name: x for name, x in (shapes | pages).items() if name in names}


def of_arrays(
    names: Collection[str], q: Shape, k: Shape, v: Shape, layout: str, sequences: int | None = None, eight: bool = False
) -> dict[str, Shape]:
    """Of the optional arrays of these names, in full. `eight`: of k and v of 8 bits beside q of 16, by row."""
    names = frozenset(names)
    ragged = of_lengths(names, q, k, layout, sequences) if names & {*LENGTHS} else {}
    if sequences is not None and not ragged:
        raise ValueError(f"--sequences is {sequences}, but nothing says that sequences are packed: --cu-seqlens-q does")
    views = [_view(x, "float32") for x in (q, k, v)]  # lengths are the same of every dtype
    plain = describe(*views, layout=layout, **{name: _view(x, "int32") for name, x in ragged.items()})
    known = ragged | ({name: x[:-1] for name, x in zip(SCALES, (k, v))} if eight else {})
    return {row.name: known.get(row.name) or whole(row, plain, views[0]).shape for row in ARRAYS if row.name in names}


def placed(names: Collection[str], q: Shape, k: Shape) -> tuple[Shape, Shape]:
    """q (1, rows, heads, dim) and k as they are where these arrays are given: packed, or in pages."""
    *_, rows, heads, dim = k
    if "page_table" in names:
        k = -(-rows // PAGE), PAGE, heads, dim
    return q[1:] if "cu_seqlens_q" in names else q, k[1:] if "cu_seqlens_k" in names else k


def of_problem(p: AttentionProblem) -> dict[str, Shape]:
    """Of q, k and v, heads last but one, and of the optional arrays in full."""
    front = (p.rows_k,) if p.rows_k is not None else (p.batch, p.seq_k if p.cache is None else p.cache)
    front = front if p.page is None else (p.pages, p.page)
    rows = (p.batch, p.seq_q) if p.rows_q is None else (p.rows_q,)
    found: dict[str, Any] = {
        "q": (*rows, p.heads_q, p.dim), "k": (*front, p.heads_k, p.dim), "v": (*front, p.heads_k, p.dim_v),
    }  # fmt: skip
    lines = (p.heads_q, p.rows_q, p.seq_k)
    return found | {x.name: lines if "line" in x.axes else ARRAY_RULES[x.name].shape(p) for x in p.given}


def even(p: AttentionProblem) -> dict[str, np.ndarray]:
    """Arrays of lengths by which all sequences are equally long, and as long as there is room for."""
    n, found = p.batch, dict[str, np.ndarray]()
    for side, rows, most in (("q", p.rows_q, p.seq_q), ("k", p.rows_k, p.seq_k)):
        if rows is not None:
            found[f"cu_seqlens_{side}"] = np.arange(n + 1) * min(rows // max(n, 1), most)
    if p.has("seqlens_k"):
        found["seqlens_k"] = np.full(n, p.seq_k)
    if p.page is not None:
        found["page_table"] = np.arange(n * p.extent("page")).reshape(n, -1) % max(p.pages, 1)
    return {name: x.astype(given.dtype) for name, x in found.items() if (given := p.array(name))}


def _view(shape: Shape, dtype: str) -> View:
    return View(shape, contiguous(shape), dtype, "cpu", "shape")
