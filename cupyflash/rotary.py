"""Rotary positions (Su et al. 2021): pairs of columns turned by the angles of a row's position."""

from __future__ import annotations

from typing import Any

from .namespaces import cast
from .problem import View


def check_tables(cos: View, sin: View, dim: int, dtype: str) -> None:
    """ValueError or TypeError where these cannot turn rows of `dim` columns."""
    taken = list(dict.fromkeys((dtype, "float32")))
    for name, x in (("rotary[0]", cos), ("rotary[1]", sin)):
        if x.dtype not in taken:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be {' or '.join(taken)}")
        if len(x.shape) != 2 or not x.shape[0] or not 1 <= x.shape[1] <= dim // 2:
            raise ValueError(
                f"{name} has shape {x.shape}; it must be (positions, half), cosines and sines of each position's "
                f"angles, with half of 1 to {dim // 2} for rows of {dim} columns"
            )
    if sin.shape != cos.shape:
        raise ValueError(f"rotary[1] has shape {sin.shape}; it must have that of rotary[0], {cos.shape}")


def tables(rotary: Any) -> dict[str, Any]:
    """(cos, sin) by the names that messages have for them."""
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        what = f"holds {len(rotary)} arrays" if isinstance(rotary, (tuple, list)) else f"is a {type(rotary).__name__}"
        raise TypeError(f"rotary {what}; it must be (cos, sin), two arrays (positions, half), or None")
    return {"rotary[0]": rotary[0], "rotary[1]": rotary[1]}


def rotate(xp: Any, x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """x (..., heads, D) with its first columns turned, rows by the angles of `positions` (...); rounded once.

    Pairs are columns (i, i + half), or, interleaved, (2 i, 2 i + 1).
    """
    half, wide = cos.shape[1], xp.float64 if str(x.dtype).endswith("float64") else xp.float32
    at = xp.clip(positions, 0, cos.shape[0] - 1)
    c, s = (cast(table[at], wide)[..., None, :] for table in (cos, sin))
    turned = cast(x[..., : 2 * half], wide)
    a, b = (turned[..., i::2] if interleaved else turned[..., i * half : (i + 1) * half] for i in (0, 1))
    pair = [a * c - b * s, a * s + b * c]
    turned = xp.stack(pair, -1).reshape(turned.shape) if interleaved else xp.concatenate(pair, -1)
    return xp.concatenate([cast(turned, x.dtype), x[..., 2 * half :]], -1)
