"""Nobody reads outside of arrays: what a process cannot survive (tests/unmapped.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("unmapped.py")


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("family", ["sm90", "sm80", "simt"])
def test_nothing_is_read_outside_of_arrays(family: str, place: str) -> None:
    command = [sys.executable, SCRIPT, family, place]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
