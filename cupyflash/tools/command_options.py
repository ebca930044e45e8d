"""The options of a call on the command line: one for each row of problem.OPTIONS that can be written and of
problem.ARRAYS, named by none here.

A row whose default is False becomes a flag; the value of any other is read as `value` does and judged by its row.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..passes import BACKWARD, Pass
from ..problem import ARRAYS, OPTIONS, OptionRule

# Flags for a further value of an option that is a flag itself.
FURTHER = {"top_left": ("causal", "top_left", "As --causal, but query i sees keys up to i.")}


def asked(files: bool = False, of: Pass = BACKWARD, without: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Give a command the options of the tables, in place of its parameters `options` and `arrays`.

    It gets `options`, the values by name of those that are given, and `arrays`: with `files` the path of each that is
    given by name, else the names of those that shall be there. `of`: of the backward also what changes the gradients
    alone. With `files` an array of one number may be that number, which is among the `options` then.
    """
    rows = [
        row for row in OPTIONS if row.written and row.name not in without and (of.of_gradients or not row.of_gradients)
    ]
    further = {name: x for name, x in FURTHER.items() if any(row.name == x[0] for row in rows)}
    numbers = [array.name for array in ARRAYS if files and not array.axes]  # or files of them

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in ("options", "arrays")
        ]
        added = [_parameter(row.name, *_option(row)) for row in rows]
        added += [_parameter(name, bool, False, help) for name, (_, _, help) in further.items()]
        for array in ARRAYS:
            says = array.entry[0].upper() + array.entry[1:]
            axes = ", ".join(array.axes) or "one number"
            if array.name in numbers:
                of: Any = str | None, None, f"The {array.label}, a whole number or a file of one. {says}."
            elif files:
                of = Path | None, None, f"File of the {array.label} ({axes}). {says}."
            else:
                of = bool, False, f"With {array.label} ({axes}). {says}."
            added.append(_parameter(array.name, *of))

        @functools.wraps(command)
        def whole(**given: Any) -> Any:
            options = {row.name: _value(row, given.pop(row.name)) for row in rows}
            for name, (option, meant, _) in further.items():
                if given.pop(name):
                    options[option] = meant
            options = {name: x for name, x in options.items() if x is not None}
            arrays = {array.name: given.pop(array.name) for array in ARRAYS}
            arrays = {name: x for name, x in arrays.items() if x not in (None, False)}
            for name in arrays.keys() & numbers:
                found = _number_or_file(name, arrays.pop(name))
                (options if isinstance(found, int) else arrays)[name] = found
            return command(**given, options=options, arrays=arrays if files else tuple(arrays))

        whole.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        whole.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
        return whole

    return decorate


def flag(name: str) -> str:
    """What an option is called on the command line."""
    return f"--{name.replace('_', '-')}"


def value(text: str) -> Any:
    """A value as it is written on a command line: an integer, a number, a word, or several with commas (none: None)."""
    if "," in text:
        return tuple(value(part) if part.strip() else None for part in text.split(","))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _option(row: OptionRule) -> tuple[Any, Any, str]:
    if row.default is False:
        return bool, False, row.help
    help = row.help + " As 255,0 or ,0: empty, no bound." if row.name == "window" else row.help
    return str | None, row.default if isinstance(row.default, str) else None, help


def _parameter(name: str, kind: Any, default: Any, help: str) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(flag(name), help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _number_or_file(name: str, text: str) -> int | Path:
    from .files import SUFFIXES

    if Path(text).suffix in SUFFIXES:
        return Path(text)
    number = value(text)
    if not isinstance(number, int) or not 0 <= number < 2**64:
        raise ValueError(
            f"{flag(name)} is {text!r}; it must be a whole number from 0 to 2**64 - 1, or a file that ends in "
            f"{', '.join(SUFFIXES)}"
        )
    return number


def _value(row: OptionRule, given: Any) -> Any:
    """What is given, as the row has it; None where it is not. The row says what is wrong with it."""
    if given is None or given is False:
        return None
    found = given if given is True or row.text else value(given)
    if row.name == "window" and not (
        isinstance(found, tuple) and len(found) == 2 and all(x is None or isinstance(x, int) for x in found)
    ):
        raise ValueError(
            f"--window is {given!r}; it must be LEFT,RIGHT, numbers of keys, empty where there is no bound: 255,0 or ,0"
        )
    row.check(found)
    return found
