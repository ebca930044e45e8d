"""The backward where the loss depends on the lse too, for the array library that the arrays come from."""

from __future__ import annotations

import importlib
from typing import Any

from . import api
from .merging import NAMESPACES, cast, over_out

Array = Any
COLUMNS = 8  # rows of 16-bit numbers stay multiples of 16 bytes


def attention_backward(
    kind: str, dout: Array | None, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array, **options: Any
) -> tuple[Array, Array, Array]:
    """`cupyflash.attention_backward` with `dlse`, the gradient of the lse, beside dout; None: there is none.

    dS = P (dP - delta + dlse), which is what the backward computes if V has one more column, of ones, dO has dlse there
    (so that dP gets it), and O has zeros (so that delta = rowsum(dO * O) does not).
    """
    xp = importlib.import_module(NAMESPACES[kind])
    if dout is None:
        dout = xp.zeros_like(out)
    if dlse is None:
        return api.attention_backward(dout, q, k, v, out, lse, **options)
    seen = xp.where(lse == -xp.inf, xp.zeros_like(lse), dlse)  # rows that see no key have no gradient
    column = cast(over_out(seen, options["layout"]), dout.dtype)
    none = xp.zeros_like(out[..., :1])
    rows = xp.zeros_like(v[..., :1])
    dq, dk, dv = api.attention_backward(
        xp.concatenate([dout, column] + [none] * (COLUMNS - 1), -1),
        q,
        k,
        xp.concatenate([v, xp.ones_like(rows)] + [rows] * (COLUMNS - 1), -1),
        xp.concatenate([out] + [none] * COLUMNS, -1),
        lse,
        **options,
    )
    return dq, dk, dv[..., : v.shape[-1]]
