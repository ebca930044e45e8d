"""Arguments that are one flag or one whole number: what is one, and how messages tell it."""

from __future__ import annotations

import itertools
import operator
from typing import Any


def told(x: Any) -> Any:
    """x as messages tell it: numbers that torch.compile has as symbols, of which it writes no text, are numbers."""
    if isinstance(x, (tuple, list)):
        found = [told(y) for y in x]
        return found if isinstance(x, list) else tuple(found)
    ((x, _),) = itertools.groupby([x], key=lambda y: y)  # it makes a number of a symbol here, and nearly nowhere else
    return x


def check_flag(name: str, x: Any) -> bool:
    if type(x).__name__ not in ("bool", "bool_"):  # NumPy's too
        raise TypeError(f"{name} is {told(x)!r}; it must be True or False")
    return bool(x)


def check_no_text(**flags: Any) -> None:
    """Of functions in the place of another library's: what is true or false is a flag, as there, but for text."""
    for name, x in flags.items():
        if isinstance(x, str):  # causal's "top_left" means nothing there, and "no" would be yes
            raise TypeError(f"{name} is {x!r}; it must be True or False")


def integer(name: str, x: Any) -> int:
    if (number := whole_number(x)) is None:
        raise TypeError(f"{name} is {x!r}; it must be an integer")
    return number


def whole_number(x: Any) -> int | None:
    """The number that x is; None where it is none, as a flag is."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None
