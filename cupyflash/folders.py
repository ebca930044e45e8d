"""Where files of a user go on each platform."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path


def user_folder(variable: str, windows: tuple[str, str], mac: str, linux: tuple[str, str]) -> Path:
    """What the environment variable says; else "cupyflash" in a folder of the platform.

    windows and linux: the platform's own environment variable, and the place in the user's home where it is not set.
    Where no folder can be named the path is one under which nothing can be kept.
    """
    chosen = os.environ.get(variable)
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            warn_once(f"{variable} is {chosen!r}, but no such user is known; nothing is kept or looked for there")
            return Path(os.devnull, "cupyflash")
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(os.devnull)  # a user without a home
    if sys.platform == "darwin":
        return home / mac / "cupyflash"
    name, place = windows if sys.platform == "win32" else linux
    return Path(os.environ.get(name) or home / place) / "cupyflash"


@functools.cache
def warn_once(message: str) -> None:
    """A RuntimeWarning, once per process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
