"""Arrays in files, for people who have files: .npy, .npz and .safetensors."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SUFFIXES = (".npy", ".npz", ".safetensors")


def suffix(path: Path) -> str:
    """The format of a file by its name; ValueError for one that is not known."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix or 'no suffix'!r}; it must end in {', '.join(SUFFIXES)}")
    return path.suffix


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name; the one of an .npy file has the file's stem as its name.

    .npy and .npz hold bfloat16 as two bytes of no type ("V2"): those are read as bfloat16. ValueError names a file that
    is not what its suffix says; OSError where it cannot be opened.
    """
    kind = suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if kind == ".safetensors":
        import safetensors
        import safetensors.numpy

        try:
            return safetensors.numpy.load_file(path)
        except (safetensors.SafetensorError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as .safetensors: {error}") from error
    try:
        if kind == ".npy":
            return {path.stem: _typed(np.load(path, mmap_mode="r", allow_pickle=False))}
        with np.load(path, allow_pickle=False) as archive:
            return {name: _typed(archive[name]) for name in archive.files}
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error}") from error


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name in the format that the path's suffix names; .npy holds exactly one."""
    kind = suffix(path)
    whole: dict[str, Any] = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    if kind == ".npy":
        if len(whole) != 1:
            raise ValueError(f"{path} holds one array, not {', '.join(whole)}; write .npz or .safetensors")
        np.save(path, next(iter(whole.values())))
    elif kind == ".npz":
        np.savez(path, **whole)
    else:
        import safetensors.numpy

        safetensors.numpy.save_file(whole, path)


def _typed(x: np.ndarray) -> np.ndarray:
    return x.view(ml_dtypes.bfloat16) if x.dtype == np.dtype("V2") else x
