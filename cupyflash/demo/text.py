"""The training text: the source of Python's own standard library, as found on this machine."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "encodings", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes held out, as uint8 vectors, and the number of files they come from."""

    train: np.ndarray
    held_out: np.ndarray
    files: int


def standard_library(folder: Path | None = None, limit: int = 16_000_000) -> Text:
    """Read the .py files under `folder` (default: the standard library), at most `limit` bytes; every 20th is
    held out."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = [], []
    files = size = 0
    for path in sorted(folder.rglob("*.py")):
        if size >= limit:
            break
        if SKIPPED.isdisjoint(path.relative_to(folder).parts):
            source = path.read_bytes()
            parts[files % 20 == 10].append(source)
            files, size = files + 1, size + len(source)
    train, held_out = (np.frombuffer(b"\n".join(p), dtype=np.uint8) for p in parts)
    if min(train.size, held_out.size) < 10_000:
        raise FileNotFoundError(
            f"found {files} Python sources, {size} bytes, under {folder}; the demo learns from them"
        )
    return Text(train, held_out, files)
