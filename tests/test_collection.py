"""The tests themselves, where a library that few of them need is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_all_are_collected_without_cupy(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text('raise ModuleNotFoundError("No module named \'cupy\'", name="cupy")\n')
    path = os.pathsep.join(x for x in (str(tmp_path), os.environ.get("PYTHONPATH", "")) if x)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).parent))
    given = os.environ | {"PYTHONPATH": path}
    found = subprocess.run(command, check=False, env=given, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:]
