"""Arrays in files, for people who have files: .npy, .npz and .safetensors.

A file may come from anywhere, so nothing in it is believed: no pickle is loaded, only what is asked for is read, and a
header that promises more than its file can hold is refused before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from ..folders import written_whole

SUFFIXES = (".npy", ".npz", ".safetensors")
BFLOAT16 = np.dtype("V2")  # as NumPy writes it: two bytes of no type
DEFLATE = 1032  # bytes that one byte of a compressed .npz can become at most


def suffix(path: Path) -> str:
    """The format of a file by its name; ValueError for one that is not known."""
    if path.suffix not in SUFFIXES:
        kind = f"ends in {path.suffix!r}" if path.suffix else "is a folder" if path.is_dir() else "has no suffix"
        raise ValueError(f"{path} {kind}; it must be a file that ends in {', '.join(SUFFIXES)}")
    return path.suffix


def names(path: Path) -> list[str]:
    """The names of the arrays in a file, none of which is read; that of an .npy file is the file's stem.

    ValueError names a file that is not what its suffix says; OSError where it cannot be opened.
    """
    with _opened(path) as (kind, file):
        if kind == ".npy":
            return [path.stem]
        if kind == ".npz":
            with zipfile.ZipFile(file) as archive:
                return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        with _safetensors(path) as held:
            return list(held.keys())


def read(path: Path, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of a file by name: those wanted that it has, or all. Errors are those of `names`.

    .npy and .npz hold bfloat16 as two bytes of no type ("V2"): those are read as bfloat16.
    """
    chosen = [name for name in names(path) if wanted is None or name in wanted]
    with _opened(path) as (kind, file):
        if kind == ".safetensors":
            return _read_safetensors(path, chosen)
        size = os.fstat(file.fileno()).st_size
        if kind == ".npy":
            _header(file, size)  # refuses what NumPy would not
            file.close()
            return {name: _typed(np.load(path, mmap_mode="r", allow_pickle=False)) for name in chosen}
        with zipfile.ZipFile(file) as archive:
            return {name: _typed(_member(archive, f"{name}.npy", size)) for name in chosen}


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name in the format that the path's suffix names; .npy holds exactly one.

    The file is there whole or not at all: one that it replaces is lost only when the new one is complete.
    """
    kind = suffix(path)
    whole: dict[str, Any] = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    if kind == ".npy" and len(whole) != 1:
        raise ValueError(f"{path} holds one array, not {', '.join(whole)}; write .npz or .safetensors")
    try:
        with written_whole(_target(path)) as file:
            if kind == ".npy":
                np.save(file, next(iter(whole.values())))
            elif kind == ".npz":
                np.savez(file, **whole)
            else:
                import safetensors.numpy

                file.write(safetensors.numpy.save(whole))  # its save_file writes one that nobody else can read
    except OSError as error:  # names the other file
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def writable(path: Path) -> bool:
    """Whether a file can be expected to be written there: asked before the work, not after it."""
    try:
        target = _target(path)
        if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
            return False
        return os.access(target.parent, os.W_OK)
    except OSError:  # a name that is too long
        return False


def _target(path: Path) -> Path:
    """Of a link, the file that it leads to."""
    try:
        return path.resolve()
    except RuntimeError as error:  # links in a circle, before Python 3.13
        raise OSError(str(error)) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """(format, open file). Whatever a parser makes of its content is a ValueError that names it."""
    kind = suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    with open(path, "rb") as file:
        try:
            yield kind, file
        except ImportError:
            raise  # of safetensors: the command line says how to get it
        except MemoryError:
            raise ValueError(f"{path} cannot be read as {kind}: there is not enough memory for its arrays") from None
        except Exception as error:  # hostile files make NumPy, zlib and safetensors raise a dozen kinds
            raise ValueError(f"{path} cannot be read as {kind}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of an array in the .npy format, of which `size` bytes are there, header and all."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it has version {version} of the format, which is not one of plain arrays")
    try:
        shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    except ValueError as error:
        if "allow_pickle" in str(error):  # advice for who calls NumPy
            raise ValueError("its header is longer than that of any plain array") from None
        if "malformed node" in str(error):  # names an object of Python's parser
            raise ValueError("its header holds more than plain values") from None
        raise
    if dtype.kind not in "biufc" and dtype != BFLOAT16:
        raise ValueError(f"it holds elements of type {dtype}, not numbers")
    if any(isinstance(n, bool) or n < 0 for n in shape):
        raise ValueError(f"its header says shape {shape}")
    if math.prod(shape) * dtype.itemsize > size - file.tell():
        raise ValueError(f"its header says shape {shape} of {dtype}, more than the {size} bytes that are there")
    return shape, fortran, dtype


def _member(archive: zipfile.ZipFile, name: str, size: int) -> np.ndarray:
    """One array of an .npz file of `size` bytes."""
    info = archive.getinfo(name)
    if info.compress_size > size or info.file_size > DEFLATE * info.compress_size + 64:
        raise ValueError(f"{name} says it has {info.file_size} bytes, more than can be in a file of {size}")
    try:
        with archive.open(info) as member:
            shape, fortran, dtype = _header(member, info.file_size)
            data = member.read(math.prod(shape) * dtype.itemsize)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{name}: {_reason(error)}") from error
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _safetensors(path: Path) -> Any:
    import safetensors

    return safetensors.safe_open(path, framework="numpy")


def _read_safetensors(path: Path, chosen: Sequence[str]) -> dict[str, np.ndarray]:
    with _safetensors(path) as held:
        eight = [name for name in chosen if held.get_slice(name).get_dtype() == "F8_E4M3"]
        found = {name: held.get_tensor(name) for name in chosen if name not in eight}
    return found | {name: _float8(path, name) for name in eight}


def _float8(path: Path, name: str) -> np.ndarray:
    """An array for which safetensors knows no dtype of NumPy's, from a file whose header it has checked."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(size))[name]
        begin, end = about["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), ml_dtypes.float8_e4m3fn).reshape(about["shape"])


def _typed(x: np.ndarray) -> np.ndarray:
    if x.dtype == BFLOAT16:
        return x.view(ml_dtypes.bfloat16)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
