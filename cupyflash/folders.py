"""Where files of a user go on each platform."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_folder(variable: str, windows: tuple[str, str], mac: str, linux: tuple[str, str]) -> Path:
    """What the environment variable says; else "cupyflash" in a folder of the platform.

    windows and linux: the platform's own environment variable, and the place in the user's home where it is not set.
    """
    chosen = os.environ.get(variable)
    if chosen:
        return Path(chosen).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(os.devnull)  # a user without a home: nothing can be kept
    if sys.platform == "darwin":
        return home / mac / "cupyflash"
    name, place = windows if sys.platform == "win32" else linux
    return Path(os.environ.get(name) or home / place) / "cupyflash"
