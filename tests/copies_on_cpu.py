"""Copies of `gpu/copies.py` without a GPU: by NumPy, and by their kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes  # noqa: F401 - bfloat16 by its name
import numpy as np
from cuda_on_cpu import Launch, as_cpp, compile_all, launch

from cupyflash.gpu.copies import NAME, THREADS, Copies, Side


def by_numpy(copies: Copies, addresses: Sequence[int]) -> None:
    def seen(side: Side, lengths: tuple[int, ...], itemsize: int) -> np.ndarray:
        memory = (ctypes.c_char * itemsize).from_address(addresses[side.array] + side.at)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, f"V{itemsize}"), lengths, side.strides)

    given, written = (np.dtype(x) for x in copies.dtypes) if copies.dtypes else (None, None)
    for x in copies.pieces:
        if 0 in x.lengths:
            continue
        if copies.dtypes is None:
            seen(x.to, x.lengths, x.itemsize)[...] = seen(x.source, x.lengths, x.itemsize)
            continue
        total, *more = (seen(y, x.lengths, x.itemsize).view(given) for y in (x.source, *x.added))
        for y in more:
            total = total + y
        with np.errstate(over="ignore"):
            seen(x.to, x.lengths, written.itemsize).view(written)[...] = total


def by_kernel(copies: Copies, addresses: Sequence[int], last_first: bool = False) -> None:
    for x in copies.launches:
        size = 'extern "C" unsigned params() { return sizeof(Params); }'
        (library,) = compile_all(as_cpp(x.program.source(), [NAME]) + size)
        params = x.params(addresses)
        assert len(params) == library.params() <= 4096
        wrong = launch(library, NAME, Launch(x.blocks, THREADS, 1, 2, 1024, 0, last_first), params)
        assert wrong is None, wrong
