"""Where files of a user go on each platform, and how they get there whole."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PARTIAL = re.compile(r"\.cupyflash-[0-9a-f]{16}")  # the names of files that are being written
# Never through a link, nor into a file that is there; and Windows would turn bytes into text.
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


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


@contextlib.contextmanager
def written_whole(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, which then takes the place of what is at `path`. After an error or an interrupt that is as
    before."""
    partial = path.with_name(f".cupyflash-{secrets.token_hex(8)}")
    handle = os.open(partial, _CREATE, mode)
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
