"""k and v of 8 bits beside q of 16, as caches hold them: what they may be, and what their numbers are multiplied by.

A scale of a row is laid out as the cache without its last axis, so that it lies where the row does; one for each head
is the same for all rows.
"""

from __future__ import annotations

from typing import Any

from .namespaces import cast, float8_of
from .passes import Pass
from .problem import ARRAY_RULES, EIGHT, FLOAT8, FLOATS, HALVES, INPUTS, AttentionProblem, Given, View, to_bshd

SCALES = ("k_descale", "v_descale")
LARGEST = {FLOAT8: 448.0, "int8": 127.0}
_KEPT = (*INPUTS, f"int8 beside q of {' or '.join(HALVES)}")
TAKEN = {"q": INPUTS, "k": _KEPT, "v": _KEPT}  # dtypes
SMALLEST = 1e-30  # of scales that are made of rows


def of_eight(x: Any) -> bool:
    """Whether an array of any library, or a `View`, has 8 bits a number."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.") in EIGHT


def name_of(x: Any) -> str:
    """The name of such a dtype."""
    return str(x.dtype).removeprefix("torch.")


def of_rows(scale: Any, cache: Any) -> bool:
    """Whether an array of scales, or a number, has one for each row of a cache (entries, rows, heads, D)."""
    return len(getattr(scale, "shape", ())) == len(cache.shape) - 1


def taken(q: View, k: View, v: View, given: dict[str, Any]) -> tuple[str | None, dict[str, View]]:
    """The dtype of k and v where they are of 8 bits beside q of 16, and the arrays of scales that are given then."""
    if q.dtype == FLOAT8 or not (k.dtype in EIGHT or v.dtype in EIGHT):
        return None, {}
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in EIGHT:
            raise TypeError(
                f"{name} has dtype {x.dtype}, and the other of k and v is of 8 bits; both must have one dtype"
            )
        if q.dtype not in HALVES:
            raise TypeError(
                f"{name} has dtype {x.dtype} beside q of {q.dtype}; k and v of 8 bits are for q of "
                f"{' or '.join(HALVES)}"
            )
    if v.dtype != k.dtype:
        raise TypeError(f"v has dtype {v.dtype} but k has {k.dtype}; both must have one dtype")
    return k.dtype, {name: given[name] for name in SCALES if given.get(name) is not None}


def refuse_float8(dtype: str, of: Pass, cache_dtype: str | None = None) -> None:
    if cache_dtype is not None:
        raise TypeError(
            f"k has dtype {cache_dtype} beside q of {dtype}, of which there is a forward alone; attention_{of} takes k "
            f"and v of {dtype}"
        )
    if dtype == FLOAT8:
        raise TypeError(
            f"q has dtype {FLOAT8}, of which there is a forward alone; attention_{of} takes {', '.join(FLOATS)}"
        )


def stated(scales: dict[str, View], k: View, layout: str) -> list[Given]:
    """Arrays of scales as a problem has them. TypeError, ValueError where they are not what they must be."""
    return [Given(name, "float32", check(name, x, k.shape, layout)) for name, x in scales.items()]


def check(name: str, x: View, cache: tuple[int, ...], layout: str) -> tuple[str, ...]:
    """The axes along which a scale differs: none, of heads, or of rows too. `cache`: the shape of k."""
    if x.dtype != "float32":
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float32 ({ARRAY_RULES[name].entry})")
    heads = to_bshd(cache, layout)[2]
    if x.shape == cache[:-1] and len(cache) > 2:
        return ("row", "key_head")
    if x.shape in ((), (1,)):
        return ()
    if x.shape not in ((heads,), cache[:-1]):
        raise ValueError(
            f"{name} has shape {x.shape}; it must be ({heads},), one for each head of k, or {cache[:-1]}, one for each "
            "of its rows and heads, or hold one number"
        )
    return ("key_head",) if x.shape == (heads,) else ("row",)


def strides(problem: AttentionProblem, name: str, x: View, layout: str) -> tuple[int, int, int, int]:
    """Element strides of (batch, head, query, key) of an array of scales: the key is its row."""
    given = problem.array(name)
    if given is None or "row" not in given.axes:
        return (0, x.strides[0] if given and given.axes else 0, 0, 0)
    batch, row, head, _ = to_bshd((*x.strides, 1), layout, fill=0)
    return (batch, head, 0, row)


def _over(xp: Any, x: Any, by: Any) -> Any:
    """x / by, another divisor for each number: by one that is constant, or the same for a row, XLA does not divide, but
    multiplies by its inverse, which is rounded another way."""
    return x / xp.where(xp.isnan(x), x, by if hasattr(by, "shape") else xp.full_like(x, by))


def quantised(xp: Any, x: Any, dtype: str, scale: Any) -> tuple[Any, Any]:
    """Rows (..., heads, D) of 16 bits in 8, and what these are multiplied by: `scale`, a number or one for each head;
    None: one for each row, with which its largest number is the dtype's.

    What is too large becomes the largest. Of NaN e4m3 has one, int8 none: there it becomes 0, beside a scale of NaN
    where rows have their own.
    """
    import numpy as np  # not with the package, which imports no array library

    wide, largest = cast(x, xp.float32), LARGEST[dtype]
    if scale is None:
        scale = _over(xp, xp.amax(xp.abs(wide), -1), largest) if x.shape[-1] else xp.zeros_like(wide.sum(-1))
        scale = xp.where(scale < SMALLEST, xp.full_like(scale, SMALLEST), scale)
    by = scale[..., None] if hasattr(scale, "shape") else scale
    with np.errstate(all="ignore"):  # by 0, or of what is not finite
        numbers = xp.clip(_over(xp, wide, by), -largest, largest)
    if dtype == "int8":
        numbers = xp.round(xp.where(xp.isnan(numbers), xp.zeros_like(numbers), numbers))
        return cast(numbers, xp.int8), scale
    return cast(numbers, float8_of(xp)), scale
