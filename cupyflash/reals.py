"""Options that are real numbers: what is one, and what is told of what is none."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from .scalars import told


def real(name: str, x: Any) -> float | None:
    """The number that an option called `name` is; an array of no dimensions is one, too."""
    if x is None:
        return None
    plain = isinstance(x, numbers.Real) and not isinstance(x, bool)
    if not plain and (not hasattr(x, "__float__") or getattr(x, "shape", None) != () or _odd(x)):
        raise TypeError(_no_number(name, x))
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    except Exception as error:  # traced by JAX, vmapped by PyTorch: no number is there yet
        raise TypeError(_no_number(name, x)) from error
    if not -math.inf < value < math.inf:  # (math.isfinite takes no symbol of torch.compile's)
        raise ValueError(f"{name} is {told(value)}; it must be finite")
    return value


# How to have what a number cannot be: an array, learned or traced.
_INSTEAD = {
    "scale": "one that is learned, traced, or another for each head multiplies q: q * scale as q (in its dtype), and "
    "scale=1.0",
    "softcap": "one that is learned or traced is read by a score function: score=lambda s, b, h, i, j, c: c[0] * "
    'cupyflash.score.tanh(s / c[0]), score_arrays={"c": softcap.reshape(1)}',
}


def _no_number(name: str, x: Any) -> str:
    must, shape = "it must be a real number or None", getattr(x, "shape", None)
    if not isinstance(shape, tuple):
        return f"{name} is {x!r}; {must}"
    # (torch.compile, which reads this, writes no tensor as text.)
    what = f"{name} is {type(x).__name__} of shape {tuple(shape)} and dtype {x.dtype}; {must}"
    return what + (f"; {_INSTEAD[name]}" if name in _INSTEAD else ", known when the call is made")


FOLLOWS: list[Callable[[Any], bool]] = []  # libraries that differentiate say here whether they follow an array


def _odd(scalar: Any) -> bool:
    """Whether an array of no dimensions holds no real number, or one that a derivative is expected for."""
    kind = str(getattr(scalar, "dtype", ""))
    return (
        "complex" in kind
        or "bool" in kind
        or getattr(scalar, "requires_grad", False)
        or any(x(scalar) for x in FOLLOWS)
    )


def positive(name: str, x: Any) -> float:
    """One of which float32 has the inverse, too."""
    value = real(name, x)
    if value is None or not 1e-30 <= value <= 1e30:
        raise ValueError(f"{name} is {told(value)}; it must be more than 0, from 1e-30 to 1e+30")
    return value
