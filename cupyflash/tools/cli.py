"""The entrance of the command line; the commands themselves are in `commands.py`.

Nothing beyond the standard library is imported before it is known to be there, and an error that a user can meet is one
message on stderr and exit code 2. CUPYFLASH_TRACEBACK=1 shows where it came from. What we warn of is a line, too.
Whatever is told may quote a file or the environment, so control characters in it are shown and not sent.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from ..pip_line import pip_line
from .visible import VisibleStream

EXTRA = {"typer", "click", "rich", "matplotlib", "safetensors"}  # what the extra `demo` installs


def main() -> None:
    """Run the command line on sys.argv."""
    with told():
        if sys.argv[1:] == ["--version"]:  # needs no extra
            from .. import __version__

            print(f"cupyflash {__version__}")
            raise SystemExit
        from .commands import app

        app(prog_name="cupyflash")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around a command: what a user can meet is told in a line, and what the terminal cannot show is replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    shown, errors = warnings.showwarning, sys.stderr
    if errors is not None:
        sys.stderr = cast(TextIO, VisibleStream(errors))

    def show(message: Warning | str, category: type[Warning], filename: str, *where: Any, **also: Any) -> None:
        if Path(filename).is_relative_to(Path(__file__).parent.parent):
            print(f"cupyflash: warning: {message}", file=sys.stderr)
        else:
            shown(message, category, filename, *where, **also)

    warnings.showwarning = show
    try:
        yield
    except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        if os.environ.get("CUPYFLASH_TRACEBACK"):
            raise
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in EXTRA:
            _fail(f"this command needs {missing}, which is not installed; run {pip_line('demo')}")
        _fail(str(error) or type(error).__name__)
    finally:
        warnings.showwarning, sys.stderr = shown, errors


def _fail(message: str) -> NoReturn:
    print(f"cupyflash: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
