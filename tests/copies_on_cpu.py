"""Copies of `gpu/copies.py` without a GPU: by NumPy, and by their kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from cuda_on_cpu import Launch, as_cpp, compile_all, launch

from cupyflash.gpu.copies import _PROGRAM, NAME, THREADS, Copies, Side


def by_numpy(copies: Copies, addresses: Sequence[int]) -> None:
    def seen(side: Side, lengths: tuple[int, ...], itemsize: int) -> np.ndarray:
        memory = (ctypes.c_char * itemsize).from_address(addresses[side.array] + side.at)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, f"V{itemsize}"), lengths, side.strides)

    for x in copies.pieces:
        if 0 not in x.lengths:
            seen(x.to, x.lengths, x.itemsize)[...] = seen(x.source, x.lengths, x.itemsize)


def by_kernel(copies: Copies, addresses: Sequence[int], last_first: bool = False) -> None:
    (library,) = compile_all(
        as_cpp(_PROGRAM.source(), [NAME]) + 'extern "C" unsigned params() { return sizeof(Params); }'
    )
    for x in copies.launches:
        params = x.params(addresses)
        assert len(params) == library.params() <= 4096
        wrong = launch(library, NAME, Launch(x.blocks, THREADS, 1, 2, 1024, 0, last_first), params)
        assert wrong is None, wrong
