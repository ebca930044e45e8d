"""Processes of a test that run together, as the ranks of a group do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def together(code: str, *arguments: tuple[object, ...]) -> None:
    """Run it in a process for each of these, beside each other, and fail with what they said if one of them does."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, given)], cwd=Path(__file__).parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for given in arguments
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(arguments), "\n".join(said)[-4000:]
